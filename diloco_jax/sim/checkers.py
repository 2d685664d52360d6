"""What must hold in every run, whatever is delayed, repeated, cut, frozen or killed.

Each invariant is a class: an id, the sentence that it enforces, and what it looks at. It is shown
every record before the books (books.py) take it, and every turn after they have, so it can compare
what a machine does with what is true. It never asks a machine. So the same checkers watch the
simulated world live and read the tapes of real processes afterwards::

    checkers = Checkers(config)
    checkers.born(now_ns, life)                       # a process begins
    checkers.saw(life, now_ns, event, actions)        # a machine took a turn
    checkers.died(now_ns, life, killed)               # a process is gone
    checkers.logged(now_ns, note)                     # simulated world: the syncer's disk
    checkers.healed(now_ns)                           # nothing goes wrong from here on
    checkers.finished(now_ns)                         # the run is over: end-of-run statements

The ids I1 ... are those of safety and L1 ... those of liveness. A run that breaks one raises
`Violation`, which says which, in words, and what was seen. Turns cost the same with any number of
learners: whatever looks at all of them is done once a sync, once a heartbeat or at the end.
"""

import collections
from typing import Any, Callable, Iterable, Sequence

from diloco_jax.protocol import actions
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import events
from diloco_jax.protocol import messages
from diloco_jax.protocol import published
from diloco_jax.protocol import tape
from diloco_jax.sim import books
from diloco_jax.sim import observers

Life = observers.Life
Reason = messages.Reason

LEARNER, SYNCER = 'learner', 'syncer'
EVERY = 'every turn'


class Violation(AssertionError):
  """An invariant does not hold: its id, its sentence, and what was seen."""

  def __init__(self, invariant_id: str, sentence: str, detail: str):
    super().__init__(f'{invariant_id}: {sentence} {detail}')
    self.invariant, self.sentence, self.detail = invariant_id, sentence, detail


def on(role: str, *kinds: Any) -> Callable:
  """The method sees every such event or action (a message's class; a report's name) of a role,
  before the books do: method(book, now_ns, what, the turn's actions or event)."""
  return _mark('_on', role, kinds)


def after(role: str, *kinds: Any) -> Callable:
  """The method sees every turn of a role that such an event began, after the books:
  method(book, now_ns, event, actions)."""
  return _mark('_after', role, kinds)


def _mark(name: str, role: str, kinds: Iterable[Any]) -> Callable:
  def decorate(method: Callable) -> Callable:
    setattr(method, name, [(role, kind) for kind in kinds])
    return method
  return decorate


class Invariant:
  """One statement about every run."""

  id = ''
  sentence = ''

  def __init__(self, run: books.Run):
    self.run, self.config = run, run.config

  def fail(self, *seen: Any) -> None:
    raise Violation(self.id, self.sentence, ', '.join(str(one) for one in seen))

  def logged(self, now_ns: int, note: observers.LogNote) -> None:
    """Something happened to the syncer's log, before the books know."""

  def healed(self, now_ns: int) -> None:
    """Nothing goes wrong from here on."""

  def finished(self, now_ns: int) -> bool | None:
    """The run is over. False: it did not come so far that the end can be judged."""


# --- Safety: contributions and versions -----------------------------------------------------------


class CountedOnce(Invariant):
  id = 'I1'
  sentence = 'No token of a process counts twice for a fragment.'

  @on(SYNCER, actions.Merge)
  def merge(self, book, now_ns, merge, event):
    gather = book.gathers[merge.sync]
    for one in merge.participants:
      peer, message = gather.payloads[one.handle]
      true = book.true_range(peer, message)
      upto = book.lineage.merged_upto.get((peer.join.nonce, merge.fragment), 0)
      if true is not None and true[0] < upto:
        self.fail(one, message, f'merged up to {upto}')
      cursor = book.account(peer).cursors[merge.fragment]
      if message.tokens_from < cursor:
        self.fail(one, message, f'settled up to {cursor}')


class OneAnswer(Invariant):
  id = 'I1b'
  sentence = 'A learner answers pulls of its present stream only, and snapshots an anchor once.'

  @on(LEARNER, actions.Encode)
  def encode(self, book, now_ns, encode, event):
    anchor = book.anchors[encode.fragment]
    if not book.joined or book.pulls.get(encode.fragment) != encode.sync or anchor.contributed:
      self.fail(book, encode, book.pulls, anchor)

  @on(LEARNER, messages.Contribution)
  def contribute(self, book, now_ns, send, event):
    snapshot = book.handles.get(send.handle)
    if snapshot is None or snapshot.session != send.session or not book.joined:
      self.fail(book, send, snapshot)

  @on(LEARNER, messages.Decline)
  def decline(self, book, now_ns, send, event):
    """An answer without a payload tells the truth about why."""
    message, anchor = send.message, book.anchors[send.message.fragment]
    trained = book.trained_on(anchor)
    match message.reason:
      case 'contributed':
        holds = anchor.contributed
      case 'empty':
        holds = not trained and not anchor.contributed and not book.may_step
      case _:
        holds = isinstance(event, events.Encoded) and event.handle is None
    pulled = book.pulls.get(message.fragment) == message.sync or isinstance(event, events.Encoded)
    if not holds or not pulled or not book.joined:
      self.fail(book, message, anchor, f'{trained} steps since')


class VersionsInOrder(Invariant):
  id = 'I3'
  sentence = 'The versions of a fragment are 0, 1, 2, ...; what is published is the newest.'

  @on(SYNCER, actions.Merge)
  def merge(self, book, now_ns, merge, event):
    if merge.version != book.lineage.versions[merge.fragment] + 1:
      self.fail(merge, book.lineage.versions)

  @on(SYNCER, messages.Publish)
  def publish(self, book, now_ns, send, event):
    message, lineage = send.message, book.lineage
    newest = lineage.versions[message.fragment], lineage.digests[message.fragment]
    base = message.version - 1 if isinstance(event, events.MergeDone) else None
    if (message.version, message.digest) != newest or message.base_version != base:
      self.fail(message, f'(version, digest) is {newest}')
    if message.sync != lineage.last_sync[message.fragment]:
      self.fail(message, f'made by sync {lineage.last_sync[message.fragment]}')


