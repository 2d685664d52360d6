"""The work of a learner: inner steps, encoding, adoptions and saves on one island.

Two threads. The *step thread* (the caller of `run`, or of `next_step` in a loop of the user's own)
takes work first in, first out and is the only one that touches the island: between two steps it
only dispatches encodings and adoptions, all on the device and inside jit. The *egress thread* waits
for the few results that must reach the host (encoded bytes, digests), announces them and posts
their events, so the next step does not wait for a copy, a checksum or the network. Compilation
ahead of use and the wait for a save have threads while they last.
"""

import collections
import contextlib
import functools
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from diloco_jax.config import build, run_config
from diloco_jax.learner import island_port, on_device, stuck
from diloco_jax.node import payload as payload_lib
from diloco_jax.node import ports
from diloco_jax.numerics import digest as digest_lib
from diloco_jax.protocol import actions, events, messages
from diloco_jax.report import facts as report_facts
from diloco_jax.report import records as records_lib
from diloco_jax.storage import states
from diloco_jax.train import island as island_lib
from diloco_jax.train import optimizer as optimizer_lib
from diloco_jax.transport import payloads as payloads_lib

_STEP_ENDED = object()  # in the queue of work: the devices have completed a step


class LearnerWork:
  """The Work port of a learner (node.ports.Work). `run` on the step thread, `submit` from any."""

  def __init__(
    self,
    assembled: build.Assembly,
    island: island_port.IslandState,
    post: ports.Post,
    fail: Callable[[BaseException], None],
    payloads: ports.Payloads,
    records: records_lib.Recorder,
    exchange: on_device.Exchange | None = None,
  ):
    """`fail` ends the node after an exception on a thread of this work: without its egress thread a
    learner would train on and contribute nothing."""
    self._config = assembled.config
    self._island = island
    self._post = post
    self._fail = fail
    self._payloads = payloads
    self._records = records
    self.exchange = exchange or on_device.Exchange(assembled, island).begin()
    self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self._egress: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
    self._steps = 0
    self._tokens = 0
    self.loss: float | None = None  # of the newest recorded step, if it is finite
    self._stepped = threading.Event()  # once
    self._thread = 0  # the thread of the steps
    self.doing = ''  # what it does (messages.DOING); '': it waits for work
    # For each complete step its times, until a StepDone has them.
    self._times: collections.deque[dict[str, int]] = collections.deque()
    self._lock_step = assembled.protocol.lag is not None
    self._saving_ns = self._idle_ns = 0  # since the last step
    self._evaluates = bool(assembled.never_sent)  # then only learners have the whole model

  def submit(self, action: actions.Work) -> None:
    if isinstance(action, actions.Examine):
      self._post(stuck.examine(self._thread, self.doing))
    else:
      self._queue.put(action)

  def stop(self) -> None:
    """Ends `run` after all work submitted before."""
    self._queue.put(None)

  def run(self) -> None:
    """Performs work until `stop`, on an Island. An exception ends it and reaches the caller."""
    with self.run_threads():
      after, steps = 0, self._config.train.steps
      while (clock := self.next_step()) is not None:
        self._evaluate(clock)
        self._step(clock)
        after = clock + 1
      self._finish()
      if after >= steps:  # the merged steps of other learners are in it, too
        self._evaluate(steps)

  def abandon(self, end: actions.Exit) -> None:
    """Ends the thread of the steps, which is stuck, or else the process; called on another one."""
    if stuck.abandon(end, self._thread, lambda: self.doing):
      code = end.code or actions.NOT_IN_TIME
      self._records.ended(code)
      os._exit(code)

  @contextlib.contextmanager
  def run_threads(self) -> Iterator[None]:
    """Runs the egress thread, and one that compiles what is not compiled yet."""
    ended = threading.Event()
    both = [
      threading.Thread(target=self._drain, name='egress', daemon=True),
      threading.Thread(target=self._compile_meanwhile, args=(ended,), name='compile', daemon=True),
    ]
    for thread in both:
      thread.start()
    try:
      yield
    finally:
      self._egress.put(None)
      ended.set()
      self._stepped.set()
      for thread in both:
        thread.join()  # a process that ends while it compiles may crash

  def _compile_meanwhile(self, ended: threading.Event) -> None:
    """After the first step, which it would delay: tracing holds the GIL."""
    try:
      self._stepped.wait()
      self.exchange.compile_all(ended.is_set)
    except Exception as error:
      self._records.say(
        f'compiling ahead of use failed: {error}. Training continues; what is missing is compiled '
        'when it is needed.'
      )

  def next_step(self) -> int | None:
    """Performs work until the machine asks for an inner step; returns the step's clock, None after
    `stop`."""
    self._thread = threading.get_ident()
    while (action := self._take()) is not None:
      if isinstance(action, actions.Step):
        return action.clock
      self._perform(action)
    return None

  def _take(self) -> actions.Work | None:
    """Waits for work. A step that ends meanwhile is recorded at once; from there on the wait is one
    for others."""
    while True:
      idle, begun_ns = not self._island.must_finish(0), time.monotonic_ns()
      self.doing = ''
      action = self._queue.get()
      self.doing = messages.SAVING if isinstance(action, actions.Save) else messages.STEPPING
      if idle:
        self._idle_ns += time.monotonic_ns() - begun_ns
      if action is not _STEP_ENDED:
        return action
      self._finish(1)

  def _drain(self) -> None:
    try:
      while (task := self._egress.get()) is not None:
        task()
    except BaseException as error:  # raised again where the node runs
      self._fail(error)

  def _perform(self, action: actions.Work) -> None:
    match action:
      case actions.Encode(sync=sync, fragment=fragment):
        data, ok = self.exchange.encode(fragment)
        self._egress.put(functools.partial(self._encoded, sync, fragment, data, ok))
      case actions.Adopt():
        self._adopt(action)
      case actions.UseShard():
        self._use_shard(action)
      case actions.Save():
        self._save(action)
      case _:
        raise TypeError(f'a learner has no such work: {action}')

  def _adopt(self, adopt: actions.Adopt) -> None:
    data = self._take_payload(adopt.payload_id)
    digest = self.exchange.adopt(adopt.fragment, data, adopt.whole, adopt.keep, adopt.merged)
    self._egress.put(functools.partial(self._adopted, adopt.fragment, adopt.version, digest))

  def _take_payload(self, payload_id: int) -> payload_lib.Payload:
    """Takes a payload that has arrived out of its store. Of several hosts (hosts.py) this is a
    meeting: each of them enters it at the same place of its work, or all of them wait."""
    data = self._payloads.get(payload_id)
    self._payloads.drop(payload_id)
    return data

  def _use_shard(self, use: actions.UseShard) -> None:
    """Reads on from the committed cursor of a shard, even if the checkpoint has another position:
    training beyond that cursor was lost with its process, so its batches are read again."""
    if use.rewind:
      self.exchange.rewind()
    self._island.read_from(use.shard, use.cursor)

  def _step(self, clock: int) -> None:
    """Dispatches the step, and waits for the one before only: the work of the boundary follows on
    the devices, where it belongs. After the last step it waits for this one, too."""
    ended = self._island.dispatch(clock)
    if self._lock_step:  # else it waits for no others
      ended.add_done_callback(lambda _: self._queue.put(_STEP_ENDED))
    self._finish(0 if clock + 1 >= self._config.train.steps else 1)
    times = self._times.popleft() if self._times else {'step_ns': 0}
    self._post(events.StepDone(tokens=self._island.tokens_per_step, loss=self.loss, **times))

  def _evaluate(self, clock: int) -> None:
    """Records the held-out loss before the step at `clock`, if it is due."""
    train = self._config.train
    due = clock in (0, train.steps) or (train.eval_every and clock % train.eval_every == 0)
    if self._evaluates and due:
      self._finish()
      evaluate(self._island, self._records, clock)

  def _finish(self, ahead: int = 0) -> None:
    """Waits for the steps that were dispatched, but not for the newest `ahead` of them."""
    while self._island.must_finish(ahead):
      result = self._island.finish()
      saving_ns, idle_ns = self.take_between()
      step_ns, data_ns = int(result.seconds * 1e9), int(result.data_s * 1e9)
      self._times.append({'step_ns': step_ns, 'data_ns': data_ns, 'saving_ns': saving_ns})
      self.record(result, saving_ns, idle_ns)

  def record(self, result: island_lib.StepResult, saving_ns: int, idle_ns: int) -> None:
    """Records a step, and what `take_between` has returned after it."""
    self._steps += 1
    self._stepped.set()
    self._tokens += result.tokens
    if result.loss is not None:
      self.loss = result.loss if math.isfinite(result.loss) else None
    record_step(
      self._records,
      self._config,
      self._island,
      self._steps,
      self._tokens,
      result,
      saving_s=saving_ns / 1e9,
      # Before its first step a process joins: no wait for others.
      waited_s=idle_ns / 1e9 if self._lock_step and self._steps > 1 else 0.0,
    )

  def take_between(self) -> tuple[int, int]:
    """Time in ns since the last step that saves took on this thread, and without any work."""
    saving_ns, idle_ns = self._saving_ns, self._idle_ns
    self._saving_ns = self._idle_ns = 0
    return saving_ns, idle_ns

  def _encoded(self, sync: int, fragment: int, data: jax.Array, ok: jax.Array) -> None:
    if not bool(ok):
      self._post(events.Encoded(sync=sync, fragment=fragment, payload_id=None, payload=None))
      return
    payload_id, payload = payloads_lib.keep(self._payloads, self.exchange.wire(fragment, data))
    self._post(events.Encoded(sync=sync, fragment=fragment, payload_id=payload_id, payload=payload))

  def _adopted(self, fragment: int, version: int, digest: jax.Array) -> None:
    self._post(
      events.AdoptDone(fragment=fragment, version=version, digest=digest_lib.as_int(digest))
    )

  def _save(self, save: actions.Save) -> None:
    """Starts an asynchronous save; a separate thread waits for its end. The steps before it are
    done first, so that their time does not count as time of the save."""
    self._finish()
    begun_ns = time.monotonic_ns()
    try:
      wait = self._island.save(save.clock, save.machine_state)
    except states.StateError as error:
      self._post(events.SaveDone(clock=save.clock, error=str(error)))
      return
    finally:
      self._saving_ns += time.monotonic_ns() - begun_ns
    threading.Thread(target=self._saved, args=(save.clock, wait), name='save', daemon=True).start()

  def _saved(self, step: int, wait: Callable[[], int]) -> None:
    try:
      wait()
    except states.StateError as error:
      self._post(events.SaveDone(clock=step, error=str(error)))
    except BaseException as error:
      self._fail(error)
    else:
      self._post(events.SaveDone(clock=step))


