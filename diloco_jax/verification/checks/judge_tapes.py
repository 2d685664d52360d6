"""Judges a run of real processes from their tapes, after its end.

Every process of a run wrote a tape (protocol/tape/tape.py): each event of its machine, its time,
and the actions that the machine asked for. All processes of one host share one monotonic clock, and
a turn is on the tape before its actions are carried out. So in the order of the times of all turns
no message is received before it was sent. The judge shows the turns in this order to the invariants
that watch the simulated world live (checkers.py); they never ask a machine.

The judge knows the tapes, which processes were killed (their tapes have no Exit), and when the last
injected fault ended. It also finds a crash of a machine: the tape ends with it.

A full disk ends a tape and not its process. The judge notices that of a syncer by what the syncer
did later, reads no further and says so: what is on no tape is neither right nor a violation.
"""

import collections
import dataclasses
import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from diloco_jax.protocol import actions
from diloco_jax.protocol.tape import observers
from diloco_jax.protocol.tape import tape as tape_lib
from diloco_jax.verification.checks import checkers as checkers_lib
from diloco_jax.verification.checks.books import run as run_book
from diloco_jax.verification.checks.invariants import invariant

SHOWN_TURNS = 50
SHOWN_CHARACTERS = 200
NO_CRASH = 'C'
NO_CRASH_SENTENCE = 'No machine raises an exception.'


@dataclasses.dataclass(frozen=True, slots=True)
class Tape:
  """The tape of one process: a name to print, its start, its turns."""

  name: str
  start: tape_lib.Start
  turns: Iterable[tape_lib.Record | tape_lib.Crash]


@dataclasses.dataclass(frozen=True, slots=True)
class Broken:
  """The first violation: the invariant, the contradicting values, the tape, and the turns
  before."""

  id: str
  sentence: str
  detail: str
  node_tape: str
  before: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
  """The result for all tapes: how much was read, and what did not hold. `unread`: why the turns
  after these could not be judged."""

  tapes: int
  turns: int
  broken: Broken | None
  unread: str = ''

  def text(self) -> str:
    """The verdict in text."""
    lines = [f'The judge read {self.turns} turns on {self.tapes} tapes.']
    if self.broken is None:
      many = len(checkers_lib.INVARIANTS)
      lines.append(f'All {many} invariants held, those of the end of a run if it came to its end.')
      if self.unread:
        lines.append(
          f'Only up to here: a tape of the syncer ended before its process, or is missing '
          f'({self.unread}). What the run did later is not judged.'
        )
      return '\n'.join(lines)
    lines += [
      f'VIOLATION of {self.broken.id}: {self.broken.sentence}',
      f'  seen on {self.broken.node_tape}: {self.broken.detail}',
      f'The last {len(self.broken.before)} turns of all processes:',
    ]
    return '\n'.join([*lines, *(f'  {line}' for line in self.broken.before)])


def judge(node_tapes: Sequence[Tape], healed_ns: int | None = None) -> Verdict:
  """Reads all tapes of a run to the first violation or to the end.

  Args:
    node_tapes: of every process of every node, in any order.
    healed_ns: when the last injected fault ended; None: liveness is not checked.

  Raises:
    ValueError: `node_tapes` is empty.
    tape.TapeError: one of them is damaged.
  """
  if not node_tapes:
    raise ValueError(
      'there are no tapes to judge: the run wrote none, or wrote them to another folder'
    )
  return _Reading(node_tapes, healed_ns).run()


