"""A real run as a setting of the simulator, and what that predicts for another plan of kills.

Everything that takes time is read from the tapes of a run (tape_times.py): steps and what comes
before them, encodings, adoptions, transfers, outer steps, starts of processes. The simulated world
then draws *stretches* of that run, some seconds long, and whatever happens in one takes the time
that it took in the same stretch of the run. So what happened together stays together: where
learners share cores, slow steps, slow encodings and slow transfers come at the same time. A stretch
is drawn among those with as many learners that train, and that start, as there are now, since a
start takes cores from others.
"""

import collections
import pathlib
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from diloco_jax.protocol import actions, events
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.tape import observers
from diloco_jax.report import book as book_lib
from diloco_jax.verification import random_streams
from diloco_jax.verification.sim import engine as engine_lib
from diloco_jax.verification.sim import network, no_arrays, processes, world
from experiments.goodput import measured, tape_times

STRETCH_NS = 3 * engine_lib.SECOND  # how long the world stays at a stretch of the run, at most
_PATIENCE_NS = 3_600 * engine_lib.SECOND


def drawn_kills(
  config: config_lib.ProtocolConfig, every_s: float, down_s: float, length_ns: int, seed: int
) -> list[tape_times.Kill]:
  """Kills of every learner at random, with this mean time between those of one learner."""
  found = []
  for which in range(config.learners):
    draw = random_streams.random_stream(seed, 'kills', str(which))
    at_s = draw.expovariate(1 / every_s)
    while at_s * engine_lib.SECOND < length_ns:
      at_ns, down_ns = (round(s * engine_lib.SECOND) for s in (at_s, down_s))
      found.append(tape_times.Kill(f'l{which}', at_ns, down_ns))
      at_s += draw.expovariate(1 / every_s)
  return found


class Stretches:
  """Draws stretches of a run."""

  def __init__(self, source: tape_times.Source, draw: random.Random):
    self._source, self._draw = source, draw
    self._spans: dict[tuple[int, int], list[tuple[int, int]]] = collections.defaultdict(list)
    for (at_ns, state), (end_ns, _) in zip(
      source.states, [*source.states[1:], (source.over_ns, None)]
    ):
      end_ns = min(end_ns, source.over_ns)
      if state[1] and end_ns > at_ns:
        self._spans[state].append((at_ns, end_ns))
    self._state: tuple[int, int] | None = None
    self._offset_ns = self._until_ns = 0  # from the world's time to the run's; until when
    self._last: dict[tuple[str, str], int] = {}
    self._known: dict[str, list[str]] = collections.defaultdict(list)  # learners, by kind
    for kind, learner in source.times:
      self._known[kind].append(learner)

  def took(self, now_ns: int, state: tuple[int, int], kind: str, learner: str = '') -> Any:
    """How long this takes now; `state`: how many learners start, and train. That of another learner
    if this one was down then; 0 if it never occurred in the run."""
    if state != self._state or now_ns >= self._until_ns:
      self._move(now_ns, state)
    if kind not in self._known:
      return 0
    found = self._next(now_ns, kind, learner) if learner in self._known[kind] else None
    if found is None or found[0] >= STRETCH_NS:
      nearby = (self._next(now_ns, kind, name) for name in self._known[kind])
      found = min(nearby, key=lambda one: one[0])
    _, place, took, key = found
    self._last[key] = place
    return took

  def _next(self, now_ns: int, kind: str, learner: str) -> tuple[int, int, Any, tuple[str, str]]:
    """How far it is from here, its number, how long it took, and its kind and learner."""
    key = kind, learner
    at_ns = now_ns + self._offset_ns
    return *self._source.times[key].next(at_ns, self._last.get(key, -1), STRETCH_NS), key

  def _move(self, now_ns: int, state: tuple[int, int]) -> None:
    """Goes to another stretch of the run, in this state or the nearest to it."""

    def distance(other: tuple[int, int]) -> tuple[int, int]:
      return abs(other[0] - state[0]), abs(other[1] - state[1])

    spans = self._spans[min(self._spans, key=distance)]
    begin_ns, end_ns = self._draw.choices(spans, [end - begin for begin, end in spans])[0]
    at_ns = self._draw.randrange(begin_ns, end_ns)
    self._state, self._offset_ns = state, at_ns - now_ns
    self._until_ns = now_ns + min(STRETCH_NS, end_ns - at_ns)
    self._last.clear()


