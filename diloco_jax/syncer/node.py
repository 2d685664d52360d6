"""Builds the node of one syncer from its ports and runs it to its end.

The same function serves a separate process (gRPC) and the single-controller mode (in process): only
the transport differs. However the last process ended, this one continues from the newest checkpoint
and the log of outer steps behind it (storage/outer_log.py).
"""

import contextlib
import dataclasses
import functools
import pathlib
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

from diloco_jax.config import brought, build
from diloco_jax.node import loop, ports
from diloco_jax.protocol import actions, events, facts, rate_limited_log
from diloco_jax.protocol import tempo as tempo_lib
from diloco_jax.protocol.syncer import machine as syncer_machine
from diloco_jax.protocol.syncer import recovery
from diloco_jax.protocol.tape import tape as tape_lib
from diloco_jax.report import facts as report_facts
from diloco_jax.report import header
from diloco_jax.report import records as records_lib
from diloco_jax.storage import checkpoint, folders, outer_log, states, tapes, wal
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import lineage as lineage_lib
from diloco_jax.syncer import commit, global_model, stored
from diloco_jax.syncer import evaluation as evaluation_lib
from diloco_jax.syncer import followers as followers_lib
from diloco_jax.syncer import work as syncer_work
from diloco_jax.transport import link
from diloco_jax.transport import payloads as payloads_lib

STOP_SEEN_S = 0.1  # after which a stop ends the last evaluation
_SAY_S = 60.0


class SyncerRecords:
  """The syncer's records, with the bytes on the wire after each ledger (node.ports.Records)."""

  def __init__(
    self,
    records: records_lib.Recorder,
    traffic: link.Traffic,
    assembled: build.Assembly,
    followers: followers_lib.Followers | None,
  ):
    self._records = records
    self._traffic = traffic
    self._followers, self._followed = followers, True  # the process before had some, perhaps
    self._learners = assembled.config.sync.learners
    self._parameters = assembled.parameters
    self._steps = assembled.config.train.steps
    self._next_s = 0.0
    self.say = records.say
    # For a learner that comes again and again.
    self._notices = rate_limited_log.Notices(int(_SAY_S * 1e9), records.say)
    self._lost = set[str]()  # learners of which the newest line says so
    self._owed: dict[str, tuple[facts.Member, float]] = {}  # what it does not say, until when

  def report(self, fact: facts.Fact) -> None:
    up, down = self._traffic.received_bytes, self._traffic.sent_bytes
    self._records.report(fact)
    match fact:
      case facts.Ledger():
        parallel = self._data_parallel_bytes(fact)
        self._records.report(
          report_facts.Traffic(bytes_up=up, bytes_down=down, bytes_data_parallel=parallel)
        )
        self.report_followers()
        self.report_owed()
        self._say(fact)
      case facts.Member(state='joined' | 'lost'):
        self._owed[fact.learner] = fact, time.monotonic() + _SAY_S
        self._say_member(fact, fact.state == 'joined' and fact.learner in self._lost)
      case facts.Synced():
        self._records.scalars(
          fact.sync,
          {
            'sync/participants': len(fact.participants),
            'sync/staleness': fact.staleness,
            'sync/bytes_up': up,
            'sync/bytes_down': down,
            # A closing sync waits for everybody.
            **({'sync/grace_seconds': fact.grace_ns / 1e9} if fact.sync <= self._steps else {}),
          },
        )

  def _say_member(self, fact: facts.Member, always: bool) -> None:
    why = fact.reason if fact.reason.startswith('left') else f'is lost: {fact.reason}'
    line = f'{fact.learner} {"joined" if fact.state == "joined" else why}'
    subject = f'{fact.learner} {fact.state}'
    if self._notices.say(time.monotonic_ns(), subject, line, always):
      (self._lost.add if fact.state == 'lost' else self._lost.discard)(fact.learner)
    if (fact.state == 'lost') == (fact.learner in self._lost):
      del self._owed[fact.learner]  # the newest line is so

  def report_owed(self, ended: bool = False) -> None:
    """Prints that a learner was lost again within the pause after such a line, once it is over."""
    for fact, until_s in [*self._owed.values()]:
      if ended or time.monotonic() >= until_s:
        self._say_member(fact, always=True)

  def report_followers(self, ended: bool = False) -> None:
    count, behind = self._followers.state() if self._followers and not ended else (0, 0)
    if count or self._followed:
      self._records.report(report_facts.Followers(count=count, behind=behind))
    self._followed = bool(count)

  def _say(self, ledger: facts.Ledger) -> None:
    """Says a line about the whole run, every now and then."""
    if 0 < ledger.sync < self._steps and time.monotonic() >= self._next_s:
      self._next_s = time.monotonic() + _SAY_S
      self.say(
        f'{ledger.sync / self._steps:.0%}: clock {ledger.sync} of {self._steps}, {ledger.synced} '
        f'outer steps, {ledger.trained:,} tokens'
      )

  def _data_parallel_bytes(self, ledger: facts.Ledger) -> int:
    """The bytes that data-parallel training of the same steps would have moved: in every inner step
    a ring all-reduce of bfloat16 gradients, in which each of M learners sends 2 (M - 1) / M of
    them."""
    steps = sum(row['steps'] for row in ledger.learners.values())
    return steps * 2 * self._parameters * 2 * (self._learners - 1) // self._learners


