"""Faults of the islands of a single controller: kill, freeze, slow, and devices that are lost.

Stands where the supervisor and inject_faults.py stand for processes (conductor.py). All but a kill
happens at the inner steps of its victim. Its machine runs on, so the syncer hears its heartbeats.
"""

import asyncio
import pathlib
import threading
import time

import jax

from diloco_jax.api import single_controller
from diloco_jax.config import run_config
from diloco_jax.launch import supervisor

MOST_S = 1.0  # of the time between two steps counts as that of a step


class Islands:
  """A run of a single controller, and primitives for its faults, from any thread.

  The primitives return whether their victim was running.
  """

  def __init__(self, config: run_config.Config, workdir: pathlib.Path, **settings):
    """`settings`: of the SingleController."""
    self.controller = single_controller.SingleController(
      config, workdir, at_step=self._at_step, **settings
    )
    self._frozen: dict[str, threading.Event] = {}
    self._slowed: dict[str, float] = {}
    self._lost: dict[str, int] = {}
    self._went_s: dict[str, float] = {}  # the end of this function, by learner

  async def run(self) -> supervisor.Outcome:
    self.controller.start()
    end = single_controller.verdict(await asyncio.to_thread(self.controller.join))
    return supervisor.Outcome(code=end.code, text=end.text, statuses={}, interrupted=False)

  def retire(self) -> None:
    self.controller.stop('the plan was carried out')

  def kill(self, name: str, down_s: float) -> bool:
    return self.controller.bring_down(name, down_s, 'killed')

  def lose(self, name: str, times: int) -> None:
    """The next `times` steps of its islands find no devices."""
    self._lost[name] = times

  def freeze(self, name: str) -> bool:
    self._frozen[name] = threading.Event()
    return True

  def thaw(self, name: str) -> None:
    if frozen := self._frozen.pop(name, None):
      frozen.set()

  def slow(self, name: str, factor: float) -> bool:
    self._slowed[name] = factor
    return True

  async def unslow(self, name: str) -> None:
    self._slowed.pop(name, None)

  async def heal(self) -> None:
    self._slowed.clear()
    self._lost.clear()
    for name in list(self._frozen):
      self.thaw(name)

  def _at_step(self, name: str, clock: int) -> None:
    if self._lost.get(name):
      self._lost[name] -= 1
      raise jax.errors.JaxRuntimeError(f'UNAVAILABLE: injected: no devices at clock {clock}')
    if frozen := self._frozen.get(name):
      frozen.wait()
    now_s = time.monotonic()
    own_s = min(MOST_S, now_s - self._went_s.get(name, now_s))
    time.sleep(own_s * (self._slowed.get(name, 1) - 1))
    self._went_s[name] = time.monotonic()
