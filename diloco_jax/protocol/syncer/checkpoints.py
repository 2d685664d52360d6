"""When the syncer saves, and which checkpoints make a snapshot of the whole run.

**Checkpoints.** The syncer saves every so many outer steps, when every sync is over, and at its
end. A checkpoint is of no half-done merge: Theta and the ledger must tell of the same outer steps.
So a save that is due waits for the merges under way and lets no other begin before it (the syncer
*holds back*); a busy syncer would never be between two of them otherwise. One save runs at a time;
the last one of a process is asked for after its books were closed, whatever was under way before.

Learners leave for good once they hear Finish. So it waits for the *durable end*: the disk says that
the run is over, and a syncer that begins there has only to say it again. A save that was asked for
when every sync was over makes it so. If that save fails, the log will do, but only if the books of
its last outer step know that no sync is to open any more: a sync that was cancelled leaves no
record. Else the save is tried again.

**Snapshots.** A snapshot of the run is a *manifest* that pins one checkpoint of the syncer and one
of each learner. It is written last, so a snapshot without one never was::

    syncer                                         learner
      between two outer steps:
      saves, SnapshotNow(snapshot) ->                trains on
                                                     at the next boundary: saves
                   <- SnapshotSaved(snapshot)        once the checkpoint is on its disk
      every learner has answered, left, died or had `snapshot_wait_ns`; its own save is done:
      writes the manifest

The syncer's checkpoint is of one log position: every merge before it, none after it. A learner's is
of a boundary after it heard SnapshotNow, so whatever the syncer's checkpoint has heard of a learner
was said before the learner's: no token that it counts as merged is trained on again by a learner
that goes on from there. A learner's checkpoint may know of later versions than the syncer's. That
does no harm, because a learner that goes on takes every fragment from the syncer; what only it
knows is kept: its inner optimizer. Its place in the data is the committed cursor (shards.py).

Training waits for no snapshot: a learner that does not answer in time is left out and named in the
manifest (it comes back from the syncer's fragments), and a syncer whose own save fails gives the
snapshot up. A snapshot that no learner has saved for is given up, too: it would take the place of a
better one. One is taken at a time. What a manifest pins is kept as long as the manifest: `keep` are
the older snapshots that are, and a process that saves for a snapshot may unpin all others.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from diloco_jax.protocol import action_list, actions, events, facts, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.syncer import members as members_lib

SNAPSHOTS_KEPT = 2  # beside the one being taken


class Saving:
  """What is not saved yet, and the save under way."""

  def __init__(self, every: int):
    """`every`: how many outer steps between two saves, 0: only the last one."""
    self._every = every
    self._unsaved = 0
    self._last = False  # the newest save is the last one of this process
    self._closed = False  # it was asked for when every sync was over
    self._logged = False  # the newest outer step was decided when no other was to come
    self.running = False
    self.end_is_durable = False  # the disk says that the run is over
    self.again_ns = 0  # a save that failed is not tried again before

  @property
  def due(self) -> bool:
    return bool(self._every) and self._unsaved >= self._every and not self.running

  def resume(self, unsaved: int) -> None:
    """A syncer goes on behind a checkpoint and so many outer steps of its log: however often it
    dies before the next save is due, that save will come; but first an outer step, so that a save
    that kills it does not stop the run."""
    self._unsaved = min(unsaved, max(0, self._every - 1))

  def outer_step(self) -> None:
    self._unsaved += 1

  def decided(self, over: bool) -> None:
    """An outer step is on its way to the log; `over`: no other sync is undecided, or to open."""
    self._logged = over

  def begin(self, closed: bool, last: bool) -> None:
    """A save is asked for; `closed`: every sync is over, `last`: the process ends after it."""
    self.running, self._unsaved, self._closed, self._last = True, 0, closed, last

  def end(self, failed: bool, again_ns: int) -> bool:
    """The save is finished; whether it was the last one."""
    self.running = False
    if self._closed and (self._logged or not failed):
      self.end_is_durable = True
    if failed:
      self.again_ns = again_ns
    return self._last


@dataclasses.dataclass(slots=True)
class _Taking:
  """The snapshot under way: whose answers are awaited, and by which session."""

  snapshot: int
  deadline_ns: int
  awaited: dict[str, int]
  parts: dict[str, actions.Part] = dataclasses.field(default_factory=dict)
  missing: dict[str, str] = dataclasses.field(default_factory=dict)
  own: events.SaveDone | None = None
  writing: bool = False


class Snapshots:
  """When a snapshot of the run begins, which answers it waits for, what its manifest says."""

  def __init__(
    self,
    config: config_lib.ProtocolConfig,
    members: members_lib.Members,
    out: action_list.ActionList,
  ):
    self._every, self._wait_ns = config.snapshot_syncs, config.snapshot_wait_ns
    self._members = members
    self._out = out
    self._outer_steps = 0  # since the last one began
    self._wanted = False  # an operator asked for one
    self._last = 0
    self._kept: list[int] = []  # snapshots with a manifest, ascending
    self._taking: _Taking | None = None

  def load(self, kept: Iterable[int]) -> None:
    """The snapshots that have a manifest already. Numbers go on behind them: one that never got a
    manifest may be taken again under its number."""
    self._kept = sorted(kept)[-SNAPSHOTS_KEPT:]
    self._last = self._kept[-1] if self._kept else 0

  @property
  def due(self) -> bool:
    often = bool(self._every) and self._outer_steps >= self._every
    return self._taking is None and (self._wanted or often) and bool(self._joined())

  def _joined(self) -> list[members_lib.Member]:
    return [member for member in self._members.live() if member.held_versions]

  @property
  def deadline_ns(self) -> int | None:
    """When the answers that are missing are waited for no longer."""
    taking = self._taking
    return taking.deadline_ns if taking is not None and taking.awaited else None

  def resume(self, outer_steps: int) -> None:
    """A syncer goes on after so many in all; when it died does not shift the times of snapshots."""
    self._outer_steps = outer_steps % self._every if self._every else 0

  def outer_step(self) -> None:
    self._outer_steps += 1

  def ask(self) -> None:
    self._wanted = True

  def begin(self, now_ns: int, clock: int, books: dict[str, Any]) -> None:
    """Between two outer steps, while no save runs: this is the moment of the snapshot."""
    self._wanted, self._outer_steps, self._last = False, 0, self._last + 1
    joined, keep = self._joined(), tuple(self._kept)
    self._taking = _Taking(
      self._last, now_ns + self._wait_ns, {member.learner: member.session for member in joined}
    )
    self._out.do(actions.Save(clock=clock, machine_state=books, snapshot=self._last, keep=keep))
    for member in joined:
      self._out.send(member.session, messages.SnapshotNow(snapshot=self._last, keep=keep))

  def answered(self, member: members_lib.Member, answer: messages.SnapshotSaved) -> None:
    """A learner has saved for it, or could not."""
    taking = self._taking
    if taking is None or answer.snapshot != taking.snapshot:
      return  # of a snapshot that was given up
    if taking.awaited.get(member.learner) != member.session:
      return  # it waited too long, or says so twice
    del taking.awaited[member.learner]
    if answer.error:
      taking.missing[member.learner] = f'it could not save: {answer.error}'
    else:
      taking.parts[member.learner] = actions.Part(
        learner=member.learner,
        incarnation=member.incarnation,
        checkpoint=answer.checkpoint,
        record_sha256=answer.record_sha256,
      )

  def saved(self, done: events.SaveDone) -> None:
    """A save of the syncer is finished: one runs at a time, so the first one is the snapshot's."""
    taking = self._taking
    if taking is None or taking.own is not None:
      return
    taking.own = done
    if done.error:
      self._give_up(f'the syncer could not save: {done.error}')

  def advance(self, now_ns: int) -> None:
    """A learner that has left or died is not waited for; the manifest follows the last answer."""
    taking = self._taking
    if taking is None or taking.writing:
      return
    for learner, session in list(taking.awaited.items()):
      if session not in self._members.by_session:
        taking.missing[learner] = 'it was gone before it had saved'
      elif now_ns >= taking.deadline_ns:
        taking.missing[learner] = f'no answer in {self._wait_ns // config_lib.SECOND_NS} s'
      else:
        continue
      del taking.awaited[learner]
    if taking.own is None or taking.awaited:
      return
    if taking.parts:
      taking.writing = True
      self._out.do(
        actions.WriteManifest(
          snapshot=taking.snapshot,
          clock=taking.own.clock,
          checkpoint=taking.own.checkpoint,
          record_sha256=taking.own.record_sha256,
          parts=tuple(part for _, part in sorted(taking.parts.items())),
          missing=tuple(sorted(taking.missing.items())),
        )
      )
    else:
      self._give_up('no learner has saved for it')

  def written(self, done: events.ManifestWritten) -> None:
    """The manifest is durable, and with it the snapshot; or it is not."""
    taking, number = self._taking, done.snapshot
    if not done.error:
      self._kept = [*self._kept, number][-SNAPSHOTS_KEPT:]
    if taking is None or taking.snapshot != number:
      return
    if done.error:
      self._give_up(f'its manifest could not be written: {done.error}')
      return
    self._taking = None
    without = ''.join(f'; without {name}: {why}' for name, why in sorted(taking.missing.items()))
    self._out.say(
      f'snapshot {number} of {len(taking.parts)} learners at sync {taking.own.clock} '
      f'is complete{without}'
    )
    self._out.report(
      facts.Snapshot(
        number=number, parts=tuple(sorted(taking.parts)), missing=tuple(sorted(taking.missing))
      )
    )

  def abandon(self) -> None:
    """The syncer ends: what is not written yet never will be, unless it is being written."""
    if self._taking is not None and not self._taking.writing:
      self._taking = None

  def _give_up(self, why: str) -> None:
    number, self._taking = self._taking.snapshot, None
    self._out.say(
      f'snapshot {number} is given up: {why}. Training goes on; older snapshots are untouched.'
    )
    self._out.report(facts.Snapshot(number=number, error=why))

  def check(self) -> None:
    """Asserts that numbers only grow, and that no answer is awaited for what is being written."""
    assert self._kept == sorted(set(self._kept)) and len(self._kept) <= SNAPSHOTS_KEPT, self._kept
    assert not self._kept or self._kept[-1] <= self._last, (self._kept, self._last)
    taking = self._taking
    if taking is not None:
      assert taking.snapshot == self._last, (taking, self._last)
      assert not (taking.writing and taking.awaited), taking
      assert not taking.awaited.keys() & (taking.parts.keys() | taking.missing.keys()), taking
