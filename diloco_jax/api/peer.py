"""A learner inside a training loop of the user's own.

    with diloco_jax.join(params, syncer=address) as peer:
      for clock, batch in peer.steps(read):
        params, loss = my_step(params, batch)
        params = peer.sync(params, tokens=4096, metrics={'loss': loss})

The loop keeps its model, optimizer and data. `sync` is the boundary between two inner
steps: it passes the parameters to the protocol and returns those to go on with, the same tree with
the same dtypes and shardings; a fragment that has arrived is adopted in it. `sync` never waits for
the network, except after the last step, when the learner waits for the end of the run, and with
settings of lock step.
"""

import contextlib
import dataclasses
import operator
import os
import pathlib
import signal
import threading
import time
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.api import admission as admission_lib
from diloco_jax.api import advice as advice_lib
from diloco_jax.api import own_arrays, own_node
from diloco_jax.api import states as loop_states
from diloco_jax.config import run_config
from diloco_jax.learner import hosts as hosts_lib
from diloco_jax.process import dial, exits, lifecycle, own_model, run_folder
from diloco_jax.process import learner as learner_process
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import events, ids, messages
from diloco_jax.report import header
from diloco_jax.train import island as island_lib
from diloco_jax.transport import addresses

WAIT_S = 120.0
_GO_ON = 'Go on with what peer.sync returns: `state = peer.sync(state, ...)`'


class Ended(RuntimeError):
  """The learner cannot go on: the run is over, the syncer refused it, or an error ended it."""


