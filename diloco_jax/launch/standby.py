"""Standby processes: each is ready to take over when the active process of its program dies.

A new process spends more time on imports and compilation than on the recovery of the run. A standby
process has done this in advance and has said so; it has touched no file of the run, and begins when
it reads a line on its standard input. A program has at most one standby process, which costs its
memory. The supervisor never waits for a standby process that is not ready when it is needed.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

from diloco_jax.launch import children

LINE = 'standby'  # a standby process prints a line that begins with this word when it is ready


@dataclasses.dataclass(slots=True, eq=False)
class _Standby:
  """One standby process; the task `life` runs from its start to its death."""

  child: children.Child | None = None
  ready: bool = False
  life: asyncio.Task[None] | None = None


class Standbys:
  """The standby processes, by program."""

  def __init__(
    self,
    start: Callable[[str, children.Listen], Awaitable[children.Child]],
    listen: children.Listen,
  ):
    """`start` starts the standby process of a program; `listen` gets each line that it prints."""
    self._start = start
    self._listen = listen
    self._all: dict[str, _Standby] = {}

  def prepare(self, name: str) -> None:
    """Starts a standby process for a program, unless it has one or one died before it was ready."""
    if name not in self._all:
      standby = self._all[name] = _Standby()
      standby.life = asyncio.create_task(self._live(name, standby))

  def ready(self, name: str) -> bool:
    """Whether a standby process could take over now."""
    return name in self._all and self._all[name].ready

  async def take_over(self, name: str) -> children.Child | None:
    """Lets the standby process begin; returns None if none is ready."""
    standby = self._all.pop(name, None)
    if standby is None:
      return None
    if standby.ready:
      standby.child.begin()
      return standby.child
    await self._dismiss(standby)
    return None

  async def close(self) -> None:
    """Ends all standby processes."""
    while self._all:
      await self._dismiss(self._all.popitem()[1])

  async def _live(self, name: str, standby: _Standby) -> None:
    """Runs a standby process from its start to its death, also after it has taken over."""

    def listen(child: str, line: str) -> None:
      standby.ready = standby.ready or line.startswith(LINE)
      self._listen(child, line)

    try:
      standby.child = await self._start(name, listen)
    except OSError as error:  # no memory or no descriptors: the supervisor will start a new process
      self._listen(name, f'no standby process: {error}')
      return
    await standby.child.wait()
    if standby.ready and self._all.get(name) is standby:
      del self._all[name]  # it died before it took over

  async def _dismiss(self, standby: _Standby) -> None:
    if standby.child is not None:
      standby.child.kill()
    else:
      standby.life.cancel()
    await asyncio.gather(standby.life, return_exceptions=True)
