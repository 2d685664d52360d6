"""Donations: what a donor gives, what a joiner takes, and that no joiner waits for ever."""

from diloco_jax.protocol import actions, events, facts, messages
from diloco_jax.protocol.syncer import moments_relay
from diloco_jax.verification.checks.invariants import invariant
from diloco_jax.verification.checks.model import donation as donation_book

EVERY, LEARNER, SYNCER = invariant.EVERY, invariant.LEARNER, invariant.SYNCER

Way = messages.Way


class Donated(invariant.Invariant):
  id = 'I23'
  sentence = (
    'Donated moments come from a caught-up peer that has reached the vector clock given to the '
    'joiner, and all from one step boundary; only that joiner receives them, once; it takes them '
    'before its first step, if their digest fits and they are at most H steps old.'
  )

  def __init__(self, run):
    super().__init__(run)
    self._reads: dict[int, list[tuple]] = {}  # by the process's number: copies in progress
    self._asked: dict[int, messages.Donate] = {}  # the newest
    self._now: dict[int, tuple] = {}  # the copy that was read in this turn
    self._got: dict[int, dict[int, messages.Donation]] = {}  # donations by payload id

  def died(self, now_ns, book, killed):
    for of_processes in (self._reads, self._asked, self._now, self._got):
      of_processes.pop(book.life.number, None)

  # --- Syncer -------------------------------------------------------------------------------------

  @invariant.on(SYNCER, messages.Joined)
  def promised(self, book, now_ns, send, event):
    message, peer = send.message, book.peers[send.session]
    if not message.donation:
      return
    if message.donation in book.promises:
      self.fail(send, f'promised before: {book.promises[message.donation]}')
    if not message.clock or not self._others(book, peer):
      self.fail(send, 'no learner can donate')

  def _others(self, book, peer):
    return [other for other in book.members.values() if other is not peer and other.caught_up]

  @invariant.on(SYNCER, messages.Donate)
  def asked(self, book, now_ns, send, event):
    message, donor = send.message, book.peers[send.session]
    promise = book.promises.get(message.transfer)
    if promise is None or not promise.open or promise.peer is donor or not promise.peer.member:
      self.fail(send, promise)
    if promise.peer.due:
      self.fail(send, promise, 'the donation would age while fragments are due')
    busy = donation_book.giving(book)
    if donor.session in busy or len(busy) >= moments_relay.MAX_RELAYS:
      self.fail(send, f'{book.asked} are asked')
    patient = now_ns < promise.asked_ns + self.config.donor_wait_ns // 2
    if promise.donor is not None and promise.donor.member and patient:
      self.fail(send, f'{promise.donor} was asked')
    holder = book.lineage.holders[donor.join.learner]
    if not donor.caught_up or holder.clock < promise.clock:
      self.fail(send, donor, holder, promise)
    if (message.clock, message.versions) != (promise.clock, promise.versions):
      self.fail(send, promise)

  @invariant.on(SYNCER, messages.Donation)
  def relayed(self, book, now_ns, what, event):
    if type(what) is not actions.Send:
      return
    message, promise = what.message, book.promises.get(what.message.transfer)
    if (
      promise is None
      or not promise.open
      or not promise.peer.member
      or (what.session != promise.peer.session)
    ):
      self.fail(what, promise)
    if (
      type(event) is not events.Received
      or (event.message, event.payload_id) != (message, what.payload_id)
      or message.donor != book.peer.join.learner
    ):
      self.fail(what, event)
    if not messages.dominates(message.clock, message.versions, promise.clock, promise.versions):
      self.fail(what, promise)

  @invariant.on(SYNCER, messages.NoDonation)
  def abandoned(self, book, now_ns, what, event):
    if type(what) is actions.Send:
      promise = book.promises.get(what.message.transfer)
      if promise is None or not promise.open or what.session != promise.peer.session:
        self.fail(what, promise)

  # --- Donor --------------------------------------------------------------------------------------

  @invariant.on(LEARNER, messages.Donate)
  def is_asked(self, book, now_ns, event, out):
    if event.session == book.session:
      self._asked[book.life.number] = event.message

  @invariant.on(LEARNER, actions.ReadMoments)
  def snapshot(self, book, now_ns, read, event):
    reads = self._reads.setdefault(book.life.number, [])
    if book.running or reads or not book.training:
      self.fail(book, read, reads)
    asked, versions = self._asked[book.life.number], tuple(one.version for one in book.anchors)
    if read.transfer != asked.transfer or not messages.dominates(
      book.clock, versions, asked.clock, asked.versions
    ):
      self.fail(book, read, asked, book.clock, versions)
    reads.append((read.transfer, book.clock, versions))

  @invariant.on(LEARNER, events.MomentsRead)
  def read(self, book, now_ns, event, out):
    self._now[book.life.number] = self._reads[book.life.number].pop(0)

  @invariant.on(LEARNER, messages.Donation)
  def donates(self, book, now_ns, what, event):
    message = what.message
    if type(what) is not actions.Send:
      if what.session == book.session:
        self._got.setdefault(book.life.number, {})[what.payload_id] = message
      return
    true = self._now.get(book.life.number)
    if (
      type(event) is not events.MomentsRead
      or message.donor != book.learner
      or (true != (message.transfer, message.clock, message.versions))
      or (message.digest != event.digest)
    ):
      self.fail(book, message, true)

  # --- Joiner -------------------------------------------------------------------------------------

  @invariant.on(LEARNER, actions.TakeMoments)
  def takes(self, book, now_ns, take, event):
    message = self._got.get(book.life.number, {}).get(take.payload_id)
    if (
      message is None or message.transfer != take.transfer or book.awaited_transfer != take.transfer
    ):
      self.fail(book, take, message)
    if book.way or book.steps or book.running or book.due or message.digest != take.digest:
      self.fail(book, take, book.way, book.steps)
    if book.clock - message.clock > self.config.period:
      self.fail(book, take, f'the clock is {book.clock}, that of the donation {message.clock}')

  @invariant.on(LEARNER, facts.Moments)
  def recovered(self, book, now_ns, moments, event):
    way, restored = moments.by, book.life.start.state is not None
    taken = type(event) is events.MomentsTaken and event.matched
    if book.way or (way == Way.DONOR) != taken:
      self.fail(book, moments, event)
    if not taken and way != (Way.CHECKPOINT if restored else Way.FRAGMENTS):
      self.fail(book, moments)
    if not taken and not self._in_vain(book, now_ns, event):
      self.fail(book, moments, 'a donation may come')

  def _in_vain(self, book, now_ns, event) -> bool:
    """Whether there was no donation to be had."""
    if not book.awaited_transfer or type(event) is events.MomentsTaken:
      return True
    late = book.deadline_ns is not None and now_ns >= book.deadline_ns
    return late or any(
      book.clock - message.clock > self.config.period
      for message in self._got.get(book.life.number, {}).values()
    )


