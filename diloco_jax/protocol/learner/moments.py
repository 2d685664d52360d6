"""Donations, the learner's half: giving and taking the state of the inner optimizer.

A process that begins to train gets its *moments* (the inner optimizer's state: one or two averages
per parameter and their step count) in the first of these ways that is possible::

    donor        a peer's, at one of its step boundaries, relayed by the syncer (moments_relay.py)
    checkpoint   its own, from its last verified checkpoint
    fragments    fresh ones: the process has only the published fragments
    start        fresh ones, like all learners: the run begins

The learner decides on one way per process, before its first step, and always decides: a syncer that
promised a donation also says when there is none (NoDonation), and if the syncer is silent the
joiner stops waiting one lease after the time that the syncer has for a donation.

The joiner takes a donation if its digest matches and it is at most H steps behind the joiner's
clock.

The donor copies its moments at a step boundary, as it does for a pull, so that all arrays are of
the same step. It transfers one copy at a time off the device.
"""

import collections
from typing import Any

from diloco_jax.protocol import action_list, actions, events, facts, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.learner import connection as connection_lib

Way = messages.Way

FRESH_MOMENTS_WARNING = (
  'No peer could donate the moments of its inner optimizer, and this learner has no checkpoint: it '
  'begins with fresh moments from the published fragments. No merged update is lost; expect a '
  'higher loss for some steps. A checkpoint folder that outlives the process avoids this.'
)


class Giver:
  """Answers the syncer's Donate."""

  def __init__(
    self, learner: str, connection: connection_lib.Connection, out: action_list.ActionList
  ):
    self._learner = learner
    self._connection = connection
    self._out = out
    self._asked: messages.Donate | None = None
    self._newest = 0  # the newest transfer that was requested on this session
    self._reading: collections.deque[tuple[int, dict[str, Any]]] = collections.deque()

  def asked(self, donate: messages.Donate) -> None:
    if donate.transfer > self._newest:  # else a repeated request
      self._asked, self._newest = donate, donate.transfer

  def hung_up(self) -> None:
    self._asked, self._newest = None, 0

  def boundary(self, trains: bool, clock: int, versions: tuple[int, ...]) -> None:
    """Between two steps: copies the moments if the joiner's vector clock is reached."""
    asked = self._asked
    if asked is None or self._reading:
      return
    if not trains:
      self._asked = None
      self._connection.send(messages.NoDonation(transfer=asked.transfer, reason='not training'))
    elif messages.dominates(clock, versions, asked.clock, asked.versions):
      self._asked = None
      covers = {
        'transfer': asked.transfer,
        'donor': self._learner,
        'clock': clock,
        'versions': versions,
      }
      self._reading.append((self._connection.session, covers))
      self._out.do(actions.ReadMoments(transfer=asked.transfer))

  def read(self, read: events.MomentsRead) -> None:
    """Sends the copy, unless the session has changed since."""
    session, covers = self._reading.popleft()
    assert covers['transfer'] == read.transfer, (covers, read)
    if not self._connection.joined or session != self._connection.session:
      self._out.drop(read.payload_id)
    elif read.payload_id is None:
      self._connection.send(messages.NoDonation(transfer=read.transfer, reason='bad_value'))
    else:
      donation = messages.Donation(**covers, digest=read.digest, payload=read.payload)
      self._connection.send(donation, read.payload_id)
      self._out.drop(read.payload_id)


