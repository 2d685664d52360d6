"""Safety and liveness of snapshots of the whole run (protocol/syncer/checkpoints.py)."""

import collections
import dataclasses

from diloco_jax.protocol import actions, events, facts, messages
from diloco_jax.protocol.syncer import machine as syncer_machine
from diloco_jax.verification.checks.invariants import invariant
from diloco_jax.verification.checks.model import syncer as syncer_book

SYNCER, LEARNER, EVERY = invariant.SYNCER, invariant.LEARNER, invariant.EVERY
KEPT = 2  # snapshots


@dataclasses.dataclass(slots=True)
class _Taking:
  """The snapshot that a syncer takes: the learners asked, by session, and their answers."""

  number: int
  began_ns: int
  asked: dict[str, syncer_book.Peer] = dataclasses.field(default_factory=dict)
  told: dict[str, messages.SnapshotSaved] = dataclasses.field(default_factory=dict)
  own: events.SaveDone | None = None
  ended: bool = False


class _Snapshots(invariant.Invariant):
  """Follows the snapshots of the syncers."""

  def __init__(self, run):
    super().__init__(run)
    self.taking: dict[int, _Taking] = {}  # by the syncer's life

  def died(self, now_ns, book, killed):
    self.taking.pop(book.life.number, None)

  def of(self, book) -> _Taking | None:
    """The snapshot in progress."""
    taking = self.taking.get(book.life.number)
    return None if taking is None or taking.ended else taking

  @invariant.on(SYNCER, actions.Save)
  def begins(self, book, now_ns, save, event):
    if save.snapshot is not None:
      self.taking[book.life.number] = _Taking(save.snapshot, now_ns)

  @invariant.on(SYNCER, messages.SnapshotNow)
  def asks(self, book, now_ns, send, event):
    peer = book.peers[send.session]
    self.taking[book.life.number].asked[peer.join.learner] = peer

  @invariant.on(SYNCER, messages.SnapshotSaved)
  def answers(self, book, now_ns, event, out):
    taking, peer, message = self.of(book), book.peer, event.message
    if taking is None or message.snapshot != taking.number or not peer.member:
      return
    if taking.asked.get(peer.join.learner) is peer:
      taking.told.setdefault(peer.join.learner, message)

  @invariant.on(SYNCER, events.SaveDone)
  def saved(self, book, now_ns, event, out):
    """One save runs at a time: the first answer is that of the snapshot's."""
    taking = self.of(book)
    if taking is not None and taking.own is None:
      taking.own = event

  @invariant.on(SYNCER, facts.Snapshot)
  def ends(self, book, now_ns, snapshot, event):
    self.taking[book.life.number].ended = True

  def excused(self, taking, learner, now_ns) -> bool:
    """Whether the syncer need not wait for a learner that has not answered."""
    late = now_ns >= taking.began_ns + self.config.snapshot_wait_ns
    return late or not taking.asked[learner].member


class ManifestIsTrue(_Snapshots):
  id = 'I16b'
  sentence = (
    'A manifest names the part that the syncer saved for it and the part of each learner that '
    'reported one on the session on which it was asked; every other learner that was asked is '
    'listed as missing for a reason; the syncer takes one run snapshot at a time.'
  )

  @invariant.on(SYNCER, actions.Save)
  def begins(self, book, now_ns, save, event):
    if save.snapshot is None:
      return
    before = self.taking.get(book.life.number)
    if before is not None and not (before.ended and before.number < save.snapshot):
      self.fail(f'snapshot {save.snapshot} begins after {before}')
    super().begins(book, now_ns, save, event)

  @invariant.on(SYNCER, actions.WriteManifest)
  def written(self, book, now_ns, write, event):
    taking = self.of(book)
    if taking is None or write.snapshot != taking.number:
      self.fail(write, 'no such snapshot is being taken')
    own = taking.own
    if own is None or own.error or _name(own) != _name(write) or own.clock != write.clock:
      self.fail(write, f'the syncer saved {own}')
    named, missing = {part.learner for part in write.parts}, dict(write.missing)
    if named & missing.keys() or named | missing.keys() != taking.asked.keys():
      self.fail(write, f'the learners asked are {sorted(taking.asked)}')
    for part in write.parts:
      told, peer = taking.told.get(part.learner), taking.asked[part.learner]
      same = told is not None and _name(told) == _name(part)
      if not same or told.error or peer.incarnation != part.incarnation:
        self.fail(part, f'the learner reported {told}')
    for learner, why in missing.items():
      told = taking.told.get(learner)
      if not (told.error if told else self.excused(taking, learner, now_ns)):
        self.fail(f'{learner} is left out: {why}')


def _name(checkpoint) -> tuple[int, str]:
  """How a checkpoint is named wherever it is told of."""
  return checkpoint.checkpoint, checkpoint.record_sha256


@dataclasses.dataclass(slots=True)
class _LearnersPart:
  """What a learner saves for a snapshot: what it had trained by then, as its incarnation counts."""

  snapshot: int
  learner: str
  incarnation: int
  tokens: int


