"""The records of a process: facts as JSON lines, curves for TensorBoard, lines for people.

There is one file per program, WORKDIR/records/NAME.jsonl, with one fact per line. Each line is
flushed, so a process killed at any moment leaves at most one torn line, which readers skip and a
later process of the program cuts off before it appends. Each line is {"t_ns": monotonic, "time":
wall clock in s, "name": ..., fields} (facts.py). The supervisor, the page and the report read
only these files. The first line of a process has the format (protocol/formats.py).

Writing never stops training: a full disk is reported once, and training continues; once there is
space again, a fact says how many others are missing (facts.Missing). A file that has become
LIMIT_BYTES long is reported once, too, and grows no more.
"""

import collections
import contextlib
import dataclasses
import heapq
import json
import math
import os
import pathlib
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from diloco_jax.protocol import formats, safe_json
from diloco_jax.report import facts as report_facts
from diloco_jax.report import header

RECORDS = 'records'
TENSORBOARD = 'tensorboard'
_BLOCK_BYTES = 1 << 12
FIRST = 'records'  # the name of the first line of a process
MAX_LINE_BYTES = 16 << 20  # that are read as one fact
_OF_JOINS = b'"joined"', f'"{FIRST}"'.encode()  # in the lines of the syncer
SKEW_S = 60.0
_Row = tuple[str, dict[str, Any]]
LIMIT_BYTES = 2 << 30  # of the records of one program: some million steps
_JUMP_S = 600.0  # of a wall clock: somebody has set it, or the machine slept


