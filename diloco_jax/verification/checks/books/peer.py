"""What a syncer knows of one session, and one of its syncs."""

import collections
import dataclasses

from diloco_jax.protocol import actions, messages
from diloco_jax.verification.checks.books import lineage as lineage_book

Range = tuple[int, int]


@dataclasses.dataclass(slots=True)
class Peer:
  """One session at the syncer."""

  session: int
  heard_ns: int
  join: messages.Join | None = None
  offered: int | None = None
  incarnation: int = 0
  member: bool = False  # it holds its id
  entered_ns: int = 0
  contributed: bool = False
  joined: bool = False  # it was sent Joined
  open: bool = True
  due: set[int] = dataclasses.field(default_factory=set)
  sent: dict[int, int] = dataclasses.field(default_factory=dict)  # fragment: newest version
  versions_in_flight: dict[int, list[int]] = dataclasses.field(
    default_factory=lambda: collections.defaultdict(list)
  )  # fragment: versions not adopted yet
  wholes: dict[int, int] = dataclasses.field(default_factory=dict)  # in flight whole: versions
  repaired_ns: dict[int, int] = dataclasses.field(default_factory=dict)  # by fragment
  differs: set[int] = dataclasses.field(default_factory=set)  # it reported other bits since then
  owed: set[int] = dataclasses.field(default_factory=set)  # wholes instead of its own steps
  held: tuple[messages.Held, ...] = ()
  claim: Range | None = None  # its process's position in the data when it confirmed
  next_position: Range | None = None  # the position that Joined gave it

  @property
  def caught_up(self) -> bool:
    return self.joined and self.member and not self.due


@dataclasses.dataclass(slots=True)
class Sync:
  """One sync: the learners it waits for, and its payloads by `payload_id`."""

  t: int
  fragment: int
  opened_ns: int | None = None  # None: it is announced
  asked: set[int] = dataclasses.field(default_factory=set)  # sessions
  waiting: set[str] = dataclasses.field(default_factory=set)
  payloads: dict[int, tuple[Peer, messages.Contribution]] = dataclasses.field(default_factory=dict)
  left_ns: int = 0  # when it was last left open, with enough payloads
  merging: actions.Merge | None = None
  merged: tuple[tuple[Peer, messages.Contribution], ...] = ()
  record: lineage_book.Record | None = None
  complete: bool = False  # late payloads of all contributors: announced without a pull, perhaps
