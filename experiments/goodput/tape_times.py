"""How long everything took in a real run, read from its tapes and records."""

import bisect
import collections
import dataclasses
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from diloco_jax.protocol import actions, events, ids, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import facts as protocol_facts
from diloco_jax.protocol.tape import observers
from diloco_jax.report import book as book_lib
from diloco_jax.report import facts
from diloco_jax.verification.checks import judge_tapes
from experiments.goodput import measured


class Kill(NamedTuple):
  """A learner's process is killed, `at_ns` after the run has begun (the first learner has joined),
  and the next one starts `down_ns` later."""

  learner: str
  at_ns: int
  down_ns: int


class Step(NamedTuple):
  """A step as the learner's machine sees it: from asking for it to its report."""

  before_ns: int  # for other work and for the machine
  saving_ns: int
  step_ns: int
  data_ns: int


class Times:
  """How long something took, by the time at which it was asked for."""

  def __init__(self):
    self._at_ns: list[int] = []
    self._took: list[Any] = []

  def __len__(self) -> int:
    return len(self._at_ns)

  def add(self, at_ns: int, took: Any) -> None:
    """Adds one; they come nearly in the order of time."""
    place = bisect.bisect_right(self._at_ns, at_ns)
    self._at_ns.insert(place, at_ns)
    self._took.insert(place, took)

  def next(self, at_ns: int, last: int, within_ns: int) -> tuple[int, int, Any]:
    """The next one from a time on, after number `last` if that is not later than `within_ns`: how
    far it is from that time, its number, and how long it took."""
    place = bisect.bisect_left(self._at_ns, at_ns)
    following = last + 1
    if place < following < len(self) and self._at_ns[following] < at_ns + within_ns:
      place = following
    place = min(place, len(self) - 1)
    return abs(self._at_ns[place] - at_ns), place, self._took[place]


@dataclasses.dataclass
class Source:
  """What a run has told.

  Attributes:
    config: of its machines.
    joined_ns, over_ns: when the first learner joined, and the end of the last inner step.
    tokens: of an inner step.
    times: how long everything took, by kind and learner ('' for the syncer).
    starts: of each learner, of its processes in order: (what it does, for how long) until the first
      turn of its machine.
    kills: of learners, after `joined_ns`.
    states: the number of learners that start and that train, from a time on.
  """

  config: config_lib.ProtocolConfig
  joined_ns: int
  over_ns: int
  tokens: int
  times: dict[tuple[str, str], Times]
  starts: dict[str, list[list[tuple[str, int]]]]
  kills: list[Kill]
  states: list[tuple[int, tuple[int, int]]]

  @property
  def length_ns(self) -> int:
    """From its beginning to the last inner step."""
    return self.over_ns - self.joined_ns


def read(workdir: pathlib.Path) -> Source:
  """Reads the tapes and records of a run that its supervisor has started.

  Raises:
    ValueError: the folder has no tapes, no learner has trained, or no supervisor told of its start.
    TapeError: a tape is damaged.
  """
  found = measured.node_tapes(workdir)
  reading = _Reading()
  for _, life, turn, _ in judge_tapes.in_order(found):
    reading.take(life, turn.now_ns, turn.event, getattr(turn, 'actions', ()))
  lives = _lives(measured.facts_of(workdir, facts.Process, facts.Exit, facts.Startup))
  if not reading.over_ns or not lives:
    raise ValueError(
      f'{workdir} tells too little: it needs tapes and records of a supervised run whose learners '
      'have trained'
    )
  return Source(
    config=found[0].start.config,
    joined_ns=reading.joined_ns,
    over_ns=reading.over_ns,
    tokens=reading.tokens,
    times=dict(reading.times),
    starts=_starts(lives, reading.first_turns),
    kills=_kills(lives, reading.joined_ns),
    states=_states(lives, reading.first_steps),
  )


# --- Starts and ends ------------------------------------------------------------------------------


@dataclasses.dataclass
class _Life:
  """A process of a learner; `phases`: what its start is busy with, from when on."""

  learner: str
  started_ns: int
  phases: list[tuple[int, str]]
  ended_ns: int | None = None
  killed: bool = False

  def first(self, times_ns: list[int]) -> int | None:
    """The first of these times in its life."""
    end_ns = self.ended_ns or times_ns[-1]
    return next((ns for ns in times_ns if self.started_ns <= ns <= end_ns), None)


