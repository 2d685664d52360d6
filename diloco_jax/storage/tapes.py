"""The tapes of a run on disk: WORKDIR/tapes/NODE.LIFE.SEGMENT.jsonl (lines: protocol/tape/tape.py).

LIFE counts the processes of a node: each process writes its own tape under the next free number. A
tape is cut into segments; the process closes a full segment, begins the next, and a separate thread
packs the full one (.jsonl.gz), in small parts, so that the machine's thread never waits for the
interpreter lock.

The operating system has a line before the actions of its turn are carried out, so a killed process
loses no turn with a visible effect. A host that loses power may lose the last lines (there is no
fsync, which would cost milliseconds per turn); the end of the tape is then damaged.

The tapes of a node take at most `limit_bytes` on disk: at its start a process removes the oldest
tapes until the others take at most half of it, and its own tape ends when it reaches the other
half. A tape cannot lose its beginning: only the events since the start of the process lead to the
present state of its machine (a checkpoint holds less: no session, no open sync), so it could not be
replayed.

A failing disk ends the tape, not the run: the tape is cut back to its last whole line, the process
prints one warning and writes nothing more. While a disk is full the process keeps up to BACKLOG
lines, and writes them once there is space. A tape may therefore end early but never has a gap.
"""

import collections
import contextlib
import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from typing import Any

from diloco_jax import version
from diloco_jax.protocol import actions, events
from diloco_jax.protocol.tape import tape as tape_lib
from diloco_jax.storage import files_port, json_files

TAPES = 'tapes'
SEGMENT_BYTES = 64 << 20
LIMIT_BYTES = 2 << 30
BACKLOG = 1 << 16  # more than the turns of a syncer until it ends for want of space
_SEGMENTS = 32  # at least so many segments in `limit_bytes`
PART_BYTES = 128 << 10  # zlib and the disk release the interpreter lock within each part
UNKNOWN = 'unknown'

NAME = re.compile(r'(?P<node>[a-z0-9_-]+)\.(?P<process>\d+)\.(?P<segment>\d+)\.jsonl(?:\.gz)?')
_CHECKOUT = pathlib.Path(__file__).resolve().parents[2]


# --- Writing --------------------------------------------------------------------------------------


