"""Starts, logs and reliably kills one child process of the supervisor.

Each child leads its own process group. Ctrl-C in a terminal therefore reaches only the supervisor,
which ends the children in its own order, and SIGKILL can reach every process that the child
started. The kernel kills the child when the supervisor dies, even by SIGKILL (die_with_parent.py).
Each line of output goes to WORKDIR/logs/NAME.log and to the listener.
"""

import asyncio
import contextlib
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

import psutil

TETHER = pathlib.Path(__file__).with_name('die_with_parent.py')
_READ_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 16
_DRAIN_S = 1.0
_POLL_S = 0.02

Listen = Callable[[str, str], None]
"""Called with the child's name and one line of its output."""


class Child:
  """A running or ended process. Made by `start`."""

  def __init__(self, name: str, process: asyncio.subprocess.Process, log: BinaryIO, listen: Listen):
    self.name = name
    self.started_s = time.monotonic()
    self.last_error = ''
    self._process = process
    self._listen = listen
    self._log = log
    self._relay = asyncio.create_task(self._relay_output())

  @property
  def pid(self) -> int:
    return self._process.pid

  @property
  def running(self) -> bool:
    return self._process.returncode is None

  async def wait(self) -> int:
    """Returns the exit code (negative: the signal's number). The process group is dead by then."""
    while self.running:  # Process.wait waits for the output, too, which a descendant may keep open
      await asyncio.sleep(_POLL_S)
    self._signal_group(signal.SIGKILL)  # processes that the child started must not outlive it
    await asyncio.wait([self._relay], timeout=_DRAIN_S)
    self._relay.cancel()
    self._log.close()
    return self._process.returncode

  def freeze(self) -> None:
    """Stops the process group with SIGSTOP: alive and silent, its sockets stay open."""
    if self.running:
      self._signal_group(signal.SIGSTOP)

  def thaw(self) -> None:
    """Continues a frozen process group; has no effect on a running one."""
    if self.running:
      self._signal_group(signal.SIGCONT)

  def terminate(self) -> None:
    """Sends SIGTERM, after a thaw, since a frozen process handles no signals."""
    if self.running:
      self.thaw()
      self._process.send_signal(signal.SIGTERM)

  def kill(self) -> None:
    """Kills the process and all its descendants at once."""
    if self.running:
      with contextlib.suppress(psutil.Error):
        for process in psutil.Process(self.pid).children(recursive=True):
          with contextlib.suppress(psutil.Error):
            process.kill()
      self._signal_group(signal.SIGKILL)

  def _signal_group(self, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(self.pid, number)

  async def _relay_output(self) -> None:
    rest = b''
    while data := await self._process.stdout.read(_READ_BYTES):
      *lines, rest = (rest + data).split(b'\n')
      for line in lines:
        self._log_line(line)
      if len(rest) > _MAX_LINE_BYTES:
        self._log_line(rest)
        rest = b''
    if rest:
      self._log_line(rest)

  def _log_line(self, line: bytes) -> None:
    with contextlib.suppress(OSError):  # a full disk must not stop a run
      self._log.write(line + b'\n')
    text = line.decode(errors='replace').rstrip('\r')
    if text.startswith('error: '):
      self.last_error = text.removeprefix('error: ')
    self._listen(self.name, text)


async def start(
  name: str,
  command: Sequence[str],
  environment: Mapping[str, str],
  log: pathlib.Path,
  listen: Listen,
  cpus: Sequence[int] = (),
) -> Child:
  """Starts a child, restricted to `cpus` if any are given. Raises OSError if the start fails."""
  log.parent.mkdir(parents=True, exist_ok=True)
  output = open(log, 'ab', buffering=0)  # first, so that no process runs that nothing can end
  try:
    process = await asyncio.create_subprocess_exec(
      sys.executable,
      '-I',
      '-S',
      str(TETHER),
      str(os.getpid()),
      ','.join(map(str, cpus)) or 'all',
      *command,
      env=dict(environment),
      start_new_session=True,
      stdin=asyncio.subprocess.DEVNULL,
      stdout=asyncio.subprocess.PIPE,
      stderr=asyncio.subprocess.STDOUT,
    )
  except BaseException:
    output.close()
    raise
  return Child(name, process, output, listen)
