"""An outer round of four learners in lock step, against an all-reduce and a bare gRPC star.

    python scripts/benchmarks/outer_round.py [--quick] [--torch] [--json=FILE]    # nine minutes

Four processes with one thread of arithmetic hold 25 million values each. A round begins when the
last process holds its pseudo-gradient, and ends when the slowest process has the result. All four
begin their next step together. Medians in seconds:

  ours     loops of one's own with `diloco_jax.join` and `diloco syncer`, one fragment, lock step:
           encode, send, screen, merge, commit to the log on this disk, publish, adopt
  gloo     jax.lax.psum of the float32 values between four processes
  star     four Python gRPC streams of raw bytes, 1 MiB a message, to one process that adds the
           float32 values with numpy and sends back the sum; no checks, no log, no optimizer

  torch    --torch: an all-reduce over gloo under PyTorch, and torchft's DiLoCo (torch_peers.py)

They take turns, on one machine, over loopback. --torch installs PyTorch and torchft into an
environment of their own under .cache; where pip finds no wheel for CPUs alone, these are gigabytes.
"""

import multiprocessing
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from multiprocessing import connection
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import grpc
import numpy as np

from scripts.benchmarks import measured

LEARNERS = 4
WIDTH, ARRAYS = 1024, 24
VALUES = ARRAYS * WIDTH * WIDTH
CHUNK = 1 << 20
WARM = 3  # rounds that compile and touch pages
DEADLINE_S = 600
TORCH = ('torch==2.13.0', 'torchft==0.2.0', 'numpy')
TORCH_PEERS = pathlib.Path(__file__).parents[1] / 'torch_peers.py'
LOCK_STEP = {'learners': LEARNERS, 'quorum': LEARNERS, 'fragments': 1, 'period': 1, 'overlap': 0}

Rounds = Iterator[tuple[float, float]]  # when this process held its values, and when the result


# --- The processes --------------------------------------------------------------------------------


def ours(index: int, address: str, rounds: int, variant: str) -> Rounds:
  import jax
  import jax.numpy as jnp

  import diloco_jax
  from diloco_jax.configs import own_loop

  sync = own_loop.get_config().sync
  for name, value in (LOCK_STEP | {'codec_up': variant, 'codec_down': variant}).items():
    setattr(sync, name, value)
  params = {f'w{k:02}': jnp.zeros((WIDTH, WIDTH)) for k in range(ARRAYS)}
  step = inner_step(index)
  join = diloco_jax.join(
    params, learner=f'l{index}', syncer=address, total_steps=rounds, sync=sync, wait_s=DEADLINE_S
  )
  with join as peer:
    params = peer.params
    for clock in peer.steps():
      params = jax.block_until_ready(step(params, clock))
      holds = time.monotonic()
      params = jax.block_until_ready(peer.sync(params, tokens=1))
      yield holds, time.monotonic()


def inner_step(index: int) -> Callable:
  """Of a learner of `ours`; stages.py has another one."""
  import jax

  draw = lambda clock: jax.random.split(jax.random.key(LEARNERS * clock + index), ARRAYS)
  noise = lambda leaf, key: leaf + 1e-3 * jax.random.normal(key, leaf.shape)
  return jax.jit(
    lambda params, clock: {
      name: noise(leaf, key) for (name, leaf), key in zip(params.items(), draw(clock))
    }
  )


def gloo(index: int, address: str, rounds: int, variant: str) -> Rounds:
  del variant
  import jax

  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.distributed.initialize(address, LEARNERS, index)
  mesh = jax.make_mesh((LEARNERS,), ('m',))
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('m'))
  whole = jax.sharding.PartitionSpec()
  total = jax.jit(
    jax.shard_map(lambda x: jax.lax.psum(x[0], 'm'), mesh=mesh, in_specs=rows.spec, out_specs=whole)
  )
  row = np.full((1, VALUES), index, np.float32)
  values = jax.make_array_from_process_local_data(rows, row, (LEARNERS, VALUES))
  for _ in range(rounds):
    holds = time.monotonic()
    jax.block_until_ready(total(values))
    yield holds, time.monotonic()


