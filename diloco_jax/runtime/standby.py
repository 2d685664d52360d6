"""Processes that stand by: ready to take the place of one that falls, and waiting for their turn.

What a new process does first (imports, compilers) takes longer than what it has to do for the run.
A process that stands by has done that; it has touched nothing of the run, and begins once it reads
a line on its standard input. At most one of a program; while it is not needed it costs its memory.
"""

import asyncio
from typing import Awaitable, Callable

from diloco_jax.runtime import children

LINE = 'stands by'  # what a process says when it is ready


class Standbys:
  """The processes that stand by, by program."""

  def __init__(self, start: Callable[[str], Awaitable[children.Child]]):
    """`start` starts the process that stands by for a program."""
    self._start = start
    self._starting: dict[str, asyncio.Task[children.Child]] = {}

  def prepare(self, name: str) -> None:
    """Has a process stand by for a program, unless one does."""
    if name not in self._starting:
      self._starting[name] = asyncio.create_task(self._start(name))

  async def take_over(self, name: str) -> children.Child | None:
    """Lets the process begin that stands by, ready or not; None: there is none, or it has died."""
    child = await self._relieve(name)
    if child is None:
      return None
    if child.running:
      child.begin()
      return child
    await child.wait()
    return None

  async def close(self) -> None:
    """Nobody stands by any more."""
    for name in list(self._starting):
      child = await self._relieve(name)
      if child is not None:
        child.kill()
        await child.wait()

  async def _relieve(self, name: str) -> children.Child | None:
    """The process that has stood by until now, dead or alive."""
    starting = self._starting.pop(name, None)
    try:
      return None if starting is None else await starting
    except OSError:  # it could not be started: no memory, no descriptors
      return None
