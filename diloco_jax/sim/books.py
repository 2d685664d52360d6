"""The truth of a run, as its records tell it: the books that the checkers (checkers.py) read.

Nothing here asks a machine. A *learner's book* knows what its process really did: the steps that
ended, the tokens they trained, what it adopted and at which count, what every snapshot covers. A
*syncer's book* knows its streams, who holds which id, what each open sync has and waits for. The
*lineage* is what outlives a syncer: versions, ids, and a ledger written a second time, from what
the learners said and from the verdicts that they heard.

What a syncer has decided is written down one outer step after the other (*records*), before anybody
hears of it. So a syncer that ends goes on behind the last record that its disk has: with the books
as they were at that decision (a copy of the lineage then), and with the outer steps that were under
way in them ended as they did; or with a snapshot that it saved behind that record. Only if an
operator had to repair the log are versions *lost* that were published: a learner that holds one may
be sent an older one.

Books are updated after the checkers have seen a record, so that a checker sees both sides of it.
"""

import collections
import copy
import dataclasses
from typing import Any, Callable, Iterable, Sequence

from diloco_jax.protocol import actions
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import events
from diloco_jax.protocol import grace
from diloco_jax.protocol import messages
from diloco_jax.protocol import schedule as schedule_lib
from diloco_jax.sim import observers

Reason = messages.Reason
Range = tuple[int, int]


# --- A learner's process --------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Anchor:
  """The value of a fragment that a process holds, and its own counts when it took it."""

  version: int
  digest: int
  tokens: int = 0
  steps: int = 0
  sound: bool = True  # its bits are those that were published
  contributed: int = 0  # the sync it was snapshot for on this stream, 0: none
  ended: int = 0  # the last due time that this learner needs not wait for


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
  """What an Encode covers: `true` in tokens of the process, `told` in those of its incarnation."""

  sync: int
  fragment: int
  version: int
  session: int
  steps: int
  true: Range
  told: Range


