"""How long a loop of the user's own waits for the syncer to admit it."""

import threading

from diloco_jax.node import loop, ports
from diloco_jax.protocol import events, messages


class Admission:
  """The wait of a learner for the syncer to admit it. After `wait_s` its node fails: a run that has
  ended says nothing."""

  def __init__(self, learner: str, event_queue: loop.EventQueue, wait_s: float):
    self._learner, self._event_queue, self._wait_s = learner, event_queue, wait_s
    self._timer = threading.Timer(min(wait_s, threading.TIMEOUT_MAX), self._give_up)
    self._timer.daemon = True
    self._refused = 0  # the session of the last refusal
    self._reason = 'no syncer has answered'

  def begin(self, post: ports.Post) -> ports.Post:
    """Begins the wait, which what is posted ends."""
    self._timer.start()

    def watched(event: events.Event) -> None:
      self._watch(event)
      post(event)

    return watched

  def cancel(self) -> None:
    self._timer.cancel()

  def _watch(self, event: events.Event) -> None:
    match event:
      case events.Received(message=messages.Heartbeat() | messages.Joined()) | events.Stop():
        self._timer.cancel()  # a syncer sends heartbeats to members only
      case events.Received(session=session, message=messages.Refused(text=text)):
        self._refused, self._reason = session, text
      case events.Disconnected(session=session, reason=reason) if session != self._refused:
        self._reason = reason

  def _give_up(self) -> None:
    self._event_queue.fail(
      TimeoutError(
        f'no syncer has admitted learner {self._learner} within {self._wait_s:g} s: '
        f'{self._reason}. If the run has ended, it takes no more learners'
      )
    )
