"""Snapshots of the whole run, taken while everybody trains on.

A snapshot has *parts*, one of the syncer and one of each learner's island, and a *manifest* that
names them and is written last, so a snapshot without one never was::

    syncer                                    learner
      between two outer steps:
      saves its part, Mark(snapshot) ->         goes on with its step
                                                at the next boundary: saves its part
                          <- Marked(snapshot)   once it is on its disk
      everybody has answered, left, died or had `snapshot_wait_ns`; its own part is saved:
      writes the manifest

The syncer's part is of one log position: every merge before it, none after it. A learner's part is
of a boundary after it heard the mark, so whatever the syncer's part has heard of a learner was said
before the learner's part: no token that it counts as merged is trained on again by who goes on from
there. A learner's part may know of later versions than the syncer's. That does no harm, because a
learner that goes on takes every fragment from the syncer; what only it knows is kept: its inner
optimizer. Its place in the data is the committed cursor (shards.py).

Nobody waits: a learner that does not answer in time is left out and named in the manifest (it comes
back from the syncer's fragments), and a syncer whose own part fails gives the snapshot up. A
snapshot that no learner has a part of is given up, too: it would take the place of a better one.
One is taken at a time. Parts are kept as long as the manifest that names them: `keep` are the older
snapshots that are, whoever saves a part may remove all others.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from diloco_jax.protocol import action_list, actions, events, facts, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.syncer import members as members_lib

KEPT = 2  # snapshots, beside the one being taken


@dataclasses.dataclass(slots=True)
class _Taking:
  """The snapshot under way: whose answers are awaited, and by which session."""

  snapshot: int
  deadline_ns: int
  awaited: dict[str, int]
  parts: dict[str, actions.Part] = dataclasses.field(default_factory=dict)
  missing: dict[str, str] = dataclasses.field(default_factory=dict)
  own: events.PartSaved | None = None
  writing: bool = False


class Marking:
  """The syncer's half: when a snapshot begins, whom it waits for, what its manifest says."""

  def __init__(
    self, config: config_lib.ProtocolConfig, members: members_lib.Members, out: action_list.Outbox
  ):
    self._every, self._wait_ns = config.snapshot_syncs, config.snapshot_wait_ns
    self._members = members
    self._out = out
    self._outer_steps = 0  # since the last one began
    self._wanted = False  # somebody asked for one
    self._last = 0
    self._kept: list[int] = []  # snapshots with a manifest, ascending
    self._taking: _Taking | None = None

  def load(self, kept: Iterable[int]) -> None:
    """The snapshots that have a manifest already. Numbers go on behind them: one that never got a
    manifest may be taken again under its number."""
    self._kept = sorted(kept)[-KEPT:]
    self._last = self._kept[-1] if self._kept else 0

  @property
  def due(self) -> bool:
    often = bool(self._every) and self._outer_steps >= self._every
    return self._taking is None and (self._wanted or often) and bool(self._joined())

  def _joined(self) -> list[members_lib.Member]:
    return [member for member in self._members.live() if member.sent]

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

  def begin(self, now_ns: int, step: int, books: dict[str, Any]) -> None:
    """Between two outer steps: this is the moment of the syncer's part."""
    self._wanted, self._outer_steps, self._last = False, 0, self._last + 1
    joined = self._joined()
    self._taking = _Taking(
      self._last, now_ns + self._wait_ns, {member.learner: member.session for member in joined}
    )
    self._out.do(
      actions.SavePart(snapshot=self._last, step=step, books=books, keep=tuple(self._kept))
    )
    for member in joined:
      self._out.send(member.session, messages.Mark(snapshot=self._last, keep=tuple(self._kept)))

  def marked(self, member: members_lib.Member, marked: messages.Marked) -> None:
    """A learner has saved its part, or could not."""
    taking = self._taking
    if taking is None or marked.snapshot != taking.snapshot:
      return  # of a snapshot that was given up
    if taking.awaited.get(member.learner) != member.session:
      return  # it waited too long, or says so twice
    del taking.awaited[member.learner]
    if marked.error:
      taking.missing[member.learner] = f'it could not save: {marked.error}'
    else:
      taking.parts[member.learner] = actions.Part(
        learner=member.learner, incarnation=member.incarnation, step=marked.step, seal=marked.seal
      )

  def saved(self, done: events.PartSaved) -> None:
    """The syncer's own part is on its disk, or is not."""
    taking = self._taking
    if taking is None or done.snapshot != taking.snapshot:
      return
    taking.own = done
    if done.error:
      self._give_up(f'the syncer could not save: {done.error}')

  def advance(self, now_ns: int) -> None:
    """Who has left or died is not waited for; the manifest follows the last answer."""
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
          step=taking.own.step,
          seal=taking.own.seal,
          parts=tuple(part for _, part in sorted(taking.parts.items())),
          missing=tuple(sorted(taking.missing.items())),
        )
      )
    else:
      self._give_up('no learner has saved its part')

  def written(self, done: events.ManifestWritten) -> None:
    """The manifest is durable, and with it the snapshot; or it is not."""
    taking, number = self._taking, done.snapshot
    if not done.error:
      self._kept = [*self._kept, number][-KEPT:]
    if taking is None or taking.snapshot != number:
      return
    if done.error:
      self._give_up(f'its manifest could not be written: {done.error}')
      return
    self._taking = None
    without = ''.join(f'; without {name}: {why}' for name, why in sorted(taking.missing.items()))
    self._out.say(
      f'snapshot {number} of {len(taking.parts)} learners at sync {taking.own.step} '
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
    """Asserts that numbers only grow, and that nobody is awaited for what is being written."""
    assert self._kept == sorted(set(self._kept)) and len(self._kept) <= KEPT, self._kept
    assert not self._kept or self._kept[-1] <= self._last, (self._kept, self._last)
    taking = self._taking
    if taking is not None:
      assert taking.snapshot == self._last, (taking, self._last)
      assert not (taking.writing and taking.awaited), taking
      assert not taking.awaited.keys() & (taking.parts.keys() | taking.missing.keys()), taking
