"""Reinforcement learning over islands: trainers that join a run, workers that follow it.

    python experiments/examples/reinforce.py run runs/rl    # with two kills on the way
    python experiments/examples/reinforce.py alone          # one loop that does all by itself
    diloco report runs/rl

On several machines, with certificates (`diloco certs`) of the syncer, of l0, l1, ... and w0, ...
in the folder CERTS, the first line on one of them and the second on others:

    python reinforce.py run runs/rl listen=HOST:7070 queue=HOST:7071 tls=CERTS trainers=1 workers=2
    python reinforce.py w2 runs/w2 syncer=HOST:7070 queue=HOST:7071 tls=CERTS

The task is the sum of two digits, '3+4=' -> '07'; the reward is 1 for the right two digits, else 0,
so a model that guesses gets 1/100. The algorithm is GRPO (arXiv 2402.03300) with a bonus for
entropy in the place of its KL term: of each prompt a group is sampled, and the advantage of a
sample is its reward less the group's mean, over the group's standard deviation.

A *worker* samples with the newest model of the run (`diloco_jax.follow`), asks the verifier, and
puts a rollout into a queue: prompts, completions, their log-probabilities and rewards, and the
version of the model. A *trainer* (`diloco_jax.join`) takes the newest rollout of the queue, drops
stale ones, and weighs each sample by the clipped ratio of its probabilities now and then. No
process waits for a dead one, which `run` starts again.

docs/howto/reinforce.md has what was measured.
"""

import contextlib
import io
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent import futures

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import optax

import diloco_jax
from diloco_jax.certs import proofs
from diloco_jax.process import dial
from diloco_jax.transport import addresses, listen

PROMPTS, GROUP, STEPS = 64, 16, 600  # of a rollout, samples of a prompt, clocks of the run
STALE = 6  # outer steps behind the newest model: an older rollout is dropped
PENDING = 4  # rollouts in the queue: then the workers wait
CLIENTS = 64  # calls that the queue serves at once
ANSWER_S, CALL_S = 1.0, 10.0  # how long a call waits in the queue; after that it is away
VERIFY_S = 0.25  # a verifier of real tasks runs tests, or asks a tool; that of sums takes no time
WAIT_S = 120.0
PLUS, EQUALS, NONE, TOKENS = 10, 11, 12, 13  # the tokens after the ten digits
ALL_PAIRS = np.stack(np.divmod(np.arange(100), 10), axis=1)
TX = optax.adam(3e-3)
OUTER = 'nesterov(learning_rate=0.7, momentum=0.6)'
SYNC = diloco_jax.SyncConfig(learners=2, fragments=2, period=4, overlap=1, outer=OUTER)


def init() -> dict[str, jax.Array]:
  draw = np.random.default_rng(0).standard_normal
  scales = {'embed': ((TOKENS, 16), 1.0), 'hidden': ((80, 128), 0.11), 'head': ((128, 10), 0.01)}
  return {name: jnp.asarray(draw(shape) * by, jnp.float32) for name, (shape, by) in scales.items()}


def prompts_of(pairs_Nx2: np.ndarray) -> np.ndarray:
  first_N, second_N = pairs_Nx2.T
  plus_N, equals_N = (np.full_like(first_N, token) for token in (PLUS, EQUALS))
  return np.stack([first_N, plus_N, second_N, equals_N], axis=1).astype(np.int32)


def verify(prompts_Nx4: np.ndarray, completions_Nx2: np.ndarray) -> np.ndarray:
  """The reward of each completion."""
  return (completions_Nx2 @ [10, 1] == prompts_Nx4[:, 0] + prompts_Nx4[:, 2]).astype(np.float32)


def next_digit(params: dict, prompts_Nx4: jax.Array, first_N: jax.Array | int) -> jax.Array:
  """Log-probabilities float32[N, 10] of the digit after the prompt, or after its first digit."""
  first_Nx1 = jnp.broadcast_to(first_N, len(prompts_Nx4))[:, None]
  x_NxD = params['embed'][jnp.concatenate([prompts_Nx4, first_Nx1], axis=1)]
  hidden_NxF = jnp.tanh(x_NxD.reshape(len(x_NxD), -1) @ params['hidden'])
  return jax.nn.log_softmax(hidden_NxF @ params['head'])


