"""Learners and syncer are killed in turn: every batch that is committed counts once.

One run of real processes serves all tests: `tiny` with two learners, three data streams, and
checkpoints of the learners that are behind what is committed. The books below are kept from the
tapes of all processes, batch by batch, and know nothing of the machines' own cursors.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Iterator

import pytest

from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.node import failpoints
from diloco_jax.protocol import actions, events, messages
from diloco_jax.report import records
from diloco_jax.storage import tapes
from experiments.configs import stdlib_lm
from tests.runs import conductor

DEADLINE_S = 280
LEARNERS = ('l0', 'l1')
AT_COMMIT = 'syncer at wal.after_commit'
PLAN = ('l1', 'syncer', AT_COMMIT, 'everybody')
QUICK = {'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'}  # to compile, not to run
OVERRIDES = {
  **conductor.ENDLESS,
  'sync.learners': 2,
  'sync.checkpoint_every_syncs': 3,
  'train.checkpoint_every_steps': 40,
  'data.streams': 3,
}


class Conductor(conductor.Conductor):
  """Carries out the plan on a run; waits for facts only."""

  def __init__(self, workdir: pathlib.Path, recorder: records.Recorder):
    self._environment: dict[str, str] = {}  # of the syncer's next life
    super().__init__(workdir, recorder, OVERRIDES, change=self._quick)

  def _quick(self, program: supervisor_lib.Program) -> supervisor_lib.Program:
    environment = {**program.environment, **QUICK}
    if program.name == 'syncer':
      self._environment.update(environment)
      environment = self._environment
    return dataclasses.replace(program, environment=environment)

  async def carry_out(self) -> None:
    await self._merged(4)
    for victim in PLAN:
      if victim == AT_COMMIT:
        await self._kill_at_commit()
      else:
        await self._kill((*LEARNERS, 'syncer') if victim == 'everybody' else (victim,))
      await self._merged(3)
    self.supervisor.retire()

  async def _kill_at_commit(self) -> None:
    """The syncer's next life ends when its first outer step is durable and nobody knows of it."""
    fate = self.supervisor.fates['syncer']
    starts = fate.starts
    self._environment[failpoints.VARIABLE] = 'wal.after_commit:kill'
    await self._kill(('syncer',))
    await self.until(lambda: fate.starts > starts)
    del self._environment[failpoints.VARIABLE]
    await self.until(lambda: fate.starts > starts + 1)

  async def _kill(self, names: tuple[str, ...]) -> None:
    for name in names:
      await self.until(lambda: self.supervisor.child(name) is not None)
    for name in names:
      assert self.supervisor.bring_down(name, 0.1, 'killed by the test'), name

  async def _merged(self, more: int) -> None:
    """Until every learner has had so many contributions merged from now on."""
    self.look()
    at = len(self.facts)
    await self.until(lambda: all(self.merges(name, at) >= more for name in LEARNERS))


# --- Books, from the tapes ------------------------------------------------------------------------


@dataclasses.dataclass
class Books:
  """What was read, in the order of time, and what was merged of it; nothing of it is what a machine
  says of its cursors. `begun` are leases that did not go on where a process had been."""

  reads: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (stream, batch)
  merged: dict[tuple[int, int], set[int]] = dataclasses.field(  # (stream, fragment): batches
    default_factory=lambda: collections.defaultdict(set)
  )
  begun: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
  moves: dict[int, tuple[int, int, list]] = dataclasses.field(default_factory=dict)  # under way

  def committed(self, stream: int) -> int:
    """The batch behind the last one that a merge has covered."""
    return max(
      (max(batches) + 1 for (of, _), batches in self.merged.items() if of == stream and batches),
      default=0,
    )

  def commit(self, sync: int) -> None:
    fragment, _, contributions = self.moves.pop(sync)
    for said in contributions:
      batches = set(range(said.cursor - said.steps, said.cursor))
      twice = batches & self.merged[said.stream, fragment]
      assert not twice, f'merged twice for fragment {fragment}: {twice} of stream {said.stream}'
      self.merged[said.stream, fragment] |= batches