class _Learner(processes.Learner):
  """A learner whose work takes the time of a stretch."""

  def work(self, action: actions.Work) -> None:
    match action:
      case actions.Encode():
        self.island.encode_ns = self.world.took('encode', self.learner)
      case actions.Adopt():
        self.island.adopt_ns = self.world.took('adopt', self.learner)
    super().work(action)

  def begin_step(self) -> None:
    self._training = True
    step: tape_times.Step = self.world.took('step' if self.steps else 'first step', self.learner)

    def end() -> None:
      self.post(
        events.StepDone(
          tokens=self.world.source.tokens,
          step_ns=step.step_ns,
          data_ns=step.data_ns,
          saving_ns=step.saving_ns,
        )
      )

    self.island.begin(step.before_ns + step.saving_ns + step.step_ns, end)


class _Syncer(processes.Syncer):
  """A syncer whose work takes the time of a stretch."""

  def takes_ns(self, action: actions.Work) -> int:
    kinds = {actions.Merge: 'merge', actions.ReadFragment: 'read', actions.Save: 'save'}
    return self.world.took(kinds[type(action)]) if type(action) in kinds else 0


class _Link(network.Link):
  """A link on which messages take the time of a stretch."""

  def __init__(self, world: 'World', name: str, draw: random.Random):
    super().__init__(draw)
    self._world, self._name = world, name

  def flight_ns(self, lane: str) -> int:
    return self._world.took(f'control {lane}', self._name)

  def transfer_ns(self, lane: str, payloads: int) -> int:
    if not payloads:
      return 0
    return self._world.took(f'payload {lane}', self._name)


class Turns(observers.Observer):
  """Books the turns of all processes of a simulated world."""

  def __init__(self, book: book_lib.Book):
    self.book = book

  def born(self, now_ns: int, life: observers.ObservedProcess) -> None:
    if life.start.role == 'learner':
      self.book.waits(life.start.node, now_ns)

  def saw(
    self, life: observers.ObservedProcess, now_ns: int, event: events.Event, out: observers.Actions
  ) -> None:
    name = life.start.node
    if type(event) is events.StepDone and event.tokens:
      self.book.stepped(name, now_ns, event.tokens, event.step_ns, event.data_ns, event.saving_ns)
      self.book.waits(name, now_ns)  # until the next step: in this turn, if none is waited for
    for action in out:
      if type(action) is actions.Report:
        self.book.take(name, now_ns, action.fact)
      elif type(action) is actions.Step:
        self.book.trains(name, now_ns)

  def died(self, now_ns: int, life: observers.ObservedProcess, killed: bool) -> None:
    if life.start.role == 'learner':
      self.book.died(life.start.node, now_ns, killed)
    else:
      self.book.syncer_died(now_ns)


