"""Data shards: the reader and position of each, and how far each is committed.

The text is cut into V shards, and batch i of shard v is the same for every learner (train/data.py).
So a *position* is two integers: a shard, and its *cursor*, the next batch to read. A learner reads
one batch per step; a contribution of s steps that ends at cursor c has read [c - s, c).

    free --assigned--> held --its reader's incarnation ends, or another learner needs it--> free

A batch is *committed* once a merge has covered it for any fragment. A new reader begins exactly at
the committed cursor: it never reads merged batches again, and reads all others. It is "any", not
"all": a batch that was merged for one fragment and is read again would count twice for that
fragment. Cursors move when an outer step succeeds and are logged with it (`machine_state`), so they
are durable exactly with the merges. While an outer step is in progress its shards get no new
reader, because their next cursor is not known yet.

A process that reconnects continues at its position if it claims it and still holds the shard: its
steps since then are unsettled, not lost. A disconnected member keeps its shard until another
learner needs one and none is free. A restarted syncer may not know the latest readers, so it
accepts the claims of processes that reconnect. In every case a contribution counts only if none of
its batches was merged for its fragment before.

With `data.local` each learner has data of its own. Its batches then have a *number* instead of a
shard: the one that it had before, or one under which nothing was ever merged. So no learner waits
for a number, none ever reads on under the number of another, and each batch of a learner's own data
counts once. Nothing is known of the data themselves: two learners may have the same text.
"""

import itertools
from collections.abc import Collection, Iterable
from typing import Any

from diloco_jax.protocol import messages


class Shards:
  """The shards of a run: holders, and cursors per fragment. `local`: they are numbers of learners'
  own data."""

  def __init__(self, shards: int, fragments: int, local: bool = False):
    self._shards, self._fragments, self._local = shards, fragments, local
    self._holders: dict[int, str] = {}
    self._merged: dict[int, list[int]] = {}  # per fragment: the end of the merged batches
    # sync: (learner, shard, fragment, cursor) of its participants, applied if they are merged
    self._moves: dict[int, list[list[Any]]] = {}

  def committed(self, shard: int) -> int:
    """The batch at which the next reader begins."""
    return max(self._merged.get(shard, (0,)))

  # --- Readers ------------------------------------------------------------------------------------

  def assign(
    self,
    learner: str,
    claim: messages.ShardPosition | None,
    former: int | None,
    live: Collection[str],
    steps: int = 0,
  ) -> messages.ShardPosition | None:
    """A shard for a learner that enters; None: all have a reader, or wait for an outer step to end.

    Args:
      learner: its id.
      claim: the position of the process, if it has read a shard.
      former: the shard that its id had before.
      live: ids that keep their shards.
      steps: of its incarnation: it has read at most so many batches behind a committed one.
    """
    if claim is not None and self._may_keep(learner, claim, former, steps):
      return self._hold(learner, claim)
    self.give_back(learner)
    candidates = [self._number(former)] if self._local else range(self._shards)
    unheld = [shard for shard in candidates if shard not in self._holders]
    free = [shard for shard in unheld if not self._moving(shard)]
    if former in free:
      return self._begin(learner, former)
    if not unheld:
      away = [shard for shard, holder in self._holders.items() if holder not in live]
      free = [shard for shard in away if not self._moving(shard)]
    return self._begin(learner, min(free, key=self._order)) if free else None

  def _number(self, former: int | None) -> int:
    """The number of a learner's own data: the one that it had, or one that no merge has seen."""
    if former is not None and former not in self._holders:
      return former
    moving = {move[1] for moves in self._moves.values() for move in moves}
    used = self._holders.keys() | self._merged.keys() | moving
    return next(number for number in itertools.count() if number not in used)

  def _may_keep(
    self, learner: str, claim: messages.ShardPosition, former: int | None, steps: int
  ) -> bool:
    """Whether no other learner reads the shard, or has read it past the claimed position, and the
    process can have come so far: batches before a cursor that was merged are read by nobody."""
    if not claim.shard < self._shards:
      return False
    holder = self._holders.get(claim.shard)
    unknown = holder is None and not self._moving(claim.shard)
    committed = self.committed(claim.shard)
    if self._local and committed and claim.shard != former:
      unknown = False  # it is the number of another learner, which is away
    possible = committed <= claim.cursor <= committed + steps
    return possible and (holder == learner or unknown)

  def _order(self, shard: int) -> tuple[int, int]:
    return self.committed(shard), shard

  def _begin(self, learner: str, shard: int) -> messages.ShardPosition:
    return self._hold(learner, messages.ShardPosition(shard, self.committed(shard)))

  def _hold(self, learner: str, position: messages.ShardPosition) -> messages.ShardPosition:
    self.give_back(learner)
    self._holders[position.shard] = learner
    return position

  def give_back(self, learner: str) -> None:
    """Frees the shard of a learner."""
    for shard in [shard for shard, holder in self._holders.items() if holder == learner]:
      del self._holders[shard]

  def all_read(self, live: Collection[str]) -> bool:
    """Whether these learners read all shards."""
    return len(self._holders) == self._shards and set(self._holders.values()) <= set(live)

  # --- Cursors ------------------------------------------------------------------------------------

  def counts(self, learner: str, contribution: messages.Contribution) -> bool:
    """Whether the sender reads this shard, and none of the batches was merged for the fragment."""
    shard, first = contribution.shard, contribution.cursor - contribution.steps
    merged = self._merged.get(shard)
    return self._holders.get(shard) == learner and (
      merged is None or first >= merged[contribution.fragment]
    )

  def merge(
    self, sync: int, fragment: int, payloads: Iterable[tuple[str, messages.Contribution]]
  ) -> None:
    """An outer step with these contributions begins: the cursors move if it succeeds."""
    self._moves[sync] = [
      [name, message.shard, fragment, message.cursor] for name, message in payloads
    ]

  def end(self, sync: int, refused: Collection[str], failed: bool) -> None:
    """An outer step has ended: it has `failed`, or has merged all but the `refused` learners."""
    for learner, shard, fragment, cursor in self._moves.pop(sync):
      if not failed and learner not in refused:
        self._merged.setdefault(shard, [0] * self._fragments)[fragment] = cursor

  def _moving(self, shard: int) -> bool:
    return any(move[1] == shard for moves in self._moves.values() for move in moves)

  # --- Machine state ------------------------------------------------------------------------------

  def state(self) -> dict[str, Any]:
    """The shards as JSON types; `moves` are of the outer steps in progress."""
    return {
      'holders': [[shard, holder] for shard, holder in sorted(self._holders.items())],
      'merged': [[shard, list(cursors)] for shard, cursors in sorted(self._merged.items())],
      'moves': [[sync, [list(move) for move in moves]] for sync, moves in self._moves.items()],
    }

  def load(self, state: dict[str, Any]) -> None:
    self._holders = dict(state['holders'])
    self._merged = {shard: list(cursors) for shard, cursors in state['merged']}
    self._moves = dict(state['moves'])

  def check(self) -> None:
    """Asserts that no learner holds two shards, and that cursors are possible."""
    holders = list(self._holders.values())
    assert len(set(holders)) == len(holders), self._holders
    assert all(shard < self._shards for shard in self._holders), self._holders
    for shard, cursors in self._merged.items():
      assert len(cursors) == self._fragments and min(cursors) >= 0, (shard, cursors)