class Recorder:
  """Records of one process (node.ports.Records). Thread-safe; never raises on a failing disk."""

  def __init__(
    self, workdir: str | os.PathLike, process: str, tensorboard: bool = True, prefix: str = ''
  ):
    """Opens the file of facts.

    Args:
      workdir: the run's folder; created if it does not exist (OSError if that fails).
      process: the name of the process, for example 'l0' or 'syncer'.
      tensorboard: also write curves. A killed process loses the last 8 KiB of them.
      prefix: of every line for people, if several nodes share an output.
    """
    self._process = process
    self._prefix = prefix
    self._lock = threading.Lock()
    self._failed = False
    self._missing, self._why = 0, ''  # facts that could not be written since the last one, and why
    self._opening = _row(FIRST, formats.stamp('records'))  # until it is written
    path = pathlib.Path(workdir) / RECORDS / f'{process}.jsonl'
    path.parent.mkdir(parents=True, exist_ok=True)
    self._file = open(path, 'a+b', buffering=0)
    self._guard(self._cut_torn_line)
    self._guard(self._catch_up)
    self._curves: Curves | None = None
    if tensorboard:
      folder = pathlib.Path(workdir) / TENSORBOARD / process
      self._guard(lambda: setattr(self, '_curves', Curves(folder)))

  def report(self, fact: report_facts.Fact) -> None:
    """Appends one fact."""
    line = _line(fact)
    with self._lock:
      self._guard(lambda: self._append(line))

  def scalars(self, step: int, values: dict[str, float]) -> None:
    """Adds points to curves such as `learning/loss`, `perf/step_time_seconds`, `sync/...`."""
    with self._lock:
      if (curves := self._curves) is not None and not self._missing:  # else its file would be torn
        self._guard(lambda: curves.add(step, values))

  def config(self, config: dict[str, Any]) -> None:
    """Adds the config of the run beside the curves, as a text."""
    with self._lock:
      if (curves := self._curves) is not None:
        self._guard(lambda: curves.text('config', json.dumps(config, indent=2)))

  def say(self, text: str) -> None:
    """Prints a line for people on standard output."""
    self._guard(lambda: header.say(f'{self._prefix}{header.clock()}{text}'))

  def completed(
    self, step: int, seconds: float, measured: dict[str, float], cost: report_facts.Cost
  ) -> None:
    """Prints a line about a step like MaxText's; what follows the metrics is of one device."""
    rate = cost.tokens / seconds if seconds > 0 else math.nan
    line = f'completed step: {step}, seconds: {seconds:.3f}, tokens/s: {rate:.0f}'
    figures = [f'{name}: {v:{".3f" if name == "loss" else ".4g"}}' for name, v in measured.items()]
    parts = [line, *figures, report_facts.speed_text(cost.speed(seconds))]
    self.say(', '.join(filter(None, parts)))

  def evaluated(self, fact: report_facts.Eval) -> None:
    """Reports a held-out loss, as a fact, a line and a point of a curve."""
    self.report(fact)
    self.say(f'held-out loss at clock {fact.step}: {fact.text}')
    self.scalars(fact.step, {'evaluation/loss': fact.loss})

  def measured(self, step: int, figures: Mapping[str, Any]) -> None:
    """Reports what a program of the user's own has measured of the model."""
    values = {name: float(value) for name, value in figures.items()}
    if 'loss' in values:
      self.evaluated(report_facts.Eval(step=step, loss=values.pop('loss')))
    if values:
      self.report(report_facts.Metrics(step=step, values=values))
      figures_text = ', '.join(f'{name}: {value:.4g}' for name, value in values.items())
      self.say(f'held-out at clock {step}: {figures_text}')
      self.scalars(step, {f'evaluation/{name}': value for name, value in values.items()})

  def ended(self, code: int) -> None:
    """Reports the end of the node: there may be no supervisor that does."""
    self.report(report_facts.Exit(child=self._process, pid=os.getpid(), code=code))

  def close(self) -> None:
    """Flushes everything to disk."""
    with self._lock:
      self._guard(self._file.close)
      if self._curves is not None:
        self._guard(self._curves.close)
        self._curves = None

  def _append(self, line: bytes) -> None:
    if self._file.tell() + len(line) > LIMIT_BYTES:
      raise OSError(f'{self._file.name} has {LIMIT_BYTES >> 20} MiB, the most that it may have')
    try:
      self._catch_up()
      self._write(line)
    except OSError as error:
      self._missing, self._why = self._missing + 1, error.strerror or str(error)
      raise

  def _catch_up(self) -> None:
    """Writes the first line of this process, and what a full disk has cost."""
    self._write(self._opening)
    self._opening = b''
    if self._missing:
      self._write(_line(report_facts.Missing(facts=self._missing, error=self._why)))
      self._missing = 0

  def _write(self, line: bytes) -> None:
    """Appends a line or nothing: a disk that becomes full may write a part."""
    start = self._file.tell()
    try:
      done = 0
      while done < len(line):
        done += self._file.write(line[done:])
    except OSError:
      with contextlib.suppress(OSError):
        self._file.seek(self._file.truncate(start))
      raise

  def _cut_torn_line(self) -> None:
    """Cuts off the torn line of a killed predecessor, so that each line is one fact."""
    size = end = self._file.tell()
    while end:
      start = max(0, end - _BLOCK_BYTES)
      newline = os.pread(self._file.fileno(), end - start, start).rfind(b'\n')
      if newline >= 0:
        end = start + newline + 1
        break
      end = start
    if end < size:
      self._file.truncate(end)
      self._file.seek(end)

  def _guard(self, write) -> None:
    """Runs `write`; a failing disk, or no TensorBoard, is reported once and then tolerated."""
    try:
      write()
    except (OSError, ValueError, ImportError, TypeError) as error:  # closed; of another protobuf
      if not self._failed:
        self._failed = True
        text = f'[{self._process}] records are incomplete from here on: {error}'
        with contextlib.suppress(OSError):  # standard error is closed, too
          print(text, file=sys.stderr, flush=True)


