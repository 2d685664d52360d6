"""Injects faults into the processes of a supervisor: kill, end, freeze, replace, slow down.

Primitives without a plan: the caller decides when to use which (verification/faults/chaos_run.py);
faults of the network are in verification/faults/proxy.py. Each returns whether its victim was
running. The supervisor can still end a frozen process.

`slow` freezes a process briefly, often: in every SLICE_S it may run a `factor`-th of the time. So
the heartbeats of a learner are slow as well as its steps.
"""

import asyncio
from collections.abc import Callable

from diloco_jax.launch import supervisor as supervisor_lib

SLICE_S = 0.04


class Nemesis:
  """Primitives on a running supervisor. All methods belong to its event loop.

  Args:
    second: makes the second program for the learner id of a frozen learner, with its own name and
      folder.
  """

  def __init__(
    self,
    supervisor: supervisor_lib.Supervisor,
    second: Callable[[str], supervisor_lib.LocalProgram],
  ):
    self._supervisor, self._second = supervisor, second
    self._frozen: set[str] = set()
    self._slowed: dict[str, asyncio.Task] = {}

  def kill(self, name: str, down_s: float) -> bool:
    """SIGKILL; the supervisor starts it again `down_s` later."""
    return self._supervisor.bring_down(name, down_s, 'killed')

  def terminate(self, name: str, notice_s: float, down_s: float) -> bool:
    """SIGTERM, SIGKILL if it has not ended `notice_s` later; it starts again `down_s` after."""
    child = self._supervisor.child(name)
    if not self._supervisor.bring_down(name, down_s, 'preempted', politely=True):
      return False
    asyncio.get_running_loop().call_later(notice_s, child.kill)
    return True

  def freeze(self, name: str) -> bool:
    """SIGSTOP: the process is alive and silent."""
    child = self._supervisor.child(name)
    if child is None:
      return False
    self._frozen.add(name)
    child.freeze()
    return True

  def thaw(self, name: str) -> None:
    """SIGCONT: the process has not noticed the time that has passed."""
    self._frozen.discard(name)
    if child := self._supervisor.child(name):
      child.thaw()

  def start_second(self, name: str) -> bool:
    """Starts another process under the same learner id."""
    if self._supervisor.child(name) is None:
      return False
    self._supervisor.add(self._second(name))
    return True

  def slow(self, name: str, factor: float) -> bool:
    """The process takes `factor` times as long for everything, until `unslow`."""
    if self._supervisor.child(name) is None or name in self._slowed:
      return False
    self._slowed[name] = asyncio.create_task(self._brake(name, factor))
    return True

  async def unslow(self, name: str) -> None:
    if task := self._slowed.pop(name, None):
      task.cancel()
      await asyncio.gather(task, return_exceptions=True)

  async def heal(self) -> None:
    """Every process runs, at full speed."""
    for name in list(self._slowed):
      await self.unslow(name)
    for name in list(self._frozen):
      self.thaw(name)

  async def _brake(self, name: str, factor: float) -> None:
    child = None
    try:
      while True:
        child = self._supervisor.child(name)  # another one, after a restart
        if child is not None and name not in self._frozen:
          child.freeze()
        await asyncio.sleep(SLICE_S * (1 - 1 / factor))
        if child is not None and name not in self._frozen:
          child.thaw()
        await asyncio.sleep(SLICE_S / factor)
    finally:
      if child is not None and name not in self._frozen:
        child.thaw()
