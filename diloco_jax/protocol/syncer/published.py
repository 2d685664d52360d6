"""The published fragments, and the version of each that every learner holds.

The versions of a fragment are 0, 1, 2, ...: the outer steps that the ledger knows. A Copy
(members.py) records the version of one learner, and how the learner gets the next one. The syncer
reads a whole fragment once for all learners that need it, and sends the version that the fragment
has when the read is answered; the same read serves a learner that needs it before.

A learner keeps received versions until its next step boundary, and on a slow link they arrive late,
so they would pile up. At most MAX_VERSIONS_IN_FLIGHT versions of a fragment are in flight to a
learner, and `most_delta_bytes` of all fragments; then it *lags*: the syncer sends it nothing more
of the fragment until it catches up with the newest whole. A joiner lags with every fragment that
is due to it.

At most MAX_WHOLES fragments are read for a learner or in flight to it whole; each that it adopts
makes room for the next. So a model of any size can be joined, the payloads that wait for a joiner
are two fragments, and while it receives one the next is read, so that a round trip costs nothing.
More at once would only be older when they arrive.
"""

import dataclasses

from diloco_jax.protocol import actions, events, messages
from diloco_jax.protocol.syncer import books as books_lib
from diloco_jax.protocol.syncer import links as links_lib
from diloco_jax.protocol.syncer import members as members_lib


@dataclasses.dataclass(slots=True)
class Fragment:
  """The published value of one fragment: its digest, its version and the sync that made it."""

  digest: int
  payload_bytes: int  # of an encoded pseudo-gradient
  version: int = 0
  last_sync: int = 0


