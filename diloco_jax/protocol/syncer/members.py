"""Members: the learner ids of a run, the processes that hold them, and their leases.

A learner id names a learner, a *nonce* one of its processes; an *incarnation* counts the processes
that have held the id. One process holds it at a time::

    absent --Confirm--> live --session closed, lease over, Leave--> absent

Only a Confirm that names the offered incarnation takes the id (join.py); a repeated one with the
nonce of the holder changes nothing. While the holder is live, the syncer refuses other processes. A
process that rejoins with the nonce of the last holder (its session broke, or it slept past its
lease) continues the same incarnation; any other process starts the next one, and the unsettled
tokens of the last process are lost.
"""

import dataclasses
from typing import Any

from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import messages
from diloco_jax.protocol import states as protocol_states
from diloco_jax.protocol.syncer import grace

CLIP = 4
# Fields of a Member in the machine state.
STATE = 'learner shard incarnation nonce host pid clock left strikes others_merged max_strikes'
COPY_STATES = (
  ('lags', 'follows', 'the learner joins with the published value'),
  ('lags', 'read', 'there is room for a whole fragment'),
  ('read', 'follows', 'the whole fragment is read and sent'),
  ('follows', 'lags', 'no room for a delta, other bits, or the learner must drop its steps'),
)


@dataclasses.dataclass(slots=True)
class Uplink:
  """The way of a learner's payloads to the syncer (links.py).

  Attributes:
    marks: (tokens, time) of the reported steps whose payloads have not all arrived.
    arrived_ns: of the last payload.
    samples: the newest measures, in ns per KiB.
    periods: what follows.
    asked: by the numbers of the syncs for which it was pulled: when; until an answer arrives.
    asked_at: of the newest one, answered or not.
  """

  marks: list[tuple[int, int]] = dataclasses.field(default_factory=list)
  arrived_ns: int = 0
  samples: list[int] = dataclasses.field(default_factory=list)
  periods: int = 1
  asked: dict[int, int] = dataclasses.field(default_factory=dict)
  asked_at: int = 0


@dataclasses.dataclass(slots=True)
class Downlink:
  """The way of the versions to a learner (links.py).

  Attributes:
    sent: (fragment, version, time, bytes) of those that it has not reported as adopted.
    arrived_ns: of its last report.
    samples: the newest measures, (ns, bytes).
    delays: of the newest versions, from when they were sent to the report.
  """

  sent: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)
  arrived_ns: int = 0
  samples: list[tuple[int, int]] = dataclasses.field(default_factory=list)
  delays: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Copy:
  """The copy of a fragment at a process of a learner, and what is sent to it next (published.py)::

  follows   it is the newest version, or that is in flight: the next one is sent as a delta
  lags      nothing of the fragment is sent until there is room for the whole one
  read      the whole fragment is being read for it
  """

  state: str = 'lags'
  adopted: int = 0  # the version that the learner has reported
  # (version, whole) that are sent and not yet reported. Invariant: in the order of versions; the
  # last one of a copy that follows is the published version.
  in_flight: list[tuple[int, bool]] = dataclasses.field(default_factory=list)
  due: bool = False  # to adopt before it may contribute. Invariant: only Joined sets it
  tokens: int = 0  # of the learner when it adopted. Invariant: at most what it has trained
  # The learner must drop its steps when it adopts next, after a fault. Invariant: only an Adopted
  # with a reason, or another process, ends it.
  spoiled: bool = False
  # Sent whole in this heartbeat, since its bits differed, and they differ again. Invariant:
  # `differs` only if `repaired`.
  repaired: bool = False
  differs: bool = False

  def move(self, state: str) -> None:
    self.state = protocol_states.move(COPY_STATES, self.state, state)

  def enter(self, version: int, published: bool) -> None:
    """The learner joins with this version, which is the published value or not."""
    self.state, self.adopted, self.in_flight, self.due = 'lags', version, [], not published
    if published:
      self.move('follows')

  def adopt(self, message: messages.Adopted) -> None:
    self.adopted, self.tokens, self.due = message.version, message.tokens, False
    self.spoiled, self.differs = self.spoiled and not message.reason, False
    self.in_flight = [sent for sent in self.in_flight if sent[0] > message.version]

  @property
  def is_whole(self) -> bool:
    """Whether the whole fragment is being read for the learner, or in flight to it."""
    return self.state == 'read' or any(whole for _, whole in self.in_flight)


