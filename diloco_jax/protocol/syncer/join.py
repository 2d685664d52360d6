"""Admission: how a process comes to hold a learner id, and how a run begins.

Joining takes two phases, because a Join may be old or repeated::

    Join --refused--> closed, with the reason in words
    Join --Offer--> offered: it holds nothing yet
    offered --Confirm of what was offered, the id still free--> admitted: the id is its own
    admitted --the run has begun--> welcomed (the syncer sends Joined)

What may not happen, and why:
* A live holder is never displaced by another process: a second process that was given the same id
  by mistake must not ruin the first.
* A process that was replaced never comes back under its id: what it holds was settled as lost, and
  its tokens would count twice.
* A process in quarantine never comes back (screening.py); another one may take its id.
* An offer binds nobody. Two processes may be offered the same incarnation; the first Confirm gets
  it, so the offer is looked at again before it counts.

A new run begins with everybody who is expected, or `start_wait_ns` after the first was admitted,
so that a quick starter does not train alone for the others to skip. Until then the admitted are in
the *waiting room*; once the run has begun only those stay there for whom there is no data stream
(shards.py). A restored run has begun already.

Refusals are pure functions: the first reason that holds, with both sides and the remedy.
"""

import dataclasses

from diloco_jax.protocol import action_list, messages
from diloco_jax.protocol import agreement as agreement_lib
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.syncer import ledger as ledger_lib
from diloco_jax.protocol.syncer import members as members_lib
from diloco_jax.protocol.syncer import screening
from diloco_jax.protocol.syncer import shards as shards_lib

Reason = messages.Reason


# --- Refusals -------------------------------------------------------------------------------------


def unfit(join: messages.Join, agreement: str) -> messages.Refused | None:
  """Why this process can never take part, if so: it speaks or trains something else."""
  if join.protocol != messages.PROTOCOL_VERSION:
    side = 'the syncer' if join.protocol > messages.PROTOCOL_VERSION else 'this learner'
    return messages.Refused(
      code='PROTOCOL',
      text=f'The syncer speaks protocol {messages.PROTOCOL_VERSION}, this learner '
      f'{join.protocol}. Nothing was sent. Upgrade {side}.',
      retry_ns=None,
    )
  if not members_lib.ID.fullmatch(join.learner):
    return messages.Refused(
      code='BAD_ID',
      text=f'{join.learner[:80]!r} is not a learner id: use up to 63 of a-z 0-9 _ -, a letter '
      'or digit first.',
      retry_ns=None,
    )
  difference = agreement_lib.refusal(join.agreement, agreement)
  if difference:
    return messages.Refused(code='MISMATCH', text=difference, retry_ns=None)
  return None


def taken(
  join: messages.Join, members: members_lib.Members, config: config_lib.ProtocolConfig, now_ns: int
) -> messages.Refused | None:
  """Why the id is not this process's to take, if so: it is fenced or in quarantine, or another one
  lives."""
  if members.replaced(join.learner, join.nonce):
    return messages.Refused(
      code='FENCED',
      text=f'Another process has taken learner id "{join.learner}" since; this one was fenced and '
      'nothing it sends is merged. What was merged of its work is safe. Give it another '
      '--learner_id, or stop the other.',
      retry_ns=None,
    )
  member = members.by_id.get(join.learner)
  if member is not None and member.nonce == join.nonce and members.quarantined(member):
    return screening.quarantine(member)
  holder = members.held_by_other(join.learner, join.nonce)
  if holder is None:
    return None
  heard_s = (now_ns - holder.heard_ns) / config_lib.SECOND_NS
  lease_s = config.lease_ns / config_lib.SECOND_NS
  return messages.Refused(
    code='ID_IN_USE',
    text=f'Learner id "{join.learner}" is in use by {holder.host} pid {holder.pid}, last heard '
    f'{heard_s:.1f} s ago, and goes on undisturbed. Use another --learner_id, or stop the other '
    f'and wait {lease_s:g} s.',
    retry_ns=members.lease_left_ns(holder, now_ns) + config.heartbeat_ns,
  )


# --- From Join to the start -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Offered:
  """A session that has been offered an incarnation and holds nothing yet."""

  join: messages.Join
  incarnation: int