class NeverBack(Invariant):
  id = 'I4'
  sentence = 'What a learner holds of a fragment never gets older, unless the syncer lost it.'

  @on(LEARNER, actions.Adopt)
  def adopt(self, book, now_ns, adopt, event):
    held, p = book.anchors[adopt.fragment], adopt.fragment
    if adopt.version < held.version and (p, held.version, held.digest) not in self.run.lost:
      self.fail(book, adopt, held)


class DeltasFit(Invariant):
  id = 'I4b'
  sentence = ('A delta goes to those who hold its base, to all who can take it, and is applied to '
              'it; who could not take one is sent the newest value once it can.')

  @on(SYNCER, messages.Publish)
  def publish(self, book, now_ns, send, event):
    message, peer = send.message, book.peers[send.session]
    base = message.base_version
    if base is not None and peer.sent.get(message.fragment) != base:
      self.fail(send, f'it was sent {peer.sent}')

  @after(SYNCER, events.MergeDone)
  def published(self, book, now_ns, done, out):
    if done.failed or done.fragment in book.reads:
      return
    version = book.lineage.versions[done.fragment]
    for peer in book.members.values():
      holds = peer.joined and peer.sent.get(done.fragment) == version - 1
      if holds and len(peer.on_way[done.fragment]) < published.AHEAD:
        self.fail(f'{peer.join.learner} was not sent version {version} of {done.fragment}')

  @after(SYNCER, messages.Adopted)
  def catches_up(self, book, now_ns, event, out):
    p, peer = event.message.fragment, book.peer
    if not peer.joined or not peer.member or book.exiting:
      return
    if not event.message.matched:
      if p not in book.reads:
        self.fail(event, 'it differs, and no whole fragment is read for it')
      return
    newest = peer.sent.get(p, book.lineage.versions[p]) == book.lineage.versions[p]
    if not newest and not peer.on_way[p] and p not in book.reads:
      self.fail(event, f'it is left at {peer.sent}, the newest are {book.lineage.versions}')

  @on(LEARNER, actions.Adopt)
  def adopt(self, book, now_ns, adopt, event):
    publish, held = book.handles[adopt.handle], book.anchors[adopt.fragment]
    if adopt.whole != (publish.base_version is None) or adopt.version != publish.version:
      self.fail(adopt, publish)
    key = adopt.fragment, publish.version, publish.digest
    if not adopt.whole and self.run.bases.get(key, held.digest) != held.digest:
      self.fail(book, publish, held)

  @on(LEARNER, messages.Adopted)
  def adopted(self, book, now_ns, send, event):
    """It is never sent a delta that does not fit what it holds."""
    welcomed = type(event) is events.Received and type(event.message) is messages.Joined
    if not send.message.matched and not welcomed and type(event) is not events.AdoptDone:
      self.fail(book, send, book.anchors[send.message.fragment])


class Quorum(Invariant):
  id = 'I5'
  sentence = ('An outer step has the payloads of at least K different learners, live and joined, '
              'and begins when everybody has answered or the grace window, as long as the paper '
              'has it, is over.')

  @on(SYNCER, actions.Merge)
  def merge(self, book, now_ns, merge, event):
    names = [one.learner for one in merge.participants]
    if len(set(names)) != len(names) or len(names) < self.config.quorum:
      self.fail(merge)
    gather = book.gathers.get(merge.sync)
    if gather is None or gather.merging:
      self.fail(merge, 'this sync is not open')
    if {one.handle for one in merge.participants} != gather.payloads.keys():
      self.fail(merge, gather.payloads)
    silence_ns = self.config.lease_ns + self.config.heartbeat_ns
    for peer, message in gather.payloads.values():
      if not peer.member or not peer.joined or now_ns - peer.heard_ns > silence_ns:
        self.fail(merge, peer)

  @on(SYNCER, 'synced')
  def synced(self, book, now_ns, report, event):
    """The reason that is recorded holds."""
    values = report.values
    gather = book.gathers[values['sync']]
    if values['grace_ns'] != gather.grace_ns:
      self.fail(values, f'the grace window is {gather.grace_ns} ns')
    if gather.waiting and now_ns < gather.quorum_ns + values['grace_ns']:
      self.fail(values, f'{gather.waiting} have not answered')
    if values['tokens'] != sum(one.tokens for one in gather.merging.participants):
      self.fail(values, gather.merging)


class Fresh(Invariant):
  id = 'I6'
  sentence = 'No payload is merged whose anchor is more than max_staleness versions old.'

  @on(SYNCER, actions.Merge)
  def merge(self, book, now_ns, merge, event):
    version = book.lineage.versions[merge.fragment]
    for peer, message in book.gathers[merge.sync].payloads.values():
      if not 0 <= version - message.version <= self.config.max_staleness:
        self.fail(merge, message, f'the newest version is {version}')


# --- Safety: the books ----------------------------------------------------------------------------


class HonestLearner(Invariant):
  id = 'I7a'
  sentence = 'A learner tells of its steps, tokens and snapshots exactly what is true.'

  @on(LEARNER, messages.Contribution)
  def contribute(self, book, now_ns, send, event):
    said, snapshot = send.message, book.handles[send.handle]
    true = (snapshot.sync, snapshot.fragment, snapshot.version, snapshot.steps, *snapshot.told)
    if true != (said.sync, said.fragment, said.version, said.steps, said.tokens_from,
                said.tokens_to):
      self.fail(book, said, snapshot)

  @on(LEARNER, messages.Progress)
  def progress(self, book, now_ns, send, event):
    said = send.message
    true = book.step, book.told_steps, book.told_tokens, book.step >= self.config.total_steps
    if (said.step, said.steps, said.tokens, said.finished) != true:
      self.fail(book, said, true)

  @on(LEARNER, messages.Confirm)
  def confirm(self, book, now_ns, send, event):
    said = send.message
    going_on = said.incarnation == book.incarnation
    true = (book.told_steps, book.told_tokens) if going_on else (0, 0)
    held = tuple((anchor.version, anchor.digest) for anchor in book.anchors)
    if (said.steps, said.tokens) != true or said.step != book.step:
      self.fail(book, said, true, book.step)
    if tuple((one.version, one.digest) for one in said.held) != held:
      self.fail(book, said, held)

  @on(LEARNER, actions.Step)
  def step(self, book, now_ns, step, event):
    if step.step != book.step:
      self.fail(book, step, f'its clock is {book.step}')


