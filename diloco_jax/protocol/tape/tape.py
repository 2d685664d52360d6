"""Tapes: every turn of a machine, written so that the machine can be replayed.

A machine decides from its start and its events alone, so these determine a process completely: the
same code must ask for the same actions in another process, under another hash seed, on another
Python. A tape holds the start and the turns as lines of JSON::

    Header   schema, segment, previous, role, node, start, config_digest, commit, versions
    Record   index, now_ns, event, actions          one per turn, before its actions are done
    Crash    index, now_ns, event, error            the event on which the machine raised; the last

codec.py defines their JSON. A kind, a field or a type that this code does not know is a
`TapeError`, never a guess. The dicts of a machine state or a report keep their order, so an order
that depends on the hash seed is a difference as well.

The last field of every line is `hash`: SHA-256 over the previous hash and the line up to
`,"hash":`, byte by byte. So the reader finds a line that was changed, removed or moved. A tape may
be cut into *segments*, each with a header that names the hash before it; the segments in order are
the tape.

A tape ends with an Exit (`exit`), with a crash (`crash`), or without an end (`open`: the process
was killed, or still runs). A kill may *tear* the last line; its actions were never carried out, so
the line does not count. Nothing here does I/O: functions take and return lines.
"""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from diloco_jax.protocol import actions, events, formats, safe_json
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.learner import connection
from diloco_jax.protocol.tape import codec

if TYPE_CHECKING:
  from diloco_jax.protocol.learner import machine as learner_machine
  from diloco_jax.protocol.syncer import machine as syncer_machine

SCHEMA = formats.NUMBERS['tape']
PROGRAM = 'diloco-jax'  # in the versions of a header
GENESIS = '0' * 64  # the hash before the first line

Machine: TypeAlias = 'syncer_machine.SyncerMachine | learner_machine.LearnerMachine'

TapeError = codec.TapeError
encode = codec.encode
decode = codec.decode


# --- What is on a tape ----------------------------------------------------------------------------


