"""When the syncer saves, and which checkpoints make a run snapshot.

**Checkpoints.** The syncer saves every so many outer steps, when every sync is over, and at its
end. Theta and the ledger of a checkpoint must include the same outer steps. So a due save waits for
the merges in progress, and no other merge begins before it; otherwise a busy syncer would never be
between two merges. One save runs at a time. The last save of a process begins after the syncer has
closed the ledger; a save that was in progress then is not the last one.

Learners leave for good when they receive Finish. So the syncer sends Finish only after the *durable
end*: the disk says that the run is over, so that a restarted syncer only sends Finish again. A save
that was asked for when every sync was over makes the end durable. If that save fails, the log is
enough, but only if the machine state in its last record says that no sync will open any more (a
cancelled sync leaves no record); otherwise the syncer tries the save again.

**Run snapshots.** A run snapshot is a *manifest* that pins one checkpoint of the syncer and one of
each learner. The syncer writes the manifest last; without it there is no snapshot::

    syncer                                         learner
      between two outer steps:
      saves, SnapshotNow(snapshot) ->                continues to train
                                                     at the next boundary: saves
                   <- SnapshotSaved(snapshot)        once the checkpoint is on its disk
      every learner has answered, left, died or had `snapshot_wait_ns`; its own save is done:
      writes the manifest

The syncer's checkpoint is of one log position: every merge before it, none after it. A learner's
checkpoint is of a boundary after SnapshotNow, so the learner sent everything that the syncer's
checkpoint includes before its own checkpoint: a learner that continues from there trains again on
no token that the syncer counts as merged. A learner's checkpoint may hold later versions than the
syncer's. That does no harm, because a restored learner takes every fragment from the syncer and
keeps only its inner optimizer. It reads from the committed cursor (shards.py).

Training waits for no snapshot. The syncer leaves a learner that does not answer in time out of the
snapshot and names it in the manifest (a restore starts it from the syncer's fragments). The syncer
abandons a snapshot if its own save fails, or if no learner has saved, since that snapshot would
replace a better one. It takes one at a time. The checkpoints that a manifest pins are kept as long
as the manifest: `keep` lists the older snapshots that are kept, and a process that saves for a
snapshot may unpin all others.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from diloco_jax.protocol import action_list, actions, events, facts, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.syncer import members as members_lib

SNAPSHOTS_KEPT = 2  # beside the one being taken


class Saving:
  """Counts the unsaved outer steps and tracks the save in progress."""

  def __init__(self, every: int):
    """`every`: how many outer steps between two saves, 0: only the last one."""
    self._every = every
    self._unsaved = 0
    self._last = False  # the newest save is the last one of this process
    self._closed = False  # the newest save was asked for when every sync was over
    self._logged = False  # the newest outer step was decided as the last one of the run
    self.running = False
    self.end_is_durable = False  # the disk says that the run is over
    self.again_ns = 0  # a failed save is not tried again before

  @property
  def due(self) -> bool:
    return bool(self._every) and self._unsaved >= self._every and not self.running

  def resume(self, unsaved: int) -> None:
    """Continues after a checkpoint and `unsaved` outer steps of the log, so that a save becomes due
    even if the syncer dies again and again. One more outer step comes before it, so that a save
    that kills the syncer does not stop the run."""
    self._unsaved = min(unsaved, max(0, self._every - 1))

  def outer_step(self) -> None:
    self._unsaved += 1

  def decided(self, over: bool) -> None:
    """An outer step was decided; `over`: no other sync is undecided or still to open."""
    self._logged = over

  def begin(self, closed: bool, last: bool) -> None:
    """Begins a save; `closed`: every sync is over, `last`: the process ends after it."""
    self.running, self._unsaved, self._closed, self._last = True, 0, closed, last

  def end(self, failed: bool, again_ns: int) -> bool:
    """Ends the save; returns whether it was the last one."""
    self.running = False
    if self._closed and (self._logged or not failed):
      self.end_is_durable = True
    if failed:
      self.again_ns = again_ns
    return self._last


@dataclasses.dataclass(slots=True)
class _Taking:
  """The run snapshot in progress."""

  snapshot: int
  deadline_ns: int
  awaited: dict[str, int]  # learners that have not answered: their sessions
  parts: dict[str, actions.Part] = dataclasses.field(default_factory=dict)
  missing: dict[str, str] = dataclasses.field(default_factory=dict)
  own: events.SaveDone | None = None
  writing: bool = False


class Snapshots:
  """Decides when a run snapshot begins, which answers it waits for and what its manifest says."""

  def __init__(
    self,
    config: config_lib.ProtocolConfig,
    members: members_lib.Members,
    out: action_list.ActionList,
  ):
    self._every, self._wait_ns = config.snapshot_syncs, config.snapshot_wait_ns
    self._members = members
    self._out = out
    self._outer_steps = 0  # since the last snapshot began
    self._wanted = False  # an operator asked for a snapshot
    self._last = 0
    self._kept: list[int] = []  # snapshots with a manifest, ascending
    self._taking: _Taking | None = None

  def resume(self, kept: Iterable[int], outer_steps: int) -> None:
    """Continues after a restart: `kept` are the snapshots that have a manifest, `outer_steps` all
    of the run. Numbers continue after `kept`, so the number of a snapshot without a manifest may be
    used again. The time of a restart does not shift the times of snapshots."""
    self._kept = sorted(kept)[-SNAPSHOTS_KEPT:]
    self._last = self._kept[-1] if self._kept else 0
    self._outer_steps = outer_steps % self._every if self._every else 0

  @property
  def due(self) -> bool:
    often = bool(self._every) and self._outer_steps >= self._every
    return self._taking is None and (self._wanted or often) and bool(self._joined())

  def _joined(self) -> list[members_lib.Member]:
    return [member for member in self._members.live() if member.held_versions]

  @property
  def deadline_ns(self) -> int | None:
    """When the syncer stops waiting for missing answers."""
    taking = self._taking
    return taking.deadline_ns if taking is not None and taking.awaited else None

  def outer_step(self) -> None:
    self._outer_steps += 1

  def ask(self) -> None:
    self._wanted = True

  def begin(self, now_ns: int, clock: int, machine_state: dict[str, Any]) -> None:
    """Begins a snapshot, between two outer steps and while no save runs."""
    self._wanted, self._outer_steps, self._last = False, 0, self._last + 1
    joined, keep = self._joined(), tuple(self._kept)
    self._taking = _Taking(
      self._last, now_ns + self._wait_ns, {member.learner: member.session for member in joined}
    )
    self._out.do(
      actions.Save(clock=clock, machine_state=machine_state, snapshot=self._last, keep=keep)
    )
    for member in joined:
      self._out.send(member.session, messages.SnapshotNow(snapshot=self._last, keep=keep))

  def answered(self, member: members_lib.Member, answer: messages.SnapshotSaved) -> None:
    """A learner has saved for the snapshot, or could not."""
    taking = self._taking
    if taking is None or answer.snapshot != taking.snapshot:
      return  # of an abandoned snapshot
    if taking.awaited.get(member.learner) != member.session:
      return  # too late, or repeated
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
    """A save of the syncer has ended: one runs at a time, so the first one is the snapshot's."""
    taking = self._taking
    if taking is None or taking.own is not None:
      return
    taking.own = done
    if done.error:
      self._abandon_taking(f'the syncer could not save: {done.error}')

  def advance(self, now_ns: int) -> None:
    """Stops waiting for learners that left or died; writes the manifest after the last answer."""
    taking = self._taking
    if taking is None or taking.writing:
      return
    for learner, session in list(taking.awaited.items()):
      if session not in self._members.by_session:
        taking.missing[learner] = 'it disconnected before it had saved'
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
      self._abandon_taking('no learner has saved for it')

  def written(self, done: events.ManifestWritten) -> None:
    """The manifest is durable, and so is the snapshot; or writing it failed."""
    taking, number = self._taking, done.snapshot
    if not done.error:
      self._kept = [*self._kept, number][-SNAPSHOTS_KEPT:]
    if taking is None or taking.snapshot != number:
      return
    if done.error:
      self._abandon_taking(f'its manifest could not be written: {done.error}')
      return
    self._taking = None
    found = len(taking.parts) - len(done.unverified)
    without = ''.join(f'; without {name}: {why}' for name, why in sorted(taking.missing.items()))
    elsewhere = ', '.join(sorted(done.unverified))
    self._out.say(
      f'snapshot {number} of {found} learners at sync {taking.own.clock} is complete{without}'
      + (f'; unverified, not in this folder: {elsewhere}' if elsewhere else '')
    )
    self._out.report(
      facts.Snapshot(
        number=number,
        parts=tuple(sorted(taking.parts)),
        unverified=tuple(sorted(done.unverified)),
        missing=tuple(sorted(taking.missing)),
      )
    )

  def abandon(self) -> None:
    """Abandons the snapshot when the syncer ends, unless its manifest is being written."""
    if self._taking is not None and not self._taking.writing:
      self._taking = None

  def _abandon_taking(self, why: str) -> None:
    number, self._taking = self._taking.snapshot, None
    self._out.say(
      f'snapshot {number} is abandoned: {why}. Training continues; older snapshots are untouched.'
    )
    self._out.report(facts.Snapshot(number=number, error=why))

  def check(self) -> None:
    """Asserts that numbers only grow, and that no answer is awaited while a manifest is written."""
    assert self._kept == sorted(set(self._kept)) and len(self._kept) <= SNAPSHOTS_KEPT, self._kept
    assert not self._kept or self._kept[-1] <= self._last, (self._kept, self._last)
    taking = self._taking
    if taking is not None:
      assert taking.snapshot == self._last, (taking, self._last)
      assert not (taking.writing and taking.awaited), taking
      assert not taking.awaited.keys() & (taking.parts.keys() | taking.missing.keys()), taking