class Taker:
  """Decides in which `way` a process gets its moments; '' until then."""

  def __init__(
    self,
    config: config_lib.ProtocolConfig,
    restored: bool,
    connection: connection_lib.Connection,
    out: action_list.ActionList,
  ):
    self._config = config
    self._restored = restored
    self._connection = connection
    self._out = out
    self.way = ''
    self.deadline_ns: int | None = None  # when it stops waiting
    self._promised = 0  # the transfer of this session, until Recovered is sent
    self._arrived: tuple[messages.Donation, int] | None = None
    self._taking: messages.Donation | None = None

  def joined(self, now_ns: int, joined: messages.Joined) -> None:
    """Begins to wait if a donation is promised on this session, else decides."""
    self._promised = joined.donation
    if self.way:
      self._tell()
    elif not joined.donation and self._taking is None:
      self._decide(self._way_alone(joined.clock), joined.clock)
    elif self.deadline_ns is None and self._taking is None:
      self.deadline_ns = now_ns + self._config.donor_wait_ns + self._config.lease_ns

  def _way_alone(self, clock: int) -> str:
    """The way without a donor."""
    if self._restored:
      return Way.CHECKPOINT
    return Way.FRAGMENTS if clock else Way.START

  def hung_up(self) -> None:
    """The promise ended with its session; another one may come before the deadline."""
    self._promised = 0
    self.drop_arrived()

  def arrived(self, donation: messages.Donation, payload_id: int) -> None:
    if donation.transfer == self._promised and self._waits:
      self._arrived = donation, payload_id
    else:
      self._out.drop(payload_id)  # repeated, or too late

  @property
  def _waits(self) -> bool:
    return not self.way and self._arrived is None and self._taking is None

  def none(self, refused: messages.NoDonation, clock: int) -> None:
    if refused.transfer == self._promised and self._waits:
      self._decide(self._way_alone(clock), clock, refused.reason)

  def expire(self, now_ns: int, clock: int) -> None:
    """Decides without a donor once the deadline has passed."""
    if self.deadline_ns is not None and now_ns >= self.deadline_ns and self._taking is None:
      self._decide(self._way_alone(clock), clock, 'the syncer sent none in time')

  def boundary(self, clock: int) -> None:
    """Takes or refuses an arrived donation. All due fragments are adopted, so the clock of the
    first step is known."""
    if self._arrived is None:
      return
    (donation, payload_id), self._arrived = self._arrived, None
    late = clock - donation.clock
    if late > self._config.period:
      self._out.drop(payload_id)
      self._decide(
        self._way_alone(clock),
        clock,
        f'that of {donation.donor} is {late} steps old, at most {self._config.period}',
      )
    else:
      self._taking, self.deadline_ns = donation, None
      self._out.do(
        actions.TakeMoments(
          transfer=donation.transfer, payload_id=payload_id, digest=donation.digest
        )
      )

  def on_replaced(self, taken: events.MomentsTaken, clock: int) -> None:
    donation, self._taking = self._taking, None
    assert donation.transfer == taken.transfer, (donation, taken)
    if taken.matched:
      self._decide(Way.DONOR, clock, donor=donation.donor, donated=donation.clock)
    else:
      self._decide(self._way_alone(clock), clock, f'that of {donation.donor} is not as it was sent')

  def _decide(
    self, way: str, clock: int, reason: str = '', donor: str = '', donated: int = 0
  ) -> None:
    self.way, self.deadline_ns = way, None
    self.drop_arrived()
    if way != Way.START:
      self._out.report(
        facts.Moments(by=way, clock=clock, donor=donor, donor_step=donated, reason=reason)
      )
    if way == Way.DONOR:
      self._out.say(f'recovered by: donor {donor}, moments of its step {donated}')
    elif way != Way.START and self._config.donor_wait_ns:
      why = f' (no donation: {reason})' if reason else ''
      self._out.say(f'recovered by: {way}{why}')
    if way == Way.FRAGMENTS and self._config.donor_wait_ns:
      self._out.say(FRESH_MOMENTS_WARNING)
    self._tell()

  def _tell(self) -> None:
    if self._promised:
      self._connection.send(messages.Recovered(transfer=self._promised, way=self.way))
      self._promised = 0

  def drop_arrived(self) -> None:
    if self._arrived is not None:
      self._out.drop(self._arrived[1])
      self._arrived = None