class DonationEnds(invariant.Invariant):
  id = 'L10'
  sentence = (
    'A joiner that waits for moments gets them as soon as a donor can give them, is told at once '
    'when no donor will, and trains with its own moments when its waiting time is over: neither a '
    'dead donor nor silence delays it.'
  )

  @invariant.after(SYNCER, EVERY)
  def syncer(self, book, now_ns, event, out):
    for number in () if book.exiting else sorted(book.promises):
      promise = book.promises[number]
      if promise.open and promise.peer.member:
        self._waits(book, now_ns, number, promise)
      else:
        del book.promises[number]

  def _waits(self, book, now_ns, number, promise):
    if now_ns >= promise.since_ns + self.config.donor_wait_ns:
      self.fail(number, promise, 'its waiting time is over')
    donor = promise.donor
    if donor is not None and donor.member:
      return
    busy = donation_book.giving(book)
    hopes = [
      peer
      for peer in book.members.values()
      if peer is not promise.peer and peer.caught_up and peer.join.learner not in promise.refused
    ]
    if not hopes:
      self.fail(number, promise, 'no learner can donate')
    for peer in () if promise.peer.due else hopes:
      holder = book.lineage.holders[peer.join.learner]
      if (
        peer.session not in busy
        and len(busy) < moments_relay.MAX_RELAYS
        and (holder.clock >= promise.clock)
      ):
        self.fail(number, promise, f'{peer} could donate')

  @invariant.after(LEARNER, EVERY)
  def learner(self, book, now_ns, event, out):
    if book.way or book.exited or not book.ever_joined or book.taking:
      return
    if book.deadline_ns is not None and now_ns >= book.deadline_ns:
      self.fail(book, 'its waiting time is over')
    if book.joined and not book.awaited_transfer:
      self.fail(book, 'there is nothing to wait for')