@dataclasses.dataclass(slots=True)
class Member:
  """One learner id, and its state in each part of the syncer."""

  learner: str
  # The holder of the id (this file).
  incarnation: int = 0
  nonce: int | None = None
  session: int | None = None
  heard_ns: int = 0
  entered_ns: int = 0  # when it got its shard
  # Reports of the process (join.py).
  host: str = ''
  pid: int = 0
  clock: int = 0  # as far as it counts for the pace (pace.py)
  claimed: int = 0  # its newest reported clock
  since: tuple[int, int] | None = None  # a clock and its time; None: of an earlier syncer process
  # Steps and the times of their reports; empty: of an earlier syncer process.
  steps_marks: list[tuple[int, int]] = dataclasses.field(default_factory=list)
  step_ns: grace.Average = dataclasses.field(default_factory=grace.Average)  # reported
  report_ns: grace.Average = dataclasses.field(default_factory=grace.Average)  # measured
  reported_ns: int = 0
  loss: float | None = None  # reported
  recorded_steps: int = 0  # of all incarnations, at the last report of its progress
  left: bool = False  # it sent Leave
  # Its links (links.py); the time from an Offer to its Confirm, which bring no payloads.
  round_trip_ns: int = 0
  up: Uplink = dataclasses.field(default_factory=Uplink)
  down: Downlink = dataclasses.field(default_factory=Downlink)
  # What became of its payloads (syncs.py).
  contributed: bool = False  # on this session
  merged_ns: int = 0
  rejected: int = 0  # since the last merged one
  last_reason: str = ''
  # Assigned when it joined (join.py).
  shard: int | None = None  # the last one
  first_batch: int = 0  # it reads batch first_batch + s of the shard in its step s
  joined: bool = False  # Joined was sent on this session
  copies: list[Copy] = dataclasses.field(default_factory=list)  # of each fragment
  # Refused updates (screening.py).
  strikes: int = 0  # in a row
  others_merged: bool = False  # a payload of another learner was merged since the first of them
  max_strikes: int = 0  # the most in a row of this process that count for its quarantine
  fault: str = ''  # of the newest one
  doing: str = ''  # of its newest heartbeat, if its step is missing

  @property
  def live(self) -> bool:
    return self.session is not None

  @property
  def inner_step_ns(self) -> int:
    """The time of its inner step: as reported, within a quarter and four times of the time between
    its reports; 0: unknown."""
    if not self.step_ns.samples or not self.report_ns.samples:
      return 0
    measured = self.report_ns.value
    return min(max(self.step_ns.value, measured // CLIP), measured * CLIP)

  @property
  def caught_up(self) -> bool:
    """Whether it trains on published values only, so that it may contribute and set the pace."""
    return self.live and self.joined and not any(copy.due for copy in self.copies)


class Members:
  """All learner ids that ever joined, by id and by session."""

  def __init__(self, config: config_lib.ProtocolConfig):
    self._config = config
    self.by_id: dict[str, Member] = {}
    self.by_session: dict[int, Member] = {}
    self.began_ns: int | None = None  # the first event of this process of the syncer

  def live(self) -> list[Member]:
    """Live members in the order of their ids."""
    return sorted(self.by_session.values(), key=lambda member: member.learner)

  def offer(self, join: messages.Join) -> int:
    """The incarnation that a process would get. One that this syncer does not know never gets the
    incarnation that it claims: a process that keeps its incarnation brings steps and tokens, and
    nothing here could judge them."""
    member = self.by_id.get(join.learner)
    if member is not None and member.nonce == join.nonce:
      return member.incarnation
    offered = member.incarnation + 1 if member is not None else 1
    return offered + (offered == join.incarnation)

  def held_by_other(self, learner: str, nonce: int) -> Member | None:
    """The live holder of the id, if it is another process."""
    member = self.by_id.get(learner)
    return member if member is not None and member.live and member.nonce != nonce else None

  def replaced(self, learner: str, nonce: int, incarnation: int) -> bool:
    """Whether the process that held this incarnation was replaced by another one."""
    member = self.by_id.get(learner)
    return member is not None and member.nonce != nonce and 0 < incarnation < member.incarnation

  def quarantined(self, member: Member) -> bool:
    """Whether the holder of the id may not take part any more."""
    return 0 < self._config.strikes <= member.max_strikes

  def lease_left_ns(self, member: Member, now_ns: int) -> int:
    return max(0, member.heard_ns + self._config.lease_ns - now_ns)

  def bind(self, learner: str, nonce: int, incarnation: int, session: int, now_ns: int) -> Member:
    """Gives the id to this process, on this session."""
    member = self.by_id.get(learner)
    if member is None:
      member = self.by_id[learner] = Member(learner)
    if member.nonce != nonce:
      member.clock = member.claimed = 0
      member.since, member.steps_marks = (0, now_ns), [(0, now_ns)]
      member.step_ns, member.report_ns = grace.Average(), grace.Average()
      member.loss, member.up, member.down = None, Uplink(), Downlink()
      member.copies = self._new_copies()
      member.strikes = member.max_strikes = 0
      member.others_merged = False
    member.nonce, member.incarnation, member.left = nonce, incarnation, False
    member.session, member.contributed, member.joined = session, False, False
    member.up.marks, member.up.asked, member.down.sent = [], {}, []
    member.heard_ns = member.entered_ns = member.reported_ns = now_ns
    self.by_session[session] = member
    return member

  def _new_copies(self) -> list[Copy]:
    return [Copy() for _ in range(self._config.fragments)]

  def release(self, session: int) -> Member | None:
    """Frees the id of a closed session."""
    member = self.by_session.pop(session, None)
    if member is not None:
      member.session = None
    return member

  def expired(self, now_ns: int) -> list[Member]:
    """Live members whose lease is over."""
    return [m for m in self.live() if self.lease_left_ns(m, now_ns) == 0]

  def state(self) -> list:
    rows = []
    for _, member in sorted(self.by_id.items()):
      row: dict[str, Any] = {name: getattr(member, name) for name in STATE.split()}
      row['spoiled'] = [p for p, copy in enumerate(member.copies) if copy.spoiled]
      rows.append(row)
    return rows

  def forget(self, learner: str) -> None:
    """Removes an absent learner id."""
    del self.by_id[learner]

  def load(self, rows: list) -> None:
    """Loads the members of a machine state; none of them is live."""
    for row in rows:
      spoiled, copies = row.pop('spoiled'), self._new_copies()
      self.by_id[row['learner']] = Member(**row, claimed=row['clock'], copies=copies)
      for p in spoiled:
        copies[p].spoiled = True
