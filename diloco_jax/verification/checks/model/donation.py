"""Promised donations, the donors asked for them, and how each learner obtained its moments.

Extends the model of the syncer (`SyncerBook.promises`, `Peer.awaits`) and of the learner
(`LearnerBook.way` and its causes); these tables are applied after theirs.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from diloco_jax.protocol import actions, events, facts, messages

Way = messages.Way


@dataclasses.dataclass(slots=True)
class Promise:
  """One transfer: the joiner, the vector clock it was given, and the donor that was asked."""

  peer: Any
  clock: int
  versions: tuple[int, ...]
  since_ns: int
  donor: Any = None
  asked_ns: int = 0
  refused: set[str] = dataclasses.field(default_factory=set)
  open: bool = True  # neither relayed nor abandoned


def giving(book) -> set[int]:
  """Sessions of asked donors that have neither answered nor left."""
  return {
    session
    for session, _ in book.asked.items()
    if session in book.peers and book.peers[session].member
  }


# --- The syncer -----------------------------------------------------------------------------------


def promises(book, now_ns: int, send: actions.Send, event: Any) -> None:
  message = send.message
  peer = book.peers[send.session]
  peer.awaited_transfer = message.donation
  if message.donation:
    book.promises[message.donation] = Promise(
      peer, message.clock, tuple(book.lineage.versions), now_ns
    )


def asks(book, now_ns: int, send: actions.Send, event: Any) -> None:
  promise = book.promises[send.message.transfer]
  if promise.donor is not None and promise.donor.member:
    promise.refused.add(promise.donor.join.learner)  # too slow
  promise.donor, promise.asked_ns = book.peers[send.session], now_ns
  book.asked = {session: book.asked[session] for session in giving(book)}
  book.asked[send.session] = send.message.transfer


def answer(book, now_ns: int, what: Any, other: Any) -> None:
  """A Donation or NoDonation: received from a donor, or relayed to a joiner."""
  if type(what) is actions.Send:
    book.promises[what.message.transfer].open = False
    return
  message = what.message
  if type(message) is messages.Donation:
    book.payload_ids.add(what.payload_id)
  if book.asked.get(what.session) == message.transfer:
    del book.asked[what.session]
    promise = book.promises.get(message.transfer)  # None: its joiner has gone
    if promise is not None and promise.donor is book.peer:
      promise.donor = None
      promise.refused.add(book.peer.join.learner)  # its donation is relayed in this turn, or never


def recovered(book, now_ns: int, event: events.Received, out: Sequence) -> None:
  peer, transfer = book.peer, event.message.transfer
  if (
    peer.joined
    and peer.member
    and not book.exiting
    and peer.awaited_transfer == transfer
    and transfer
  ):
    peer.awaited_transfer = 0
    if transfer in book.promises:
      book.promises[transfer].open = False


SYNCER_UPDATES: dict[type, Callable] = {
  messages.Recovered: recovered,
  messages.Joined: promises,
  messages.Donate: asks,
  messages.Donation: answer,
  messages.NoDonation: answer,
}


# --- The learner ----------------------------------------------------------------------------------


def welcomed(book, now_ns: int, event: events.Received, out: Sequence) -> None:
  message = event.message
  if event.session != book.session or book.welcomed_on == event.session:
    return
  book.welcomed_on, book.awaited_transfer = event.session, message.donation
  if message.donation and book.deadline_ns is None and not book.way:
    book.deadline_ns = now_ns + book.config.donor_wait_ns + book.config.lease_ns
  if not (message.donation or message.clock or book.life.start.state or book.taking or book.way):
    book.way = Way.START
  book.begin()


def disconnected(book, now_ns: int, event: events.Disconnected, out: Sequence) -> None:
  if event.session == book.session:
    book.awaited_transfer = 0


def donation_ended(book, now_ns: int, what: Any, other: Any) -> None:
  """A Donation or NoDonation, received as a joiner or sent as a donor."""
  if type(what) is events.Received and what.session == book.session:
    if type(what.message) is messages.NoDonation and what.message.transfer == book.awaited_transfer:
      book.awaited_transfer = 0


def takes(book, now_ns: int, take: actions.TakeMoments, event: Any) -> None:
  book.taking = True


def taken(book, now_ns: int, event: events.MomentsTaken, out: Sequence) -> None:
  book.taking = False


def decides(book, now_ns: int, moments: facts.Moments, event: Any) -> None:
  book.way, book.deadline_ns = moments.by, None
  book.begin()


LEARNER_UPDATES: dict[type, Callable] = {
  messages.Joined: welcomed,
  events.Disconnected: disconnected,
  events.MomentsTaken: taken,
  messages.Donation: donation_ended,
  messages.NoDonation: donation_ended,
  actions.TakeMoments: takes,
  facts.Moments: decides,
}
