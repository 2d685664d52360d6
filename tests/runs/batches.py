"""The way of every batch in a run of real processes, from the tapes of all of them.

The books know nothing of the machines' own cursors.
"""

import collections
import dataclasses
from collections.abc import Iterator

from diloco_jax.protocol import actions, events, messages
from diloco_jax.storage import tapes
from experiments.configs import stdlib_lm
from tests.runs import conductor


@dataclasses.dataclass
class Books:
  """What was read, in the order of time, and what was merged of it; nothing of it is what a machine
  says of its cursors. `begun` are leases that did not go on where a process had been."""

  reads: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (shard, batch)
  merged: dict[tuple[int, int], set[int]] = dataclasses.field(  # (shard, fragment): batches
    default_factory=lambda: collections.defaultdict(set)
  )
  begun: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
  moves: dict[int, tuple[int, int, list]] = dataclasses.field(default_factory=dict)  # under way

  def committed(self, shard: int) -> int:
    """The batch behind the last one that a merge has covered."""
    return max(
      (max(batches) + 1 for (of, _), batches in self.merged.items() if of == shard and batches),
      default=0,
    )

  def commit(self, sync: int) -> None:
    fragment, _, contributions = self.moves.pop(sync)
    for said in contributions:
      batches = set(range(said.cursor - said.steps, said.cursor))
      twice = batches & self.merged[said.shard, fragment]
      assert not twice, f'merged twice for fragment {fragment}: {twice} of shard {said.shard}'
      self.merged[said.shard, fragment] |= batches


def syncer_turns(life: tapes.ProcessTape, books: Books) -> None:
  """Books one life of the syncer; what it had under way when it was killed is the next one's."""
  reader = tapes.read(life)
  snapshot = reader.header.start.state
  for sync, (fragment, version, _) in list(books.moves.items()):
    if snapshot is not None and snapshot['versions'][fragment] >= version:
      books.commit(sync)  # it was durable
  books.moves.clear()
  said, claims = {}, {}
  for turn in reader:
    match turn.event:
      case events.Received(message=messages.Contribution() as message, payload_id=payload_id):
        said[payload_id] = message
      case events.Received(message=messages.Confirm() as confirm, session=session):
        claims[session] = confirm.shard, confirm.cursor
      case events.MergeDone(sync=sync, failed=failed):
        assert not failed
        books.commit(sync)
    for action in turn.actions:
      match action:
        case actions.Merge():
          parts = [said[one.payload_id] for one in action.participants]
          books.moves[action.sync] = action.fragment, action.version, parts
        case actions.Send(message=messages.Joined() as joined, session=session):
          lease = joined.shard, joined.cursor
          if lease != claims[session]:
            books.begun.append((*lease, books.committed(joined.shard)))


def learner_reads(life: tapes.ProcessTape) -> Iterator[tuple[int, int, int]]:
  """(time, stream, batch) of every step of a life; never behind where its lease began."""
  shard = batch = 0
  for turn in tapes.read(life):
    if isinstance(turn.event, events.StepDone):
      yield turn.now_ns, shard, batch
      batch += 1
    for action in turn.actions:
      if isinstance(action, actions.UseShard):
        shard, batch = action.shard, action.cursor


def keep(run: conductor.Run) -> Books:
  """Asserts on the way that no batch is merged twice for a fragment."""
  books, reads = Books(), []
  for life in run.tapes():
    if life.node == 'syncer':
      syncer_turns(life, books)
    else:
      reads += learner_reads(life)
  books.reads = [(shard, batch) for _, shard, batch in sorted(reads)]
  assert not books.moves
  return books


def check(run: conductor.Run, books: Books) -> None:
  """What is committed was read, and as much counts as is said to be merged, token by token."""
  committed = {(shard, batch) for (shard, _), batches in books.merged.items() for batch in batches}
  times = collections.Counter(books.reads)
  assert committed <= times.keys()
  counted = sum(map(len, books.merged.values()))
  again = sum(times.values()) - len(times)
  print(
    f'read {sum(times.values())} batches, {len(times)} of them different, {again} again; '
    f'committed {len(committed)}, counted for {counted} fragments'
  )
  start = tapes.read(run.tapes()[-1]).header.start
  assert start.config.fragments * len(committed) >= counted > 0
  data = stdlib_lm.get_config('tiny').data
  merged = run.of('syncer', 'ledger')[-1]['merged']
  assert merged == counted * data.batch_size * data.seq_len
