"""The pulls of a session that a learner has not answered yet, and when each is due."""

from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import messages


class Pulls:
  """By fragment, the newest sync that has pulled it."""

  def __init__(self, config: config_lib.ProtocolConfig):
    self._config = config
    self._waiting: dict[int, int] = {}
    self._newest: dict[int, int] = {}  # answered or not
    self._open: set[int] = set()  # fragments whose sync has opened

  def forget(self) -> None:
    """The session is over."""
    self._waiting.clear()
    self._newest.clear()
    self._open.clear()

  def add(self, pull: messages.Pull) -> None:
    fragment, sync = pull.fragment, pull.sync
    if sync > self._newest.get(fragment, 0):  # else it is repeated
      self._waiting[fragment] = self._newest[fragment] = sync
      self._open.discard(fragment)
    if pull.now and self._waiting.get(fragment) == sync:
      self._open.add(fragment)

  def due(self, clock: int, ends: bool) -> list[tuple[int, int]]:
    """(fragment, sync) of every pull to be answered at this boundary; `ends`: no step can follow,
    so it is the last one."""
    return [
      (fragment, sync)
      for fragment, sync in self._waiting.items()
      if ends or fragment in self._open or clock >= self._given_at(sync)
    ]

  def _given_at(self, sync: int) -> int:
    """The clock at which a fragment is due for a sync."""
    return min(sync - self._config.steps_ahead, self._config.total_steps)

  def answered(self, fragment: int) -> None:
    del self._waiting[fragment]
    self._open.discard(fragment)

  def ended(self, fragment: int, upto: int) -> None:
    """The syncs of the fragment up to this one need no answer any more."""
    if self._waiting.get(fragment, upto + 1) <= upto:
      self.answered(fragment)
