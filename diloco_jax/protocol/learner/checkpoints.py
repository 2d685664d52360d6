"""When a learner saves: every so many steps, for a run snapshot, and at its end.

All saves are ordinary checkpoints, taken at a step boundary. A request of the syncer
(syncer/checkpoints.py) makes a save due; that snapshot pins the next save, whatever made it due. A
request that comes while a save runs waits for a later boundary; of several requests the newest
counts. The learner answers a request on the session of the request or not at all.
"""

from typing import Any

from diloco_jax.protocol import action_list, actions, events, messages, rate_limited_log
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.learner import connection as connection_lib

ERROR_CHARS = 200  # of an error that are sent to the syncer


class Saving:
  """Tracks the last saved step, the requested snapshot and the save in progress."""

  def __init__(
    self,
    config: config_lib.ProtocolConfig,
    connection: connection_lib.Connection,
    out: action_list.ActionList,
  ):
    self._every = config.save_steps
    self._notices = rate_limited_log.Notices(config.say_again_ns, out.say)
    self._connection = connection
    self._out = out
    self._saved_steps = 0
    self._heard = 0  # the newest snapshot that was requested on this session
    self._asked: messages.SnapshotNow | None = None  # not begun yet
    self._answers: tuple[int, int] | None = None  # session and snapshot of the save in progress
    self.running = False

  def begin_life(self) -> None:
    """Steps are counted per incarnation."""
    self._saved_steps = 0

  def heard(self, request: messages.SnapshotNow) -> None:
    if request.snapshot > self._heard:  # else a repeated request
      self._heard, self._asked = request.snapshot, request

  def forget(self) -> None:
    """The session has closed."""
    self._heard, self._asked, self._answers = 0, None, None

  def due(self, steps: int) -> bool:
    often = bool(self._every) and steps - self._saved_steps >= self._every
    return not self.running and (often or self._asked is not None)

  def unsaved(self, steps: int) -> bool:
    return steps > self._saved_steps

  def begin(self, clock: int, steps: int, machine_state: dict[str, Any]) -> None:
    """Begins a save, at a boundary at which no save runs."""
    asked, self._asked = self._asked, None
    self.running, self._saved_steps = True, steps
    snapshot, keep = None, ()
    if asked is not None:
      snapshot, keep = asked.snapshot, asked.keep
      self._answers = self._connection.session, snapshot
    self._out.do(
      actions.Save(clock=clock, machine_state=machine_state, snapshot=snapshot, keep=keep)
    )

  def saved(self, now_ns: int, done: events.SaveDone) -> None:
    self.running = False
    if done.error:
      text = f'checkpoint of step {done.clock} failed: {done.error}'
      self._notices.say(now_ns, 'save', text)  # on a full disk each of them fails
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
