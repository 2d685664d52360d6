"""The actions of a machine for one event, in the order in which it decides them.

A machine consists of parts. All parts add to one list, so their decisions reach the shell in the
order in which they were made.
"""

from diloco_jax.protocol import actions, facts, messages, rate_limited_log


class ActionList:
  """The actions decided since the machine last returned them."""

  def __init__(self):
    self._actions: list[actions.Action] = []
    self.notices = rate_limited_log.Notices(rate_limited_log.PAUSE_NS, self.say)
    self.closing: set[int] = set()  # sessions that this machine closes, not yet Disconnected

  def take(self) -> list[actions.Action]:
    """All actions since the last call."""
    decided, self._actions = self._actions, []
    return decided

  def do(self, action: actions.Action) -> None:
    self._actions.append(action)

  def send(self, session: int, message: messages.Message, payload_id: int | None = None) -> None:
    self.do(actions.Send(session=session, message=message, payload_id=payload_id))

  def close(self, session: int, reason: str) -> None:
    self.closing.add(session)
    self.do(actions.Close(session=session, reason=reason))

  def drop(self, payload_id: int | None) -> None:
    """Drops a payload, if there is one."""
    if payload_id is not None:
      self.do(actions.Drop(payload_id=payload_id))

  def say(self, text: str) -> None:
    self.do(actions.Say(text=text))

  def report(self, fact: facts.Fact) -> None:
    self.do(actions.Report(fact=fact))
