"""What a machine asks for while it handles one event, in the order in which it decides.

A machine is made of parts with a theory each. They share one outbox, so that their decisions reach
the shell in the order in which they were taken, whichever part took them.
"""

from diloco_jax.protocol import actions, facts, messages


class Outbox:
  """A list that is emptied once per event."""

  def __init__(self):
    self._actions: list[actions.Action] = []
    self.closing: set[int] = set()  # sessions closed from here whose end has not been heard of

  def take(self) -> list[actions.Action]:
    """All that was asked for since the last call."""
    taken, self._actions = self._actions, []
    return taken

  def do(self, action: actions.Action) -> None:
    self._actions.append(action)

  def send(self, session: int, message: messages.Message, handle: int | None = None) -> None:
    self.do(actions.Send(session=session, message=message, handle=handle))

  def close(self, session: int, reason: str) -> None:
    self.closing.add(session)
    self.do(actions.Close(session=session, reason=reason))

  def drop(self, handle: int | None) -> None:
    """Lets go of a payload, if there is one."""
    if handle is not None:
      self.do(actions.Drop(handle=handle))

  def say(self, text: str) -> None:
    self.do(actions.Say(text=text))

  def report(self, fact: facts.Fact) -> None:
    self.do(actions.Report(fact=fact))