def star(index: int, address: str, rounds: int, variant: str) -> Rounds:
  del variant
  channel = grpc.insecure_channel(address)
  grpc.channel_ready_future(channel).result(DEADLINE_S)
  call = channel.stream_stream('/star/add', lambda data: data, lambda data: data)
  values, result = np.full(VALUES, index, np.float32), np.empty(VALUES, np.float32)
  for _ in range(rounds):
    holds = time.monotonic()
    _receive(call(_chunks(values), metadata=(('index', str(index)),)), result)
    yield holds, time.monotonic()


def serve_star(address: str) -> None:
  """The centre of the star, until its input closes."""
  rows, total = np.empty((LEARNERS, VALUES), np.float32), np.empty(VALUES, np.float32)
  gather = threading.Barrier(LEARNERS, lambda: np.add.reduce(rows, axis=0, out=total))
  sent = threading.Barrier(LEARNERS)

  def add(stream: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[memoryview]:
    index = int(dict(context.invocation_metadata())['index'])
    _receive(stream, rows[index])
    gather.wait(DEADLINE_S)
    yield from _chunks(total)
    sent.wait(DEADLINE_S)

  server = grpc.server(futures.ThreadPoolExecutor(LEARNERS))
  handler = grpc.stream_stream_rpc_method_handler(add, lambda data: data, lambda data: data)
  server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler('star', {'add': handler}),))
  server.add_insecure_port(address)
  server.start()
  sys.stdin.read()
  server.stop(0)


def _chunks(values: np.ndarray) -> Iterator[bytes]:
  data = memoryview(values).cast('B')
  return (bytes(data[start : start + CHUNK]) for start in range(0, len(data), CHUNK))


def _receive(stream: Iterator[bytes], to: np.ndarray) -> None:
  data, done = memoryview(to).cast('B'), 0
  for chunk in stream:
    data[done : done + len(chunk)] = chunk
    done += len(chunk)


# --- Turns ----------------------------------------------------------------------------------------


def torch_python() -> str:
  """The interpreter of the environment of torch_peers.py; '' if it cannot be made."""
  folder = ROOT / '.cache' / 'benchmarks' / 'torch'
  python = str(folder / 'bin' / 'python')
  try:
    subprocess.run([sys.executable, '-m', 'venv', folder], check=True)
    subprocess.run([python, '-m', 'pip', 'install', '--quiet', *TORCH], check=True)
  except (OSError, subprocess.CalledProcessError) as error:
    print(f'torch and torchft are not measured: {error}', flush=True)
    return ''
  return python


def turn(way: str, variant: str, rounds: int, python: str = '', program: str = '') -> list[float]:
  """Seconds of each round of one run of four processes.

  Args:
    way: the function that each process runs.
    variant: the codec of `ours`; how many fragments torchft has.
    rounds: the rounds that are measured.
    python: runs a way of torch_peers.py; '': the way is of this file.
    program: runs learners and syncer of `ours` in place of this file and of `diloco` (stages.py).
  """
  file = str(TORCH_PEERS if python else program or __file__)
  python = python or sys.executable
  with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{free.getsockname()[1]}'
    free.close()
    steps = rounds + WARM
    centre = None
    if way in ('star', 'torchft'):
      centre = _start(python, [file, f'--way=serve_{way}', f'--address={address}'])
    elif way == 'ours':
      settings = LOCK_STEP | {'codec_up': variant, 'codec_down': variant}
      centre = _start(
        python,
        [
          *([program] if program else ['-m', 'diloco_jax']),
          'syncer',
          '--config=own_loop',
          f'--workdir={folder}',
        ]
        + [f'--config.sync.{name}={value}' for name, value in settings.items()]
        + [f'--config.train.steps={steps + 1}'],
      )
      address, steps = f'file:{folder}/syncer/address', steps + 1  # after the last one is no round
    learners, pipes = [], []
    try:
      for index in range(LEARNERS):
        near, far = multiprocessing.Pipe()
        words = [file, f'--way={way}', f'--address={address}', f'--variant={variant}']
        words += [f'--index={index}', f'--rounds={steps}', f'--pipe={far.fileno()}']
        learners.append(_start(python, words, far.fileno()))
        far.close()
        pipes.append(near)
      times = [meet(pipes) for _ in range(steps)]
      for process in learners:
        if process.wait(DEADLINE_S):
          raise RuntimeError(f'a process of {way} {variant} ended with {process.returncode}')
    finally:
      for process in [*learners, centre]:
        if process is not None:
          process.kill()
          process.communicate()
  by_round = times[WARM : WARM + rounds]
  return [max(end for _, end in ends) - max(holds for holds, _ in ends) for ends in by_round]


