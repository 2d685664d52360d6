"""What else the syncer may send to a learner, of what waits for it: the rules of
protocol/syncer/published.py, implemented a second time."""

from diloco_jax.protocol import messages
from diloco_jax.verification.checks.books import syncer as syncer_book


def for_delta(book: syncer_book.SyncerBook, peer: syncer_book.Peer, fragment: int) -> bool:
  sizes, in_flight = book.process.start.payload_bytes, peer.versions_in_flight
  waiting = sum(sizes[p] * len(versions) for p, versions in in_flight.items())
  few = len(in_flight[fragment]) < messages.MAX_VERSIONS_IN_FLIGHT
  return few and waiting + sizes[fragment] <= messages.most_delta_bytes(sizes)


def for_whole(book: syncer_book.SyncerBook, peer: syncer_book.Peer) -> bool:
  """Whether one more fragment may be read for a peer, if all that are read are for it."""
  return len(peer.wholes.keys() | book.reads) < messages.MAX_WHOLES