def run(
  assembled: build.Assembly,
  theta: global_model.Theta,
  workdir: pathlib.Path,
  event_queue: loop.EventQueue,
  make_transport: ports.MakeTransport,
  records: records_lib.Recorder,
  finished: Callable[[], None] = lambda: None,
  store: stored.Stored | None = None,
  measure: evaluation_lib.Measure | None = None,
  followers: followers_lib.Followers | None = None,
  last_word: Callable[[BaseException | None], str] = lambda error: '',
) -> actions.Exit:
  """Runs a syncer until every fragment is closed or a Stop arrives.

  Args:
    assembled: the run.
    theta: at version 0.
    workdir: holds log, checkpoints and tapes; the run in it is continued.
    event_queue: other threads may post a Stop to it.
    make_transport: called before the recovery, so that learners can connect; their messages wait in
      the event queue until the machine exists.
    records: where facts go.
    finished: called once the run is over and no learner is waited for, before the last evaluation.
    store: of the run, if the caller has opened it.
    measure: of the published model, where there is no task.
    followers: of the run, whom the transport serves.
    last_word: the text for learners as the transport shuts down, after an error perhaps.

  Returns:
    The machine's Exit; its saves are on disk, and in the store. NOT_IN_TIME: not in the store yet.

  Raises:
    DirectoryError: the log's folder cannot be written, another syncer has it, or a restore has not
      ended.
    WalError: the log cannot be recovered, or the disk failed.
    StoreError: the store cannot be read or written.
    ValueError: a file of the run is not what was written, or the data or the initial model are not
      what it has begun with.
  """
  with contextlib.ExitStack() as cleanup:
    config = assembled.config
    store = store or cleanup.enter_context(stored.open_store(config, workdir, records.say))
    log_files = store.log_files if store else files_lib.Files(folders.log_folder(workdir))
    log = commit.CommitLog(log_files, assembled.agreement, records.say, store=store)
    cleanup.callback(log.close)
    lineage = lineage_lib.begin(workdir)  # behind the lock: now no restore begins
    _introduce(assembled, records)
    payloads = payloads_lib.PayloadStore()
    transport = make_transport(event_queue.post, payloads)
    cleanup.push(lambda _, error, where: transport.shutdown(ports.SHUTDOWN_S, last_word(error)))
    brought.begin(workdir, assembled.things, config.train.store)
    records_lib.report_startup(records, 'listens')
    keep_every = assembled.protocol.keep_every
    folder = folders.syncer_folder(workdir)
    checkpoints = checkpoint.Checkpoints(
      str(folder / folders.CHECKPOINTS), keep_every, remedy_if_damaged(folder, log_files, store)
    )
    cleanup.callback(checkpoints.close)
    cleanup.enter_context(theta.use_own_device())
    start = recover(assembled, theta, checkpoints, log, records, lineage)
    tape = tapes.Tape(workdir, start, records.say, config.to_dict())
    cleanup.callback(tape.close)
    if store:
      store.begin(assembled.agreement, checkpoints, event_queue.fail)
    records_lib.report_startup(records, 'recovered')
    machine = start.make()
    if not machine.closed:
      _forget_export(workdir, store)
    task = None if assembled.never_sent else assembled.task
    evaluation = evaluation_lib.Evaluation(task, theta, records, config.train.steps, measure)
    cleanup.callback(evaluation.stop)
    if start.state is None:  # a continued run waits for its next evaluation: this costs time
      evaluation.submit(machine.clock)
    work = syncer_work.SyncerWork(
      assembled,
      theta,
      event_queue.post,
      event_queue.fail,
      payloads,
      records,
      checkpoints,
      log,
      evaluation,
      store,
      followers,
    )
    work.start()
    if followers:
      followers.begin(work.read_for_followers)
    cleanup.callback(work.stop)
    cleanup.callback(log.stop)  # if the node fails, the work waits for no space
    records_lib.report_startup(records, 'ready')
    facts_port = SyncerRecords(records, transport.traffic, assembled, followers)
    clock = loop.Monotonic()
    node = loop.Node(machine, event_queue, clock, transport, work, payloads, facts_port, tape)
    result = node.run()
    facts_port.report_followers(ended=True)
    facts_port.report_owed(ended=True)
    if followers and machine.finished:
      followers.finish()
    work.stop()
    stopped = not machine.finished
    if machine.finished:  # a syncer that was asked to stop has no time for it
      finished()
      evaluation.submit(machine.clock)
      _export(theta, workdir, {'run': lineage.run, **log.position}, records, store)
      stopped = _wait_or_stop(evaluation, event_queue)
    return store.finish(result, event_queue, stopped, machine.finished) if store else result