def evaluate(island: island_lib.Island, records: records_lib.Recorder, step: int) -> None:
  """Records the held-out loss of an island, if its task has batches for it."""
  if (loss := island.evaluate()) is not None:
    bits_per_byte = island.bits_per_byte(loss)
    records.evaluated(report_facts.Eval(step=step, loss=loss, bits_per_byte=bits_per_byte))


def introduce(island: island_lib.Island, records: records_lib.Recorder) -> None:
  """Records and prints what the learner trains, before it compiles that."""
  cost = island.cost()
  records.report(cost)
  flops = f', {cost.flops * cost.devices / 1e9:.3g} GFLOP a step' if cost.flops else ''
  records.say(f'compiles the step: {cost}{flops}')


def record_step(
  records: records_lib.Recorder,
  config: run_config.Config,
  island: island_port.IslandState,
  steps: int,
  tokens: int,
  result: island_lib.StepResult,
  saving_s: float = 0.0,
  waited_s: float = 0.0,
) -> None:
  """Records one inner step; every log_every steps also the other curves and a line for people.

  `steps` and `tokens` are the totals of this process; for the others see facts.Step.
  """
  step = result.clock + 1
  measured = ({} if result.loss is None else {'loss': result.loss}) | result.metrics
  records.report(
    report_facts.Step(
      step=step,
      steps=steps,
      tokens=tokens,
      loss=result.loss,
      seconds=result.seconds,
      data_s=result.data_s,
      saving_s=saving_s,
      waited_s=waited_s,
    )
  )
  if result.metrics:
    records.report(report_facts.Metrics(step=step, values=result.metrics))
  curves = {f'learning/{name}': value for name, value in measured.items()}
  if steps % config.train.log_every:
    records.scalars(step, curves)
    return
  if result.grad_norm is not None:
    curves['learning/grad_norm'] = result.grad_norm
    rate = optimizer_lib.schedule(config.optimizer, config.train.steps)(step - 1)
    curves['learning/learning_rate'] = rate
  cost = island.cost()
  records.report(cost)
  records.scalars(
    step,
    {
      'perf/step_time_seconds': result.seconds,
      'perf/tokens_per_second': result.tokens / result.seconds,
      'perf/tokens_per_step': cost.tokens,
      'perf/parameters': cost.parameters,
      **{f'perf/{name}': value for name, value in cost.speed(result.seconds).items()},
      **curves,
    },
  )
  records.completed(step, result.seconds, measured, cost)