class Published:
  """The published fragments. It moves the copies of all live members."""

  def __init__(self, books: books_lib.Books, fragments: list[Fragment], links: links_lib.Links):
    self._members = books.members
    self._ledger = books.ledger
    self._out = books.out
    self.fragments = fragments
    self._links = links
    self._reads: set[int] = set()  # fragments being read whole
    self.last_sync = 0  # the newest of all fragments

  def compare(self, member: members_lib.Member, learner_held: tuple[messages.Held, ...]) -> None:
    """A learner enters: every fragment that it does not hold as published is due to it."""
    for copy, held, our in zip(member.copies, learner_held, self.fragments, strict=True):
      same = (held.version, held.digest) == (our.version, our.digest)
      copy.enter(held.version, same and not copy.spoiled)
    member.joined = True

  def advance(self, done: events.MergeDone) -> messages.Publish:
    """An outer step is done: the fragment gets its next version; returns its delta's message."""
    fragment = self.fragments[done.fragment]
    base, fragment.version = fragment.version, fragment.version + 1
    fragment.digest, fragment.last_sync = done.digest, done.sync
    self.last_sync = max(self.last_sync, done.sync)
    return self._announce(done.fragment, base, done.payload)

  def send_delta(
    self, member: members_lib.Member, publish: messages.Publish, payload_id: int
  ) -> None:
    """Sends a new version to a learner that holds the one before and has room for it."""
    copy = member.copies[publish.fragment]
    if not member.joined or copy.state != 'follows':
      return
    if self._has_room(member, publish.fragment):
      self._send(member, publish, payload_id)
    else:
      copy.move('lags')
      self.catch_up(member)

  def _has_room(self, member: members_lib.Member, fragment: int) -> bool:
    sizes = [fragment.payload_bytes for fragment in self.fragments]
    counts = [len(copy.in_flight) for copy in member.copies]
    in_flight_bytes = sum(count * size for count, size in zip(counts, sizes))
    few = counts[fragment] < messages.MAX_VERSIONS_IN_FLIGHT
    fits = in_flight_bytes + sizes[fragment] <= messages.most_delta_bytes(sizes)
    return few and fits

  def _send(
    self,
    member: members_lib.Member,
    publish: messages.Publish,
    payload_id: int,
    merging_from: int | None = None,
  ) -> None:
    p, copy = publish.fragment, member.copies[publish.fragment]
    publish = dataclasses.replace(
      publish,
      settled_to=self._ledger.of(member).cursors[p] if merging_from is None else merging_from,
      keep=not copy.spoiled,
    )
    self._out.send(member.session, publish, payload_id)
    self._links.sent(member, publish)
    copy.in_flight.append((publish.version, publish.base_version is None))

  def adopted(self, member: members_lib.Member, adopted: messages.Adopted) -> None:
    """The learner now holds this version."""
    self._links.adopted(member, adopted.fragment, adopted.version)
    member.copies[adopted.fragment].adopt(adopted)
    self.catch_up(member)

  def catch_up(self, member: members_lib.Member) -> None:
    """Sends a lagging learner the newest values that it has room and use for: those without which
    it may not contribute before others, those that are read for another learner before others."""
    behind = [
      (not copy.due, p not in self._reads, copy.adopted - self.fragments[p].version, p)
      for p, copy in enumerate(member.copies)
      if copy.state == 'lags' and (copy.spoiled or not copy.in_flight)
    ]
    for *_, p in sorted(behind):
      wholes = sum(copy.is_whole for copy in member.copies)
      if member.copies[p].is_whole or wholes < messages.MAX_WHOLES:
        self._read(member.copies[p], p)

  def replace(self, member: members_lib.Member, fragment: int) -> None:
    """Sends the whole fragment to a learner that must drop its own steps: after a refused update, a
    repair, or a contribution that began among settled tokens."""
    copy = member.copies[fragment]
    copy.spoiled = True
    if copy.state == 'follows':
      copy.move('lags')
    self.catch_up(member)

  def _read(self, copy: members_lib.Copy, fragment: int) -> None:
    copy.move('read')
    if fragment not in self._reads:
      self._reads.add(fragment)
      self._out.do(actions.ReadFragment(fragment=fragment))

  def send_whole(self, read: events.FragmentRead, merging_from: dict[tuple[str, int], int]) -> None:
    """A read is answered: sends the fragment to every learner that needs it.

    Args:
      read: the whole fragment.
      merging_from: of each (learner, incarnation) in an outer step of the fragment that is in
        progress, where the tokens of its contribution begin. They are settled, but this version
        does not contain them.
    """
    self._reads.discard(read.fragment)
    fragment = self.fragments[read.fragment]
    assert (read.version, read.digest) == (fragment.version, fragment.digest), (read, fragment)
    publish = self._announce(read.fragment, None, read.payload)
    for member in self._members.live():
      if member.joined and member.copies[read.fragment].state == 'read':
        start = merging_from.get((member.learner, member.incarnation))
        self._send(member, publish, read.payload_id, start)
        member.copies[read.fragment].move('follows')
    self._out.drop(read.payload_id)

  def _announce(
    self, fragment: int, base: int | None, payload: messages.Payload
  ) -> messages.Publish:
    now = self.fragments[fragment]
    return messages.Publish(
      sync=now.last_sync,
      fragment=fragment,
      version=now.version,
      base_version=base,
      digest=now.digest,
      settled_to=0,  # of each receiver: `_send`
      keep=True,
      payload=payload,
    )

  def check(self) -> None:
    """Asserts the invariants of the copies of joined learners (members.Copy)."""
    for member in self._members.live():
      for p, copy in enumerate(member.copies if member.joined else ()):
        versions = [version for version, _ in copy.in_flight]
        assert versions == sorted(versions), copy
        assert copy.state != 'follows' or versions[-1:] in ([], [self.fragments[p].version]), copy
        assert copy.state != 'read' or p in self._reads, copy
        assert copy.repaired or not copy.differs, copy

  def state(self) -> dict[str, list[int]]:
    return {
      'versions': [fragment.version for fragment in self.fragments],
      'digests': [fragment.digest for fragment in self.fragments],
      'last_sync': [fragment.last_sync for fragment in self.fragments],
    }

  def load(self, state: dict[str, list[int]]) -> None:
    """Restores the versions of a machine state; the digests are set already."""
    for fragment, version, sync in zip(self.fragments, state['versions'], state['last_sync']):
      fragment.version, fragment.last_sync = version, sync
    self.last_sync = max(state['last_sync'])