def remedy_if_damaged(
  folder: pathlib.Path, log_files: files_lib.Files, store: stored.Stored | None
) -> str:
  """What to do once no checkpoint of the syncer can be read."""
  checkpoints = folder / folders.CHECKPOINTS
  if store:
    aside, has = folder, 'the next start then continues from the store'
  elif 0 in wal.numbers(log_files):
    aside, has = checkpoints, 'the next start then repeats every outer step from the log'
  else:
    return f'put a copy of {checkpoints} back: the log has only the outer steps behind them'
  return f'move them aside: {shlex.join(["mv", f"{aside}", f"{aside}-damaged"])}; {has}'


def _introduce(assembled: build.Assembly, records: records_lib.Recorder) -> None:
  """Says what the run trains and exchanges."""
  config, layout = assembled.config, assembled.layout
  sync, steps, tokens = config.sync, config.train.steps, 0
  count = len(assembled.never_sent)
  never_sent = f' and {count} arrays that never leave a learner' if count else ''
  trained = f'{assembled.parameters:,} parameters{never_sent}, T = {steps:,} inner steps'
  if assembled.task:
    tokens = assembled.task.tokens_per_batch
    trained += f' of {tokens:,} tokens: {tokens * steps * sync.learners:,} on all learners'
  up = sum(assembled.payload_bytes)
  sizes = [layout.size(p) for p in range(layout.num_fragments)]
  down = sum(map(assembled.codec_down.encoded_size, sizes))
  labels = {piece.path: piece.label for pieces in layout.fragments for piece in pieces}
  if assembled.task:  # a user's loop prints itself what never leaves it
    labels |= {name: assembled.task.label(name) for name in assembled.never_sent}
  waits = '' if sync.max_lag is None else f', max_lag = {sync.max_lag}'
  lines = [
    trained,
    header.labels(labels),
    f'M = {sync.learners} learners, quorum K = {sync.quorum}; P = {sync.fragments} fragments, each '
    f'every H = {sync.period} steps',
    f'overlap tau = {sync.overlap}{waits}; outer optimizer {sync.outer}',
    f'{header.size(up)} up as {sync.codec_up} and {header.size(down)} down as {sync.codec_down} '
    f'for each learner in {sync.period} steps',
  ]
  records.report(
    report_facts.Layout(
      parameters=assembled.parameters, tokens=tokens, bytes_up=up, bytes_down=down, lines=lines
    )
  )
  records.config(config.to_dict())
  for line in lines:
    records.say(line)


def _wait_or_stop(evaluation: evaluation_lib.Evaluation, event_queue: loop.EventQueue) -> bool:
  """Waits for the last evaluation, or until the process is asked to stop; returns whether it
  was."""
  while not evaluation.wait(STOP_SEEN_S):
    if isinstance(event_queue.take(0), events.Stop):
      return True
  return False