def syncer_turns(life: tapes.Life, books: Books) -> None:
  """Books one life of the syncer; what it had under way when it was killed is the next one's."""
  reader = tapes.read(life)
  snapshot = reader.header.start.snapshot
  for sync, (fragment, version, _) in list(books.moves.items()):
    if snapshot is not None and snapshot['versions'][fragment] >= version:
      books.commit(sync)  # it was durable
  books.moves.clear()
  said, claims = {}, {}
  for turn in reader:
    match turn.event:
      case events.Received(message=messages.Contribution() as message, handle=handle):
        said[handle] = message
      case events.Received(message=messages.Confirm() as confirm, session=session):
        claims[session] = confirm.stream, confirm.cursor
      case events.MergeDone(sync=sync, failed=failed):
        assert not failed
        books.commit(sync)
    for action in turn.actions:
      match action:
        case actions.Merge():
          parts = [said[one.handle] for one in action.participants]
          books.moves[action.sync] = action.fragment, action.version, parts
        case actions.Send(message=messages.Joined() as joined, session=session):
          lease = joined.stream, joined.cursor
          if lease != claims[session]:
            books.begun.append((*lease, books.committed(joined.stream)))


def learner_reads(life: tapes.Life) -> Iterator[tuple[int, int, int]]:
  """(time, stream, batch) of every step of a life; never behind where its lease began."""
  stream = batch = 0
  for turn in tapes.read(life):
    if isinstance(turn.event, events.StepDone):
      yield turn.now_ns, stream, batch
      batch += 1
    for action in turn.actions:
      if isinstance(action, actions.UseStream):
        stream, batch = action.stream, action.cursor


@dataclasses.dataclass
class Run(conductor.Run):
  """And its books."""

  lives: list[tapes.Life]
  books: Books


@pytest.fixture(scope='module', name='run')
def _run(tmp_path_factory) -> Run:
  _, left = conductor.play(tmp_path_factory.mktemp('leases'), Conductor, DEADLINE_S)
  books, lives, reads = Books(), left.tapes(), []
  for life in lives:
    if life.node == 'syncer':
      syncer_turns(life, books)
    else:
      reads += learner_reads(life)
  books.reads = [(stream, batch) for _, stream, batch in sorted(reads)]
  return Run(**vars(left), lives=lives, books=books)


def test_the_run_ends_well(run):
  assert run.outcome.code == 0, '\n'.join(run.said)
  fates = run.outcome.fates
  assert (fates['syncer'].starts, fates['l0'].starts, fates['l1'].starts) == (5, 2, 3)
  assert not run.books.moves


def test_every_batch_that_is_committed_counts_once_and_was_read(run):
  """That none is merged twice for a fragment is asserted while the books are kept."""
  books = run.books
  committed = {
    (stream, batch) for (stream, _), batches in books.merged.items() for batch in batches
  }
  times = collections.Counter(books.reads)
  assert committed <= times.keys()
  counted = sum(map(len, books.merged.values()))
  again = sum(times.values()) - len(times)
  print(
    f'read {sum(times.values())} batches, {len(times)} of them different, {again} again; '
    f'committed {len(committed)}, counted for {counted} fragments'
  )
  assert counted > 0
  # As many as are said to be merged, token by token.
  start = tapes.read(run.lives[-1]).header.start
  assert start.config.fragments * len(committed) >= counted
  tokens = stdlib_lm.get_config('tiny').data
  ledger = run.of('syncer', 'ledger')[-1]
  assert ledger['merged'] == counted * tokens.batch_size * tokens.seq_len


def test_only_what_was_not_committed_is_read_again(run):
  """Every lease that did not go on where its process was begins exactly behind what was merged."""
  assert len(run.books.begun) >= 5  # two first lives, and three after a kill
  for stream, cursor, committed in run.books.begun:
    assert cursor == committed, f'stream {stream} is read from {cursor}, {committed} are committed'
  assert any(cursor for _, cursor, _ in run.books.begun)


def test_nothing_is_skipped(run):
  """Of every stream, the batches that were read are 0, 1, 2, ..."""
  for stream in {stream for stream, _ in run.books.reads}:
    batches = {batch for of, batch in run.books.reads if of == stream}
    assert batches == set(range(len(batches))), stream


def test_the_invariants_hold_on_the_tapes(run):
  verdict = run.verdict()
  assert verdict.broken is None, verdict.text()
  assert all(one.looks for one in verdict.held if one.id.startswith('I21')), verdict.text()
