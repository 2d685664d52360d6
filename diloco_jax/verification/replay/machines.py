"""Replay: the machine of a tape, made again and fed the same events, must ask for the same actions.

The first turn in which it does not is a `Divergence`, which says what was recorded and what was
replayed, and shows the turns before it.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable

from diloco_jax.protocol import actions
from diloco_jax.protocol.tape import codec
from diloco_jax.protocol.tape import tape as tape_lib

CONTEXT = 5  # turns that a divergence shows before it
SHOWN_CHARS = codec.SHOWN_CHARS


@dataclasses.dataclass(frozen=True, slots=True)
class Divergence:
  """The first turn in which the replayed machine differs from the tape.

  `replayed` are the actions of the replayed machine, or the exception that it raised.
  """

  turn: tape_lib.Record | tape_lib.Crash
  replayed: tuple[actions.Action, ...] | Exception
  before: tuple[tape_lib.Record | tape_lib.Crash, ...]

  def text(self) -> str:
    """Several lines for people: the turns before, the event, and the differing actions."""
    turn = self.turn
    lines = [_turn_text(earlier) for earlier in self.before]
    lines += [
      f'turn {turn.index} at {turn.now_ns} ns',
      f'  event     {_cut(tape_lib.encode(turn.event))}',
    ]
    was, now = _answer(turn), _answer(self.replayed)
    for index in range(max(len(was), len(now))):
      a = was[index] if index < len(was) else 'nothing'
      b = now[index] if index < len(now) else 'nothing'
      if a == b:
        lines.append(f'  both      {_cut(a)}')
      else:
        unlike = (i for i, (x, y) in enumerate(zip(a, b)) if x != y)
        start = next(unlike, min(len(a), len(b)))
        lines += [f'  recorded  {_cut(a, start)}', f'  replayed  {_cut(b, start)}']
    return '\n'.join(lines)


@dataclasses.dataclass(frozen=True, slots=True)
class Replay:
  """The result of a replay: `divergence` is None if every turn was the same.

  `header` is None if not even the header of the tape is whole. `crash` is the exception of a
  machine that crashed as recorded, with its traceback.
  """

  header: tape_lib.Header | None
  events: int
  hash: str
  end: str
  torn: bool
  divergence: Divergence | None = None
  crash: Exception | None = None

  @property
  def identical(self) -> bool:
    return self.divergence is None

  def text(self) -> str:
    """One line without a divergence, else the first divergence with the turns before it."""
    if self.header is None:
      return 'nothing to replay: the process was killed before its first turn, or the tape is empty'
    if self.divergence is not None:
      return f'diverges at turn {self.divergence.turn.index}:\n{self.divergence.text()}'
    notes = {'exit': '', 'crash': ', crashes as recorded', 'open': ', no exit (killed or running)'}
    torn = ', the last line was cut off' if self.torn else ''
    return f'identical: {self.events} events, hash {self.hash}{notes[self.end]}{torn}'


def replay(lines: Iterable[bytes], where: Callable[[], str] | None = None) -> Replay:
  """Makes the machine of a tape again, feeds it the events and compares its actions.

  Args:
    lines: of all segments in order, each with its line end.
    where: file and line of the last one taken from `lines`, for errors.

  Raises:
    TapeError: the tape is damaged, or of a version that this code cannot read.
  """
  reader = tape_lib.Reader(lines, where)
  divergence = crash = None
  if reader.header is not None:
    machine = _make(reader.header.start)
    before: collections.deque[tape_lib.Record | tape_lib.Crash] = collections.deque(maxlen=CONTEXT)
    for turn in reader:
      replayed = _take(machine, turn)
      if not _same(turn, replayed):
        divergence = Divergence(turn, replayed, tuple(before))
        break
      crash = replayed if isinstance(replayed, Exception) else None
      before.append(turn)
  return Replay(
    reader.header, reader.events, reader.hash, reader.end, reader.torn, divergence, crash
  )


def _make(start: tape_lib.Start) -> tape_lib.Machine:
  try:
    return start.make()
  except Exception as error:
    raise tape_lib.TapeError(
      f'no machine can be made of the header: {tape_lib.describe(error)}'
    ) from error


def _take(
  machine: tape_lib.Machine, turn: tape_lib.Record | tape_lib.Crash
) -> tuple[actions.Action, ...] | Exception:
  try:
    return tuple(machine.handle(turn.now_ns, turn.event))
  except Exception as error:  # any exception of the machine is a result here
    return error


def _same(
  turn: tape_lib.Record | tape_lib.Crash, replayed: tuple[actions.Action, ...] | Exception
) -> bool:
  """Compares every character of actions; of a crash only the class, since texts differ between
  Pythons."""
  if isinstance(turn, tape_lib.Crash):
    return type(replayed).__name__ == turn.error.split(':')[0]
  return isinstance(replayed, tuple) and tape_lib.encode(turn.actions) == tape_lib.encode(replayed)


def _answer(answer: tape_lib.Record | tape_lib.Crash | tuple | Exception) -> list[str]:
  """The text of every action, or of the exception."""
  match answer:
    case tape_lib.Record(actions=answers):
      return [tape_lib.encode(action) for action in answers]
    case tape_lib.Crash(error=error):
      return [f'raised {error}']
    case Exception():
      return [f'raised {tape_lib.describe(answer)}']
  return [tape_lib.encode(action) for action in answer]


def _turn_text(turn: tape_lib.Record | tape_lib.Crash) -> str:
  kinds = [type(action).__name__ for action in getattr(turn, 'actions', ())]
  return (
    f'turn {turn.index} at {turn.now_ns} ns  {_cut(tape_lib.encode(turn.event))} -> '
    f'{", ".join(kinds) or "nothing"}'
  )


def _cut(text: str, around: int = 0) -> str:
  """At most `SHOWN_CHARS` characters of a text, around a position."""
  begin = max(0, around - SHOWN_CHARS // 2) if len(text) > SHOWN_CHARS else 0
  end = begin + SHOWN_CHARS
  return ('...' if begin else '') + text[begin:end] + ('...' if end < len(text) else '')