class HonestDigests(Invariant):
  id = 'I7b'
  sentence = 'A learner says that it holds the published bits if and only if it does.'

  @on(LEARNER, messages.Adopted)
  def adopted(self, book, now_ns, send, event):
    said = send.message
    if isinstance(event, events.AdoptDone):
      anchor = book.last_adopted
      true = anchor.version, book.told(anchor), anchor.sound
      if (said.version, said.tokens, said.matched) != true:
        self.fail(book, said, anchor)
    elif said.matched:
      self.fail(book, said, 'nothing was adopted')

  @after(LEARNER, events.AdoptDone)
  def adopt_done(self, book, now_ns, done, out):
    anchor = book.last_adopted
    if anchor.sound or not book.joined or anchor is not book.anchors[done.fragment]:
      return
    if not any(type(one) is actions.Send and type(one.message) is messages.Adopted for one in out):
      self.fail(book, done, anchor)


class TokensConserved(Invariant):
  id = 'I7'
  sentence = ('Every fragment-token is merged, discarded with its reason or unsettled: the '
              "syncer's ledger is what the learners' own counts and its verdicts add up to.")

  @on(SYNCER, actions.Merge)
  def merge(self, book, now_ns, merge, event):
    gather = book.gathers[merge.sync]
    for one in merge.participants:
      peer, said = gather.payloads[one.handle]
      true = peer.join.learner, said.tokens_to - said.tokens_from, said.steps
      if (one.learner, one.tokens, one.steps) != true:
        self.fail(one, said)

  @on(SYNCER, 'ledger')
  def ledger(self, book, now_ns, report, event):
    values = report.values
    if self._differs(book, values) and not values['unsettled'] and book.can_end(now_ns):
      book.lineage.close_all()
    difference = self._differs(book, values)
    if difference:
      self.fail(difference)

  def _differs(self, book, values) -> str:
    true = book.lineage.totals()
    for name, count in true.items():
      if values[name] != count:
        return f'{name} is {values[name]}, it should be {count}'
    rows = {
      name: (row['incarnations'], row['tokens'], row['merged'], row['discarded'])
      for name, row in values['learners'].items()
    }
    true = book.lineage.learners()
    return '' if rows == true else f'learners are {rows}, it should be {true}'

  @on(SYNCER, 'ledger')
  def counts(self, book, now_ns, report, event):
    values, lineage = report.values, book.lineage
    true = (sum(lineage.versions), sum(lineage.cancelled), lineage.repaired,
            lineage.skipped * self.config.fragments, lineage.opened)
    said = tuple(values[name] for name in ('synced', 'cancelled', 'repaired', 'skipped', 'sync'))
    if said != true:
      self.fail(f'synced, cancelled, repaired, skipped, sync are {said}, they should be {true}')

  @on(SYNCER, messages.Leave)
  def leave(self, book, now_ns, event, out):
    """Who says goodbye has told of every token."""
    peer = book.peer
    learner = book.learner(peer) if peer.member and peer.joined and not book.exiting else None
    if learner is not None and book.account(peer).trained != learner.told_tokens:
      self.fail(learner, book.account(peer), f'it trained {learner.told_tokens}')

  def finished(self, now_ns):
    syncer = self.run.syncer
    if syncer is None or not syncer.over or not syncer.exited:
      return False
    totals = syncer.lineage.totals()
    settled = totals['merged'] + sum(totals['discarded'].values())
    trained: dict[str, int] = collections.Counter()
    for book in self.run.learners.values():
      trained[book.learner] += book.tokens
    if totals['unsettled'] or settled != self.config.fragments * totals['trained']:
      self.fail(totals)
    for name, (_, tokens, _, _) in syncer.lineage.learners().items():
      if name in trained and tokens > trained[name]:
        self.fail(f'{name} trained {trained[name]} tokens, the ledger has {tokens}')


class Verdicts(Invariant):
  id = 'I7c'
  sentence = 'Every contribution gets one verdict, its learner is told, and the verdict is true.'

  def __init__(self, run):
    super().__init__(run)
    self._told: dict[int, set[int]] = {}  # sync that is being cancelled: the streams that heard

  @on(SYNCER, messages.Settled)
  def settled(self, book, now_ns, send, event):
    said = send.message
    if said.merged:
      ended = book.ended
      merged = isinstance(event, events.MergeDone) and not event.failed and ended.sync == said.sync
      nonce = book.peers[send.session].join.nonce  # on whatever stream it has now
      if not merged or all(peer.join.nonce != nonce for peer, _ in ended.merged):
        self.fail(send, event, ended.merged)
    elif said.reason == messages.CANCELLED:
      gather = book.gathers.get(said.sync)
      if said.sync <= book.lineage.last_sync[said.fragment] or (gather and gather.merging):
        self.fail(send, f'sync {said.sync} made a version or may make one')
      if gather or isinstance(event, events.MergeDone):
        self._told.setdefault(said.sync, set()).add(send.session)
    else:
      self._discarded(book, send, event)

  def _discarded(self, book, send, event):
    said = send.message
    heard = type(event) is events.Received and type(event.message) is messages.Contribution
    if not heard or event.session != send.session or event.message.sync != said.sync:
      self.fail(send, event)
    message, lineage = event.message, book.lineage
    gather = book.gathers.get(said.sync)
    match said.reason:
      case Reason.LATE:
        true = gather is None or gather.merging or gather.fragment != message.fragment
      case Reason.STALE:
        age = lineage.versions[said.fragment] - message.version
        true = not 0 <= age <= self.config.max_staleness
      case Reason.DUPLICATE:
        true = message.tokens_from < book.account(book.peer).cursors[said.fragment]
      case Reason.BAD_VALUE:
        true = message.payload.size_bytes != book.life.start.payload_bytes[said.fragment]
      case _:
        true = False
    if not true:
      self.fail(send, message, gather, lineage.versions)

  @on(SYNCER, 'cancelled')
  def cancelled(self, book, now_ns, report, event):
    """Everybody is told, also who was not asked: a lock-step learner may wait for it."""
    told = self._told.pop(report.values['sync'], set())
    for peer in book.members.values():
      if peer.joined and peer.session not in told:
        self.fail(report.values, f'{peer.join.learner} was not told')

  @after(SYNCER, messages.Contribution)
  def answered(self, book, now_ns, event, out):
    peer, message = book.peer, event.message
    if event.handle in book.pending or not peer.joined or not peer.member or book.exiting:
      return
    gather = book.gathers.get(message.sync)
    held = gather.payloads.values() if gather is not None else ()
    settled = message.tokens_to <= book.account(peer).cursors[message.fragment]
    if settled or any(other is peer for other, _ in held):
      return  # said twice
    for action in out:
      if type(action) is actions.Send and action.session == peer.session and (
          type(action.message) is messages.Settled and action.message.sync == message.sync):
        return
    self.fail(event, 'nothing was answered')

  @after(SYNCER, events.MergeDone)
  def merge_done(self, book, now_ns, done, out):
    told = {
      (one.session, one.message.merged) for one in out
      if type(one) is actions.Send and type(one.message) is messages.Settled
      and one.message.sync == done.sync
    }
    for peer, message in book.ended.merged:
      if peer.member and (peer.session, not done.failed) not in told:
        self.fail(done, f'{peer.join.learner} was not told')