def _lives(rows: Iterable[tuple[int, str, Any]]) -> list[_Life]:
  """All processes of learners, in the order of their starts, from the facts of the records."""
  found: list[_Life] = []
  present: dict[str, _Life] = {}
  for at_ns, who, fact in rows:
    match fact:
      case facts.Process(child=name, state='starting') if name not in ids.NO_LEARNERS:
        present[name] = _Life(name, at_ns, [(at_ns, book_lib.INIT)])
        found.append(present[name])
      case facts.Startup(phase=phase) if who in present and phase in book_lib.PHASES:
        present[who].phases.append((at_ns, book_lib.PHASES[phase]))
      case facts.Exit(child=name, code=code) if name in present:
        present[name].ended_ns, present[name].killed = at_ns, code < 0
  return found


def _starts(
  lives: list[_Life], first_turns: dict[str, list[int]]
) -> dict[str, list[list[tuple[str, int]]]]:
  """Of every process with a turn: what its start is busy with, and for how long. The first ones
  last until the syncer has its first turn, too."""
  starts = collections.defaultdict(list)
  for life in lives:
    turn_ns = life.first(first_turns[life.learner]) if first_turns[life.learner] else None
    if turn_ns is not None:
      if not starts[life.learner]:
        turn_ns = max(turn_ns, first_turns[''][0])
      ends = [*(at_ns for at_ns, _ in life.phases[1:]), turn_ns]
      starts[life.learner].append(
        [(what, end_ns - at_ns) for (at_ns, what), end_ns in zip(life.phases, ends)]
      )
  return dict(starts)


def _kills(lives: list[_Life], joined_ns: int) -> list[Kill]:
  """The kills after `joined_ns` after which a learner has started again."""
  found = []
  for place, life in enumerate(lives):
    again = next((one for one in lives[place + 1 :] if one.learner == life.learner), None)
    if life.killed and life.ended_ns >= joined_ns and again is not None:
      down_ns = again.started_ns - life.ended_ns
      found.append(Kill(life.learner, life.ended_ns - joined_ns, down_ns))
  return found


def _states(
  lives: list[_Life], first_steps: dict[str, list[int]]
) -> list[tuple[int, tuple[int, int]]]:
  """From each time on: how many learners start, how many train."""
  changes = []
  for life in lives:
    changes.append((life.started_ns, 1, 0))
    steps = first_steps.get(life.learner)
    step_ns = life.first(steps) if steps else None
    if step_ns is not None:
      changes.append((step_ns, -1, 1))
    if life.ended_ns is not None:
      changes.append((life.ended_ns, *((0, -1) if step_ns is not None else (-1, 0))))
  starting = training = 0
  found = []
  for at_ns, more_start, more_train in sorted(changes):
    starting, training = starting + more_start, training + more_train
    found.append((at_ns, (starting, training)))
  return found


# --- How long everything took ---------------------------------------------------------------------

_LANES = {
  messages.Contribution: 'payload',
  messages.Publish: 'payload',
}


def _lane(message: messages.Message) -> str:
  return _LANES.get(type(message), 'control')


