"""How long a learner without a step to make dials without an answer: the run may be over.

It has trained to the end, or may not step (lock step), or was never admitted. Training itself waits
for no syncer.
"""

from diloco_jax.protocol import actions, messages
from diloco_jax.protocol import config as config_lib

ALONE_NS = 3600 * config_lib.SECOND_NS


class Alone:
  """Since when a learner waits, and its end.

  Attributes:
    end: the exit code and the text of a learner that has given up, else None.
  """

  def __init__(self):
    self._since_ns: int | None = None
    self.end: tuple[int, str] | None = None

  def heard(self, now_ns: int) -> None:
    """A message of the syncer has arrived."""
    self._since_ns = now_ns

  def note_time(self, now_ns: int, running: bool) -> None:
    """`running`: a step has been running until now."""
    if running or self._since_ns is None:
      self._since_ns = now_ns

  def gone(self, reason: str) -> bool:
    """Whether a session has closed because the syncer has ended for good."""
    if not reason.startswith(messages.GONE):
      return False
    self.end = (
      42,
      f'{reason}. This learner ends, too: nothing that it trains would be merged. What was merged '
      'is safe: once the syncer runs again, start the learner again.',
    )
    return True

  def gives_up(self, now_ns: int, reason: str) -> bool:
    """Whether to end, after an attempt that has failed for `reason`: a process that was frozen for
    long makes an attempt first."""
    if self._since_ns is None or now_ns - self._since_ns < ALONE_NS:
      return False
    minutes = ALONE_NS // (60 * config_lib.SECOND_NS)
    self.end = (
      actions.NOT_IN_TIME,
      f'No syncer has answered for {minutes} min ({reason}), and this learner has no step to make: '
      'it ends. If the run has ended, all is done. Else what was merged is safe: start this '
      'learner again once the syncer listens.',
    )
    return True