class Finite(Invariant):
  id = 'I9'
  sentence = 'What is not finite is never merged nor published; its learner starts anew.'

  @after(LEARNER, events.Encoded)
  def encoded(self, book, now_ns, event, out):
    """A snapshot that was refused is declined, on the stream that asked for it."""
    if event.handle is None and book.joined and book.last_encoded.session == book.session:
      for action in out:
        if type(action) is actions.Send and type(action.message) is messages.Decline and (
            action.message.reason == Reason.BAD_VALUE):
          return
      self.fail(book, event, 'it was not declined')

  @after(SYNCER, messages.Decline)
  def declined(self, book, now_ns, event, out):
    p, peer = event.message.fragment, book.peer
    refused = event.message.reason == Reason.BAD_VALUE and peer.joined and peer.member
    if refused and p not in book.reads and not book.exiting:
      self.fail(event, 'no fresh anchor is read for it')

  @on(SYNCER, messages.Publish)
  def publish(self, book, now_ns, send, event):
    if isinstance(event, events.MergeDone) and event.failed:
      self.fail(send, event)

  @after(SYNCER, events.MergeDone)
  def failed(self, book, now_ns, done, out):
    if done.failed and done.fragment not in book.reads and not book.exiting and any(
        peer.member for peer, _ in book.ended.merged):
      self.fail(done, 'no fresh anchor is read for its participants')


class Bounded(Invariant):
  id = 'I11'
  sentence = ('Memory is bounded: a syncer keeps one payload of a learner for each open sync, a '
              'learner a few versions that it has not adopted yet; at the end nothing is kept.')

  @on(SYNCER, messages.Publish)
  def publish(self, book, now_ns, send, event):
    message, peer = send.message, book.peers[send.session]
    if message.base_version is not None and len(peer.on_way[message.fragment]) >= published.AHEAD:
      self.fail(send, peer.on_way)

  @after(SYNCER, EVERY)
  def syncer(self, book, now_ns, event, out):
    if len(book.handles) != len(book.pending):
      self.fail(f'payloads {book.handles - book.pending.keys()} belong to nothing')
    if len(book.gathers) > self.config.in_flight:
      self.fail(book.gathers)

  @after(SYNCER, messages.Contribution)
  def contribution(self, book, now_ns, event, out):
    gather = book.pending.get(event.handle)
    if gather is not None and len(gather.payloads) > len({
        peer.join.learner for peer, _ in gather.payloads.values()}):
      self.fail(gather)

  @after(LEARNER, EVERY)
  def learner(self, book, now_ns, event, out):
    if book.handles and not book.running:
      self.fail(book, book.handles)

  @on(LEARNER, actions.Encode)
  def encode(self, book, now_ns, encode, event):
    if len(book.encoding) >= self.config.in_flight:
      self.fail(book, encode, book.encoding)


class SnapshotIsACut(Invariant):
  id = 'I16'
  sentence = ("A syncer's snapshot is of one moment, between two outer steps: versions, ids and "
              'ledger tell of the same ones.')

  @on(SYNCER, actions.Save)
  def save(self, book, now_ns, save, event):
    snapshot, lineage = save.snapshot, book.lineage
    if book.merges:
      self.fail('an outer step is under way')
    self._same(snapshot, lineage)

  @on(SYNCER, 'synced')
  def books(self, book, now_ns, report, event):
    """So are the books of an outer step, of the moment at which it is decided."""
    merge = book.gathers[report.values['sync']].merging
    self._same(merge.books, book.lineage)
    under_way = [sync for sync, gather in book.gathers.items() if gather.merging]
    if sorted(merge.books['merging']) != sorted(under_way):
      self.fail(f'under way are {under_way}, not {merge.books["merging"]}')

  def _same(self, snapshot, lineage):
    difference = books.difference(snapshot, lineage)
    if difference:
      self.fail(difference)


class NothingSpokenIsLost(Invariant):
  id = 'I2'
  sentence = ('No version that a learner was ever sent, or that a peer heard of, is lost by any '
              'restart, unless an operator repaired a damaged log.')

  @on(SYNCER, messages.Publish)
  def publish(self, book, now_ns, send, event):
    message, spoken = send.message, self.run.spoken
    spoken[message.fragment] = max(spoken[message.fragment], message.version)

  @on(SYNCER, messages.Settled)
  def settled(self, book, now_ns, send, event):
    p, spoken = send.message.fragment, self.run.spoken
    if send.message.merged:
      spoken[p] = max(spoken[p], book.lineage.versions[p])

  @on(SYNCER, messages.Joined)
  def joined(self, book, now_ns, send, event):
    self.run.spoken = list(map(max, self.run.spoken, book.lineage.versions))

  def born(self, error):
    """A syncer goes on from what it should not."""
    if error.lost:
      self.fail(error)

  def logged(self, now_ns, note):
    """A log is called damaged only if its disk is."""
    if note.kind == 'repaired' and not note.number:
      self.fail(note.text)


class DurableFirst(Invariant):
  id = 'I8'
  sentence = ('Whatever is said of an outer step (merged, discarded, cancelled, published) has its '
              'record durable at the moment it is sent.')

  @on(SYNCER, messages.Settled, messages.Publish, messages.Joined, messages.Finish, 'cancelled')
  def said(self, book, now_ns, what, event):
    durable, told = self.run.durable, self.run.told
    if durable is not None and durable < told:
      self.fail(what, f'{told} outer steps have ended, {durable} records are durable')


