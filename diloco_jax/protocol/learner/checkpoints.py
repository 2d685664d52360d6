"""The learner's part of a snapshot of the whole run (syncer/run_snapshot.py)."""

from typing import Any

from diloco_jax.protocol import action_list, actions, events, messages
from diloco_jax.protocol.learner import connection as connection_lib

ERROR_CHARS = 200  # of an error that cross the wire


class LearnerPart:
  """A learner's half: the mark it heard, and its part that is being saved.

  A mark that comes while a part or a checkpoint is being saved waits for a later boundary; of
  several the newest counts. What was asked for on a stream is told on that stream or not at all.
  """

  def __init__(self, connection: connection_lib.Connection, out: action_list.Outbox):
    self._connection = connection
    self._out = out
    self._heard = 0  # the newest on this stream
    self._mark: messages.Mark | None = None  # to be saved at a boundary
    self._session: int | None = None  # who wants to hear of the one being saved
    self.saving = False

  def heard(self, mark: messages.Mark) -> None:
    if mark.snapshot > self._heard:  # else it was said twice
      self._heard, self._mark = mark.snapshot, mark

  def forget(self) -> None:
    """The stream is gone."""
    self._heard, self._mark, self._session = 0, None, None

  def begin(self, step: int, books: dict[str, Any]) -> None:
    """At a boundary at which nothing else is being saved."""
    if self._mark is None or self.saving:
      return
    mark, self._mark = self._mark, None
    self.saving, self._session = True, self._connection.session
    self._out.do(actions.SavePart(snapshot=mark.snapshot, step=step, books=books, keep=mark.keep))

  def saved(self, done: events.PartSaved) -> None:
    self.saving = False
    if self._connection.joined and self._session == self._connection.session:
      self._connection.send(
        messages.Marked(
          snapshot=done.snapshot, step=done.step, seal=done.seal, error=done.error[:ERROR_CHARS]
        )
      )
    self._session = None
