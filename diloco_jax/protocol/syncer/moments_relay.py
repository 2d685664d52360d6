"""Donations, the syncer's half: which peer gives its moments to a joiner, and what if it does not.

A process that joins a run under way gets the model as published fragments. What makes it train as
the others do, the state of the inner optimizer (moments and their step count), only a peer has: the
*donor*. The syncer relays it, since no learner listens on a port (paper section 6, Recovery)::

    promised --a donor that can--> asked --its Donation--> relayed to the joiner
    asked --the donor is gone, refuses, or is slow while another could--> promised
    promised, asked --nobody is left, or donor_wait_ns is over--> given up: NoDonation

The donor's *parameters* are not donated: they hold what the donor has trained since its anchors,
and that displacement is the donor's to contribute. In the joiner's pseudo-gradient it would count
twice.

Who may give: a live learner that has caught up, has moments of its own (it awaits no donation
itself) and has seen the clock that the joiner was given; of these the furthest. It is asked once
the joiner holds its fragments, so that the donation does not age meanwhile. Once half of the
joiner's time has passed since it was asked, another is asked if there is one. A donor gives at most
one donation at a time, also if it is not wanted any more, and at most UNDER_WAY of them are on
their way at once, because the syncer holds each one whole; further joiners wait for their turn, in
the order in which they came.

A transfer number is promised to one joiner on one stream and never used again, so what comes for a
joiner that is gone, or from a donor that was given up, finds nobody. While it is promised, and
until the joiner tells that it is done (Recovered), the joiner is not waited for by any sync.
"""

import dataclasses

from diloco_jax.protocol import action_list, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.syncer import members as members_lib
from diloco_jax.protocol.syncer import published as published_lib

UNDER_WAY = 2


@dataclasses.dataclass(slots=True)
class Transfer:
  """One promise: `step` and `versions` are the vector clock that the joiner was given; `donor` is
  who was asked, '' while nobody is, and `patience_ns` when it is asked no longer; `refused` are
  those who cannot give."""

  number: int
  joiner: members_lib.Member
  session: int
  step: int
  versions: tuple[int, ...]
  deadline_ns: int
  donor: str = ''
  patience_ns: int = 0
  refused: set[str] = dataclasses.field(default_factory=set)