class RecoveredState(Invariant):
  id = 'I10'
  sentence = ('What a syncer goes on from is the state at the last durable record, or at one '
              'record more if that reached the disk whole.')

  def born(self, error):
    """A syncer goes on from what it should not."""
    self.fail(error)

  def logged(self, now_ns, note):
    if note.kind == 'not recovered':
      self.fail(note.text)
    if note.kind == 'recovered' and note.number != len(self.run.records):
      self.fail(f'the log ends with record {note.number}, the state is that behind '
                f'{len(self.run.records)}')


class CompactionKeeps(Invariant):
  id = 'I20'
  sentence = 'Compaction never removes a record newer than the newest verified snapshot.'

  def logged(self, now_ns, note):
    if note.kind == 'compacted':
      verified = max((one.position for one in self.run.saved if one.verified), default=0)
      if note.number > verified + 1:
        self.fail(f'record {note.number} is the oldest, the newest snapshot holds {verified}')


class InOrder(Invariant):
  id = 'I15'
  sentence = ('Payloads are merged, and learners are served, in the order of learner ids, whatever '
              'order they came in.')

  @on(SYNCER, actions.Merge)
  def merge(self, book, now_ns, merge, event):
    names = [one.learner for one in merge.participants]
    if names != sorted(names):
      self.fail(merge)

  @after(SYNCER, events.MergeDone, events.FragmentRead)
  def published(self, book, now_ns, event, out):
    names = [
      book.peers[one.session].join.learner for one in out
      if type(one) is actions.Send and type(one.message) is messages.Publish
    ]
    if names != sorted(names):
      self.fail(event, names)


# --- Safety: ids and streams ----------------------------------------------------------------------


class Incarnations(Invariant):
  id = 'I12'
  sentence = ('The incarnations of a learner id are 1, 2, 3, ..., one process each; what is merged '
              'carries the incarnation that holds the id, and who was replaced never comes back.')

  @on(SYNCER, messages.Confirm)
  def confirm(self, book, now_ns, event, out):
    peer, confirm = book.peer, event.message
    if peer.member or peer.join is None or book.exiting or not _stays(peer, out):
      return
    holder = book.lineage.holders.get(peer.join.learner)
    if holder is None:
      due = 1
    elif peer.join.nonce in holder.replaced:
      self.fail(event, f'it was replaced: {holder}')
    else:
      due = holder.incarnation + (holder.nonce != peer.join.nonce)
    if confirm.incarnation != due or confirm.nonce != peer.join.nonce or peer.offered != due:
      self.fail(event, peer, holder)

  @on(SYNCER, messages.Joined)
  def joined(self, book, now_ns, send, event):
    peer = book.peers[send.session]
    holder = book.lineage.holders[peer.join.learner]
    if not peer.member or (holder.nonce, holder.incarnation) != (
        peer.join.nonce, send.message.incarnation):
      self.fail(send, peer, holder)

  @on(SYNCER, actions.Merge)
  def merge(self, book, now_ns, merge, event):
    gather = book.gathers[merge.sync]
    for one in merge.participants:
      peer, _ = gather.payloads[one.handle]
      holder = book.lineage.holders[one.learner]
      if (one.incarnation, peer.join.nonce) != (holder.incarnation, holder.nonce):
        self.fail(one, peer, holder)


def _stays(peer: books.Peer, out: Sequence[actions.Action]) -> bool:
  """Whether this stream is open, and not closed in this turn."""
  return peer.open and not any(
    type(one) is actions.Close and one.session == peer.session for one in out)


class HolderStays(Invariant):
  id = 'I13'
  sentence = 'Who holds an id and is heard of within its lease is never displaced, nor hung up on.'

  @on(SYNCER, messages.Confirm)
  def confirm(self, book, now_ns, event, out):
    peer = book.peer
    if peer.join is None or book.exiting or not _stays(peer, out):
      return
    holder = book.members.get(peer.join.learner)
    if holder is not None and holder.join.nonce != peer.join.nonce:
      self.fail(event, f'{holder} holds the id')

  @on(SYNCER, actions.Close)
  def close(self, book, now_ns, close, event):
    peer = book.peers.get(close.session)
    if peer is None or not peer.member or book.exiting:
      return
    if type(event) is events.Received:
      if type(event.message) is messages.Leave and event.session == close.session:
        return
      if type(event.message) is messages.Confirm and book.peer.join.nonce == peer.join.nonce:
        return
    if now_ns - peer.heard_ns < self.config.lease_ns:
      self.fail(close, peer, f'heard {now_ns - peer.heard_ns} ns ago')


class LeaseEnds(Invariant):
  id = 'L8'
  sentence = 'Who is not heard of for a lease is not waited for any longer.'

  @on(SYNCER, 'ledger')
  def ledger(self, book, now_ns, report, event):
    if book.exiting:
      return
    for peer in book.members.values():
      if now_ns - peer.heard_ns > self.config.lease_ns + self.config.heartbeat_ns:
        self.fail(peer, now_ns)


class RefusedWithReason(Invariant):
  id = 'I13b'
  sentence = 'A process is refused only for a reason that holds.'

  @on(SYNCER, messages.Refused)
  def refused(self, book, now_ns, send, event):
    peer, said = book.peers[send.session], send.message
    holder = book.lineage.holders.get(peer.join.learner)
    live = book.members.get(peer.join.learner)
    match said.code:
      case 'FENCED':
        true = holder is not None and peer.join.nonce in holder.replaced
      case 'ID_IN_USE':
        true = live is not None and live.join.nonce != peer.join.nonce
      case 'OFFER_PASSED':
        due = holder and holder.incarnation + (holder.nonce != peer.join.nonce)
        true = holder is not None and peer.offered != due
      case 'MISMATCH':
        true = peer.join.agreement != book.life.start.agreement
      case 'PROTOCOL':
        true = peer.join.protocol != messages.PROTOCOL_VERSION
      case _:
        true = said.code == 'BAD_ID'
    if not true:
      self.fail(send, peer.join, holder)

  @on(LEARNER, actions.Exit)
  def exit(self, book, now_ns, action, event):
    true = book.ending if action.code == 0 else book.refused is not None
    if not true or book.exited:
      self.fail(book, action)