def log_p(params: dict, prompts_Nx4: jax.Array, completions_Nx2: jax.Array) -> tuple:
  """(log-probabilities of the completions' digits, entropies there), float32[N, 2] each."""
  both = [next_digit(params, prompts_Nx4, first) for first in (NONE, completions_Nx2[:, 0])]
  log_p_Nx2xV = jnp.stack(both, axis=1)
  chosen_Nx2 = jnp.take_along_axis(log_p_Nx2xV, completions_Nx2[:, :, None], axis=2)[:, :, 0]
  return chosen_Nx2, -(jnp.exp(log_p_Nx2xV) * log_p_Nx2xV).sum(axis=2)


@jax.jit
def sample(params: dict, prompts_Nx4: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(completions int32[N, 2], their log-probabilities float32[N, 2])."""
  first, second = jax.random.split(jax.random.key(seed))
  first_N = jax.random.categorical(first, next_digit(params, prompts_Nx4, NONE))
  second_N = jax.random.categorical(second, next_digit(params, prompts_Nx4, first_N))
  completions_Nx2 = jnp.stack([first_N, second_N], axis=1)
  return completions_Nx2, log_p(params, prompts_Nx4, completions_Nx2)[0]


def roll_out(params: dict, version: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
  prompts = prompts_of(np.repeat(rng.integers(0, 10, (PROMPTS, 2)), GROUP, axis=0))
  completions, log_ps = map(np.asarray, sample(params, prompts, np.uint32(rng.integers(1 << 32))))
  rewards = verify(prompts, completions)
  time.sleep(VERIFY_S)
  arrays = {'prompts': prompts, 'completions': completions, 'log_p': log_ps, 'rewards': rewards}
  return arrays | {'version': np.int32(version)}


@jax.jit
def step(params: dict, opt_state: tuple, rollout: dict) -> tuple[dict, tuple, dict]:
  """One update by a rollout: (params, opt_state, metrics)."""
  rewards_PxG = rollout['rewards'].reshape(-1, GROUP)
  above_PxG = rewards_PxG - rewards_PxG.mean(axis=1, keepdims=True)
  advantage_PxG = above_PxG / (rewards_PxG.std(axis=1, keepdims=True) + 1e-3)
  advantage_Nx1 = advantage_PxG.reshape(-1, 1)

  def loss_of(params: dict) -> jax.Array:
    now_Nx2, entropy_Nx2 = log_p(params, rollout['prompts'], rollout['completions'])
    ratio_Nx2 = jnp.exp(now_Nx2 - rollout['log_p'])
    clipped_Nx2 = jnp.clip(ratio_Nx2, 0.8, 1.2)
    gain_Nx2 = jnp.minimum(ratio_Nx2 * advantage_Nx1, clipped_Nx2 * advantage_Nx1)
    return -gain_Nx2.mean() - 0.1 * entropy_Nx2.mean()

  updates, opt_state = TX.update(jax.grad(loss_of)(params), opt_state, params)
  reward = rollout['rewards'].mean()
  # The report draws what is called `loss`: the share of wrong sums says more than that of GRPO.
  metrics = {'loss': 1 - reward, 'reward': reward, 'version': rollout['version']}
  return optax.apply_updates(params, updates), opt_state, metrics


@jax.jit
def expected_reward(params: dict) -> jax.Array:
  """Of all 100 prompts, exactly: the mean probability of the right digits."""
  answers = np.stack(np.divmod(ALL_PAIRS.sum(axis=1), 10), axis=1).astype(np.int32)
  chosen_Nx2, _ = log_p(params, prompts_of(ALL_PAIRS), answers)
  return jnp.exp(chosen_Nx2.sum(axis=1)).mean()


class Queue:
  """The rollouts on their way to the trainers, each for one of them, the newest first.

  It is at a Unix socket of this user alone, or at HOST:PORT, for who has a certificate of the run.
  A rollout is the bytes of a *.npz, so nobody runs code here. They are in memory: what is in the
  queue or in a message when a process dies is lost, as any that no trainer takes in time.
  """

  def __init__(self, address: str, tls: pathlib.Path | None = None):
    self._held: list[tuple[int, bytes]] = []  # version, rollout
    self._changed = threading.Condition()
    self._server = grpc.server(futures.ThreadPoolExecutor(CLIENTS))
    calls = {
      name: grpc.unary_unary_rpc_method_handler(self._proved(call))
      for name, call in {'put': self._put, 'take': self._take}.items()
    }
    self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler('rollouts', calls)])
    self._listener = listen.Listener(self._server, address, addresses.access(tls, False), print)
    self.address = self._listener.address
    self._server.start()

  def close(self) -> None:
    self._server.stop(None).wait()
    self._listener.close()

  def _proved(self, call: Callable[[bytes, grpc.ServicerContext], bytes]) -> Callable:
    def proved(data: bytes, context: grpc.ServicerContext) -> bytes:
      if credentials := self._listener.credentials:
        try:
          credentials.refresh([])  # a certificate may be revoked meanwhile
          credentials.prove(context)
        except proofs.Unproved as error:
          context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
      return call(data, context)

    return proved

  def _put(self, data: bytes, context: grpc.ServicerContext) -> bytes:
    version = int(unpacked(data)['version'])
    with self._changed:
      room = self._changed.wait_for(lambda: len(self._held) < PENDING, ANSWER_S)
      if room:
        self._held.append((version, data))
        self._changed.notify_all()
      return b'taken' if room else b''

  def _take(self, data: bytes, context: grpc.ServicerContext) -> bytes:
    with self._changed:
      self._changed.wait_for(lambda: self._held, ANSWER_S)
      if not self._held or not context.is_active():  # a killed trainer gets none
        return b''
      self._held.sort(key=lambda entry: entry[0])
      self._changed.notify_all()
      return self._held.pop()[1]


def packed(rollout: dict[str, np.ndarray]) -> bytes:
  file = io.BytesIO()
  np.savez(file, **rollout)
  return file.getvalue()


def unpacked(data: bytes) -> dict[str, np.ndarray]:
  with np.load(io.BytesIO(data)) as arrays:
    return dict(arrays)


class Client:
  """The queue for a worker or a trainer. It may be started again meanwhile."""

  def __init__(self, address: str, tls: pathlib.Path | None = None):
    access = addresses.access(tls, False)
    options = (('grpc.max_reconnect_backoff_ms', 1_000),)
    self._channel = listen.dial(dial.resolver(address, access)(), access, options)
    self.newest = self.dropped = 0  # the newest version of a rollout; how many were stale

  def put(self, rollout: dict[str, np.ndarray]) -> bool:
    """Whether the queue has taken it: it may be full, or away."""
    return self._ask('put', packed(rollout)) != b''

  def take(self) -> dict[str, np.ndarray]:
    """Waits for a rollout that is not stale."""
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
      if data := self._ask('take'):
        rollout = unpacked(data)
        version = int(rollout['version'])
        self.newest = max(self.newest, version)
        if self.newest - version <= STALE:
          return rollout
        self.dropped += 1
    raise TimeoutError(f'no worker has put a rollout into the queue for {WAIT_S:g} s')

  def _ask(self, call: str, data: bytes = b'') -> bytes:
    try:
      asks = self._channel.unary_unary(f'/rollouts/{call}')
      return asks(data, timeout=CALL_S, wait_for_ready=True)
    except grpc.RpcError as error:
      if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return b''
      raise


def train(learner: str, workdir: pathlib.Path, syncer: str, queue: str, tls: str = '') -> None:
  proof = pathlib.Path(tls, learner) if tls else None
  params, client = init(), Client(queue, proof)
  where = {'syncer': syncer, 'tls': proof, 'workdir': workdir, 'shards': None}
  with diloco_jax.join(params, learner=learner, opt_state=TX.init(params), **where) as peer:
    params, opt_state = peer.params, peer.opt_state
    for _, rollout in peer.steps(lambda *_: client.take()):
      params, opt_state, metrics = step(params, opt_state, rollout)
      metrics |= {'dropped': client.dropped}
      tokens = rollout['completions'].size
      params = peer.sync(params, tokens=tokens, opt_state=opt_state, metrics=metrics)


def work(worker: str, syncer: str, queue: str, tls: str = '') -> None:
  proof = pathlib.Path(tls, worker) if tls else None
  client, rng = Client(queue, proof), np.random.default_rng()  # other samples after a restart
  models = diloco_jax.follow(syncer, tls=proof, into=init())
  newest = next(models, None)  # waits for the first one

  def receive() -> None:  # on a thread, as `follow` waits for a model that is newer
    nonlocal newest
    while model := next(models, None):
      newest = model

  with futures.ThreadPoolExecutor(1) as pool:
    ended = pool.submit(receive)  # with the run
    while not ended.done():
      version, params = newest
      rollout = roll_out(params, version, rng)
      while not client.put(rollout) and not ended.done():
        pass  # the queue makes it wait
  ended.result()


def alone(steps: int = STEPS) -> None:
  params, rng, began_s = init(), np.random.default_rng(0), time.monotonic()
  opt_state = TX.init(params)
  for clock in range(1, steps + 1):
    params, opt_state, _ = step(params, opt_state, roll_out(params, 0, rng))
    if clock % 20 == 0:
      reward, seconds = expected_reward(params), time.monotonic() - began_s
      print(f'{seconds:.0f} s, clock {clock}: reward {reward:.2f}', flush=True)


def run(
  workdir: pathlib.Path,
  trainers: int = 2,
  workers: int = 4,
  steps: int = STEPS,
  listen: str = '',
  queue: str = '',
  tls: str = '',
) -> None:
  """The syncer and the queue in this process, all others as children: l1 is killed at clock 60, w0
  at clock 120, and who has died is started again."""
  children, began_s, rewards, victims = {}, time.monotonic(), [], {2: 'l1', 3: 'w0'}

  def start(name: str) -> None:
    syncer = f'file:{workdir}/syncer/address'  # which says when the run has ended
    words = f'syncer={syncer}', f'queue={rollouts.address}', f'tls={tls}'
    children[name] = subprocess.Popen([sys.executable, __file__, name, str(workdir), *words])

  def evaluate(params: dict[str, np.ndarray]) -> dict[str, float]:
    rewards.append(float(expected_reward(params)))  # every 60 clocks
    print(f'{time.monotonic() - began_s:.0f} s: reward {rewards[-1]:.2f}', flush=True)
    return {'loss': 1 - rewards[-1], 'reward': rewards[-1]}

  proof = pathlib.Path(tls, 'syncer') if tls else None
  settings = {'total_steps': steps, 'shards': None, 'workdir': workdir, 'evaluate': evaluate}
  settings |= {'listen': listen, 'tls': proof}
  with (
    diloco_jax.run_syncer(init, sync=SYNC, **settings) as server,
    contextlib.ExitStack() as cleanup,
  ):
    socket = f'unix:{cleanup.enter_context(tempfile.TemporaryDirectory())}/queue'
    rollouts = cleanup.enter_context(contextlib.closing(Queue(queue or socket, proof)))
    cleanup.callback(lambda: [child.kill() for child in children.values()])
    for name in [f'l{m}' for m in range(trainers)] + [f'w{m}' for m in range(workers)]:
      start(name)
    ended = False
    while not ended:
      if child := children.get(victims.pop(len(rewards), '')):
        child.kill()
      for name, child in children.items():
        if child.poll():
          print(f'{name} has ended with code {child.poll()}: it is started again', flush=True)
          start(name)
      with contextlib.suppress(TimeoutError):
        server.wait(0.2)
        ended = True
    for child in children.values():
      child.wait(WAIT_S)


def main(what: str, workdir: str = 'runs/rl', *words: str) -> None:
  folder, given = pathlib.Path(workdir).absolute(), dict(word.split('=', 1) for word in words)
  if what == 'run':
    numbers = {name: int(word) for name, word in given.items() if word.isdigit()}
    run(folder, **given | numbers)
  elif what == 'alone':
    alone()
  elif what.startswith('l'):
    train(what, folder, **given)
  else:
    work(what, **given)


if __name__ == '__main__':
  main(*sys.argv[1:])
