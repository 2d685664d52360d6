"""How long a learner that has no step to make waits for a syncer: for ALONE_NS, since the run may
be over. A learner that trains waits for none, and a syncer that answers at all is waited for."""

from diloco_jax.protocol import config as config_lib

ALONE_NS = 3600 * config_lib.SECOND_NS
NOT_IN_TIME = 75  # the exit code


class Alone:
  """Since when the learner has had no step to make and no message of a syncer."""

  def __init__(self):
    self._since_ns: int | None = None
    self.gave_up = ''

  def begins_turn(self, now_ns: int) -> None:
    if self._since_ns is None:
      self._since_ns = now_ns

  def heard(self, now_ns: int) -> None:
    self._since_ns = now_ns

  def trains(self) -> None:
    self._since_ns = None

  def attempt_failed(self, now_ns: int, reason: str) -> bool:
    """Whether the learner gives up. Judged after an attempt that has failed, since a process that
    was frozen for long may find its syncer."""
    if self._since_ns is None or now_ns - self._since_ns < ALONE_NS:
      return False
    minutes = ALONE_NS // (60 * config_lib.SECOND_NS)
    self.gave_up = (
      f'No syncer has answered for {minutes} min ({reason}), and this learner has no step to '
      'make: it ends. If the run has ended, all is done. Else what was merged is safe: start '
      'this learner again once the syncer listens.'
    )
    return True
