"""A member that lies: a world of two honest learners and one hostile one, and what must hold in it.

The machines are the production ones. The hostile learner, `x`, is a production learner with a
process that changes what it sends: a *lie* changes a field in every message of its kind from then
on, a *word* is one message more. So its words are plausible but for what a test makes wrong. A
process without an id, the *stranger*, says words on a session of its own.

The world notices by itself a machine that raises, a broken `check()`, a token that is merged twice,
and an honest payload that screening refuses (diloco_jax/verification/sim). `Judge` notices the
rest.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from diloco_jax.protocol import actions, events, facts, messages
from diloco_jax.protocol.learner import machine as learner_machine
from diloco_jax.protocol.syncer import screening
from diloco_jax.protocol.tape import observers, tape
from diloco_jax.verification.sim import arrays, engine, processes
from diloco_jax.verification.sim import world as world_lib
from tests.protocol import transcript

MS = engine.MS
HONEST, LIAR = ('l0', 'l1'), 'x'
STEP_MS = 100  # of an honest learner
FAIR_MS = 60
MOST = 2**63 - 1  # the largest count on the wire
FASTER = 16  # than the liar's true steps: what its clock may claim (syncer/pace.py)


class Lie(NamedTuple):
  """How a field is changed: 'set' it to a number, or 'add' one to its true value."""

  how: str
  number: int

  def of(self, true: Any) -> Any:
    if isinstance(true, bool):
      return bool(self.number % 2)
    if self.how == 'add':
      return min(MOST, max(0, (true or 0) + self.number))
    return self.number


@dataclasses.dataclass(frozen=True, slots=True)
class Forged(arrays.Gradient):
  """The bytes of a hostile payload. They mean what its message says; `spoiled` is its norm."""

  @property
  def norm(self) -> int:
    return int(self.spoiled)


def config(quorum: int, **settings: Any) -> Any:
  return transcript.protocol_config(
    **{
      'learners': 2,
      'shards': 4,
      'quorum': quorum,
      'fragments': 2,
      'period': 4,
      'overlap': 2,
      'norm_warmup': 2,
      'total_steps': 1_000_000,
      **settings,
    }
  )


# --- The hostile processes ------------------------------------------------------------------------


class Liar(processes.Learner):
  """A learner that lies. `lies`: by message class and field, or by 'norm' for its payloads."""

  lies: dict[tuple[type, str], Lie]
  norm: int | None  # of its payloads, in screening.UNIT; None: that of an honest learner
  quick = False  # it answers a pull at once, without waiting for the end of its step

  def __init__(self, *how: Any):
    super().__init__(*how)
    # By class: the word that it says after its next message of that class.
    self.follow: dict[type, Callable[[], Any]] = {}
    self.offer: messages.Offer | None = None  # the newest

  def _perform(self, action: Any) -> None:
    if isinstance(action, actions.Send):
      self.say(action.session, self._changed(action.message), self.contents.get(action.payload_id))
    else:
      super()._perform(action)

  def _handle(self, event: Any) -> None:
    """Its own machine may raise on the answers to its lies; then its process ends."""
    if not self.alive:
      return
    match event:
      case events.Received(session=session, message=messages.Pull() as pull) if self.quick:
        if self._answer(session, pull):
          return
      case events.Received(message=messages.Offer() as offer):
        self.offer = offer
    try:
      super()._handle(event)
    except (processes.MachineCrash, AssertionError, KeyError):
      self.contents.clear()
      if self.alive:
        self.world.end(self)

  def _answer(self, session: int, pull: messages.Pull) -> bool:
    """Answers a pull with its steps so far; False: it has none."""
    self.machine._pulls.add(pull)
    word = self.true_word(messages.Contribution)
    if word.steps:
      self.say(session, self._changed(word))
    return bool(word.steps)

  def _changed(self, message: Any) -> Any:
    changes = {
      field: lie.of(getattr(message, field))
      for (cls, field), lie in self.lies.items()
      if isinstance(message, cls)
    }
    return dataclasses.replace(message, **changes)

  def say(self, session: int, message: Any, content: Any = None) -> None:
    """Sends a message, with bytes that mean what it says."""
    if isinstance(message, messages.Contribution):
      content = self._forge(message, content)
    self.world.network.send(self, session, message, content)
    following = self.follow.pop(type(message), None)
    if following is not None:
      self.say(session, following())

  def _forge(self, message: messages.Contribution, content: Any) -> Forged:
    norm = self.norm if self.norm is not None else content.norm if content else screening.UNIT
    return Forged(
      self.learner,
      self.nonce,
      message.tokens_from,
      message.tokens_to,
      message.steps,
      spoiled=str(norm),
      narrow=message.narrow,
    )

  def true_word(self, cls: type) -> Any:
    """The message of a class that an honest learner might send now."""
    machine, pulls = self.machine, self.machine._pulls._waiting
    fragment = max(pulls, key=pulls.get, default=0)
    anchor, position = machine._anchors[fragment], machine._position
    shard, cursor = position or (0, 0)
    values = {
      'protocol': messages.PROTOCOL_VERSION,
      'learner': self.learner,
      'nonce': self.nonce,
      'agreement': world_lib.AGREEMENT,
      'host': 'host',
      'pid': 1,
      'run': self.offer.run if self.offer else '',
      'incarnation': self.offer.incarnation if self.offer else 0,
      'clock': machine.clock,
      'steps': machine.steps,
      'tokens': machine.tokens,
      'step_ns': self.island.step_ns,
      'loss': 2.5,
      'finished': False,
      'held': tuple(messages.Held(version=a.version, digest=a.digest) for a in machine._anchors),
      'shard': shard,
      'cursor': cursor,
      'sync': pulls.get(fragment, 0),
      'fragment': fragment,
      'version': anchor.version,
      'tokens_from': anchor.tokens,
      'tokens_to': machine.tokens,
      'narrow': (narrow := machine._pulls.narrow.get(fragment, False)),
      'payload': arrays.NARROW_PAYLOAD if narrow else arrays.PAYLOAD,
      'reason': messages.Reason.BAD_VALUE,
      'matched': True,
      'versions': tuple(a.version for a in machine._anchors),
    }
    if cls is messages.Contribution:
      values['steps'] = machine.steps - anchor.steps
    return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls)})


class Stranger:
  """A process without a machine: it dials, says a word, and hears nothing."""

  alive, frozen, name = True, False, 'stranger'

  def __init__(self, world: 'World'):
    self._world = world
    self._numbers = itertools.count(1)

  def post(self, event: Any, content: Any = None) -> None:
    pass

  def say(self, *words: Any) -> None:
    """Says these words on a new session."""
    number, world = next(self._numbers), self._world
    world.network.dial(self, world.link(self.name), number)
    world.run(world.now_ns + 20 * MS)
    for word in words:
      content = 'bytes' if getattr(word, 'payload', None) else None
      world.network.send(self, number, word, content)
    world.run(world.now_ns + 20 * MS)


# --- What must hold -------------------------------------------------------------------------------


class Violation(AssertionError):
  """A promise to the honest learners is broken."""


def claim(holds: bool, sentence: str, *detail: Any) -> None:
  if not holds:
    raise Violation(f'{sentence} {" ".join(map(str, detail))}')


class Judge(observers.Observer):
  """Watches the turns of the syncer for what hostile words did to the honest learners."""

  def __init__(self):
    self.world: World | None = None
    self.steps: dict[str, int] = dict.fromkeys(HONEST, 0)
    self.merges: list[tuple[str, ...]] = []  # the participants of each outer step
    self._participants: dict[int, tuple[actions.Participant, ...]] = {}  # by sync

  def crashed(self, life: Any, now_ns: int, event: Any, error: Exception) -> None:
    pass  # the process raises

  def saw(
    self, life: observers.ObservedProcess, now_ns: int, event: events.Event, out: observers.Actions
  ) -> None:
    node = life.start.node
    if node in HONEST:
      self.steps[node] += isinstance(event, events.StepDone)
      for action in out:
        claim(not isinstance(action, actions.Exit), 'An honest learner trains on.', node, action)
    elif node == 'syncer':
      self._syncer(event, out)

  def _syncer(self, event: events.Event, out: observers.Actions) -> None:
    if isinstance(event, events.Disconnected):
      self._left_alone(event.session, event)
    if isinstance(event, events.MergeDone):
      self._merged(event)
    for action in out:
      match action:
        case actions.Close(session=session):
          self._left_alone(session, action)
        case actions.Send(session=session, message=messages.Refused() | messages.Finish()):
          self._left_alone(session, action)
        case actions.Merge():
          self._participants[action.sync] = action.participants
        case actions.Report(fact=facts.Merging() as fact):
          self._merging(fact)
        case actions.Exit():
          claim(False, 'The syncer serves on.', action)

  def _left_alone(self, session: int, what: Any) -> None:
    found = self.world.network._sessions.get((self.world.syncer, session))
    name = found and found.learner.name
    claim(name not in HONEST, 'An honest session stays.', name, what)

  def _merging(self, fact: facts.Merging) -> None:
    most_ns = 4 * self.world.config.overlap * STEP_MS * MS
    claim(fact.grace_ns <= most_ns, 'A grace window is short.', fact)
    self.merges.append(fact.participants)

  def _merged(self, done: events.MergeDone) -> None:
    """A merged payload of the liar is no longer than an honest one of as many steps could be."""
    participants = self._participants.pop(done.sync)
    if self.world.syncer.theta.versions[done.fragment] <= 2 * self.world.config.norm_warmup:
      return
    for one, norm in zip(participants, done.norms):
      if one.learner == LIAR and one.learner not in done.refused:
        # An honest learner makes at most these steps in the time that the world is old.
        steps = self.world.now_ns // (self.world.liar.island.step_ns)
        most = 8 * screening.UNIT * self.world.config.norm_factor * (steps + 1)
        claim(norm <= most, 'Norms are limited.', one, norm / screening.UNIT)


class World(world_lib.World):
  """Two honest learners and the liar, all of them training."""

  def __init__(self, quorum: int, liar_step_ms: int = STEP_MS, **settings: Any):
    self.judge = Judge()
    self.judge.world = self
    self.broken = False  # a promise is broken, and the world may be half-way through an event
    super().__init__(config(quorum, **settings), watchers=[self.judge])
    for name, offset in zip(HONEST, (0, 30)):
      self.start(name).island.step_ns = (STEP_MS + offset // 10) * MS
    self.island(LIAR).step_ns = liar_step_ms * MS
    self.run(1_200 * MS)
    self.lies: dict[tuple[type, str], Lie] = {}
    self.norm: int | None = None
    self.quick = False
    self.start_liar()
    self.stranger = Stranger(self)
    self.run(self.now_ns + 400 * MS)
    for name in HONEST:
      assert self.judge.steps[name] > 1, name

  def start_liar(self) -> Liar:
    """Starts a process of the liar, which goes on with the lies of the one before."""
    nonce = 1_000_000 + next(self._nonces)
    identity = learner_machine.Identity(
      learner=LIAR, nonce=nonce, agreement=world_lib.AGREEMENT, host='bad', pid=nonce, seed=nonce
    )
    life = self._life(
      tape.Start(
        role='learner', node=LIAR, config=self.config, identity=identity, digests=self.model.digests
      )
    )
    self.liar = self.learners[LIAR] = Liar(self, LIAR, life)
    self.liar.lies, self.liar.norm, self.liar.quick = self.lies, self.norm, self.quick
    self._begin(self.liar)
    return self.liar

  def run(self, *how: Any) -> None:
    self.broken = True
    super().run(*how)
    self.broken = False

  def pass_time(self, ms: int) -> None:
    """Time passes; a liar that has ended starts again."""
    until_ns = self.now_ns + ms * MS
    while self.now_ns < until_ns:
      self.run(min(until_ns, self.now_ns + 50 * MS))
      if not self.liar.alive:
        self.start_liar()
    self.check()

  def check(self) -> None:
    """The clock of the run is no faster than a learner may be."""
    most = FASTER * self.now_ns // (self.liar.island.step_ns) + self.config.period
    claim(self.syncer.machine.clock <= most, 'The clock of the run is that of its learners.', most)
    self.syncer.machine.check()

  def check_progress(self) -> None:
    """Honest learners train on and are merged, whatever the liar goes on doing."""
    before = dict(self.judge.steps)
    self.pass_time(2_000)
    self.judge.merges.clear()
    self.pass_time(3_000)
    for name in HONEST:
      steps = self.judge.steps[name] - before[name]
      claim(steps >= 0.9 * 5_000 / (STEP_MS + 3), 'An honest learner trains on.', name, steps)
    if self.island(LIAR).step_ns < FAIR_MS * MS:
      return  # a learner that is truly much faster leaves the others little
    for name in HONEST:
      merged = sum(name in participants for participants in self.judge.merges)
      claim(merged, 'An honest learner is merged.', name, merged, len(self.judge.merges))
    shares = sum(not set(HONEST).isdisjoint(one) for one in self.judge.merges)
    claim(4 * shares >= len(self.judge.merges), 'Honest learners are in the outer steps.', shares)