class PartsAreACut(invariant.Invariant):
  id = 'I16c'
  sentence = (
    'A learner saves its part at a step boundary after the request reached it on its session, and '
    "the part includes every token that the syncer's part counts."
  )

  def __init__(self, run):
    super().__init__(run)
    self.heard: dict[int, tuple[int, set[int]]] = {}  # by nonce: session, snapshots
    self.saving: dict[int, _LearnersPart] = {}  # by nonce
    self.saved: dict[str, _LearnersPart] = {}  # by the SHA-256 of the record
    # By the syncer's life: the newest snapshot, and the tokens of each incarnation in it.
    self.trained: dict[int, tuple[int, dict[tuple[str, int], int]]] = {}

  def died(self, now_ns, book, killed):
    if book.life.start.role == SYNCER:
      self.trained.pop(book.life.number, None)
    else:
      self.heard.pop(book.nonce, None)
      self.saving.pop(book.nonce, None)

  @invariant.on(LEARNER, messages.SnapshotNow)
  def hears(self, book, now_ns, event, out):
    session, heard = self.heard.get(book.nonce, (0, set()))
    if event.session == book.session:
      heard = heard if session == book.session else set()
      self.heard[book.nonce] = book.session, heard | {event.message.snapshot}

  @invariant.on(LEARNER, actions.Save)
  def saves(self, book, now_ns, save, event):
    if save.snapshot is None:
      return
    session, heard = self.heard.get(book.nonce, (0, set()))
    if session != book.session or save.snapshot not in heard:
      self.fail(book, save.snapshot, 'it was not asked for that')
    if book.running:
      self.fail(book, save.snapshot, 'a step is running')
    self.saving[book.nonce] = _LearnersPart(
      save.snapshot, book.learner, book.incarnation, book.reported_tokens
    )

  @invariant.on(LEARNER, events.SaveDone)
  def ends(self, book, now_ns, event, out):
    part = self.saving.pop(book.nonce, None)
    if part is not None and not event.error:
      self.saved[event.record_sha256] = part

  @invariant.on(SYNCER, actions.Save)
  def begins(self, book, now_ns, save, event):
    if save.snapshot is not None:
      tokens = {
        (learner, incarnation): row['trained']
        for learner, incarnation, row in save.machine_state['ledger']
      }
      self.trained[book.life.number] = save.snapshot, tokens

  @invariant.on(SYNCER, actions.WriteManifest)
  def written(self, book, now_ns, write, event):
    snapshot, trained = self.trained[book.life.number]
    if snapshot != write.snapshot:
      self.fail(write, f'the newest snapshot is {snapshot}')
    for one in write.parts:
      part = self.saved.get(one.record_sha256)
      if part is None or (part.snapshot, part.learner, part.incarnation) != (
        write.snapshot,
        one.learner,
        one.incarnation,
      ):
        self.fail(one, f'the saved part is {part}')
      heard = trained.get((one.learner, one.incarnation), 0)
      if part.tokens < heard:
        self.fail(one, f"it has {part.tokens} tokens, the syncer's checkpoint has heard of {heard}")
    self.saved = {name: part for name, part in self.saved.items() if part.snapshot > snapshot}


class PinsStay(invariant.Invariant):
  id = 'I16d'
  sentence = 'A save unpins nothing that one of the two newest manifests pins.'

  def __init__(self, run):
    super().__init__(run)
    self.written: dict[int, set[int]] = {}  # by the syncer's life
    # By a learner's life: its kept parts, by snapshot.
    self.asked: dict[int, dict[int, tuple[int, ...]]] = collections.defaultdict(dict)

  def died(self, now_ns, book, killed):
    self.written.pop(book.life.number, None)
    self.asked.pop(book.life.number, None)

  @invariant.on(SYNCER, events.ManifestWritten)
  def adds(self, book, now_ns, event, out):
    if not event.error:
      self.written.setdefault(book.life.number, set()).add(event.snapshot)

  @invariant.on(SYNCER, actions.Save)
  def begins(self, book, now_ns, save, event):
    if save.snapshot is not None:
      self._keeps(book, save)

  @invariant.on(SYNCER, messages.SnapshotNow)
  def asks(self, book, now_ns, send, event):
    self._keeps(book, send.message)

  def _keeps(self, book, what):
    before = (book.life.start.state or {}).get(syncer_machine.MANIFESTS, ())
    newest = sorted({*before, *self.written.get(book.life.number, ())})[-KEPT:]
    if not set(newest) <= set(what.keep):
      self.fail(what, f'the newest manifests are {newest}')

  @invariant.on(LEARNER, messages.SnapshotNow)
  def hears(self, book, now_ns, event, out):
    if event.session == book.session:
      self.asked[book.life.number][event.message.snapshot] = event.message.keep

  @invariant.on(LEARNER, actions.Save)
  def saves(self, book, now_ns, save, event):
    if save.snapshot is not None:
      keep = self.asked[book.life.number].get(save.snapshot)
      if save.keep != keep:
        self.fail(save, f'it was told to keep {keep}')


class SnapshotsEnd(_Snapshots):
  id = 'L9'
  sentence = (
    'Every run snapshot that begins also ends: once its own part is saved, the syncer waits for no '
    'learner that has answered or left, and for none longer than snapshot_wait_ns.'
  )

  @invariant.on(SYNCER, actions.WriteManifest)
  def written(self, book, now_ns, write, event):
    taking = self.of(book)
    if taking is not None:
      taking.ended = True

  @invariant.after(SYNCER, EVERY)
  def waits(self, book, now_ns, event, out):
    taking = self.of(book)
    if taking is None or taking.own is None or book.exiting:
      return
    waits = [
      one
      for one in taking.asked
      if one not in taking.told and not self.excused(taking, one, now_ns)
    ]
    if not waits:
      self.fail(
        f'snapshot {taking.number} waits although all needed answers are in: {sorted(taking.told)}'
      )
