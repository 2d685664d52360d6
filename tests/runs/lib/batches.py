"""Every batch of a run of real processes, from the tapes of all its processes.

The books do not use the machines' own cursors.
"""

import collections
import dataclasses
from collections.abc import Iterator

from diloco_jax.configs import stdlib_lm
from diloco_jax.protocol import actions, events, messages
from diloco_jax.storage import tapes
from diloco_jax.verification.replay import tape_files
from tests.runs.lib import conductor


@dataclasses.dataclass
class Books:
  """The batches that were read, in the order of time, and those that were merged. `begun`:
  positions that are not those at which a process had stopped."""

  reads: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (shard, batch)
  merged: dict[tuple[int, int], set[int]] = dataclasses.field(  # (shard, fragment): batches
    default_factory=lambda: collections.defaultdict(set)
  )
  begun: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
  moves: dict[int, tuple[int, int, list]] = dataclasses.field(default_factory=dict)  # in progress

  def committed(self, shard: int) -> int:
    """The batch after the last one that a merge has covered."""
    return max(
      (max(batches) + 1 for (of, _), batches in self.merged.items() if of == shard and batches),
      default=0,
    )

  def commit(self, sync: int, refused: tuple[str, ...] = ()) -> None:
    fragment, _, contributions = self.moves.pop(sync)
    for one in (one for learner, one in contributions if learner not in refused):
      batches = set(range(one.cursor - one.steps, one.cursor))
      twice = batches & self.merged[one.shard, fragment]
      assert not twice, f'merged twice for fragment {fragment}: {twice} of shard {one.shard}'
      self.merged[one.shard, fragment] |= batches


def syncer_turns(life: tapes.ProcessTape, books: Books) -> None:
  """Books one process of the syncer; merges in progress at its death are the next one's."""
  reader = tape_files.read(life)
  state = reader.header.start.state
  for sync, (fragment, version, _) in list(books.moves.items()):
    if state is not None and state['versions'][fragment] >= version:
      books.commit(sync)  # it was durable
  books.moves.clear()
  received, claims = {}, {}
  for turn in reader:
    match turn.event:
      case events.Received(message=messages.Contribution() as message, payload_id=payload_id):
        received[payload_id] = message
      case events.Received(message=messages.Confirm() as confirm, session=session):
        claims[session] = confirm.shard, confirm.cursor
      case events.MergeDone(sync=sync, failed=failed, refused=refused):
        if failed:  # Theta is unchanged
          del books.moves[sync]
        else:
          books.commit(sync, refused)
    for action in turn.actions:
      match action:
        case actions.Merge():
          parts = [(one.learner, received[one.payload_id]) for one in action.participants]
          books.moves[action.sync] = action.fragment, action.version, parts
        case actions.Send(message=messages.Joined() as joined, session=session):
          lease = joined.shard, joined.cursor
          if lease != claims[session]:
            books.begun.append((*lease, books.committed(joined.shard)))


def learner_reads(life: tapes.ProcessTape) -> Iterator[tuple[int, int, int]]:
  """(time, data shard, batch) of every step of a process."""
  shard = batch = 0
  for turn in tape_files.read(life):
    if isinstance(turn.event, events.StepDone):
      yield turn.now_ns, shard, batch
      batch += 1
    for action in turn.actions:
      if isinstance(action, actions.UseShard):
        shard, batch = action.shard, action.cursor


def keep(run: conductor.Run) -> Books:
  """Reads all tapes; asserts that no batch is merged twice for a fragment."""
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
  """Every committed batch was read, and the ledger counts exactly the merged tokens."""
  committed = {(shard, batch) for (shard, _), batches in books.merged.items() for batch in batches}
  times = collections.Counter(books.reads)
  assert committed <= times.keys()
  counted = sum(map(len, books.merged.values()))
  again = sum(times.values()) - len(times)
  print(
    f'read {sum(times.values())} batches, {len(times)} of them different, {again} again; '
    f'committed {len(committed)}, counted for {counted} fragments'
  )
  start = tape_files.read(run.tapes()[-1]).header.start
  assert start.config.fragments * len(committed) >= counted > 0
  data = stdlib_lm.get_config('tiny').data
  merged = run.of('syncer', 'ledger')[-1]['merged']
  assert merged == counted * data.batch_size * data.seq_len