class Curves:
  """Curves for TensorBoard. tensorboardX.SummaryWriter writes in a thread of its own, which a full
  disk ends; then its queue fills and `add_scalar` blocks for ever. So the caller's thread writes,
  into a buffer."""

  def __init__(self, folder: pathlib.Path):
    from tensorboardX import event_file_writer  # 0.4 s

    folder.mkdir(parents=True, exist_ok=True)
    self._writer = event_file_writer.EventsWriter(str(folder / 'events'))

  def add(self, step: int, values: dict[str, float]) -> None:
    """Adds a point to each curve. Raises OSError."""
    from tensorboardX import summary  # loaded by now

    for key, value in values.items():
      self._write(step, summary.scalar(key, value))

  def text(self, key: str, text: str) -> None:
    """Adds a text, which is shown as it is. Raises OSError."""
    from tensorboardX import summary  # loaded by now

    self._write(0, summary.text(key, textwrap.indent(text, '    ')))

  def _write(self, step: int, summary: Any) -> None:
    from tensorboardX.proto import event_pb2  # loaded by now

    make = event_pb2.Event  # type: ignore[attr-defined]  # made when it is imported
    self._writer.write_event(make(summary=summary, step=step, wall_time=time.time()))

  def close(self) -> None:
    """Writes the buffer to disk. Raises OSError."""
    self._writer.close()


def _line(fact: report_facts.Fact) -> bytes:
  values = {field.name: getattr(fact, field.name) for field in dataclasses.fields(fact)}
  return _row(report_facts.name(fact), values)


def _row(name: str, values: dict[str, Any]) -> bytes:
  row = {'t_ns': time.monotonic_ns(), 'time': time.time(), 'name': name}
  return json.dumps({**row, **values}, default=float).encode() + b'\n'


def report_startup(records: Recorder, phase: str) -> None:
  records.report(report_facts.Startup(phase=phase, cpu_s=round(time.process_time(), 3)))


class Tail:
  """Reads the records of one file as they grow; a torn or damaged line is skipped.

  Each `read` returns the facts that became complete since the last one. Their times continue those
  above them where a clock was set, a machine slept, or the program went on where a clock is behind.
  """

  def __init__(self, path: str | os.PathLike, offset: int = 0):
    self.path, self.offset = pathlib.Path(path), offset  # bytes that have been read
    self._last_s, self._shift_s = -math.inf, 0.0  # the newest time; of the times to the wall clock
    self._ahead_s = math.nan  # of the wall clock to that of the process; NaN: not known

  def read(self) -> list[dict[str, Any]]:
    return list(self.stream())

  def stream(self, *marks: bytes) -> Iterator[dict[str, Any]]:
    """The same, one at a time. With `marks` only what has one of them is parsed, which takes most
    of the time, and the lines beside it: their times show whether a clock was set."""
    for line in self._marked(marks) if marks else self._lines():
      try:
        fact = safe_json.parse(line, finite=False)  # a loss may be NaN
      except ValueError:
        fact = None
      known = fact if isinstance(fact, dict) and isinstance(fact.get('name'), str) else {}
      if known.get('name') == FIRST:
        self._require_format(known, len(line))
        self._shift_s, self._ahead_s = 0.0, math.nan
      elif known and isinstance(known.get('time', 0.0), int | float):
        yield self._in_order(known)

  def _in_order(self, fact: dict[str, Any]) -> dict[str, Any]:
    wall_s, own_ns = fact.get('time', math.nan), fact.get('t_ns')
    if math.isfinite(wall_s):
      if type(own_ns) is int and own_ns:
        before_s, self._ahead_s = self._ahead_s, wall_s - own_ns / 1e9
        jump_s = self._ahead_s - before_s
        self._shift_s -= jump_s if abs(jump_s) > _JUMP_S else 0.0
      behind_s = self._last_s - wall_s - self._shift_s
      self._shift_s += behind_s if behind_s > _JUMP_S else 0.0
      fact['time'] = wall_s + self._shift_s
      self._last_s = max(self._last_s, fact['time'])
    return fact

  def _require_format(self, opening: dict[str, Any], size: int) -> None:
    """Raises OtherFormat, and again at the next call."""
    self.offset -= size
    formats.require('records', opening, self.path)
    self.offset += size

  def _marked(self, marks: tuple[bytes, ...]) -> Iterator[bytes]:
    before, follows = b'', False
    for line in self._lines():
      marked = any(mark in line for mark in marks)
      if marked or follows:
        yield from filter(None, (before, line))
        line = b''
      before, follows = line, marked
    yield from filter(None, (before,))

  def _lines(self) -> Iterator[bytes]:
    with contextlib.suppress(OSError):  # no file yet, or not readable now: the next call reads on
      with open(self.path, 'rb') as file:
        file.seek(self.offset)
        while line := file.readline(MAX_LINE_BYTES):
          if not line.endswith(b'\n') and len(line) < MAX_LINE_BYTES:
            return  # else it is a part of a line that is no fact
          self.offset += len(line)
          yield line