class Tape:
  """The tape of one process (node.ports.Tape). One thread writes; a failing disk never raises."""

  def __init__(
    self,
    workdir: str | os.PathLike,
    start: tape_lib.Start,
    say: Callable[[str], None],
    config: dict[str, Any] | None = None,
    segment_bytes: int = SEGMENT_BYTES,
    limit_bytes: int = LIMIT_BYTES,
  ):
    """Begins a new tape in WORKDIR/tapes.

    Args:
      workdir: the run's folder.
      start: the arguments of the machine.
      say: prints the one warning.
      config: of the whole run; tapes of one run have the same digest of it.
      segment_bytes: a segment is closed once it is larger.
      limit_bytes: the most that the tapes of this node may take on disk.
    """
    self._folder = pathlib.Path(workdir) / TAPES
    self._node = start.node
    self._say = say
    self._segment_bytes = min(segment_bytes, limit_bytes // _SEGMENTS)
    self._half_bytes = limit_bytes // 2
    text = json.dumps(config, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest() if config else ''
    self._writer = tape_lib.Writer(start, digest, commit(), versions())
    self._process, self._segment = 0, -1
    self._written = 0  # bytes of the segment
    self._backlog: collections.deque[bytes] = collections.deque()  # lines for a disk that is full
    self._most = BACKLOG
    self._file = None
    self._compressing: list[threading.Thread] = []
    self.path: pathlib.Path | None = None  # of the newest segment
    self.ended = ''  # why the tape has ended
    self._guard(lambda: self._write(self._writer.header()))

  def record(self, now_ns: int, event: events.Event, asked: Sequence[actions.Action]) -> None:
    """Writes a turn; on return the operating system has the line, unless the disk is full."""
    self._guard(lambda: self._write(self._writer.turn(now_ns, event, asked)))
    if self._written >= self._segment_bytes and not self._backlog:
      self._guard(self._rotate)

  def crash(self, now_ns: int, event: events.Event, error: Exception) -> str:
    """Writes the turn that raised; returns the text for the bug report."""
    self._guard(lambda: self._write(self._writer.crash(now_ns, event, error)))
    if self.ended:
      return f'Its tape ({self.path}) ended before this: {self.ended}.'
    return f'Its tape is the bug report: {self.path}; replay it with: diloco replay {self.path}'

  def close(self) -> None:
    """Closes the newest segment and waits for the compression of the older ones."""
    self._most = 0
    self._guard(self._write)
    self._close()
    self.ended = self.ended or 'closed'
    for thread in self._compressing:
      thread.join()

  def _remove_old(self, newest: int) -> None:
    """Removes the oldest tapes of this node until those before `newest` take half of the limit."""
    total = 0
    for process in range(newest - 1, 0, -1):
      sizes = self._sizes(process)
      total += sum(sizes.values())
      if total > self._half_bytes:
        for path in sizes:
          path.unlink(missing_ok=True)

  def _sizes(self, process: int) -> dict[pathlib.Path, int]:
    """The files of one tape of this node, packed or not, and their bytes."""
    sizes = {}
    for path in self._folder.glob(f'{self._node}.{process}.*.jsonl*'):
      with contextlib.suppress(FileNotFoundError):  # packed meanwhile
        sizes[path] = path.stat().st_size
    return sizes

  def _rotate(self) -> None:
    size = sum(self._sizes(self._process).values())
    if size + self._segment_bytes > self._half_bytes:
      raise tape_lib.TapeError(
        f'it has {size >> 20} MiB, half of what the tapes of a node may take'
      )
    self._close()
    thread = threading.Thread(target=_compress, args=(self.path,), name='tape', daemon=True)
    self._compressing = [*(t for t in self._compressing if t.is_alive()), thread]
    thread.start()
    self._write(self._writer.header())

  def _open(self) -> None:
    self._folder.mkdir(parents=True, exist_ok=True)
    numbers = (
      process_tape.number
      for process_tape in process_tapes(self._folder)
      if process_tape.node == self._node
    )
    process = self._process or max(numbers, default=0) + 1
    while self._file is None:
      self.path = self._folder / f'{self._node}.{process}.{self._segment + 1}.jsonl'
      with contextlib.suppress(FileExistsError):  # another process of this node was first
        self._file = open(self.path, 'xb', buffering=0)
        self._process, self._segment, self._written = process, self._segment + 1, 0
      process += 1
    if not self._segment:
      self._remove_old(self._process)

  def _write(self, *lines: bytes) -> None:
    self._backlog += lines
    try:
      if self._file is None:
        self._open()
      while self._backlog:
        line, done = self._backlog[0], 0
        while done < len(line):  # a disk that becomes full takes a part
          done += self._file.write(line[done:])
        self._written += len(self._backlog.popleft())
    except OSError as error:
      if self._file is not None:
        self._file.seek(self._file.truncate(self._written))
      if error.errno not in files_port.FULL or len(self._backlog) > self._most:
        raise

  def _guard(self, write: Callable[[], None]) -> None:
    """Runs `write` unless the tape has ended; an error ends the tape."""
    if self.ended:
      return
    try:
      write()
    except (OSError, tape_lib.TapeError) as error:
      self.ended = str(error)
      self._say(f'[{self._node}] the tape ends here, the run continues: {error}')
      if self._file is not None:
        with contextlib.suppress(OSError):  # a reader will report the torn line
          self._file.truncate(self._written)
        self._close()

  def _close(self) -> None:
    file, self._file = self._file, None
    if file is not None:
      with contextlib.suppress(OSError):  # the lines have been written
        file.close()


def _compress(path: pathlib.Path) -> None:
  """Replaces a closed segment by its .gz, which is durable first; a kill or a loss of power
  meanwhile leaves both files or the old one."""
  target = path.with_name(f'{path.name}.gz')
  fresh = target.with_name(f'{target.name}.new')
  try:
    with open(path, 'rb', buffering=0) as source, gzip.open(fresh, 'wb', compresslevel=6) as packed:
      shutil.copyfileobj(source, packed, PART_BYTES)
    json_files.fsync(fresh)
    fresh.replace(target)
    json_files.fsync(path.parent)
    path.unlink()
  except OSError:
    fresh.unlink(missing_ok=True)  # no space: the segment stays unpacked


def versions() -> dict[str, str]:
  """The versions that decide the results of a run: Python, this package, jax and numpy."""
  numbers = {'python': platform.python_version(), tape_lib.PROGRAM: version.__version__}
  for name in ('jax', 'numpy'):
    try:
      numbers[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      numbers[name] = UNKNOWN
  return numbers


def commit(checkout: pathlib.Path = _CHECKOUT) -> str:
  """The git commit of a checkout, from its files; 'unknown' for another folder."""
  try:
    git = checkout / '.git'
    if git.is_file():  # the file of a worktree names its git folder
      git = (checkout / git.read_text('utf-8').removeprefix('gitdir:').strip()).resolve()
    head = (git / 'HEAD').read_text('utf-8').strip()
    if not head.startswith('ref:'):
      return head
    reference = head.removeprefix('ref:').strip()
    shared = git / 'commondir'
    root = (git / shared.read_text('utf-8').strip()).resolve() if shared.is_file() else git
    return _commit_of(root, reference)
  except (OSError, UnicodeDecodeError):
    return UNKNOWN


def _commit_of(git: pathlib.Path, reference: str) -> str:
  loose = git / reference
  if loose.is_file():
    return loose.read_text('utf-8').strip()
  for line in (git / 'packed-refs').read_text('utf-8').splitlines():
    if line.endswith(f' {reference}'):
      return line.split()[0]
  return UNKNOWN


# --- Names ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessTape:
  """The tape of one process: its segments in order."""

  node: str
  number: int
  segments: tuple[pathlib.Path, ...]

  @property
  def name(self) -> str:
    return f'{self.node}.{self.number}' if self.number else self.node


def process_tapes(folder: pathlib.Path) -> list[ProcessTape]:
  """All tapes in a folder, sorted by node and number."""
  tapes: dict[tuple[str, int], dict[int, pathlib.Path]] = {}
  for path in sorted(folder.iterdir(), reverse=True):
    if NAME.fullmatch(path.name) and path.is_file():
      node, process, segment = parse(path)
      # If both X.jsonl.gz and X.jsonl exist, the latter wins: it comes last in this order.
      tapes.setdefault((node, process), {})[segment] = path
  return [
    ProcessTape(node, process, tuple(path for _, path in sorted(segments.items())))
    for (node, process), segments in sorted(tapes.items())
  ]


def parse(path: pathlib.Path) -> tuple[str, int, int]:
  """Node, number of its process and number of the segment."""
  match = NAME.fullmatch(path.name)
  return match['node'], int(match['process']), int(match['segment'])
