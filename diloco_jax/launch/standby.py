"""Processes that stand by: ready to take the place of one that falls, and waiting for their turn.

What a new process does first (imports, compilers) takes longer than what it has to do for the run.
A process that stands by has done that and said so; it has touched nothing of the run, and begins
once it reads a line on its standard input. At most one of a program; while it is not needed it
costs its memory. One that is not ready when its turn comes, for whatever reason, is not waited for.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

from diloco_jax.launch import children

LINE = 'stands by'  # what a process says when it is ready, at the beginning of a line


@dataclasses.dataclass(slots=True, eq=False)
class _Standby:
  """One process; `life` runs from its start to its death."""

  child: children.Child | None = None
  ready: bool = False
  life: asyncio.Task[None] | None = None


class Standbys:
  """The processes that stand by, by program."""

  def __init__(
    self,
    start: Callable[[str, children.Listen], Awaitable[children.Child]],
    listen: children.Listen,
  ):
    """`start` starts the process that stands by for a program; `listen` gets what it says."""
    self._start = start
    self._listen = listen
    self._all: dict[str, _Standby] = {}

  def prepare(self, name: str) -> None:
    """Has a process stand by for a program, unless one does, or died before it was ready."""
    if name not in self._all:
      standby = self._all[name] = _Standby()
      standby.life = asyncio.create_task(self._live(name, standby))

  def ready(self, name: str) -> bool:
    """Somebody could take over now."""
    return name in self._all and self._all[name].ready

  async def take_over(self, name: str) -> children.Child | None:
    """Lets the process begin that stands by; None: nobody is ready."""
    standby = self._all.pop(name, None)
    if standby is None:
      return None
    if standby.ready:
      standby.child.begin()
      return standby.child
    await self._dismiss(standby)
    return None

  async def close(self) -> None:
    """Nobody stands by any more."""
    while self._all:
      await self._dismiss(self._all.popitem()[1])

  async def _live(self, name: str, standby: _Standby) -> None:
    """From the start of a process to its death, whatever it is by then."""

    def listen(who: str, line: str) -> None:
      standby.ready = standby.ready or line.startswith(LINE)
      self._listen(who, line)

    try:
      standby.child = await self._start(name, listen)
    except OSError as error:  # no memory, no descriptors: the next life is a new process
      self._listen(name, f'nobody stands by: {error}')
      return
    await standby.child.wait()
    if standby.ready and self._all.get(name) is standby:
      del self._all[name]  # it has died before its turn

  async def _dismiss(self, standby: _Standby) -> None:
    if standby.child is not None:
      standby.child.kill()
    else:
      standby.life.cancel()
    await asyncio.gather(standby.life, return_exceptions=True)