class _Reading:
  """One reading of the tapes of a run."""

  def __init__(self, node_tapes: Sequence[Tape], healed_ns: int | None):
    self._node_tapes = node_tapes
    self._healed_ns = healed_ns
    self._checkers = checkers_lib.Checkers(node_tapes[0].start.config)
    self._before: collections.deque = collections.deque(maxlen=SHOWN_TURNS)
    self._turns = 0

  def run(self) -> Verdict:
    broken, node_tape, now_ns, unread = None, None, 0, ''
    try:
      for node_tape, process, turn, last in in_order(self._node_tapes):
        now_ns = turn.now_ns
        self._take(node_tape, process, turn, last)
      node_tape = None
      self._checkers.finished(now_ns)
    except checkers_lib.Violation as error:
      broken = self._broken(node_tape, error.invariant, error.sentence, error.detail)
    except run_book.TapeMissing as error:
      unread = str(error)
    except _Crashed as error:
      broken = self._broken(node_tape, NO_CRASH, NO_CRASH_SENTENCE, str(error))
    except (LookupError, AttributeError, TypeError) as error:
      # A message that no process sent, or a payload that does not exist: the books have no entry.
      broken = self._broken(
        node_tape, 'model', 'Every turn follows from earlier turns.', tape_lib.describe(error)
      )
    return Verdict(len(self._node_tapes), self._turns, broken, unread)

  def _take(
    self,
    node_tape: Tape,
    process: observers.ObservedProcess,
    turn: tape_lib.Record | tape_lib.Crash,
    last: bool,
  ) -> None:
    if self._healed_ns is not None and turn.now_ns >= self._healed_ns:
      self._checkers.healed(self._healed_ns)
      self._healed_ns = None
    self._before.append((node_tape.name, turn))
    self._turns += 1
    if turn.index == 0:
      self._checkers.born(turn.now_ns, process)
    if isinstance(turn, tape_lib.Crash):
      raise _Crashed(turn.error)
    if node_tape.start.role == invariant.LEARNER:
      self._checkers.run.heard(turn.event)
    self._checkers.saw(process, turn.now_ns, turn.event, turn.actions)
    if last:
      ended = any(isinstance(action, actions.Exit) for action in turn.actions)
      self._checkers.died(turn.now_ns, process, not ended)

  def _broken(self, node_tape: Tape | None, id_: str, sentence: str, detail: str) -> Broken:
    name = 'all tapes together' if node_tape is None else node_tape.name
    began_ns = self._before[0][1].now_ns if self._before else 0
    before = tuple(_describe_turn(node, turn, began_ns) for node, turn in self._before)
    return Broken(id_, sentence, detail, name, before)


def in_order(
  node_tapes: Sequence[Tape],
) -> Iterator[tuple[Tape, observers.ObservedProcess, tape_lib.Record | tape_lib.Crash, bool]]:
  """(tape, process, turn, whether it is the last of its tape) of all tapes, in order of time."""
  begun = []
  for node_tape in node_tapes:
    turns = iter(node_tape.turns)
    first = next(turns, None)
    if first is not None:  # else it was killed before its first turn
      begun.append((first.now_ns, node_tape, first, turns))
  begun.sort(key=lambda start: start[0])
  ordered = [
    _with_last_mark(node_tape, observers.ObservedProcess(number, node_tape.start), first, turns)
    for number, (_, node_tape, first, turns) in enumerate(begun, 1)
  ]
  return heapq.merge(*ordered, key=lambda turn: (turn[2].now_ns, turn[1].number))


class _Crashed(Exception):
  """A machine raised in a turn."""


def _with_last_mark(
  node_tape: Tape, process: observers.ObservedProcess, first: Any, turns: Iterator
) -> Iterator[tuple]:
  """The turns of a tape; the last one is marked as such."""
  turn = first
  for following in turns:
    yield node_tape, process, turn, False
    turn = following
  yield node_tape, process, turn, True


def _describe_turn(node: str, turn: tape_lib.Record | tape_lib.Crash, began_ns: int) -> str:
  """A turn in a line: time in ms since the first one shown, node, event, actions."""
  asked = [_cut(action) for action in getattr(turn, 'actions', ())]
  return (
    f'{(turn.now_ns - began_ns) / 1e6:9.3f} ms {node} turn {turn.index}: {_cut(turn.event)} '
    f'-> {"; ".join(asked) or "nothing"}'
  )


def _cut(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= SHOWN_CHARACTERS else f'{text[:SHOWN_CHARACTERS]}...'