class JoinerCatchesUp(Invariant):
  id = 'I17'
  sentence = ('A joiner trains and contributes only on published values: whatever it does not hold '
              'as published is due to it, and is adopted first.')

  @on(SYNCER, messages.Joined)
  def joined(self, book, now_ns, send, event):
    peer, due, lineage = book.peers[send.session], send.message.due, book.lineage
    for p, held in enumerate(peer.held):
      published = held.version == lineage.versions[p] and held.digest == lineage.digests[p]
      if published == (p in due):
        self.fail(send, peer, lineage.versions, lineage.digests)
    holder = lineage.holders[peer.join.learner]
    for name, other in lineage.holders.items():
      if other is not holder and other.stream == send.message.stream:
        self.fail(send, f'{name} trains on this data stream')

  @on(SYNCER, messages.Pull)
  def pull(self, book, now_ns, send, event):
    if not book.peers[send.session].caught_up:
      self.fail(send, book.peers[send.session])

  @on(LEARNER, actions.Step)
  def step(self, book, now_ns, step, event):
    if not book.training:
      self.fail(book, step, book.due)

  @on(LEARNER, actions.Encode)
  def encode(self, book, now_ns, encode, event):
    if encode.fragment in book.due:
      self.fail(book, encode, book.due)


class OnlyMembers(Invariant):
  id = 'I19'
  sentence = ('Nothing about the run is said to a peer that has not joined, and nothing at all on '
              'a stream that is closed.')

  @on(SYNCER, messages.Pull, messages.Publish, messages.Settled, messages.Finish)
  def member(self, book, now_ns, send, event):
    peer = book.peers.get(send.session)
    if peer is None or not peer.open or not peer.joined:
      self.fail(send, peer)

  @on(SYNCER, messages.Offer, messages.Joined, messages.Refused)
  def anybody(self, book, now_ns, send, event):
    peer = book.peers.get(send.session)
    if peer is None or not peer.open:
      self.fail(send, peer)

  @on(LEARNER, messages.Progress, messages.Contribution, messages.Decline, messages.Adopted)
  def learner(self, book, now_ns, send, event):
    if not book.joined or send.session != book.session:
      self.fail(book, send)


# --- Safety: pace ---------------------------------------------------------------------------------


class Pace(Invariant):
  id = 'P1'
  sentence = ('Sync t opens once K live learners have reached step t, in the order of the '
              'schedule; no two of one fragment are in flight.')

  def __init__(self, run):
    super().__init__(run)
    self._look_ns = 0

  @on(SYNCER, messages.Pull)
  def pull(self, book, now_ns, send, event):
    sync, p = send.message.sync, send.message.fragment
    gather = book.gathers.get(sync)
    if gather is not None:
      if gather.fragment != p or gather.merging:
        self.fail(send, gather)
      return
    late, rest = divmod(sync - book.lineage.next, self.config.period)
    if late < 0 or rest or book.schedule.fragment(sync) != p:
      self.fail(send, f'the next sync is {book.lineage.next}')
    if any(other.fragment == p for other in book.gathers.values()) or book.stopping:
      self.fail(send, book.gathers)
    self._reached(book, sync)

  @after(SYNCER, EVERY)
  def opens(self, book, now_ns, event, out):
    """Once per heartbeat: the next sync waits for a slot or for learners, for nothing else."""
    if now_ns < self._look_ns or book.stopping or book.exiting or book.over:
      return
    self._look_ns = now_ns + self.config.heartbeat_ns
    sync = book.lineage.next
    p = book.schedule.fragment(sync)
    flying = [gather.fragment for gather in book.gathers.values()]
    if len(flying) >= self.config.in_flight or p in flying:
      return
    ready = 0
    for peer in book.members.values():
      holder = book.lineage.holders[peer.join.learner]
      ready += peer.caught_up and (holder.step >= sync or holder.done)
    if ready >= self.config.quorum:
      self.fail(f'sync {sync} is not open, {ready} learners are there')

  def _reached(self, book, sync):
    ready = 0
    for peer in book.members.values():
      holder, learner = book.lineage.holders[peer.join.learner], book.learner(peer)
      step = holder.step if learner is None else max(holder.step, learner.step)
      ready += peer.caught_up and (step >= sync or step >= self.config.total_steps)
    if ready < self.config.quorum:
      self.fail(f'sync {sync}, {ready} learners are there')

  @on(SYNCER, messages.Finish)
  def finish(self, book, now_ns, send, event):
    if not book.over or book.gathers:
      self.fail(send, book.gathers, f'sync {book.lineage.next} is next')


class LastWord(Invariant):
  id = 'P2'
  sentence = 'A syncer ends only when it was asked to, or when every fragment is closed.'

  @on(SYNCER, actions.Exit)
  def exit(self, book, now_ns, action, event):
    if not book.exiting or book.pending or book.saving:
      self.fail(action, book.pending)


# --- Liveness -------------------------------------------------------------------------------------


class NoStepWaits(Invariant):
  id = 'L1'
  sentence = ('A learner takes every step that it wants, in every phase, faults included: one runs '
              'whenever the settings allow it, and none when they do not.')

  @on(LEARNER, actions.Step)
  def step(self, book, now_ns, step, event):
    if book.running or not book.may_step or book.ending:
      self.fail(book, step, f'its clock is {book.step}, its limit {book.limit}')

  @after(LEARNER, EVERY)
  def turn(self, book, now_ns, event, out):
    if not book.running and book.may_step and not book.ending and not book.exited:
      self.fail(book, event, f'no step runs at {book.step}')


class NobodyIsWaitedFor(Invariant):
  id = 'L2a'
  sentence = ('An open sync is decided once everybody has answered or its grace window is over, '
              'and never cancelled before.')

  @after(SYNCER, EVERY)
  def turn(self, book, now_ns, event, out):
    if book.merges or book.exiting:
      return  # a save may hold the others back until the merge is done
    for gather in book.gathers.values():
      enough = len(gather.payloads) >= self.config.quorum
      if gather.waiting:
        if enough and now_ns > gather.quorum_ns + self._longest_ns(book):
          self.fail(gather, 'the grace window never closes')
      elif enough or self._hopeless(book, gather):
        self.fail(gather, 'everybody has answered')

  def _longest_ns(self, book) -> int:
    return self.config.overlap * book.longest_step_ns * self.config.grace_permille // 1000

  def _hopeless(self, book, gather) -> bool:
    if gather.sync > self.config.total_steps:
      return True
    return sum(peer.caught_up for peer in book.members.values()) >= self.config.quorum

  @on(SYNCER, 'cancelled')
  def cancelled(self, book, now_ns, report, event):
    gather = book.gathers.get(report.values['sync'])
    if gather is None:
      return  # its outer step was refused
    if gather.waiting or len(gather.payloads) >= self.config.quorum or (
        not self._hopeless(book, gather)):
      self.fail(report.values, gather)