class Peer:
  """A learner that the user's loop drives. Made by `join`; all calls come from one thread.

  Attributes:
    learner: its id.
    total_steps: the clock at which the run ends.
    clock: that of the step that is due; None: the loop, the run or this learner has ended.
    failed: whether an error has ended it.
  """

  def __init__(
    self,
    arrays: own_arrays.OwnArrays,
    total_steps: int,
    learner: str,
    node: own_node.LoopNode | None,
  ):
    self.total_steps, self.learner = total_steps, learner
    self._arrays = arrays
    self._node = typing.cast(own_node.LoopNode, node)  # None: the run has ended
    self._advice = advice_lib.Advice(arrays.params, node and node.restored_step)
    self._synced = True  # since the last step that `steps` yielded
    self._boundary_ns = self._data_ns = 0
    self._measured = False  # a step
    self._newest: Any = ()  # the newest step's smallest output, if no metric shows its end
    self._unrecorded: tuple[island_lib.StepResult, tuple[int, int], int] | None = None
    self._ended_ns = 0  # of the newest step that is recorded
    self.clock: int | None = None
    self.failed = False
    self._stepping = False  # the loop uses `steps`
    self._replaced = False  # some of what the last sync was given
    self._process, self._calls = os.getpid(), threading.Lock()

  @classmethod
  def of_ended(cls, arrays: own_arrays.OwnArrays, total_steps: int, learner: str) -> 'Peer':
    """A learner of a run that has ended: it has no steps."""
    header.say(
      f'[{learner}] the run has ended: there are no steps left. peer.params are those that '
      'join was given, diloco_jax.load_params has the model of the run'
    )
    return cls(arrays, total_steps, learner, None)

  @classmethod
  def begin(
    cls, arrays: own_arrays.OwnArrays, total_steps: int, learner: str, node: own_node.LoopNode
  ) -> 'Peer':
    """A learner before its first step, with the parameters of the run."""
    for line in arrays.form.describe():
      node.say(line)
    new = cls(arrays, total_steps, learner, node)
    new._next()
    if arrays.form.in_place:
      _ = new.params  # the loop's objects have them from here on
    return new

  @contextlib.contextmanager
  def driven_by_loop(self) -> Iterator[None]:
    """The time of the loop; then ends the learner."""
    if self.clock is None:
      self._require_well()
      self._node.say('the run has ended: there are no steps left')
    try:
      with self._stopping_on_sigterm():
        yield
    except Exception as error:  # JAX has several for this
      if self._replaced and not self._arrays.consumed and 'has been deleted' in str(error):
        error.add_note(f'peer.sync has replaced arrays with which this loop goes on. {_GO_ON}')
      raise
    finally:
      lost = os.getpid() != self._process or self._leave()
      if self._arrays.form.in_place and not lost:
        _ = self.params  # what has been adopted since the last sync
    if not lost:
      self._node.say(self._require_well())

  @property
  def params(self) -> Any:
    """The parameters to go on with, or the state, if `join` was given one."""
    self._advice.params_read = True
    return self._rebuild()[0]

  @property
  def opt_state(self) -> Any:
    """The inner optimizer's state to go on with. To begin with it is that of a checkpoint, or else
    the one given. After a sync it differs from the one given to it where that has copies of the
    parameters, which have moved as these have (docs/your_model.md)."""
    self._advice.moments_read()
    return self._rebuild()[1]

  def _rebuild(self) -> tuple[Any, Any]:
    return self._arrays.form.rebuild(self._arrays.params, self._arrays.kept)

  @property
  def shard(self) -> tuple[int, int]:
    """(shard, index of the next batch in it): where this learner reads."""
    return self._arrays.shard, self._arrays.next_index

  def steps(self, stream: Callable[[int, int], Any] | None = None) -> Iterator[Any]:
    """Yields the clock of each inner step until the run is over; with `stream`, (clock, batch).

    The clock is the step of learning-rate schedules: it is the same on all learners. `stream` maps
    (shard, index) to a batch; shards are leased, and a learner that takes one over reads on where
    the merged work ends. A learner keeps its shard for the whole run: `stream` must lead each shard
    through all data, as `train.data.Shard` does.
    """
    while self.clock is not None:
      self._require_own_process()
      if not self._synced:
        raise RuntimeError(
          'peer.sync has not returned since the last step: call it once per step, in the thread of '
          'the loop; in zip(peer.steps(), batches), which takes a step first, the batches may '
          'have no end'
        )
      self._synced, self._stepping = False, True
      begun_ns = time.monotonic_ns()
      work = self._node.work
      try:
        work.doing = messages.READING
        given = self.clock if stream is None else (self.clock, stream(*self.shard))
      except KeyboardInterrupt:
        if not (self._node.ended.done() and self._node.ended.result().abandons):
          raise
        return  # the run is over, and this batch was awaited for long (learner/stuck.py)
      finally:
        work.doing = ''
      self._data_ns = time.monotonic_ns() - begun_ns
      work.doing = messages.LOOPING
      yield given

  def sync(
    self,
    params: Any,
    *,
    tokens: int,
    opt_state: Any = None,
    metrics: Mapping[str, Any] | None = None,
  ) -> Any:
    """The boundary after an inner step.

    The first step of a loop that has not begun with `peer.params` does not count: the run's
    parameters take the place of what it has trained, and `steps` yields its clock and batch again.

    Args:
      params: after the step, a tree or a state like the one given to `join`. Consumed, as by
        donation: go on with what is returned.
      tokens: trained on in this step, more than 0: the weight of this learner in merges.
      opt_state: the inner optimizer's state after the step, if `join` was given one.
      metrics: scalars of this step by name, on a device or not: `loss`, and any others. They become
        curves, lines and records under `workdir`; the syncer records the loss, too. `sync` waits
        for those of the step before at most, so that the devices need not wait for the loop, and
        without any for that step itself; after the first step and the last one, for those of this
        step.

    Returns:
      The parameters, or the state, to go on with: the same tree, dtypes and shardings.

    Raises:
      Ended: the run is over, or an error has ended this learner.
      Any error of the boundary's work, which ends the learner at once, as a crash would.
      RuntimeError: the first step does not count, and has consumed what `join` was given; or the
        call is the second one in a step, or beside one of another thread, or in a process that was
        forked.
      TypeError: `tokens` is not an integer.
      ValueError: the arrays are not like those given to `join`, there are no tokens, or a metric
        is no number.
    """
    self._require_own_process()
    if not self._calls.acquire(blocking=False):
      raise RuntimeError(
        'another thread is in peer.sync: the loop of a learner is one thread, and nothing of this '
        'call counts. Two loops are two learners: call join in each'
      )
    try:
      return self._sync(params, tokens, opt_state, dict(metrics or {}))
    finally:
      self._calls.release()

  def _sync(self, params: Any, tokens: int, opt_state: Any, metrics: dict[str, Any]) -> Any:
    if self.clock is None:
      raise Ended(
        'the run is over, or this learner has ended with an error: leave the loop once peer.clock '
        'is None'
      )
    if self._stepping and self._synced:
      raise RuntimeError(
        'peer.sync was called twice in one step, and would have left a batch out: call it once for '
        'each step that peer.steps yields. Nothing of this call counts'
      )
    tokens = operator.index(tokens)  # also of NumPy and JAX: tapes and messages hold plain ones
    most = config_lib.TABLE['max_step_tokens'].default
    if not 0 < tokens <= most:
      raise ValueError(f'tokens is {tokens}: a step trains on at least one, and at most {most:,}')
    for name, value in metrics.items():
      if not hasattr(value, '__float__'):
        raise ValueError(f'metrics: {name} is {value!r}, give one number')
      if np.ndim(value):
        raise ValueError(f'metrics: {name} has the shape {np.shape(value)}, give one number')
    named, kept = self._arrays.form.split(params, opt_state)
    if kept and not named and opt_state is None:
      raise ValueError(
        'what sync was given has no array that join exchanges: give it the whole state, as join '
        'got it, and go on with the state that it returns'
      )
    if opt_state is None:  # a whole state, of which the last sync has returned all
      self._advice.moments_read()
    if not self._advice.params_read:  # a first step, on arrays that are not the run's
      if self._arrays.consumed:
        raise RuntimeError(
          'the first step has consumed the arrays that join was given (donate_argnums), and the '
          'run may have others: begin with `params = peer.params`'
        )
      self._synced, self._boundary_ns = True, time.monotonic_ns()
      return self.params
    held, copies = self._arrays.params, self._arrays.copies
    self._check(named, kept)
    for text in self._advice.of_step(named):
      self._node.say(text)
    with self._ends_with_an_error():
      self._arrays.take(named, kept)
      copies.take(self._arrays.params, self._arrays.moments or {})
      for text in self._advice.of_copies(self._arrays):
        self._node.say(text)
      if copies.moving:
        self._node.work.exchange.borrow()
      trained = self._arrays.params
      self._arrays.tokens_per_step = tokens
      self._arrays.next_index += 1
      self._synced = True
      metrics = {name: _kept_metric(value) for name, value in metrics.items()}
      self._measure(self.clock, tokens, metrics)
      if not any(hasattr(value, 'block_until_ready') for value in metrics.values()):
        changed = [leaf for name, leaf in trained.items() if leaf is not held[name]]
        self._newest = [jnp.copy(leaf) for leaf in sorted(changed, key=lambda leaf: leaf.size)[:1]]
      with self._advice.boundary(self._arrays):
        self._next()
      self._replaced = any(leaf.is_deleted() for leaf in trained.values())
      return self.params

  def _require_own_process(self) -> None:
    if os.getpid() != self._process:
      raise RuntimeError(
        f'this process was forked from the learner {self.learner}, and has neither its threads nor '
        'its connection: only the process that has joined may train, and goes on. Nothing of this '
        'call counts'
      )

  def __reduce__(self) -> Any:
    raise TypeError(
      f'the learner {self.learner} cannot go to another process: call join there, with a learner '
      'of its own'
    )

  @contextlib.contextmanager
  def _ends_with_an_error(self) -> Iterator[None]:
    """Around the work of a boundary. Without all of it the machine would wait for ever, so an error
    ends the learner at once, as a crash would: also an interrupt, or one of memory. A mesh that the
    program has set (jax.set_mesh) is the one of its own steps."""
    try:
      with jax.set_mesh(None):
        yield
    except BaseException as error:
      self.clock, self.failed = None, True
      self._node.fail(error)
      raise

  def _measure(self, clock: int, tokens: int, metrics: dict[str, Any]) -> None:
    """Tells the machine of the step, and records the one before, of which the metrics are due: the
    devices have this one to do. A step that is done is recorded now, as the first one and the last
    one must be."""
    self._node.work.doing = messages.STEPPING
    waits = not self._measured or clock + 1 >= self.total_steps
    self._measured = True
    if self._unrecorded:
      jax.block_until_ready(self._unrecorded[0].metrics)
    jax.block_until_ready(self._newest)
    times = self._record()
    outputs = [*metrics.values()]
    if not any(hasattr(output, 'is_ready') for output in outputs):
      outputs.append(min(self._arrays.params.values(), key=lambda leaf: leaf.size))
    if waits:
      jax.block_until_ready(outputs)
    between = self._node.work.take_between()
    result = island_lib.StepResult(None, None, tokens, 0.0, self._data_ns / 1e9, clock, metrics)
    self._unrecorded, self._data_ns = (result, between, self._boundary_ns), 0
    if waits or all(getattr(output, 'is_ready', lambda: True)() for output in outputs):
      times = self._record()
    self._node.post(events.StepDone(tokens=tokens, loss=self._node.work.loss, **times))

  def _record(self) -> dict[str, int]:
    """Records the step that is not recorded yet, if there is one, once its metrics are there: it
    took the time since its begin, or since the end of the step before. Returns its times."""
    if self._unrecorded is None:
      return {'step_ns': 0}
    (result, between, begun_ns), self._unrecorded = self._unrecorded, None
    metrics = {name: float(value) for name, value in result.metrics.items()}
    loss, now_ns = metrics.pop('loss', None), time.monotonic_ns()
    step_ns, self._ended_ns = max(1, now_ns - max(begun_ns, self._ended_ns)), now_ns
    data_s = min(result.data_s, step_ns / 1e9)
    result = result._replace(loss=loss, metrics=metrics, seconds=step_ns / 1e9, data_s=data_s)
    self._node.work.record(result, *between)
    return {'step_ns': step_ns, 'data_ns': int(data_s * 1e9), 'saving_ns': between[0]}

  def _check(self, named: dict[str, Any], kept: dict[str, Any] | None) -> None:
    """Raises ValueError: the arrays of the loop are not like those of `join`."""
    held, moments = self._arrays.params, self._arrays.moments
    own_arrays.require_alike(held, named)
    for name, first in held.items():
      leaf = named[name]
      if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ValueError(f'{name} is deleted: a sync before has replaced it. {_GO_ON}')
      committed = self._arrays.shardings.params[name] is not None
      moved = isinstance(leaf, jax.Array) and not committed and leaf.sharding != first.sharding
      if moved and leaf.devices() != self._arrays.devices:
        raise ValueError(
          f'{name} has moved to other devices since join: put the parameters there before, with '
          'jax.device_put(params, sharding)'
        )
    if (kept is None) != (moments is None):
      given = 'no opt_state' if kept is not None else 'an opt_state'
      raise ValueError(f'join was given {given}: give it to both or to neither')
    own_arrays.require_alike(moments or {}, kept or {}, 'opt_state: ')

  def _next(self) -> None:
    """Performs work until the next step may begin or the node has ended."""
    self.clock = self._node.work.next_step()
    self._node.work.doing = '' if self.clock is None else messages.LOOPING
    self._advice.moved_copy = self._arrays.follow()
    self._boundary_ns = time.monotonic_ns()

  @contextlib.contextmanager
  def _stopping_on_sigterm(self) -> Iterator[None]:
    """At SIGTERM the loop has no more steps: what it has trained is sent and saved, and the loop
    ends in order. Not if the program has a handler of its own. A second SIGTERM ends the
    process."""
    requests = exits.EndRequests()

    def handle(number: int, frame: object) -> None:
      del frame
      is_forked = os.getpid() != self._process  # as one that reads data
      again = requests.add() and requests.count > 1
      if again or is_forked:
        os._exit(128 + number)
      self._node.post(events.Stop(reason='preempted'))

    takes = threading.current_thread() is threading.main_thread()
    takes = takes and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if takes:
      signal.signal(signal.SIGTERM, handle)
    try:
      yield
    finally:
      if takes:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

  def _leave(self) -> bool:
    """Ends the learner; returns whether it is lost, by an error of its own or because its last step
    has consumed the parameters."""
    with contextlib.suppress(Exception):  # of a step that has failed, whose error the loop has
      self._record()
    if self._arrays.consumed and not self.failed:  # nothing to contribute, as after a crash
      self.clock, self.failed = None, True
      self._node.fail(Ended('left after a step that had consumed the parameters'))
    with self._calls, self._ends_with_an_error():  # not beside a sync of another thread
      if self.clock is not None:
        self._node.work.exchange.borrow()  # what the last sync has returned stays the loop's
        self._node.post(events.Stop(reason='its loop ended'))
        self._node.post(events.StepDone(tokens=0, step_ns=0))
      while self.clock is not None:
        self._next()
    return self.failed

  def _require_well(self) -> str:
    """How the node has ended. Raises Ended: it has failed, or the syncer has refused it."""
    result = self._node.ended.result()
    if result.code:
      raise Ended(result.text)
    return result.text