def _export(
  theta: global_model.Theta,
  workdir: pathlib.Path,
  record: dict[str, Any],
  records: records_lib.Recorder,
  store: stored.Stored | None,
) -> None:
  """Writes the trained model as a tree of named arrays, which is then copied to the store."""
  try:
    states.save(workdir / folders.MODEL, folders.MODEL, theta.params(), record)
    if store:
      store.copy()
  except states.StateError as error:
    records.say(
      f'{error}. The model is safe in the checkpoints; diloco_jax.load_params reads them.'
    )


def _forget_export(workdir: pathlib.Path, store: stored.Stored | None) -> None:
  """Removes the model that an earlier end of the run has exported. Until the next end the newest
  model is that of the checkpoints."""
  if store:
    store.forget_model()
  model = workdir / folders.MODEL
  if model.is_symlink():
    model.unlink()
  elif model.is_dir():
    shutil.rmtree(model)


def recover(
  assembled: build.Assembly,
  theta: global_model.Theta,
  checkpoints: checkpoint.Checkpoints,
  log: commit.CommitLog,
  records: records_lib.Recorder,
  lineage: lineage_lib.Lineage,
) -> tape_lib.Start:
  """Moves `theta` from version 0 to where the last process was; returns the machine's start."""
  restored = checkpoints.restore(theta.sharding, theta.like, lineage.run)
  records_lib.report_startup(records, 'restored')
  sizes = assembled.payload_bytes
  start = tape_lib.Start(
    role='syncer',
    node='syncer',
    config=assembled.protocol,
    agreement=assembled.agreement,
    run=lineage.run,
    payload_bytes=sizes,
    links_measured=tempo_lib.are_measured(sizes),
  )
  load = functools.partial(_load, start)
  if restored is None:
    digests = tuple(theta.digest(p) for p in range(assembled.protocol.fragments))
    start = dataclasses.replace(start, digests=digests)
    machine_state, origin = start.make().state(), 'version 0'
  else:
    machine_state = restored.protocol
    with _refusing_foreign_state(log):
      load(machine_state)
    origin = f'its checkpoint of sync {machine_state["opened"]}'
    theta.restore(restored.state, machine_state['versions'])
  if lineage.gone and machine_state.get(outer_log.POSITION) == lineage.log:
    machine_state = recovery.without(machine_state, lineage.gone)
  replayed = log.recover(theta, machine_state)
  machine_state = {name: machine_state[name] for name in machine_state if name not in log.position}
  if restored is None and not replayed:
    return start
  with _refusing_foreign_state(log):
    machine_state = recovery.replay_log(load, machine_state, replayed)
    load(machine_state)
  steps = assembled.config.train.steps
  if machine_state['opened'] > steps + 2 * assembled.config.sync.period:  # more than its last syncs
    raise ValueError(
      f'the run is at clock {machine_state["opened"]}, and train.steps is {steps}: it would end at '
      'once. Nothing was changed: start the syncer with the settings of the run'
    )
  records.say(
    f'the syncer continues from {origin} and {len(replayed)} later outer steps in its log, at sync '
    f'{machine_state["opened"]}'
  )
  records.report(
    report_facts.Recovered(
      replayed=len(replayed),
      sync=machine_state['opened'],
      log=log.position[outer_log.POSITION],
      versions=machine_state['versions'],
    )
  )
  return dataclasses.replace(start, digests=None, state=machine_state)


def _load(start: tape_lib.Start, machine_state: dict[str, Any]) -> syncer_machine.SyncerMachine:
  """The machine of a state whose fields have the types of those of a new machine. Raises TypeError,
  and whatever else a wrong state leads to."""
  new = dataclasses.replace(start, digests=(0,) * start.config.fragments).make().state()
  for name, value in new.items():
    if value is not None and type(machine_state[name]) is not type(value):
      raise TypeError(f'{name} is {type(machine_state[name]).__name__}')
  return syncer_machine.SyncerMachine.load(
    start.config, start.agreement, start.payload_bytes, machine_state, start.links_measured
  )


_WRONG_STATE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError)


@contextlib.contextmanager
def _refusing_foreign_state(log: commit.CommitLog) -> Iterator[None]:
  """Refuses a machine state that no syncer has written, whatever it leads to."""
  try:
    yield
  except _WRONG_STATE as error:
    raise outer_log.NotReproduced(
      f'The machine state in the checkpoint or in the log of {log.place} is none that a syncer has '
      f'written ({type(error).__name__}). The syncer did not start, nothing was changed. Go back '
      f'to a checkpoint: {wal.restore_command(log.place)}'
    ) from error