class EveryPullIsAnswered(Invariant):
  id = 'L4a'
  sentence = ('At a step boundary every pull is answered, unless the fragment is due or nothing '
              'was trained on it yet.')

  @after(LEARNER, EVERY)
  def turn(self, book, now_ns, event, out):
    if not book.pulls or book.exited or len(book.encoding) >= self.config.in_flight:
      return
    boundary = not book.running or any(type(one) is actions.Step for one in out)
    for p in book.pulls if boundary else ():
      comes = not book.trained_on(book.anchors[p]) and (book.running or book.ending)
      if p not in book.due and not comes:
        self.fail(book, book.pulls, book.anchors[p])


class MergesAgain(Invariant):
  id = 'L2'
  sentence = 'After healing every fragment is merged again.'

  LEASES = 4  # by then everybody has noticed, redialled and joined
  PERIODS = 4

  def __init__(self, run):
    super().__init__(run)
    self._from_ns: int | None = None
    self._before: tuple[int, list[int]] | None = None

  def healed(self, now_ns):
    self._from_ns = now_ns + self.LEASES * self.config.lease_ns

  @on(SYNCER, 'ledger')
  def ledger(self, book, now_ns, report, event):
    if self._before is None and self._from_ns is not None and now_ns >= self._from_ns:
      self._before = self._clock(), list(book.lineage.versions)

  def _clock(self) -> int:
    steps = [book.step for book in self.run.learners.values()]
    return max([self.run.syncer.lineage.opened, *steps])

  def finished(self, now_ns):
    if self._before is None:
      return False
    clock, before = self._before
    after = self.run.syncer.lineage.versions
    if self._end() - clock < self.PERIODS * self.config.period:
      return False
    if not all(a > b for a, b in zip(after, before)):
      self.fail(f'versions at step {clock} {before}, at the end {after}')

  def _end(self) -> int:
    """The clock at the end; a run that came to its end did all its steps."""
    return self.config.total_steps if self.run.syncer.over else self._clock()


class Joins(Invariant):
  id = 'L3'
  sentence = 'After healing the only live process of an id ends up joined, not fenced.'

  LEASES = 4

  def __init__(self, run):
    super().__init__(run)
    self._healed_ns: int | None = None
    self._alive: dict[int, tuple[int, books.LearnerBook]] = {}  # by the life's number
    self._died_ns: dict[str, int] = {}  # when the last process of an id died

  def born(self, now_ns, book):
    self._alive[book.life.number] = now_ns, book

  def healed(self, now_ns):
    self._healed_ns = now_ns

  def died(self, now_ns, book, killed):
    born_ns, _ = self._alive.pop(book.life.number)
    if not killed and not book.ending and not book.ever_joined and book.refused is not None and (
        book.refused.code in ('ID_IN_USE', 'OFFER_PASSED') and self._alone(now_ns, born_ns, book)):
      self.fail(book, book.refused)
    self._died_ns[book.learner] = now_ns

  def _alone(self, now_ns, born_ns, book) -> bool:
    """Whether it has long been the only one of its id."""
    if self._healed_ns is None or any(
        other is not book and other.learner == book.learner for _, other in self._alive.values()):
      return False
    since_ns = max(born_ns, self._healed_ns, self._died_ns.get(book.learner, 0))
    return now_ns - since_ns > self.LEASES * self.config.lease_ns

  @on(SYNCER, actions.Exit)
  def syncer_ends(self, syncer, now_ns, action, event):
    for born_ns, book in self._alive.values():
      if not book.ever_joined and not book.ending and self._alone(now_ns, born_ns, book):
        self.fail(book, 'it has not joined')

  def finished(self, now_ns):
    for born_ns, book in self._alive.values():
      if not book.joined and not self.run.syncer.exited and self._alone(now_ns, born_ns, book):
        self.fail(book, 'it has not joined')


class Contributes(Invariant):
  id = 'L5'
  sentence = ('A joiner becomes a contributor: what is due to it is sent, and once it has caught '
              'up every sync that opens, and every one that is open, asks it for its share.')

  def __init__(self, run):
    super().__init__(run)
    self._opened: list[int] = []
    self._welcomed: list[books.Peer] = []
    self._was_behind = False

  @on(SYNCER, messages.Joined)
  def joined(self, book, now_ns, send, event):
    self._welcomed.append(book.peers[send.session])

  @on(SYNCER, messages.Pull)
  def pull(self, book, now_ns, send, event):
    if send.message.sync not in book.gathers:
      self._opened.append(send.message.sync)

  @after(SYNCER, EVERY)
  def turn(self, book, now_ns, event, out):
    while self._opened:
      gather = book.gathers.get(self._opened.pop())
      if gather is not None:
        self._asks(gather, [peer for peer in book.members.values() if peer.caught_up])
    while self._welcomed:
      peer = self._welcomed.pop()
      if not book.exiting and not book.reads.issuperset(peer.due):
        self.fail(peer, f'{book.reads} are read')

  def _asks(self, gather, peers):
    asked = gather.waiting | {peer.join.learner for peer, _ in gather.payloads.values()}
    missing = {peer.join.learner for peer in peers} - asked
    if missing:
      self.fail(gather, f'{missing} were not asked')

  @on(SYNCER, messages.Adopted)
  def adopts(self, book, now_ns, event, out):
    self._was_behind = not book.peer.caught_up

  @after(SYNCER, messages.Adopted)
  def adopted(self, book, now_ns, event, out):
    if self._was_behind and book.peer.caught_up and not book.exiting:
      for gather in book.gathers.values():
        if not gather.merging:
          self._asks(gather, [book.peer])

  @after(SYNCER, events.FragmentRead)
  def read(self, book, now_ns, event, out):
    for peer in book.members.values():
      if peer.joined and event.fragment in peer.due and event.fragment not in peer.sent:
        self.fail(peer, f'fragment {event.fragment} was not sent')