def meet(pipes: list[connection.Connection]) -> list[Any]:
  """What each process sends at its next barrier: when it held its values, and had the result of a
  round. The processes begin the next step together: the step of one would take the cores of another
  whose round lasts."""
  if not all(pipe.poll(DEADLINE_S) for pipe in pipes):
    raise TimeoutError(f'a process has not ended a round within {DEADLINE_S} s')
  times = [pipe.recv() for pipe in pipes]
  for pipe in pipes:
    pipe.send(None)
  return times


def _start(python: str, words: list[str], *pipe: int) -> subprocess.Popen:
  return subprocess.Popen(
    [python, *words],
    cwd=ROOT,
    # PJRT_NPROC: of XLA's threads. RUST_LOG: torchft prints 20 lines a round.
    env=os.environ | {'JAX_PLATFORMS': 'cpu', 'PJRT_NPROC': '1', 'RUST_LOG': 'error'},
    stdin=subprocess.PIPE,
    stdout=subprocess.DEVNULL,
    pass_fds=pipe,
  )


def main() -> None:
  parser = measured.parser(__doc__)
  parser.add_argument('--torch', action='store_true', help='installs PyTorch and torchft, too')
  parser.add_argument('--way', default='', help='used by its own processes')
  parser.add_argument('--address', default='')
  parser.add_argument('--variant', default='')
  parser.add_argument('--index', type=int, default=0)
  parser.add_argument('--rounds', type=int, default=0)
  parser.add_argument('--pipe', type=int, default=0)
  flags = parser.parse_args()
  if flags.way == 'serve_star':
    serve_star(flags.address)
    return
  if flags.way:
    run: Callable[..., Rounds] = {'ours': ours, 'gloo': gloo, 'star': star}[flags.way]
    pipe = connection.Connection(flags.pipe)
    for moments in run(flags.index, flags.address, flags.rounds, flags.variant):
      pipe.send(moments)
      pipe.recv()
    return
  turns, rounds = (1, 5) if flags.quick else (3, 8)
  ways = [('gloo', '', ''), ('star', '', '')]
  ways += [('ours', codec, '') for codec in ('int8', 'int4', 'int2', 'float32')]
  if flags.torch and (python := torch_python()):
    ways += [('torch', '1', python), ('torchft', '1', python), ('torchft', '4', python)]
  times: dict[str, list[float]] = {}
  for _ in range(turns):
    for way, variant, python in ways:
      name, seconds = f'{way} {variant}'.strip(), turn(way, variant, rounds, python)
      print(f'{name}: ' + ' '.join(f'{time_s:.2f}' for time_s in seconds), flush=True)
      times.setdefault(name, []).extend(seconds)
  figures = {name: measured.spread(seconds) for name, seconds in times.items()}
  others = [name for name in figures if not name.startswith('ours') or name == 'ours int8']
  for name, figure in figures.items():
    ratios = (
      f'{figure["median"] / figures[other]["median"]:.2f} times {other}' for other in others
    )
    print(f'{name:15} {measured.text(figure)} s; {", ".join(ratios)}')
  measured.write(flags.json, {'values': VALUES, 'learners': LEARNERS, 'seconds': figures})


if __name__ == '__main__':
  main()
