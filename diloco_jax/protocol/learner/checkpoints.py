"""When a learner saves, always at a step boundary: every so many steps, every `keep_every` of its
clock, and at its end."""

from typing import Any

from diloco_jax.protocol import action_list, actions, events
from diloco_jax.protocol import config as config_lib


class LearnerSaves:
  """Tracks the last saved step and the save in progress."""

  def __init__(self, config: config_lib.ProtocolConfig, out: action_list.ActionList):
    self._every, self._keep_every = config.save_steps, config.keep_every
    self._out = out
    self._saved_steps = 0
    self._interval: int | None = None  # of `keep_every`, of the newest save or of the start
    self.running = False

  def begin_incarnation(self) -> None:
    """Steps are counted per incarnation."""
    self._saved_steps = 0

  def due(self, clock: int, steps: int) -> bool:
    """Whether to save at this boundary, at which the learner trains."""
    if self._interval is None:
      self._interval = self._interval_of(clock)
    often = bool(self._every) and steps - self._saved_steps >= self._every
    return not self.running and (often or self._interval_of(clock) > self._interval)

  def _interval_of(self, clock: int) -> int:
    return clock // self._keep_every if self._keep_every else 0

  def unsaved(self, steps: int) -> bool:
    return steps > self._saved_steps

  def begin(self, clock: int, steps: int, machine_state: dict[str, Any]) -> None:
    """Begins a save, at a boundary at which no save runs."""
    self.running, self._saved_steps = True, steps
    self._interval = self._interval_of(clock)
    self._out.do(actions.Save(clock=clock, machine_state=machine_state))

  def saved(self, now_ns: int, done: events.SaveDone) -> None:
    self.running = False
    if done.error:
      text = f'checkpoint of step {done.clock} failed: {done.error}'
      self._out.notices.say(now_ns, 'save', text)  # on a full disk each of them fails