_Actions = tuple[actions.Action, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Start:
  """Everything needed to make a machine again.

  Attributes:
    role: 'syncer' or 'learner'.
    node: the name of its node: 'syncer', 'l0', ...
    config: the numbers of the run.
    agreement: the agreement that every learner must share (syncer).
    run: the name of a new run (syncer).
    payload_bytes: sizes of each fragment's encoded pseudo-gradient (syncer).
    links_measured: whether the time of a payload is that of its link (syncer).
    digests: of each fragment at version 0; None: the machine is restored.
    identity: the learner's id and process (learner).
    state: the machine state to restore; None: a new machine.
  """

  role: str
  node: str
  config: config_lib.ProtocolConfig
  agreement: str = ''
  run: str = ''
  payload_bytes: tuple[int, ...] = ()
  links_measured: bool = False
  digests: tuple[int, ...] | None = None
  identity: connection.Identity | None = None
  state: dict[str, Any] | None = None

  def make(self) -> Machine:
    """A new machine. Raises ValueError for an unknown role."""
    if self.role == 'syncer':  # a process imports its own machine alone
      return self._syncer()
    if self.role == 'learner':
      return self._learner()
    raise ValueError(f'role is {self.role!r}, it must be "syncer" or "learner"')

  def _syncer(self) -> Machine:
    from diloco_jax.protocol.syncer import machine as syncer_machine

    if self.state is None:
      return syncer_machine.SyncerMachine(
        self.config,
        self.agreement,
        self.run,
        self.digests,
        self.payload_bytes,
        self.links_measured,
      )
    return syncer_machine.SyncerMachine.restore(
      self.config, self.agreement, self.payload_bytes, self.state, self.links_measured
    )

  def _learner(self) -> Machine:
    from diloco_jax.protocol.learner import machine as learner_machine

    if self.state is None:
      return learner_machine.LearnerMachine(self.config, self.identity, self.digests)
    return learner_machine.LearnerMachine.restore(self.config, self.identity, self.state)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Header:
  """The first line of a segment. `previous`: the hash of the line before it."""

  schema: int
  segment: int
  previous: str
  role: str
  node: str
  start: Start
  config_digest: str  # of the whole config of the run, '' without one
  commit: str  # of the code that wrote the tape
  versions: dict[str, Any]  # name to version


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
  """One turn of a machine: the event, its time, and the actions that it asked for."""

  index: int
  now_ns: int
  event: events.Event
  actions: _Actions


@dataclasses.dataclass(frozen=True, slots=True)
class Crash:
  """The turn in which the machine raised; `error` is the exception's class and text."""

  index: int
  now_ns: int
  event: events.Event
  error: str


Line = Header | Record | Crash


# --- The chain ------------------------------------------------------------------------------------

_LINE = re.compile(rb'(\{.*),"hash":"([0-9a-f]{64})"\}\n', re.DOTALL)
_HEADER = b'{"kind":"Header",'


def _chain(previous: str, body: bytes) -> str:
  """The hash of a line: over the previous hash and the line without its hash."""
  return hashlib.sha256(previous.encode() + body).hexdigest()


class Writer:
  """Turns the turns of one machine into the lines of its tape."""

  def __init__(
    self,
    start: Start,
    config_digest: str = '',
    commit: str = 'unknown',
    versions: dict[str, str] | None = None,
  ):
    self._header = Header(
      schema=SCHEMA,
      segment=0,
      previous=GENESIS,
      role=start.role,
      node=start.node,
      start=start,
      config_digest=config_digest,
      commit=commit,
      versions=versions or {},
    )
    self.index = 0  # of the next turn
    self.hash = GENESIS

  def header(self) -> bytes:
    """The first line of the next segment; to be written before any turn."""
    header = dataclasses.replace(self._header, previous=self.hash)
    self._header = dataclasses.replace(header, segment=header.segment + 1)
    return self._line(header)

  def turn(self, now_ns: int, event: events.Event, asked: Sequence[actions.Action]) -> bytes:
    """The line of the next turn. Raises TapeError for a value that JSON cannot hold."""
    line = self._line(Record(self.index, now_ns, event, tuple(asked)))
    self.index += 1
    return line

  def crash(self, now_ns: int, event: events.Event, error: BaseException) -> bytes:
    """The last line: the event on which the machine raised."""
    return self._line(Crash(self.index, now_ns, event, describe(error)))

  def _line(self, value: Line) -> bytes:
    body = encode(value)[:-1].encode()
    self.hash = _chain(self.hash, body)
    return body + b',"hash":"' + self.hash.encode() + b'"}\n'


def describe(error: BaseException) -> str:
  """The class and the text of an exception."""
  return f'{type(error).__name__}: {error}'


class OtherTape(TapeError, formats.OtherFormat):
  """The tape is of another format."""


class Reader:
  """The turns of a tape, checked line by line: iterate once.

  Attributes:
    header: of the first segment; None if not even the header is whole.
    hash: of the last line read.
    events: turns read, including the crash.
    torn: a kill cut off the last line.
    end: 'exit', 'crash' or 'open' (see the top of this file), of the lines read so far.
  """

  def __init__(self, lines: Iterable[bytes], where: Callable[[], str] | None = None):
    """Reads the header.

    Args:
      lines: of all segments in order, each with its line end.
      where: file and line of the last one taken from `lines`, for errors; by default its number.

    Raises:
      TapeError: here and while iterating, for a damaged or unknown line.
    """
    self._lines = iter(lines)
    self._number = 0
    self._where = where or (lambda: f'line {self._number}')
    self._segments = 0
    self.header: Header | None = None
    self.hash = GENESIS
    self.events = 0
    self.torn = False
    self.end = 'open'
    entry = self._next()
    assert entry is None or entry is self.header

  def __iter__(self) -> Iterator[Record | Crash]:
    while (entry := self._next()) is not None:
      if not isinstance(entry, Header):
        yield entry

  def _next(self) -> Line | None:
    """The next line; None at the end."""
    for line in self._lines:
      self._number += 1
      try:
        entry = self._read(line)
      except TapeError as error:
        raise type(error)(f'{self._where()}: {error}') from None
      if entry is not None:
        return entry
    return None

  def _read(self, line: bytes) -> Line | None:
    if self.torn:
      raise TapeError('a line follows one that was cut off')
    if not line.endswith(b'\n'):
      self.torn = True
      return None
    match = _LINE.fullmatch(line)
    if match is None:
      raise TapeError(f'this is not a line of a tape: {codec.short(line)}')
    body, written = match[1], match[2].decode()
    header = self._header_of(body) if body.startswith(_HEADER) else None
    follows = _chain(header.previous if header else self.hash, body)
    if written != follows:
      raise TapeError(
        f'the hash of the line is {written}, but its text and the line before it give '
        f'{follows}: the line was changed, or one before it is missing'
      )
    self._continue(header)
    self.hash = written
    return header or self._turn_of(body)

  def _header_of(self, body: bytes) -> Header:
    data = _parse(body)
    versions = data.get('versions')
    program = versions.get(PROGRAM) if type(versions) is dict else ''
    if other := formats.refusal('tape', data.get('schema'), 'the tape', program):
      raise OtherTape(f'{other}. It is of commit {codec.short(data.get("commit"))}')
    return decode(Header, data, 'header')

  def _continue(self, header: Header | None) -> None:
    """Raises TapeError unless a header comes exactly where one is due."""
    if header is None:
      if self.header is None:
        raise TapeError('the first line is not a header')
      return
    if header.segment != self._segments:
      raise TapeError(
        f'segment {header.segment} comes where segment {self._segments} is due: read '
        'a tape from its first segment on, all segments in order'
      )
    if header.previous != self.hash:
      raise TapeError(
        f'segment {header.segment} follows the hash {header.previous}, the segment '
        f'before it ends with {self.hash}: lines are missing between them'
      )
    if self.header is not None and encode(header.start) != encode(self.header.start):
      raise TapeError(f'segment {header.segment} is of a machine with another start')
    self._segments += 1
    self.header = self.header or header

  def _turn_of(self, body: bytes) -> Record | Crash:
    turn = decode(Record | Crash, _parse(body), 'turn')
    if turn.index != self.events:
      raise TapeError(f'turn {turn.index} comes where turn {self.events} is due')
    if self.end != 'open':
      raise TapeError(f'turn {turn.index} comes after the end ({self.end})')
    self.events += 1
    if isinstance(turn, Crash):
      self.end = 'crash'
    elif any(isinstance(action, actions.Exit) for action in turn.actions):
      self.end = 'exit'
    return turn


def _parse(body: bytes) -> dict[str, Any]:
  try:
    return safe_json.parse(body + b'}')
  except ValueError as error:
    raise TapeError(f'not JSON: {error}') from None
