"""When a learner saves: every so many steps, for a snapshot of the whole run, and at its end.

All saves are ordinary checkpoints, taken at a step boundary. What the syncer asks for
(syncer/checkpoints.py) makes one due; the save that follows is pinned by that snapshot, whatever
made it due. A request that comes while a save runs waits for a later boundary; of several the
newest counts. What was asked for on a session is told on that session or not at all.
"""

from typing import Any

from diloco_jax.protocol import action_list, actions, events, messages
from diloco_jax.protocol.learner import connection as connection_lib

ERROR_CHARS = 200  # of an error that cross the wire


class Saving:
  """What is not saved yet, the snapshot that was asked for, and the save under way."""

  def __init__(
    self, every: int, connection: connection_lib.Connection, out: action_list.ActionList
  ):
    """`every`: how many steps between two saves, 0: only the last one."""
    self._every = every
    self._connection = connection
    self._out = out
    self._saved_steps = 0
    self._heard = 0  # the newest snapshot that was asked for on this session
    self._asked: messages.SnapshotNow | None = None  # not begun yet
    self._answers: tuple[int, int] | None = None  # session and snapshot of the save under way
    self.running = False

  def begin_life(self) -> None:
    """Steps are counted per incarnation."""
    self._saved_steps = 0

  def heard(self, request: messages.SnapshotNow) -> None:
    if request.snapshot > self._heard:  # else it was said twice
      self._heard, self._asked = request.snapshot, request

  def forget(self) -> None:
    """The session is gone."""
    self._heard, self._asked, self._answers = 0, None, None

  def due(self, steps: int) -> bool:
    often = bool(self._every) and steps - self._saved_steps >= self._every
    return not self.running and (often or self._asked is not None)

  def unsaved(self, steps: int) -> bool:
    return steps > self._saved_steps

  def begin(self, clock: int, steps: int, books: dict[str, Any]) -> None:
    """At a boundary at which no save runs."""
    asked, self._asked = self._asked, None
    self.running, self._saved_steps = True, steps
    if asked is None:
      self._out.do(actions.Save(clock=clock, machine_state=books))
    else:
      self._answers = self._connection.session, asked.snapshot
      self._out.do(
        actions.Save(clock=clock, machine_state=books, snapshot=asked.snapshot, keep=asked.keep)
      )

  def saved(self, done: events.SaveDone) -> None:
    self.running = False
    if done.error:
      self._out.say(
        f'checkpoint of step {done.clock} failed: {done.error}. Training continues; the '
        'previous checkpoint is untouched.'
      )
    answers, self._answers = self._answers, None
    if answers is not None and self._connection.joined and answers[0] == self._connection.session:
      self._connection.send(
        messages.SnapshotSaved(
          snapshot=answers[1],
          checkpoint=done.checkpoint,
          record_sha256=done.record_sha256,
          error=done.error[:ERROR_CHARS],
        )
      )