class _Reading:
  """Collects how long everything took, turn by turn."""

  def __init__(self):
    self.times: dict[tuple[str, str], Times] = collections.defaultdict(Times)
    # By learner ('' for the syncer), of each process.
    self.first_turns: dict[str, list[int]] = collections.defaultdict(list)
    self.first_steps: dict[str, list[int]] = collections.defaultdict(list)
    self.tokens = self.joined_ns = self.over_ns = 0
    self._learner_of: dict[int, str] = {}  # by process
    self._stepped: set[int] = set()  # processes
    self._steps: dict[int, int] = {}  # by process: when its step was asked for
    # Work in progress, first in, first out, by process and lane: when it was asked for. When the
    # lane was free again.
    self._work: dict[tuple[int, str], collections.deque[int]] = collections.defaultdict(
      collections.deque
    )
    self._free_ns: dict[Any, int] = collections.defaultdict(int)
    # Sessions: (process, session) of a learner by that of the syncer, and back.
    self._joined: dict[int, tuple[int, int]] = {}  # by nonce
    self._learners: dict[int, tuple[int, int]] = {}
    self._sessions: dict[tuple[int, int], int] = {}
    self._sent: dict[tuple, collections.deque] = collections.defaultdict(collections.deque)
    self._flight_ns: dict[tuple[Any, str], int] = collections.defaultdict(int)

  def take(
    self,
    life: observers.ObservedProcess,
    now_ns: int,
    event: events.Event,
    out: observers.Actions,
  ) -> None:
    """Takes a turn of a process, in the order of time."""
    learner = life.start.identity.learner if life.start.role == 'learner' else ''
    process = life.number
    if process not in self._learner_of:
      self._learner_of[process] = learner
      self.first_turns[learner].append(now_ns)
    match event:
      case events.Received(session=session, message=message):
        self._received(learner, process, session, message, now_ns)
      case events.StepDone(tokens=tokens) if tokens:
        self._step_done(learner, process, now_ns, event)
      case events.Encoded():
        self._done('encode', learner, (process, 'egress'), now_ns)
      case events.AdoptDone():
        self._done('adopt', learner, (process, 'egress'), now_ns)
      case events.MergeDone():
        self._done('merge', learner, (process, 'work'), now_ns)
      case events.FragmentRead():
        self._done('read', learner, (process, 'work'), now_ns)
      case events.SaveDone() if not learner:
        self._done('save', learner, (process, 'work'), now_ns)
    for action in out:
      self._asked(learner, process, now_ns, action)

  def _asked(self, learner: str, process: int, now_ns: int, action: actions.Action) -> None:
    match action:
      case actions.Step():
        self._steps[process] = now_ns
      case actions.Encode() | actions.Adopt():
        self._work[process, 'egress'].append(now_ns)
      case actions.Merge() | actions.ReadFragment():
        self._work[process, 'work'].append(now_ns)
      case actions.Save() if not learner:
        self._work[process, 'work'].append(now_ns)
      case actions.Report(fact=protocol_facts.State(state='joined')):
        self.joined_ns = self.joined_ns or now_ns
      case actions.Send(session=session, message=message):
        end = self._learners.get(session) if not learner else (process, session)
        if isinstance(message, messages.Join):
          self._joined[message.nonce] = process, session
        lane = _lane(message)
        self._sent[end, 'up' if learner else 'down', lane].append((now_ns, message))

  def _step_done(self, learner: str, process: int, now_ns: int, done: events.StepDone) -> None:
    asked_ns = self._steps.pop(process)
    before_ns = max(0, now_ns - asked_ns - done.step_ns - done.saving_ns)
    self.tokens, self.over_ns = done.tokens, now_ns
    kind = 'step'
    if process not in self._stepped:
      kind = 'first step'
      self._stepped.add(process)
      self.first_steps[learner].append(asked_ns)
    self.times[kind, learner].add(
      asked_ns, Step(before_ns, done.saving_ns, done.step_ns, done.data_ns)
    )

  def _done(self, kind: str, learner: str, lane: tuple[int, str], now_ns: int) -> None:
    asked_ns = self._work[lane].popleft()
    self.times[kind, learner].add(asked_ns, now_ns - max(asked_ns, self._free_ns[lane]))
    self._free_ns[lane] = now_ns

  def _received(
    self, receiver: str, process: int, session: int, message: messages.Message, now_ns: int
  ) -> None:
    if isinstance(message, messages.Join):
      if message.nonce not in self._joined:
        raise ValueError('a learner has joined whose tape is not here: the times need all tapes')
      self._learners[session] = self._joined[message.nonce]
    end = (process, session) if receiver else self._learners.get(session)
    way, lane = 'down' if receiver else 'up', _lane(message)
    sent = self._sent[end, way, lane]
    while sent:
      sent_ns, found = sent.popleft()
      if found == message:
        break
    else:
      return  # of a session that no Join has named
    if lane == 'control':
      took_ns = self._flight_ns[end, way] = now_ns - sent_ns
    else:
      free_ns = max(sent_ns + self._flight_ns[end, way], self._free_ns[end, way, lane])
      took_ns = max(0, now_ns - free_ns)
      self._free_ns[end, way, lane] = now_ns
    self.times[f'{lane} {way}', receiver or self._learner_of[end[0]]].add(sent_ns, took_ns)