class Relay:
  """All promises of one syncer's process. They do not outlive it, nor the joiner's stream."""

  def __init__(
    self,
    config: config_lib.ProtocolConfig,
    members: members_lib.Members,
    published: published_lib.Published,
    out: action_list.Outbox,
  ):
    self._config = config
    self._members = members
    self._published = published
    self._out = out
    self._last = 0
    self._transfers: dict[int, Transfer] = {}  # promised and not relayed
    self._giving: dict[str, int] = {}  # learners that were asked and have not answered

  @property
  def deadline_ns(self) -> int | None:
    """When the next promise or donor is given up."""
    return min(
      (
        min(one.deadline_ns, one.patience_ns) if one.donor else one.deadline_ns
        for one in self._transfers.values()
      ),
      default=None,
    )

  def promise(self, now_ns: int, joiner: members_lib.Member, clock: int) -> int:
    """The transfer number that a process which has trained nothing yet shall wait for; 0: the run
    has just begun, or nobody could give."""
    if not clock or not self._config.donor_wait_ns:
      return 0
    versions = tuple(fragment.version for fragment in self._published.fragments)
    transfer = Transfer(
      self._last + 1, joiner, joiner.session, clock, versions, now_ns + self._config.donor_wait_ns
    )
    if not self._might_give(transfer):
      return 0
    self._last = transfer.number
    self._transfers[transfer.number] = transfer
    return transfer.number

  def _might_give(self, transfer: Transfer) -> list[members_lib.Member]:
    """Everybody who can give, now or soon."""
    return [
      member
      for member in self._members.live()
      if member.caught_up
      and member is not transfer.joiner
      and member.learner not in transfer.refused
    ]

  def advance(self, now_ns: int) -> None:
    """Asks donors for those who wait, and gives up what cannot be had."""
    for transfer in list(self._transfers.values()):
      if now_ns >= transfer.deadline_ns:
        self._give_up(transfer, 'no donation came in time')
      elif not transfer.donor:
        self._ask(now_ns, transfer)
      elif now_ns >= transfer.patience_ns:
        self._lose_patience(now_ns, transfer)

  def _lose_patience(self, now_ns: int, transfer: Transfer) -> None:
    """The donor is slow: somebody else is asked, if there is anybody."""
    if self._able(transfer):
      self._next(transfer, transfer.donor)
      self._ask(now_ns, transfer)
    else:
      transfer.patience_ns = transfer.deadline_ns

  def _able(self, transfer: Transfer) -> list[members_lib.Member]:
    """Those who can give now."""
    return (
      []
      if transfer.joiner.due or len(self._giving) >= UNDER_WAY
      else [
        member
        for member in self._might_give(transfer)
        if member.step >= transfer.step and member.learner not in self._giving
      ]
    )

  def _ask(self, now_ns: int, transfer: Transfer) -> None:
    able = self._able(transfer)
    if able:
      donor = max(able, key=lambda member: member.step)  # of equals the first, in order of ids
      transfer.donor, self._giving[donor.learner] = donor.learner, transfer.number
      transfer.patience_ns = now_ns + self._config.donor_wait_ns // 2
      self._out.send(
        donor.session,
        messages.Donate(transfer=transfer.number, step=transfer.step, versions=transfer.versions),
      )
    elif not self._might_give(transfer):
      self._give_up(transfer, 'no learner can donate')

  def _give_up(self, transfer: Transfer, reason: str) -> None:
    del self._transfers[transfer.number]
    self._out.send(transfer.session, messages.NoDonation(transfer=transfer.number, reason=reason))

  # --- What the donor says ------------------------------------------------------------------------

  def donation(self, member: members_lib.Member, donation: messages.Donation, handle: int) -> None:
    """Passes it on as it came, if the joiner still waits for it."""
    transfer = self._answered(member, donation.transfer)
    if transfer is not None:
      if donation.donor == member.learner and messages.dominates(
        donation.step, donation.versions, transfer.step, transfer.versions
      ):
        del self._transfers[transfer.number]
        self._out.send(transfer.session, donation, handle)
      else:
        self._next(transfer, member.learner)
    self._out.drop(handle)

  def refused(self, member: members_lib.Member, refused: messages.NoDonation) -> None:
    transfer = self._answered(member, refused.transfer)
    if transfer is not None:
      self._next(transfer, member.learner)

  def _answered(self, member: members_lib.Member, number: int) -> Transfer | None:
    """The transfer that a donor was asked for, if it is wanted still. The donor is free again."""
    if self._giving.get(member.learner) != number:
      return None
    del self._giving[member.learner]
    transfer = self._transfers.get(number)
    return transfer if transfer is not None and transfer.donor == member.learner else None

  def _next(self, transfer: Transfer, refused: str) -> None:
    transfer.donor = ''
    transfer.refused.add(refused)

  # --- Who is gone --------------------------------------------------------------------------------

  def done(self, number: int) -> None:
    """The joiner has its moments."""
    self._transfers.pop(number, None)

  def leave(self, member: members_lib.Member) -> None:
    """A stream is gone: its promise with it, and what it was to give somebody else gives."""
    self._giving.pop(member.learner, None)
    for transfer in list(self._transfers.values()):
      if transfer.joiner is member:
        del self._transfers[transfer.number]
      elif transfer.donor == member.learner:
        transfer.donor = ''

  def check(self) -> None:
    for number, transfer in self._transfers.items():
      assert transfer.joiner.session == transfer.session, transfer
      assert transfer.joiner.awaits == number, transfer
      assert not transfer.donor or self._giving[transfer.donor] == number, (transfer, self._giving)