class LearnerBook:
  """One learner's process. Counts are of the whole process; `base_*` is where its incarnation
  began (a syncer that went back may give a process a second one)."""

  def __init__(self, config: config_lib.ProtocolConfig, schedule: schedule_lib.Schedule,
               life: observers.Life):
    digests = life.start.digests if life.start.snapshot is None else None
    self.life, self.config, self.schedule = life, config, schedule
    self.learner, self.nonce = life.start.identity.learner, life.start.identity.nonce
    self.tokens = self.steps = self.base_tokens = self.base_steps = 0
    self.step = self.incarnation = self.session = 0
    self.joined = self.ever_joined = self.training = self.running = self.saving = False
    self.ending = self.finished = self.exited = False
    self.refused: messages.Refused | None = None
    self.due: set[int] = set()
    self.anchors = [
      Anchor(-1, 0) if digests is None else Anchor(0, digests[p]) for p in range(config.fragments)
    ]
    self.pulls: dict[int, int] = {}  # fragment: sync, on this stream
    self.pulled_to: dict[int, int] = {}  # the newest, answered or not
    self.encoding: collections.deque[Snapshot] = collections.deque()
    self.adopting: collections.deque[Anchor] = collections.deque()
    self.handles: dict[int, Any] = {}  # what is behind each: a Publish or a Snapshot
    self.last_encoded: Snapshot | None = None
    self.last_adopted: Anchor | None = None
    self.limit = 0
    self._set_limit()

  def __repr__(self) -> str:
    return f'{self.learner} (process {self.life.number})'

  @property
  def told_tokens(self) -> int:
    return self.tokens - self.base_tokens

  @property
  def told_steps(self) -> int:
    return self.steps - self.base_steps

  def told(self, anchor: Anchor) -> int:
    """The token count of an adoption, as its incarnation counts."""
    return max(0, anchor.tokens - self.base_tokens)

  def trained_on(self, anchor: Anchor) -> int:
    """Steps of this incarnation since an adoption."""
    return self.steps - max(anchor.steps, self.base_steps)

  @property
  def may_step(self) -> bool:
    """Whether nothing that the settings name holds it up."""
    if not self.training or self.finished or self.step >= self.config.total_steps:
      return False
    return self.config.lag is None or self.step < self.limit

  def _set_limit(self) -> None:
    """Lock-step modes: the clock at which it waits."""
    if self.config.lag is not None:
      nexts = [self.schedule.due(p, anchor.ended) for p, anchor in enumerate(self.anchors)]
      self.limit = min(nexts) + self.config.lag

  # --- Events -------------------------------------------------------------------------------------

  def step_done(self, now_ns: int, done: events.StepDone, out: Sequence) -> None:
    self.running = False
    self.steps, self.step, self.tokens = self.steps + 1, self.step + 1, self.tokens + done.tokens

  def hung_up(self, now_ns: int, gone: events.Disconnected, out: Sequence) -> None:
    if gone.session == self.session:
      self.joined = False
      self.pulls.clear()
      self.pulled_to.clear()

  def welcomed(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    message = event.message
    if event.session != self.session or self.joined:
      return  # of an old stream, or said twice
    self.joined = self.ever_joined = True
    if message.incarnation != self.incarnation:
      self.incarnation = message.incarnation
      self.base_tokens, self.base_steps = self.tokens, self.steps
    self.step, self.due = max(self.step, message.step), set(message.due)
    for p, anchor in enumerate(self.anchors):
      anchor.contributed = 0
      anchor.ended = message.step if p in self.due else max(anchor.ended, message.step)
    self._set_limit()
    self.training = self.training or not self.due

  def pulled(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    sync, p = event.message.sync, event.message.fragment
    if event.session == self.session and sync > self.pulled_to.get(p, 0):  # else it is said twice
      self.pulls[p] = self.pulled_to[p] = sync

  def published(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    self.handles[event.handle] = event.message

  def settled(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    message = event.message
    if event.session != self.session or message.reason != messages.CANCELLED:
      return
    anchor = self.anchors[message.fragment]
    if anchor.contributed == message.sync:
      anchor.contributed = 0
    anchor.ended = max(anchor.ended, message.sync)
    self._set_limit()
    if self.pulls.get(message.fragment) == message.sync:
      del self.pulls[message.fragment]

  def over(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    if event.session == self.session:
      self.finished = self.ending = True

  def stopped(self, now_ns: int, event: events.Stop, out: Sequence) -> None:
    self.ending = True

  def turned_away(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    if event.session == self.session:
      self.refused = event.message

  def encoded(self, now_ns: int, event: events.Encoded, out: Sequence) -> None:
    snapshot = self.last_encoded = self.encoding.popleft()
    if event.handle is not None:
      self.handles[event.handle] = snapshot

  def adopt_done(self, now_ns: int, done: events.AdoptDone, out: Sequence) -> None:
    anchor = self.last_adopted = self.adopting.popleft()
    anchor.sound = anchor.digest == done.digest

  def saved(self, now_ns: int, event: events.SaveDone, out: Sequence) -> None:
    self.saving = False

  # --- Actions ------------------------------------------------------------------------------------

  def dialled(self, now_ns: int, dial: actions.Dial, event: Any) -> None:
    self.session, self.joined = dial.session, False
    self.pulls.clear()
    self.pulled_to.clear()

  def steps_on(self, now_ns: int, step: actions.Step, event: Any) -> None:
    self.running = True

  def encodes(self, now_ns: int, encode: actions.Encode, event: Any) -> None:
    p, anchor = encode.fragment, self.anchors[encode.fragment]
    anchor.contributed = encode.sync
    self.pulls.pop(p, None)
    self.encoding.append(Snapshot(
      encode.sync, p, anchor.version, self.session, self.trained_on(anchor),
      (anchor.tokens, self.tokens), (self.told(anchor), self.told_tokens)))

  def declines(self, now_ns: int, send: actions.Send, event: Any) -> None:
    if self.pulls.get(send.message.fragment) == send.message.sync:
      del self.pulls[send.message.fragment]

  def adopts(self, now_ns: int, adopt: actions.Adopt, event: Any) -> None:
    publish, p = self.handles.pop(adopt.handle), adopt.fragment
    ended = max(self.anchors[p].ended, publish.sync)
    self.anchors[p] = Anchor(
      publish.version, publish.digest, self.tokens, self.steps, ended=ended)
    self.adopting.append(self.anchors[p])
    self._set_limit()
    if p in self.pulls and self.pulls[p] <= publish.sync:
      del self.pulls[p]
    self.step = max(self.step, publish.sync)
    self.due.discard(p)
    if self.joined and not self.due:
      self.training = True

  def saves(self, now_ns: int, save: actions.Save, event: Any) -> None:
    self.saving = True

  def drops(self, now_ns: int, drop: actions.Drop, event: Any) -> None:
    self.handles.pop(drop.handle, None)

  def exits(self, now_ns: int, action: actions.Exit, event: Any) -> None:
    self.exited, self.running = True, False


LEARNER_EVENTS: dict[type, Callable] = {
  events.StepDone: LearnerBook.step_done,
  events.Disconnected: LearnerBook.hung_up,
  events.Encoded: LearnerBook.encoded,
  events.AdoptDone: LearnerBook.adopt_done,
  events.SaveDone: LearnerBook.saved,
  events.Stop: LearnerBook.stopped,
  messages.Joined: LearnerBook.welcomed,
  messages.Pull: LearnerBook.pulled,
  messages.Publish: LearnerBook.published,
  messages.Settled: LearnerBook.settled,
  messages.Refused: LearnerBook.turned_away,
  messages.Finish: LearnerBook.over,
}
LEARNER_ACTIONS: dict[type, Callable] = {
  actions.Dial: LearnerBook.dialled,
  actions.Step: LearnerBook.steps_on,
  actions.Encode: LearnerBook.encodes,
  actions.Adopt: LearnerBook.adopts,
  actions.Save: LearnerBook.saves,
  actions.Drop: LearnerBook.drops,
  actions.Exit: LearnerBook.exits,
  messages.Decline: LearnerBook.declines,
}


# --- What outlives a syncer -----------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Account:
  """One incarnation's tokens by the learners' word and the verdicts that they heard. Figures but
  `trained` are fragment-tokens."""

  cursors: list[int]
  trained: int = 0
  merged: int = 0
  discarded: dict[str, int] = dataclasses.field(default_factory=dict)

  def discard(self, count: int, reason: str) -> None:
    if count:
      self.discarded[reason] = self.discarded.get(reason, 0) + count

  def train(self, tokens: int) -> None:
    self.trained = max(self.trained, tokens)

  def move(self, p: int, upto: int, reason: str) -> None:
    """Everything of fragment p before `upto` that has no verdict gets this one."""
    self.train(upto)
    self.discard(max(0, upto - self.cursors[p]), reason)
    self.cursors[p] = max(upto, self.cursors[p])

  def settle(self, p: int, told: Range, reason: str) -> None:
    """A contribution gets its verdict; '' is merged. What it left out before it was overwritten."""
    if told[0] < self.cursors[p]:
      self.move(p, told[1], Reason.DUPLICATE)
      return
    self.move(p, told[0], Reason.OVERWRITTEN)
    if reason:
      self.move(p, told[1], reason)
    else:
      self.merged += told[1] - told[0]
      self.cursors[p] = told[1]
      self.train(told[1])

  @property
  def unsettled(self) -> int:
    return len(self.cursors) * self.trained - sum(self.cursors)

  def close(self, reason: str) -> None:
    for p in range(len(self.cursors)):
      self.move(p, self.trained, reason)

  def copy(self) -> 'Account':
    return dataclasses.replace(
      self, cursors=list(self.cursors), discarded=dict(self.discarded))


@dataclasses.dataclass(slots=True)
class Holder:
  """Who holds a learner id, or held it last; `replaced` are the processes before."""

  nonce: int
  incarnation: int
  left: bool = False
  replaced: tuple[int, ...] = ()
  stream: int | None = None
  step: int = 0
  done: bool = False  # with its last step


@dataclasses.dataclass(slots=True)
class Lineage:
  """What a syncer's snapshot stands for; copied when it is asked for, taken up again after it."""

  versions: list[int]
  digests: list[int]
  last_sync: list[int]
  cancelled: list[int]  # syncs of which no version came
  abandoned: list[int]  # open syncs that ended with their syncer
  next: int
  opened: int = 0
  skipped: int = 0  # syncs that were left out, per fragment
  repaired: int = 0  # adoptions that differed from what was published
  holders: dict[str, Holder] = dataclasses.field(default_factory=dict)
  accounts: dict[tuple[str, int], Account] = dataclasses.field(default_factory=dict)
  merged_upto: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)

  def copy(self) -> 'Lineage':
    lists = ('versions', 'digests', 'last_sync', 'cancelled', 'abandoned')
    return dataclasses.replace(
      self, **{name: list(getattr(self, name)) for name in lists},
      holders={name: copy.copy(one) for name, one in self.holders.items()},
      accounts={key: one.copy() for key, one in self.accounts.items()},
      merged_upto=dict(self.merged_upto))

  def account(self, learner: str, incarnation: int) -> Account:
    key = learner, incarnation
    if key not in self.accounts:
      self.accounts[key] = Account([0] * len(self.versions))
    return self.accounts[key]

  def close_all(self) -> None:
    for account in self.accounts.values():
      account.close(Reason.END_OF_RUN)

  def totals(self) -> dict[str, Any]:
    """As a `ledger` report has them."""
    discarded: dict[str, int] = {}
    trained = merged = unsettled = 0
    for account in self.accounts.values():
      trained += account.trained
      merged += account.merged
      unsettled += account.unsettled
      for reason, count in account.discarded.items():
        discarded[reason] = discarded.get(reason, 0) + count
    return {'trained': trained, 'merged': merged, 'discarded': discarded, 'unsettled': unsettled}

  def learners(self) -> dict[str, tuple[int, int, int, int]]:
    """Per learner id: its incarnations, tokens, merged, discarded."""
    rows: dict[str, tuple[int, int, int, int]] = {}
    for (learner, incarnation), account in self.accounts.items():
      number, tokens, merged, discarded = rows.get(learner, (0, 0, 0, 0))
      rows[learner] = (
        max(number, incarnation), tokens + account.trained, merged + account.merged,
        discarded + sum(account.discarded.values()))
    return rows


@dataclasses.dataclass(slots=True)
class Saved:
  """A snapshot that a syncer asked to be saved; `open` are the fragments of its open syncs,
  `position` is the last record that it holds; `verified`: it was written, and read back."""

  snapshot: dict[str, Any]
  lineage: Lineage
  open: tuple[int, ...]
  position: int
  verified: bool = False


@dataclasses.dataclass(slots=True)
class Record:
  """An outer step as it was decided; `lineage` and `open` are of that moment, `under_way` are the
  records that had not ended then, this one among them. `digest` is None until its end is known."""

  merge: actions.Merge
  lineage: Lineage
  open: tuple[int, ...]
  under_way: tuple['Record', ...] = ()
  digest: int | None = None
  failed: str = ''

  def end(self, lineage: Lineage) -> None:
    """Books how it ended."""
    p = self.merge.fragment
    if self.failed:
      lineage.cancelled[p] += 1
      for one in self.merge.participants:
        account = lineage.account(one.learner, one.incarnation)
        account.merged -= one.tokens
        account.discard(one.tokens, Reason.BAD_VALUE)
    else:
      lineage.versions[p] += 1
      lineage.digests[p], lineage.last_sync[p] = self.digest, self.merge.sync


def difference(snapshot: dict[str, Any], lineage: Lineage) -> str:
  """Where a syncer's snapshot is not what is true, in words; '' if nowhere."""
  true: dict[str, Any] = {
    name: getattr(lineage, name) for name in ('versions', 'digests', 'last_sync', 'next', 'opened')
  }
  said = {name: snapshot[name] for name in true}
  said['members'] = {
    row['learner']: (
      row['nonce'], row['incarnation'], row['left'], row['step'], tuple(row['replaced']))
    for row in snapshot['members']
  }
  true['members'] = {
    name: (one.nonce, one.incarnation, one.left, one.step, one.replaced)
    for name, one in lineage.holders.items()
  }
  said['ledger'] = {
    (learner, incarnation): (row['trained'], row['merged'], row['cursors'], row['discarded'])
    for learner, incarnation, row in snapshot['ledger']
  }
  true['ledger'] = {
    key: (one.trained, one.merged, one.cursors, one.discarded)
    for key, one in lineage.accounts.items()
  }
  counts = 'synced', 'cancelled', 'repaired'
  said['counts'] = tuple(snapshot['counts'][name] for name in counts)
  true['counts'] = sum(lineage.versions), sum(lineage.cancelled), lineage.repaired
  for name, value in true.items():
    if said[name] != value:
      return f'{name}: {said[name]}, it should be {value}'
  return ''


# --- A syncer's process ---------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Peer:
  """One stream at the syncer."""

  session: int
  heard_ns: int
  join: messages.Join | None = None
  offered: int | None = None
  incarnation: int = 0
  member: bool = False  # it holds its id
  joined: bool = False  # it was told so
  open: bool = True
  due: set[int] = dataclasses.field(default_factory=set)
  sent: dict[int, int] = dataclasses.field(default_factory=dict)  # fragment: newest version
  on_way: dict[int, list[int]] = dataclasses.field(
    default_factory=lambda: collections.defaultdict(list))  # fragment: versions not adopted yet
  held: tuple[messages.Held, ...] = ()

  @property
  def caught_up(self) -> bool:
    return self.joined and self.member and not self.due


@dataclasses.dataclass(slots=True)
class Gather:
  """One open sync: whom it waits for, what it holds by handle."""

  sync: int
  fragment: int
  opened_ns: int
  waiting: set[str] = dataclasses.field(default_factory=set)
  payloads: dict[int, tuple[Peer, messages.Contribution]] = dataclasses.field(default_factory=dict)
  quorum_ns: int | None = None
  grace_ns: int = 0  # the window that began with the quorum
  merging: actions.Merge | None = None
  merged: tuple[tuple[Peer, messages.Contribution], ...] = ()
  record: Record | None = None


class Window:
  """What the grace window follows from (paper section 4): the times of steps, of gathering K
  payloads, and from the decision to merge to the first adoption."""

  def __init__(self, config: config_lib.ProtocolConfig):
    self._config = config
    self._quorum_ns, self._sync_ns = grace.Average(), grace.Average()
    self._steps_ns: dict[int, grace.Average] = collections.defaultdict(grace.Average)  # by nonce
    self._merging: dict[int, tuple[int, int]] = {}  # fragment: version, since when

  def step(self, nonce: int, step_ns: int) -> None:
    if step_ns:
      self._steps_ns[nonce].add(step_ns)

  def merges(self, now_ns: int, fragment: int, version: int) -> None:
    self._merging[fragment] = version, now_ns

  def refused(self, fragment: int) -> None:
    self._merging.pop(fragment, None)

  def adopted(self, now_ns: int, fragment: int, version: int) -> None:
    expected, since_ns = self._merging.get(fragment, (None, 0))
    if version == expected:
      self._sync_ns.add(now_ns - since_ns)
      del self._merging[fragment]

  def begins(self, waited_ns: int, nonces: Iterable[int]) -> int:
    """K payloads are there after `waited_ns`; how long to wait for the other live learners."""
    self._quorum_ns.add(waited_ns)
    if not self._sync_ns.samples:
      return 0
    fastest_ns = min((self._steps_ns[one].value for one in nonces if one in self._steps_ns),
                     default=0)
    needed_ns = self._quorum_ns.value + self._sync_ns.value
    slack_ns = max(0, self._config.overlap * fastest_ns - needed_ns)
    return slack_ns * self._config.grace_permille // 1000


class SyncerBook:
  """One syncer's process."""

  def __init__(self, run: 'Run', life: observers.Life, lineage: Lineage):
    self.run, self.life, self.lineage = run, life, lineage
    self.config, self.schedule = run.config, run.schedule
    self.peers: dict[int, Peer] = {}
    self.members: dict[str, Peer] = {}
    self.gathers: dict[int, Gather] = {}
    self.pending: dict[int, Gather] = {}  # handle: the sync that holds it
    self.handles: set[int] = set()
    self.reads: set[int] = set()  # fragments that are being read whole
    self.peer: Peer | None = None  # who spoke in this turn
    self.ended: Gather | None = None  # the sync whose merge ended last
    self.window = Window(run.config)
    self.longest_step_ns = 0
    self.merges = 0
    self.stopping = self.exiting = self.exited = False
    self.finished_ns: int | None = None
    self.saving: collections.deque[Saved] = collections.deque()

  def __repr__(self) -> str:
    return f'syncer (process {self.life.number})'

  def hears(self, now_ns: int, session: int) -> None:
    """Somebody speaks on this stream."""
    peer = self.peers.get(session)
    if peer is None:
      peer = self.peers[session] = Peer(session, now_ns)
    elif peer.member:
      peer.heard_ns = now_ns
    self.peer = peer

  def learner(self, peer: Peer) -> LearnerBook | None:
    return self.run.learners.get(peer.join.nonce)

  def account(self, peer: Peer) -> Account:
    return self.lineage.account(peer.join.learner, peer.incarnation)

  @property
  def over(self) -> bool:
    return self.lineage.next > self.schedule.last

  # --- Events -------------------------------------------------------------------------------------

  def connected(self, now_ns: int, event: events.Connected, out: Sequence) -> None:
    self.peers[event.session] = Peer(event.session, now_ns)

  def hung_up(self, now_ns: int, event: events.Disconnected, out: Sequence) -> None:
    peer = self.peers.pop(event.session, None)
    if peer is not None:
      self._release(peer)

  def _release(self, peer: Peer) -> None:
    peer.open = False
    if not peer.member:
      return
    peer.member = False
    learner = peer.join.learner
    if self.members.get(learner) is peer:
      del self.members[learner]
      for gather in self.gathers.values():
        gather.waiting.discard(learner)

  def joins(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    if not self.exiting and not self.peer.member:
      self.peer.join = event.message

  def confirms(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    """The id is taken unless the stream is closed at once."""
    peer, confirm = self.peer, event.message
    if peer.member or self.exiting or peer.join is None or not peer.open:
      return
    for action in out:
      if type(action) is actions.Close and action.session == peer.session:
        return
    self._admit(now_ns, peer, confirm)

  def _admit(self, now_ns: int, peer: Peer, confirm: messages.Confirm) -> None:
    learner, nonce = peer.join.learner, peer.join.nonce
    holder = self.lineage.holders.get(learner)
    if holder is None:
      holder = self.lineage.holders[learner] = Holder(nonce, confirm.incarnation)
    elif holder.nonce != nonce:
      self.lineage.account(learner, holder.incarnation).close(Reason.LOST_WITH_PROCESS)
      holder = self.lineage.holders[learner] = Holder(
        nonce, confirm.incarnation, replaced=(*holder.replaced, holder.nonce), stream=holder.stream)
    elif learner in self.members:  # the same process on a new stream: the old one goes first
      self._release(self.members[learner])
    holder.left, holder.step = False, max(holder.step, confirm.step)
    peer.member, peer.incarnation, peer.heard_ns = True, confirm.incarnation, now_ns
    peer.held = confirm.held
    self.members[learner] = peer
    self.account(peer).train(confirm.tokens)

  def progress(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    peer, message = self.peer, event.message
    if not self._counts(peer):
      return
    holder = self.lineage.holders[peer.join.learner]
    holder.step, holder.done = max(holder.step, message.step), holder.done or message.finished
    self.longest_step_ns = max(self.longest_step_ns, message.step_ns)
    self.window.step(peer.join.nonce, message.step_ns)
    self.account(peer).train(message.tokens)

  def _counts(self, peer: Peer) -> bool:
    return peer.joined and peer.member and not self.exiting

  def contributed(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    """It is kept unless its payload is dropped in this turn; then it is settled by what is sent."""
    handle, message, peer = event.handle, event.message, self.peer
    self.handles.add(handle)
    if not self._counts(peer):
      return
    gather = self.gathers.get(message.sync)
    if gather is not None:
      gather.waiting.discard(peer.join.learner)
    if gather is None or any(type(a) is actions.Drop and a.handle == handle for a in out):
      return
    gather.payloads[handle] = peer, message
    self.pending[handle] = gather
    if len(gather.payloads) == self.config.quorum and gather.quorum_ns is None:
      gather.quorum_ns = now_ns
      nonces = (member.join.nonce for member in self.members.values())
      gather.grace_ns = self.window.begins(now_ns - gather.opened_ns, nonces)

  def declined(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    peer, message = self.peer, event.message
    if not self._counts(peer):
      return
    if message.sync in self.gathers:
      self.gathers[message.sync].waiting.discard(peer.join.learner)
    if message.reason == Reason.BAD_VALUE:
      self.account(peer).move(message.fragment, message.tokens_to, Reason.BAD_VALUE)

  def adopted(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    peer, message = self.peer, event.message
    if not self._counts(peer):
      return
    if not message.matched:
      self.lineage.repaired += 1
    else:
      self.window.adopted(now_ns, message.fragment, message.version)
      self.account(peer).move(message.fragment, message.tokens, Reason.OVERWRITTEN)
      peer.due.discard(message.fragment)
      peer.on_way[message.fragment] = [
        version for version in peer.on_way[message.fragment] if version > message.version]

  def left(self, now_ns: int, event: events.Received, out: Sequence) -> None:
    peer = self.peer
    if peer.member and not self.exiting:
      reason = Reason.LEFT if self.finished_ns is None else Reason.END_OF_RUN
      self.account(peer).close(reason)
      self.lineage.holders[peer.join.learner].left = True
      self._release(peer)

  def merge_done(self, now_ns: int, done: events.MergeDone, out: Sequence) -> None:
    gather = self.gathers.pop(done.sync)
    self.ended, self.merges = gather, self.merges - 1
    record = gather.record
    record.digest, record.failed = done.digest, done.failed
    record.end(self.lineage)
    self.run.told += 1
    if done.failed:
      self.window.refused(done.fragment)
    else:
      self.handles.add(done.handle)
      self.run.publish(done.fragment, done.digest)

  def true_range(self, peer: Peer, message: messages.Contribution) -> Range | None:
    """What a contribution covers in its process's own tokens; None: that process has no tape."""
    learner = self.learner(peer)
    if learner is None or learner.incarnation != peer.incarnation:
      return None
    return message.tokens_from + learner.base_tokens, message.tokens_to + learner.base_tokens

  def read(self, now_ns: int, event: events.FragmentRead, out: Sequence) -> None:
    self.reads.discard(event.fragment)
    self.handles.add(event.handle)

  def stop(self, now_ns: int, event: events.Stop, out: Sequence) -> None:
    self.stopping = True

  def save_done(self, now_ns: int, event: events.SaveDone, out: Sequence) -> None:
    saved = self.saving.popleft()
    saved.verified = not event.error

  # --- Actions ------------------------------------------------------------------------------------

  def offers(self, now_ns: int, send: actions.Send, event: Any) -> None:
    self.peers[send.session].offered = send.message.incarnation

  def welcomes(self, now_ns: int, send: actions.Send, event: Any) -> None:
    peer = self.peers[send.session]
    peer.joined, peer.due = True, set(send.message.due)
    holder = self.lineage.holders[peer.join.learner]
    holder.step, holder.stream = max(holder.step, send.message.step), send.message.stream
    for p, held in enumerate(peer.held):
      if p not in peer.due:
        peer.sent[p] = held.version

  def pulls(self, now_ns: int, send: actions.Send, event: Any) -> None:
    message = send.message
    gather = self.gathers.get(message.sync)
    if gather is None:
      gather = self.gathers[message.sync] = Gather(message.sync, message.fragment, now_ns)
      lineage = self.lineage
      lineage.skipped += (message.sync - lineage.next) // self.config.period
      lineage.opened, lineage.next = message.sync, self.schedule.next(message.sync)
    gather.waiting.add(self.peers[send.session].join.learner)

  def settles(self, now_ns: int, send: actions.Send, event: Any) -> None:
    """A verdict on the contribution of this turn."""
    message = send.message
    if message.merged or message.reason == messages.CANCELLED:
      return  # merged was settled when the merge began
    peer, said = self.peers[send.session], event.message
    self.account(peer).settle(said.fragment, (said.tokens_from, said.tokens_to), message.reason)

  def publishes(self, now_ns: int, send: actions.Send, event: Any) -> None:
    peer, message = self.peers[send.session], send.message
    peer.sent[message.fragment] = message.version
    peer.on_way[message.fragment].append(message.version)

  def merge(self, now_ns: int, merge: actions.Merge, event: Any) -> None:
    gather = self.gathers[merge.sync]
    gather.merging, self.merges = merge, self.merges + 1
    self.window.merges(now_ns, merge.fragment, merge.version)
    gather.merged = tuple(gather.payloads[one.handle] for one in merge.participants)
    for one, (peer, message) in zip(merge.participants, gather.merged):
      told = message.tokens_from, message.tokens_to
      self.account(peer).settle(merge.fragment, told, '')
      true = self.true_range(peer, message)
      if true is not None:
        self.lineage.merged_upto[peer.join.nonce, merge.fragment] = true[1]
      del self.pending[one.handle]
      self.handles.discard(one.handle)
    gather.payloads.clear()
    gather.record = record = Record(merge, self.lineage.copy(), ())
    record.open = self._open()
    record.under_way = tuple(
      other.record for other in self.gathers.values() if other.record is not None)
    self.run.records.append(record)

  def _open(self) -> tuple[int, ...]:
    """The fragments of the syncs that would end with this process."""
    return tuple(one.fragment for one in self.gathers.values() if one.record is None)

  def cancels(self, now_ns: int, report: actions.Report, event: Any) -> None:
    """A sync is cancelled; after a failed merge it was counted already."""
    if self.gathers.pop(report.values['sync'], None) is not None:
      self.lineage.cancelled[report.values['fragment']] += 1

  def reads_whole(self, now_ns: int, read: actions.ReadFragment, event: Any) -> None:
    self.reads.add(read.fragment)

  def drops(self, now_ns: int, drop: actions.Drop, event: Any) -> None:
    handle = drop.handle
    self.handles.discard(handle)
    gather = self.pending.pop(handle, None)
    if gather is not None:
      del gather.payloads[handle]
      if len(gather.payloads) < self.config.quorum:
        gather.quorum_ns = None

  def closes(self, now_ns: int, close: actions.Close, event: Any) -> None:
    peer = self.peers.get(close.session)
    if peer is not None and not self.exiting:
      self._release(peer)

  def save(self, now_ns: int, save: actions.Save, event: Any) -> None:
    saved = Saved(save.snapshot, self.lineage.copy(), self._open(), len(self.run.records))
    self.saving.append(saved)
    self.run.saved.append(saved)

  def exits(self, now_ns: int, action: actions.Exit, event: Any) -> None:
    self.exited = True

  # --- After a turn -------------------------------------------------------------------------------

  def can_end(self, now_ns: int) -> bool:
    """Whether the run may be over now, perhaps since this very turn."""
    if self.finished_ns is None and not self._closed:
      return False
    gone = all(holder.left for holder in self.lineage.holders.values())
    finished_ns = now_ns if self.finished_ns is None else self.finished_ns
    return self.stopping or gone or now_ns >= finished_ns + self.config.lease_ns

  @property
  def _closed(self) -> bool:
    """Every sync is over."""
    return self.over and not self.gathers and not self.merges

  def after(self, now_ns: int) -> None:
    """The end of the run follows from what is open."""
    if self.exiting or self.merges:
      return
    if self.finished_ns is None and self._closed:
      self.finished_ns = now_ns
    self.exiting = self.stopping or self.can_end(now_ns)


SYNCER_EVENTS: dict[type, Callable] = {
  events.Connected: SyncerBook.connected,
  events.Disconnected: SyncerBook.hung_up,
  events.MergeDone: SyncerBook.merge_done,
  events.FragmentRead: SyncerBook.read,
  events.SaveDone: SyncerBook.save_done,
  events.Stop: SyncerBook.stop,
  messages.Join: SyncerBook.joins,
  messages.Confirm: SyncerBook.confirms,
  messages.Progress: SyncerBook.progress,
  messages.Contribution: SyncerBook.contributed,
  messages.Decline: SyncerBook.declined,
  messages.Adopted: SyncerBook.adopted,
  messages.Leave: SyncerBook.left,
}
SYNCER_ACTIONS: dict[Any, Callable] = {
  actions.Merge: SyncerBook.merge,
  actions.Drop: SyncerBook.drops,
  actions.Close: SyncerBook.closes,
  actions.Save: SyncerBook.save,
  actions.Exit: SyncerBook.exits,
  messages.Offer: SyncerBook.offers,
  messages.Joined: SyncerBook.welcomes,
  messages.Pull: SyncerBook.pulls,
  messages.Publish: SyncerBook.publishes,
  messages.Settled: SyncerBook.settles,
  actions.ReadFragment: SyncerBook.reads_whole,
  'cancelled': SyncerBook.cancels,
}


# --- All of them ----------------------------------------------------------------------------------


class NotTheirs(LookupError):
  """A syncer goes on from what it should not; `lost`: from an earlier record than it must."""

  def __init__(self, words: str, lost: bool):
    super().__init__(words)
    self.lost = lost


class Run:
  """All processes of a run, and what a syncer that begins goes on from.

  Attributes:
    records: of all outer steps that were decided and are not lost, the first is number 1.
    told: so many of them have ended as far as machines know.
    durable: so many are safe on the disk; None: nobody knows, as with real processes.
    repaired: the log was damaged, what the next syncer goes on from is not its fault.
    spoken: per fragment, the newest version that anybody was sent.
  """

  def __init__(self, config: config_lib.ProtocolConfig):
    self.config, self.schedule = config, schedule_lib.Schedule(config)
    self.learners: dict[int, LearnerBook] = {}  # by nonce
    self.books: dict[int, LearnerBook | SyncerBook] = {}  # by the life's number
    self.syncer: SyncerBook | None = None
    self.saved: list[Saved] = []  # those that are not gone back over
    self.records: list[Record] = []
    self.told = 0
    self.durable: int | None = None
    self.repaired = False
    self.spoken = [0] * config.fragments
    self.history: list[list[int]] = [[] for _ in range(config.fragments)]  # digests by version
    self.bases: dict[tuple[int, int, int], int] = {}  # (fragment, version, digest): of its base
    self.lost: set[tuple[int, int, int]] = set()  # values that a repair gave up

  def born(self, life: observers.Life) -> LearnerBook | SyncerBook:
    """A new process. Raises NotTheirs if a syncer goes on from what it should not."""
    if life.start.role == 'learner':
      book = LearnerBook(self.config, self.schedule, life)
      self.learners[book.nonce] = book
    else:
      book = self.syncer = SyncerBook(self, life, self._lineage(life.start))
    self.books[life.number] = book
    return book

  def publish(self, p: int, digest: int) -> None:
    """A fragment has its next version."""
    history = self.history[p]
    self.bases[p, len(history), digest] = history[-1]
    history.append(digest)

  def logged(self, note: observers.LogNote) -> None:
    """What the world says of the log."""
    match note.kind:
      case 'appended':
        record = self.records[note.number - 1]
        record.digest, record.failed = note.digest, note.failed
      case 'durable':
        self.durable = note.number
      case 'repaired':
        self.repaired = True

  def _lineage(self, start: Any) -> Lineage:
    number, lineage = self._found(start)
    self.records, self.told = self.records[:number], number
    self.saved = [saved for saved in self.saved if saved.position <= number]
    if self.repaired:
      self.repaired, self.spoken = False, list(lineage.versions)
    if self.durable is not None:
      self.durable = min(self.durable, number)  # until the world says more
    for p, history in enumerate(self.history):
      version = lineage.versions[p]
      for lost in range(version + 1, len(history)):
        self.lost.add((p, lost, history[lost]))
      self.history[p] = history[:version + 1] or [lineage.digests[p]]
      if len(self.history[p]) <= version:
        self.publish(p, lineage.digests[p])  # it is durable, but nobody had been told
    for holder in lineage.holders.values():
      holder.done = False
    return lineage

  def _found(self, start: Any) -> tuple[int, Lineage]:
    """The record behind which a syncer goes on, and what is true there."""
    if start.snapshot is None:
      number, lineage = 0, self._first(start.digests)
    else:
      found = (self._at(number, start.snapshot) for number in range(len(self.records), -1, -1))
      number, lineage = next((one for one in found if one is not None), (None, None))
    versions = [0] * self.config.fragments if number == 0 else start.snapshot['versions']
    behind = any(now < spoken for now, spoken in zip(versions, self.spoken))
    if number is None:
      raise NotTheirs(self._nearest(start.snapshot), behind and not self.repaired)
    first = self.told if self.durable is None else max(self.told, self.durable)
    if not self.repaired and (number < first or behind):
      raise NotTheirs(f'it goes on behind record {number}, {first} are durable', True)
    if self.durable is not None and number > first + 1:
      raise NotTheirs(f'it goes on behind record {number}, {first} are durable', False)
    return number, lineage

  def _at(self, number: int, snapshot: dict[str, Any]) -> tuple[int, Lineage] | None:
    """The record and the lineage, if a snapshot is what is true behind it."""
    for saved in reversed(self.saved):
      if saved.position == number and _same(saved.snapshot, snapshot):
        return number, self._ended(saved.lineage, saved.open)
    if number and (twin := self._twin(number, snapshot)) and not difference(snapshot, twin):
      return number, twin
    return None

  def _twin(self, number: int, snapshot: dict[str, Any]) -> Lineage | None:
    """What is true behind a record: that of a syncer that decided nothing more."""
    record = self.records[number - 1]
    twin = self._ended(record.lineage, record.open)
    for one in record.under_way:
      p = one.merge.fragment
      if one.digest is None:  # nobody knows: the snapshot may say it
        made = snapshot['versions'][p] == one.merge.version
        one.digest, one.failed = snapshot['digests'][p], '' if made else 'unknown'
      one.end(twin)
    return twin

  def _ended(self, lineage: Lineage, open_: Sequence[int]) -> Lineage:
    lineage = lineage.copy()
    for p in open_:
      lineage.abandoned[p] += 1
    return lineage

  def _nearest(self, snapshot: dict[str, Any]) -> str:
    """How it differs from what is true behind the last record, in words."""
    if not self.records:
      return 'nothing was written down, nothing saved'
    return difference(snapshot, self._twin(len(self.records), snapshot))

  def _first(self, digests: Sequence[int]) -> Lineage:
    zeros = [0] * self.config.fragments
    return Lineage(list(zeros), list(digests), list(zeros), list(zeros), list(zeros),
                   self.schedule.next(0))


def _same(saved: dict[str, Any], snapshot: dict[str, Any]) -> bool:
  """`merging` is of the moment: nothing is under way when a syncer begins, nor when it saves."""
  return {**saved, 'merging': []} == {**snapshot, 'merging': []}
