"""Donations, the syncer's half: which peer donates its moments to a joiner, and what if none does.

A process that joins a run in progress gets the model as published fragments. The state of the inner
optimizer (moments and their step count), without which it would train worse than the others, exists
only at a peer, the *donor*. The syncer relays it, since no learner listens on a port (paper section
6, Recovery)::

    promised --a donor is able--> asked --its Donation--> relayed to the joiner
    asked --the donor disconnects, refuses, or is slow while another is able--> promised
    promised, asked --no donor is left, or donor_wait_ns is over--> abandoned: NoDonation

The donor does not donate its *parameters*: they contain its steps since its anchors, and the donor
itself contributes that displacement. In the joiner's pseudo-gradient it would count twice.

A possible donor is a live learner that has caught up and has moments itself (it awaits no
donation); it is *able* once it has reached the clock given to the joiner. The syncer asks the able
donor with the highest clock once the joiner holds its fragments, so that the donation does not age
before. When half of the joiner's waiting time has passed since then, the syncer asks another able
donor if there is one. A donor sends one donation at a time, even if the syncer has abandoned it,
and at most MAX_RELAYS donations are in transfer, because the syncer holds each one whole; further
joiners wait for their turn, in the order in which they joined.

A transfer number belongs to one joiner on one session and is never used again, so the syncer drops
a donation for a disconnected joiner or from a replaced donor. From the promise until the joiner
reports that it has its moments (Recovered), no sync waits for the joiner.
"""

import dataclasses

from diloco_jax.protocol import action_list, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.syncer import members as members_lib
from diloco_jax.protocol.syncer import published as published_lib

MAX_RELAYS = 2


@dataclasses.dataclass(slots=True)
class Transfer:
  """One promise: `clock` and `versions` are the vector clock given to the joiner; `donor` is the
  learner that was asked ('': none), and `patience_ns` the time at which another may be asked;
  `refused` are the learners that cannot donate."""

  number: int
  joiner: members_lib.Member
  session: int
  clock: int
  versions: tuple[int, ...]
  deadline_ns: int
  donor: str = ''
  patience_ns: int = 0
  refused: set[str] = dataclasses.field(default_factory=set)


class Relay:
  """All promises of one syncer's process. They end with the process or the joiner's session."""

  def __init__(
    self,
    config: config_lib.ProtocolConfig,
    members: members_lib.Members,
    published: published_lib.Published,
    out: action_list.ActionList,
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
    """When the next promise is abandoned or the next donor replaced."""
    return min(
      (
        min(one.deadline_ns, one.patience_ns) if one.donor else one.deadline_ns
        for one in self._transfers.values()
      ),
      default=None,
    )

  def promise(self, now_ns: int, joiner: members_lib.Member, clock: int) -> int:
    """The transfer number for which a process that has trained nothing yet must wait; 0: the run
    has just begun, or no learner could donate."""
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
    """The learners that can donate, now or soon."""
    return [
      member
      for member in self._members.live()
      if member.caught_up
      and member is not transfer.joiner
      and member.learner not in transfer.refused
    ]

  def advance(self, now_ns: int) -> None:
    """Asks donors for the waiting joiners, and abandons promises that cannot be kept."""
    for transfer in list(self._transfers.values()):
      if now_ns >= transfer.deadline_ns:
        self._abandon(transfer, 'no donation came in time')
      elif not transfer.donor:
        self._ask(now_ns, transfer)
      elif now_ns >= transfer.patience_ns:
        self._ask_another(now_ns, transfer)

  def _ask_another(self, now_ns: int, transfer: Transfer) -> None:
    """The donor is slow: asks another one, if there is one."""
    if self._able(transfer):
      self._release_donor(transfer, transfer.donor)
      self._ask(now_ns, transfer)
    else:
      transfer.patience_ns = transfer.deadline_ns

  def _able(self, transfer: Transfer) -> list[members_lib.Member]:
    """The learners that can donate now."""
    return (
      []
      if transfer.joiner.due or len(self._giving) >= MAX_RELAYS
      else [
        member
        for member in self._might_give(transfer)
        if member.clock >= transfer.clock and member.learner not in self._giving
      ]
    )

  def _ask(self, now_ns: int, transfer: Transfer) -> None:
    able = self._able(transfer)
    if able:
      donor = max(able, key=lambda member: member.clock)  # of equals the first by id
      transfer.donor, self._giving[donor.learner] = donor.learner, transfer.number
      transfer.patience_ns = now_ns + self._config.donor_wait_ns // 2
      self._out.send(
        donor.session,
        messages.Donate(transfer=transfer.number, clock=transfer.clock, versions=transfer.versions),
      )
    elif not self._might_give(transfer):
      self._abandon(transfer, 'no learner can donate')

  def _abandon(self, transfer: Transfer, reason: str) -> None:
    del self._transfers[transfer.number]
    self._out.send(transfer.session, messages.NoDonation(transfer=transfer.number, reason=reason))

  # --- What the donor says ------------------------------------------------------------------------

  def donation(
    self, member: members_lib.Member, donation: messages.Donation, payload_id: int
  ) -> None:
    """Relays a donation unchanged, if the joiner still waits for it."""
    transfer = self._answered(member, donation.transfer)
    if transfer is not None:
      if donation.donor == member.learner and messages.dominates(
        donation.clock, donation.versions, transfer.clock, transfer.versions
      ):
        del self._transfers[transfer.number]
        self._out.send(transfer.session, donation, payload_id)
      else:
        self._release_donor(transfer, member.learner)
    self._out.drop(payload_id)

  def refused(self, member: members_lib.Member, refused: messages.NoDonation) -> None:
    transfer = self._answered(member, refused.transfer)
    if transfer is not None:
      self._release_donor(transfer, member.learner)

  def _answered(self, member: members_lib.Member, number: int) -> Transfer | None:
    """Frees a donor; returns the transfer that it was asked for, if that is still open."""
    if self._giving.get(member.learner) != number:
      return None
    del self._giving[member.learner]
    transfer = self._transfers.get(number)
    return transfer if transfer is not None and transfer.donor == member.learner else None

  def _release_donor(self, transfer: Transfer, refused: str) -> None:
    transfer.donor = ''
    transfer.refused.add(refused)

  # --- Ends ---------------------------------------------------------------------------------------

  def done(self, number: int) -> None:
    """The joiner has its moments."""
    self._transfers.pop(number, None)

  def drop_learner(self, member: members_lib.Member) -> None:
    """A session has closed: ends its promise, and lets another donor serve its transfer."""
    self._giving.pop(member.learner, None)
    for transfer in list(self._transfers.values()):
      if transfer.joiner is member:
        del self._transfers[transfer.number]
      elif transfer.donor == member.learner:
        transfer.donor = ''

  def check(self) -> None:
    for number, transfer in self._transfers.items():
      assert transfer.joiner.session == transfer.session, transfer
      assert transfer.joiner.awaited_transfer == number, transfer
      assert not transfer.donor or self._giving[transfer.donor] == number, (transfer, self._giving)