class TailAll:
  """Tails every file of WORKDIR/records: (process, fact) in the order of their times (Tail), by the
  clock of the syncer: a join is in the records of both, which shows clocks that are SKEW_S apart.

  Attributes:
    shifts: of learners whose clock is another one, what is added to their times, in s.
  """

  def __init__(self, workdir: str | os.PathLike):
    self._folder = pathlib.Path(workdir) / RECORDS
    self._tails: dict[str, Tail] = {}
    self._syncer = Tail(self._folder / 'syncer.jsonl')
    # An incarnation comes again if no commit of the syncer had the first one.
    self._joins_s = collections.defaultdict[tuple[str, int], list[float]](list)
    self._last: dict[str, str] = {}  # the name of the newest row of each process
    self._compared = set[str]()  # learners whose process has joined: later ones are reconnections
    self.shifts: dict[str, float] = {}

  def read(self) -> list[_Row]:
    """What became complete since the last call."""
    return list(self.stream())

  def stream(self) -> Iterator[_Row]:
    """The same, one at a time: the records of a long run need more memory than there is."""
    for row in self._syncer.stream(*_OF_JOINS):
      if row['name'] == 'member' and row.get('state') == 'joined':
        self._joins_s[row['learner'], row['incarnation']].append(row['time'])
    files = [self._on_one_clock(name, tail.stream()) for name, tail in self.all().items()]
    return heapq.merge(*files, key=_time)

  def _on_one_clock(self, name: str, rows: Iterator[dict[str, Any]]) -> Iterator[_Row]:
    """A process that starts may have another clock: its first rows wait for its join."""
    waiting: list[dict[str, Any]] = []
    for row in rows:
      what, starts = row['name'], row['name'] in ('startup', 'cost', 'nostep')
      begins = what == 'startup' and row.get('phase') != 'compiled'  # which may come twice
      if begins and self._last.get(name) not in (None, 'startup', 'state', 'cost'):
        self.shifts.pop(name, None)  # another process
        self._compared.discard(name)
      if what == 'state' and row['state'] == 'joined' and name not in self._compared:
        self._compared.add(name)
        joins_s = self._joins_s.get((name, row['incarnation']), [row['time']])
        shift_s = min((joined_s - row['time'] for joined_s in joins_s), key=abs)
        if abs(shift_s) >= SKEW_S:
          self.shifts[name] = shift_s
      self._last[name] = what
      waiting.append(row)
      if name in self.shifts or not starts:
        yield from self._shifted(name, waiting)
        waiting = []
    yield from self._shifted(name, waiting)

  def _shifted(self, name: str, rows: list[dict[str, Any]]) -> Iterator[_Row]:
    more_s = self.shifts.get(name, 0.0)
    return ((name, row | {'time': row['time'] + more_s} if more_s else row) for row in rows)

  def all(self) -> dict[str, Tail]:
    for path in filter(pathlib.Path.is_file, sorted(self._folder.glob('*.jsonl'))):
      self._tails.setdefault(path.stem, Tail(path))
    return self._tails


def records(workdir: str | os.PathLike) -> Iterator[dict[str, Any]]:
  """The records of a run so far, in the order of time, also of one that is under way.

  Each is a dict: 'process' ('syncer', 'l0', ...), 'name' ('step', 'eval', ...), 'time' in s, and
  what that fact has (diloco_jax/report/facts.py): a step its 'step', 'loss' and 'tokens'.

  Raises:
    ValueError: the folder has no records.
  """
  folder = pathlib.Path(workdir) / RECORDS
  if not folder.is_dir():
    raise ValueError(f'there are no records in {workdir}: it has no folder {RECORDS}/')
  return ({'process': process, **fact} for process, fact in TailAll(workdir).stream())


def _time(row: _Row) -> float:
  return row[1].get('time', 0.0)
