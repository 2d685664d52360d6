"""Faults of the islands of a single controller; the counterpart of supervisor and inject_faults.py.

All but a kill happens on the thread of the steps, before a step. The machine of the victim runs on,
so the syncer goes on hearing its heartbeats.
"""

import asyncio
import threading
import time

import jax

from diloco_jax.api import single_controller
from diloco_jax.launch import supervisor

MOST_S = 1.0  # between two steps that counts as the time of a step


class Islands:
  """A run of a single controller, and its faults; for the arguments see SingleController."""

  def __init__(self, *args, **settings):
    self.controller = single_controller.SingleController(*args, at_step=self._at_step, **settings)
    self.frozen: dict[str, threading.Event] = {}  # what the thread of a frozen island waits for
    self._slowed: dict[str, float] = {}
    self._lost: dict[str, int] = {}
    self._went_s: dict[str, float] = {}  # when the newest step was allowed to begin

  async def run(self) -> supervisor.Outcome:
    self.controller.start()
    end = single_controller.verdict(await asyncio.to_thread(self.controller.join))
    return supervisor.Outcome(code=end.code, text=end.text, statuses={}, interrupted=False)

  def retire(self) -> None:
    self.controller.stop('the plan was carried out')

  def kill(self, name: str, down_s: float) -> bool:
    return self.controller.keepers[name].bring_down(down_s, 'killed')

  def lose(self, name: str, times: int) -> None:
    """The next `times` steps of this learner find no devices, in as many lives."""
    self._lost[name] = times

  def freeze(self, name: str) -> bool:
    self.frozen[name] = threading.Event()
    return True

  def thaw(self, name: str) -> None:
    if frozen := self.frozen.pop(name, None):
      frozen.set()

  def slow(self, name: str, factor: float) -> bool:
    self._slowed[name] = factor
    return True

  async def unslow(self, name: str) -> None:
    self._slowed.pop(name, None)

  async def heal(self) -> None:
    self._slowed.clear()
    for name in list(self.frozen):
      self.thaw(name)

  def _at_step(self, name: str, clock: int) -> None:
    if self._lost.get(name):
      self._lost[name] -= 1
      raise jax.errors.JaxRuntimeError(f'UNAVAILABLE: injected: no devices at clock {clock}')
    if frozen := self.frozen.get(name):
      frozen.wait()
    now_s = time.monotonic()
    own_s = min(MOST_S, now_s - self._went_s.get(name, now_s))
    time.sleep(own_s * (self._slowed.get(name, 1) - 1))
    self._went_s[name] = time.monotonic()