class NoFragmentStarves(Invariant):
  id = 'L6'
  sentence = ('Every fragment has its turn: each of its due syncs became a version, was cancelled, '
              'was left out with all others of its period, or ended with its syncer.')

  def finished(self, now_ns):
    syncer = self.run.syncer
    if syncer is None or not syncer.over or not syncer.exited:
      return False
    lineage, schedule = syncer.lineage, syncer.schedule
    for p, offset in enumerate(schedule.offsets):
      dues = (schedule.last - offset) // schedule.period + 1
      ended = lineage.versions[p] + lineage.cancelled[p] + lineage.skipped + lineage.abandoned[p]
      if ended != dues:
        self.fail(f'fragment {p} was due {dues} times', lineage)


class QueuesDrain(Invariant):
  id = 'L7'
  sentence = 'When a process ends nothing is left in it: no payload, no work, no save.'

  @after(SYNCER, EVERY)
  def syncer(self, book, now_ns, event, out):
    if book.exited and (book.handles or book.merges or book.saving):
      self.fail(book, book.handles, book.gathers)

  @after(LEARNER, EVERY)
  def learner(self, book, now_ns, event, out):
    if book.exited and (book.handles or book.running or book.saving):
      self.fail(book, book.handles)


INVARIANTS: tuple[type[Invariant], ...] = (
  InOrder, Quorum, CountedOnce, OneAnswer, VersionsInOrder, NeverBack, DeltasFit, Fresh,
  HonestLearner, HonestDigests, TokensConserved, Verdicts, Finite, Bounded, SnapshotIsACut,
  NothingSpokenIsLost, DurableFirst, RecoveredState, CompactionKeeps, Incarnations,
  HolderStays, RefusedWithReason, JoinerCatchesUp, OnlyMembers, Pace, LastWord, LeaseEnds,
  NoStepWaits, NobodyIsWaitedFor, EveryPullIsAnswered, MergesAgain, Joins, Contributes,
  NoFragmentStarves, QueuesDrain,
)


# --- All of them ----------------------------------------------------------------------------------


class Checkers:
  """All invariants of one run (see the top of this file)."""

  def __init__(self, config: config_lib.ProtocolConfig):
    self.run = books.Run(config)
    self.invariants = {one: one(self.run) for one in INVARIANTS}
    self._on: dict[str, dict[Any, tuple[Callable, ...]]] = {LEARNER: {}, SYNCER: {}}
    self._after: dict[str, dict[Any, tuple[Callable, ...]]] = {LEARNER: {}, SYNCER: {}}
    self._logs = [
      one for one in self.invariants.values() if type(one).logged is not Invariant.logged
    ]
    self._register()

  def _register(self) -> None:
    """Tables from kinds to those who look at them; the books come last."""
    for invariant in self.invariants.values():
      for method in (getattr(invariant, name) for name in dir(invariant)):
        for role, kind in getattr(method, '_on', ()):
          self._on[role][kind] = (*self._on[role].get(kind, ()), method)
        for role, kind in getattr(method, '_after', ()):
          self._after[role][kind] = (*self._after[role].get(kind, ()), method)
    for role, tables in (
      (LEARNER, (books.LEARNER_EVENTS, books.LEARNER_ACTIONS)),
      (SYNCER, (books.SYNCER_EVENTS, books.SYNCER_ACTIONS)),
    ):
      for kind, update in (pair for table in tables for pair in table.items()):
        self._on[role][kind] = (*self._on[role].get(kind, ()), update)
      every = self._after[role].pop(EVERY, ())
      kinds = self._after[role].keys()
      self._after[role] = {kind: (*self._after[role][kind], *every) for kind in kinds}
      self._after[role][EVERY] = every

  def born(self, now_ns: int, life: Life) -> None:
    try:
      book = self.run.born(life)
    except books.NotTheirs as error:
      self.invariants[NothingSpokenIsLost].born(error)
      self.invariants[RecoveredState].born(error)
    if life.start.role == LEARNER:
      self.invariants[Joins].born(now_ns, book)

  def saw(
    self, life: Life, now_ns: int, event: events.Event, out: Sequence[actions.Action]
  ) -> None:
    book, role = self.run.books[life.number], life.start.role
    table, kind = self._on[role], type(event)
    if kind is events.Received:
      kind = type(event.message)
      if role == SYNCER:
        book.hears(now_ns, event.session)
    for look in table.get(kind, ()):
      look(book, now_ns, event, out)
    for action in out:
      what = type(action)
      if what is actions.Send:
        what = type(action.message)
      elif what is actions.Report:
        what = action.name
      for look in table.get(what, ()):
        look(book, now_ns, action, event)
    table = self._after[role]
    if role == SYNCER:
      book.after(now_ns)
    for look in table[kind] if kind in table else table[EVERY]:
      look(book, now_ns, event, out)

  def died(self, now_ns: int, life: Life, killed: bool) -> None:
    book = self.run.books[life.number]
    if life.start.role == LEARNER:
      self.invariants[Joins].died(now_ns, book, killed)

  def logged(self, now_ns: int, note: observers.LogNote) -> None:
    """Something happened to the syncer's log; only the simulated world knows."""
    for invariant in self._logs:
      invariant.logged(now_ns, note)
    self.run.logged(note)

  def healed(self, now_ns: int) -> None:
    """Nothing goes wrong any more: from here on it must also get on."""
    for invariant in self.invariants.values():
      invariant.healed(now_ns)

  def finished(self, now_ns: int) -> tuple[str, ...]:
    """The run is over: what must be true of it as a whole. The ids of those whose end could not be
    judged, because the run was stopped before."""
    return tuple(
      one.id for one in self.invariants.values() if one.finished(now_ns) is False)


class SameAgain(Invariant):
  id = 'I22'
  sentence = 'A machine has no input but its start, its events and their times.'


def replays(life: Life, records: Iterable[tape.Record]) -> None:
  """Lets a machine made anew take the turns of a life again. Raises Violation where it differs."""
  machine = life.start.make()
  for record in records:
    again = tuple(machine.handle(record.now_ns, record.event))
    if again != tuple(record.actions):
      raise Violation(SameAgain.id, SameAgain.sentence, (
        f'{life.start.node} (process {life.number}), turn {record.index}, {record.event}: '
        f'{record.actions}, then {again}'))