class Admission:
  """Who is on the way in. Owns the offers and the waiting room; binds ids in `members` and opens
  and closes their accounts; a life that ends returns its data stream."""

  def __init__(
    self,
    config: config_lib.ProtocolConfig,
    agreement: str,
    members: members_lib.Members,
    ledger: ledger_lib.Ledger,
    streams: shards_lib.Streams,
    out: action_list.Outbox,
  ):
    self._config = config
    self._agreement = agreement
    self._members = members
    self._ledger = ledger
    self._streams = streams
    self._out = out
    self._offered: dict[int, _Offered] = {}
    self._waiting_room: dict[int, messages.Confirm] = {}  # by session
    self.started = False  # set for a run that goes on from a snapshot
    self._start_ns: int | None = None

  @property
  def deadline_ns(self) -> int | None:
    """When the run begins whoever is there, if somebody waits for that."""
    return self._start_ns if self._waiting_room and not self.started else None

  def join(self, now_ns: int, session: int, join: messages.Join) -> None:
    """Offers an incarnation, or says why not."""
    if session in self._members.by_session:
      return  # repeated by a member
    refused = unfit(join, self._agreement) or taken(join, self._members, self._config, now_ns)
    if refused is not None:
      self._refuse(session, refused)
      return
    incarnation = self._members.offer(join.learner, join.nonce)
    self._offered[session] = _Offered(join, incarnation)
    self._out.send(session, messages.Offer(incarnation=incarnation))

  def confirm(self, now_ns: int, session: int, confirm: messages.Confirm) -> messages.Join | None:
    """The Join that this confirms, if the id is free still. `admit` is to follow."""
    offered = self._offered.pop(session, None)
    if session in self._members.by_session:
      return None  # repeated by a member
    if offered is None or (
      (offered.join.nonce, offered.incarnation, self._config.fragments)
      != (confirm.nonce, confirm.incarnation, len(confirm.held))
    ):
      self._out.close(session, 'confirmed what was not offered')
      return None
    refused = self._passed(now_ns, offered)
    if refused is not None:
      self._refuse(session, refused)
      return None
    return offered.join

  def _passed(self, now_ns: int, offered: _Offered) -> messages.Refused | None:
    """Another process may have taken the id between Offer and Confirm."""
    join = offered.join
    refused = taken(join, self._members, self._config, now_ns)
    if refused is None and self._members.offer(join.learner, join.nonce) != offered.incarnation:
      return messages.Refused(
        code='OFFER_PASSED',
        text='Another process took this id meanwhile.',
        retry_ns=self._config.heartbeat_ns,
      )
    return refused

  def _refuse(self, session: int, refused: messages.Refused) -> None:
    self._out.send(session, refused)
    self._out.close(session, refused.code)

  def admit(
    self, now_ns: int, session: int, join: messages.Join, confirm: messages.Confirm
  ) -> None:
    """The id is this process's from here on; nobody is live under it. What the process before left
    unsettled is lost with it."""
    before = self._members.by_id.get(join.learner)
    if before is not None and before.nonce != join.nonce:
      self._ledger.of(before).close(Reason.LOST_WITH_PROCESS)
      self._streams.give_back(join.learner)
    member = self._members.bind(join.learner, join.nonce, confirm.incarnation, session, now_ns)
    member.host, member.pid = join.host, join.pid
    member.step = max(member.step, confirm.step)
    member.sent = []
    account = self._ledger.of(member)
    account.closed = False  # a process that outlived the end of a run comes back to it
    account.train(confirm.steps, confirm.tokens)
    self._waiting_room[session] = confirm
    if self._start_ns is None:
      self._start_ns = now_ns + self._config.start_wait_ns

  def forget(self, session: int) -> None:
    """The session is gone, wherever it was on its way in."""
    self._offered.pop(session, None)
    self._waiting_room.pop(session, None)

  def wait(self, session: int, confirm: messages.Confirm) -> None:
    """Back to the waiting room: there is no data stream to read."""
    self._waiting_room[session] = confirm

  def welcome(self, now_ns: int) -> list[tuple[members_lib.Member, messages.Confirm]]:
    """Those who leave the waiting room now, with what they confirmed."""
    if not self.started and self._start_ns is not None:
      expected = len(self._members.by_session) >= self._config.learners
      self.started = expected or now_ns >= self._start_ns
    if not self.started or not self._waiting_room:
      return []
    entering = [(self._members.by_session[s], one) for s, one in self._waiting_room.items()]
    self._waiting_room.clear()
    return entering

  def check(self) -> None:
    """Asserts that only the admitted wait, and nobody is at two places on the way in."""
    members = self._members.by_session
    assert self._waiting_room.keys() <= members.keys(), (self._waiting_room, members)
    assert not self._offered.keys() & members.keys(), (self._offered, members)