def _kept_metric(value: Any) -> Any:
  """A copy of a metric, which is read later, when the loop may have donated or written it."""
  if isinstance(value, np.ndarray):
    return float(value)
  return jnp.copy(value) if isinstance(value, jax.Array) else value


@contextlib.contextmanager
def join(
  params: Any,
  *,
  syncer: str,
  learner: str = '',
  total_steps: int = 0,
  sync: run_config.SyncConfig | None = None,
  opt_state: Any = None,
  exchange: Callable[[Any], Any] | None = None,
  label: Callable[[str], str] | None = None,
  shards: int | None = 0,
  workdir: str | pathlib.Path | None = None,
  checkpoint_every_steps: int = 60,
  store: str = '',
  wait_s: float = WAIT_S,
  tls: str | pathlib.Path | None = None,
  plaintext_loopback: bool = False,
) -> Iterator[Peer]:
  """Makes this program a learner of a run for the time of the `with`.

  The first learner of a run brings the model to the syncer: its parameters are version 0. Later
  learners must have the same tree of shapes, and take the values from the syncer. All take the
  settings that they share from it, too; one that is given here must be the syncer's.

  A loop may be left at any time. At SIGTERM, if the program has no handler for it, `steps` yields
  no more, and the program goes on behind the loop. The learner then answers what the syncer has
  asked for, and leaves; but if its last step has consumed the parameters (`donate_argnums`) and
  `sync` was not called after it, the learner is lost as by a crash, and with it what was not merged
  yet.

  Several hosts: after `jax.distributed.initialize(heartbeat_timeout_seconds=20)` each runs the same
  program, with parameters on a mesh of all devices, and one `workdir`. All have the same clocks and
  batches and leave the loop after the same step. An exception ends all: exit code 75.

  Args:
    params: a tree of float arrays, all on the devices of this learner. They are copied before a
      merged value replaces them. Or a whole state, with its optimizer's (api/states.py): a
      TrainState of flax, (model, nnx.Optimizer), which are updated in place, or any other, with
      `exchange`. What of it is not exchanged is kept: saved as `opt_state` is.
    syncer: where it listens: 'HOST:PORT', 'unix:PATH', or 'file:PATH' of a file with one of these.
    learner: the id of this learner, for example 'l0'; one process per id, or one on each host. '':
      that of the certificate in `tls`; else a new one, which `workdir` keeps for the next process
      there after the end of this one.
    total_steps: T, the clock at which the run ends; 0: what the syncer has.
    sync: shared settings that the run must have; one counts as given if it is not the default of
      SyncConfig.
    opt_state: the inner optimizer's state, a tree of arrays. It is saved under `workdir` or
      `store`, and a process that joins a run begins with the newest saved one, of this learner or
      else of any other there: `peer.opt_state`.
    exchange: returns the part of a state of which the gradient is taken, as `lambda state:
      state.model`: its float arrays are exchanged.
    label: name of a parameter ('layers/0/kernel') -> 'embedding', 'head', 'body' or another label
      of a Task (train/task.py), which selects its merge rule. Default: task.embeddings, and
      'statistic' for a BatchStat of flax.nnx. Arrays labelled 'local' or 'frozen' are never sent or
      replaced, and no checkpoint has them.
    shards: how many shards `Peer.steps` deals out; 0: what the syncer has. None: each learner has
      data of its own (`data.local`), `peer.shard` is (its number, index), nobody waits for data.
    workdir: a folder for the tape, the records and the checkpoints of this learner, or of all
      learners of this run; None: a temporary one, and no checkpoints.
    checkpoint_every_steps: after how many inner steps `opt_state` is saved; 0: at the end only.
    store: a folder or gs://BUCKET/PREFIX for the checkpoints, instead of `workdir`: what outlives
      this machine, with those of the other learners of this run.
    wait_s: how long to wait for a syncer that listens, and then for it to admit this learner. From
      there on the learner waits for the run to begin.
    tls: the folder with this learner's certificate, or with a folder of its id (`diloco certs`),
      for every address that is not a Unix socket.
    plaintext_loopback: plain TCP on a loopback address, for debugging.

  Raises:
    ValueError: settings or arrays cannot work, or are not the syncer's, and nothing was sent; or
      the syncer refused the model.
    TimeoutError: no syncer listens, or none has admitted this learner. The run may have ended.
    Ended: the syncer refused this learner.
    StateError: the store does not answer.
  """
  if learner and not (isinstance(learner, str) and ids.is_learner(learner)):
    raise ValueError(f'learner is {learner!r}: {ids.RULE}')
  form = loop_states.Form(params, opt_state, exchange, label)
  with jax.set_mesh(None):  # that of the program is for its own steps
    arrays = own_arrays.OwnArrays(form, params, opt_state)
  del params, opt_state
  config = own_model.config(total_steps, sync or run_config.SyncConfig(), shards)
  config.train.checkpoint_every_steps = checkpoint_every_steps
  config.train.store = store
  config.train.validate()
  run_config.require_types('', config)
  lifecycle.keep_compiled()
  access = addresses.access(tls, plaintext_loopback, learner)
  address = dial.resolver(syncer, access)
  crashing = learner_process.crashing_at_once if jax.process_count() > 1 else contextlib.nullcontext
  with lifecycle.OwnStack() as cleanup:
    with crashing():
      model = arrays.describe()
      folder = pathlib.Path(workdir or '').absolute()
      if hosts_lib.leads():
        folder = run_folder.or_temporary(workdir, cleanup)
        learner = learner or admission_lib.choose(folder, access, cleanup)
        dial.require_own_certificate(access, learner)
        header.say(
          f'[{learner}] waits for a syncer at {dial.describe(syncer)}, at most {wait_s:g} s'
        )
      learner = hosts_lib.broadcast_text(learner)
      terms = admission_lib.meet(model, config, address, access, wait_s)
      if isinstance(terms, int):
        yield Peer.of_ended(arrays, terms, learner)
        return
      assembled = own_model.complete(model, terms.applied_to(config))
      # Only a syncer begins with version 0; here it would be held beside the model all along.
      assembled = dataclasses.replace(assembled, init=None)
      del model
      saves = workdir is not None or bool(store)
      connect = dial.dialer(assembled, address, access)
      with jax.set_mesh(None):
        node = own_node.begin(
          arrays, assembled, terms.run, learner, folder, saves, connect, wait_s, cleanup
        )
        peer = Peer.begin(arrays, assembled.config.train.steps, learner, node)
    with peer.driven_by_loop(), crashing():
      yield peer