class World(world.World):
  """A world in which everything takes the time of a stretch of a run.

  Attributes:
    source: the run.
    book: the account of this world.
  """

  learner_class, syncer_class = _Learner, _Syncer

  def __init__(self, source: tape_times.Source, config: config_lib.ProtocolConfig, seed: int):
    self.source = source
    self.book = book_lib.Book(config.quorum, config.period / config.fragments)
    self._stretches = Stretches(source, random_streams.random_stream(seed, 'moments'))
    self._draw = random_streams.random_stream(seed, 'starts')
    self._starting: set[str] = set()
    # The time of all payloads is that of the run.
    super().__init__(config, seed, (Turns(self.book),), no_arrays.equal(config.fragments))
    for which in range(config.learners):
      self._begin_start(f'l{which}', first=True)

  @property
  def joined(self) -> bool:
    """Whether the run has begun."""
    return any(one.joined_ns is not None for one in self.book.learners.values())

  def plan(self, kills: Iterable[tape_times.Kill]) -> None:
    """Kills learners; the run begins now."""
    for kill in kills:
      self.engine.after(kill.at_ns, lambda kill=kill: self._kill(kill))

  def took(self, kind: str, learner: str = '') -> Any:
    """How long this takes now."""
    training = sum(bool(one.steps) for one in self.learners.values())
    starting = len(self._starting) + len(self.learners) - training
    return self._stretches.took(self.now_ns, (starting, training), kind, learner)

  def link(self, name: str) -> network.Link:
    if name not in self._links:
      self._links[name] = _Link(self, name, random_streams.random_stream(self.seed, 'link', name))
    return self._links[name]

  def _kill(self, kill: tape_times.Kill) -> None:
    if kill.learner in self.learners:
      self.end(self.learners[kill.learner])
      self.engine.after(kill.down_ns, lambda: self._begin_start(kill.learner))

  def _begin_start(self, name: str, first: bool = False) -> None:
    """A process starts: its machine begins after the time of a start in the run."""
    starts = self.source.starts
    again = [start for found in starts.values() for start in found[1:]]
    of_name = starts.get(name) or next(iter(starts.values()))
    phases = of_name[0] if first or not again else self._draw.choice(again)
    at_ns = self.now_ns
    self._starting.add(name)
    self.book.starts(name, at_ns)
    for what, for_ns in phases:
      self.engine.at(at_ns, lambda what=what: self.book.enters(name, self.now_ns, what))
      at_ns += for_ns
    self.engine.at(at_ns, lambda: self._end_start(name, restored=not first))

  def _end_start(self, name: str, restored: bool) -> None:
    self._starting.discard(name)
    if not self.finished:
      self.start(name, restored=restored)


def predict(
  source: tape_times.Source,
  config: config_lib.ProtocolConfig,
  kills: Iterable[tape_times.Kill],
  length_ns: int,
  seed: int = 0,
) -> book_lib.Figures:
  """The figures of a run with this plan of kills, from the times of another run: of the time until
  no learner trains any more, at most `length_ns` after the first one has joined.

  Raises:
    RuntimeError: no learner joins within an hour.
  """
  made = World(source, config, seed)
  made.run(_PATIENCE_NS, done=lambda: made.joined)
  if not made.joined:
    raise RuntimeError(f'no learner has joined:\n{made.stuck()}')
  made.plan(kills)
  made.run(made.now_ns + length_ns, done=lambda: made.book.over)
  return made.book.figures(made.now_ns)


def outcome(workdir: pathlib.Path, source: tape_times.Source) -> book_lib.Figures:
  """The figures of the run itself, until its last inner step."""
  return measured.account(workdir, source.config, source.over_ns).figures(source.over_ns)


def text(columns: Mapping[str, Sequence[book_lib.Figures]]) -> str:
  """The means of figures as a table, in percent."""
  rows = [
    ('goodput, whole time', lambda one: one.training),
    ('goodput since joined', lambda one: one.training_since_joined),
    ('token goodput', lambda one: one.token),
    ('merged of the trained', lambda one: one.merged),
    ('uptime', lambda one: one.uptime),
    ('without long gaps', lambda one: one.system_uptime),
  ]
  width = max(map(len, columns)) + 2
  lines = [' ' * 22 + ''.join(name.rjust(width) for name in columns)]
  for what, share in rows:
    cells = (f'{100 * statistics.fmean(map(share, found)):.1f}' for found in columns.values())
    lines.append(what.ljust(22) + ''.join(cell.rjust(width) for cell in cells))
  return '\n'.join(lines)
