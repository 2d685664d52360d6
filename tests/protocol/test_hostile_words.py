"""Honest and hostile learners speak to one syncer, and the honest ones must not notice.

A Hypothesis state machine interleaves time, the lies and words of a member, and those of a process
that is none (hostile.py says what must hold). It is as good as the defects that it finds: each
defence of the syncer, removed, must be found within CASES cases.
"""

import contextlib
import dataclasses
import json
import typing
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import hypothesis
import pytest
from hypothesis import stateful
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers

from diloco_jax.protocol import agreement, messages
from diloco_jax.protocol.syncer import gathering, members, pace, plausible, screening
from diloco_jax.verification.sim import processes
from tests.protocol import hostile

CASES, CASES_BY_DEFAULT, SEED = 1_000, 12, 0
WORDS_PER_CASE = 20
pytestmark = pytest.mark.timeout(1_800)  # CASES take minutes
Lie = hostile.Lie

# Fields that hold a count, by class; the strings are in TEXTS.
COUNTS = {
  cls: [field.name for field in dataclasses.fields(cls) if field.type in (int, bool, int | None)]
  for cls in typing.get_args(messages.FromLearner)
}
LIED = [
  (cls, field)
  for cls in (messages.Progress, messages.Contribution, messages.Confirm, messages.Adopted)
  for field in COUNTS[cls]
  if field not in ('nonce', 'incarnation')
]
LAST = 1_000_000  # T of hostile.config
SMALL = (0, 1, 2, 3, 4, 10, 1_000)
LARGE = (LAST, LAST + 4, LAST + 5, 2**31 - 1, 2**31, 2**32, 2**53, hostile.MOST)

numbers = st.sampled_from(SMALL + LARGE)
lies = st.builds(Lie, st.just('set'), numbers) | st.builds(
  Lie, st.just('add'), st.sampled_from((-10, -1, 1, 2, 10, 1_000, 2**31))
)
norms = st.sampled_from(
  [None, 0, 1, screening.UNIT >> 40, *(screening.UNIT << n for n in (0, 4, 6, 10, 30))]
)
texts = st.sampled_from(
  ['', 'late', messages.Reason.BAD_VALUE, '\x1b[2J\r\nall good', '[' * 65_000, 'x']
)


@st.composite
def changes(draw: st.DrawFn, cls: type) -> dict[str, Lie | str]:
  """What to change in a message of a class; often nothing."""
  count = draw(st.sampled_from((0, 1, 1, 2)))
  names = [field.name for field in dataclasses.fields(cls) if field.type is str]
  fields = [*COUNTS[cls], *names]
  found = {}
  for _ in range(count if fields else 0):
    field = draw(st.sampled_from(fields))
    found[field] = draw(texts if field in names else lies)
  return found


OFTEN = (messages.Progress, messages.Contribution, messages.Decline, messages.Adopted)
kinds = st.sampled_from(OFTEN) | st.sampled_from(list(COUNTS))


def words(classes: st.SearchStrategy[type]) -> st.SearchStrategy[tuple[type, dict]]:
  return classes.flatmap(lambda cls: st.tuples(st.just(cls), changes(cls)))


said_by_member = words(kinds)
said_by_stranger = words(st.sampled_from((messages.Join, messages.Confirm)) | kinds)


class HostileWords(stateful.RuleBasedStateMachine):
  """See the top of this file."""

  settings: ClassVar[dict[str, int]] = {}

  @stateful.initialize(quorum=st.sampled_from((1, 2)), step_ms=st.sampled_from((40, 60, 80)))
  def start(self, quorum: int, step_ms: int) -> None:
    self.world = hostile.World(quorum, step_ms, **self.settings)

  @stateful.rule(ms=st.sampled_from((1, 10, 30, 100, 300, 1_000)))
  def pass_time(self, ms: int) -> None:
    self.world.pass_time(ms)

  @stateful.rule(field=st.sampled_from(LIED), lie=lies)
  def lie(self, field: tuple[type, str], lie: Lie) -> None:
    """From now on the member lies about a field, for a while."""
    self.world.lies[field] = lie
    self.world.pass_time(1_000)

  @stateful.rule(norm=norms)
  def send_norms(self, norm: int | None) -> None:
    """From now on the payloads of the member have this norm, for a while."""
    self.world.norm = self.world.liar.norm = norm
    self.world.pass_time(2_000)

  @stateful.rule(steps=st.sampled_from((10, 1_000, 10**6, 2**31)), norm=norms)
  def claim_steps(self, steps: int, norm: int | None) -> None:
    """Its payloads are of more steps than it made, for a while."""
    for field in ('steps', 'cursor'):
      self.world.lies[messages.Contribution, field] = Lie('add', steps)
    self.send_norms(norm)

  @stateful.rule()
  def tell_the_truth(self) -> None:
    self.world.lies.clear()
    self.world.norm = self.world.liar.norm = None

  @stateful.rule(quick=st.booleans())
  def answer_at_once(self, quick: bool) -> None:
    self.world.quick = self.world.liar.quick = quick
    self.world.pass_time(1_000)

  @stateful.rule(after=st.sampled_from(OFTEN), said=said_by_member)
  def say_after(self, after: type, said: tuple[type, dict]) -> None:
    """The member says a word right after its next message of a kind."""
    self.world.liar.follow[after] = lambda: self._word(*said)
    self.world.pass_time(1_000)

  @stateful.rule(said=said_by_member, times=st.sampled_from((1, 1, 1, 3)))
  def say(self, said: tuple[type, dict], times: int) -> None:
    """The member says a word on its session."""
    liar, word = self.world.liar, self._word(*said)
    for _ in range(times):
      liar.say(liar.machine._connection.session, word)
    self.world.pass_time(10)

  @stateful.rule(said=st.lists(said_by_stranger, min_size=1, max_size=3))
  def say_as_a_stranger(self, said: list[tuple[type, dict]]) -> None:
    """A process without an id says words on a new session."""
    self.world.stranger.say(*(self._word(*one) for one in said))
    self.world.check()

  def _word(self, cls: type, changed: dict[str, Lie | str]) -> typing.Any:
    word = self.world.liar.true_word(cls)
    return dataclasses.replace(
      word,
      **{
        field: one.of(getattr(word, field)) if isinstance(one, Lie) else one
        for field, one in changed.items()
      },
    )

  def teardown(self) -> None:
    if hasattr(self, 'world') and not self.world.broken:
      self.world.check_progress()


class WithoutGrace(HostileWords):
  """The syncer waits for no learner beyond the quorum, so the member is often alone."""

  settings: ClassVar[dict[str, int]] = {'grace_permille': 0}


def search(cases: int, seed: int, machine: type[HostileWords] = HostileWords) -> None:
  """Raises the first violation that a state machine finds in this number of cases."""
  settings = hypothesis.settings(
    max_examples=cases,
    stateful_step_count=WORDS_PER_CASE,
    deadline=None,
    database=None,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
    print_blob=False,
  )
  with _no_constants():
    stateful.run_state_machine_as_test(hypothesis.seed(seed)(machine), settings=settings)


@contextlib.contextmanager
def _no_constants() -> Iterator[None]:
  """Hypothesis draws some numbers among the constants of all modules of this package that the
  process has imported. Without them a seed has the same cases in every process."""
  constants = providers.Constants()
  providers.CONSTANTS_CACHE.cache.clear()
  with mock.patch.object(providers.HypothesisProvider, '_local_constants', constants):
    yield
  providers.CONSTANTS_CACHE.cache.clear()


@pytest.mark.parametrize('machine', [HostileWords, WithoutGrace])
def test_honest_learners_do_not_notice_hostile_words(machine, counts):
  search(CASES if counts.full else CASES_BY_DEFAULT, SEED, machine)


# --- The defences, removed ------------------------------------------------------------------------

Replacement = tuple[Any, str, Callable[[Any], Any]]  # owner, name, original -> replacement


class Mutant(NamedTuple):
  """A syncer without one of its defences; `seed`: at which `machine` finds it within `cases`, which
  is a part of the search: Hypothesis tries other cases if there are more of them."""

  bug: str
  seed: int
  cases: int
  machine: type[HostileWords]
  replace: tuple[Replacement, ...]

  @contextlib.contextmanager
  def applied(self) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
      for owner, name, wrap in self.replace:
        stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
      yield


MUTANTS: dict[str, Mutant] = {}


def mutant(
  name: str,
  bug: str,
  seed: int,
  cases: int,
  *replace: Replacement,
  machine: type[HostileWords] = HostileWords,
) -> None:
  MUTANTS[name] = Mutant(bug, seed, cases, machine, replace)


def _believes(original: Callable) -> Callable:
  """A judge of plausibility that finds no fault."""
  return lambda *args: ''


def _old_merged(original: Callable) -> Callable:
  """The window of the last commits, whoever made them."""

  def merged(self: screening.Usual, norms: dict[str, tuple[int, int]]) -> None:
    self.commits += 1
    commits = [*self.pairs.get('', []), screening.medians(list(norms.values()))]
    self.pairs = {'': commits[-16:]}

  return merged


def _old_votes(original: Callable) -> Callable:
  return lambda self, lower=False: [screening.medians(self.pairs[''])] if self.pairs else []


def _no_least(original: Callable) -> Callable:
  return lambda *args: (0, original(*args)[1])


def _nothing(original: Callable) -> Callable:
  return lambda *args, **more: None


def _without_withdrawal(original: Callable) -> Callable:
  """The payload that waits in an open sync stays there."""

  def answer(self: gathering.Gathering, *args: Any) -> None:
    with mock.patch.object(gathering.Gathering, '_withdraw', lambda *args: None):
      original(self, *args)

  return answer


PLAUSIBILITY = plausible.Plausibility
mutant(
  'D1',
  'An agreement may be nested as deeply as its sender likes.',
  1,
  20,
  (agreement, '_decode', lambda original: json.loads),
)
mutant(
  'D2',
  'The clock of a report is believed.',
  2,
  60,
  (PLAUSIBILITY, '_progress', _believes),
  (pace.Pace, '_limit', lambda original: lambda self, now_ns, member: member.claimed),
)
mutant(
  'D3',
  'Learners that are merged often decide which norms are usual.',
  2,
  150,
  (screening.Usual, 'merged', _old_merged),
  (screening.Usual, 'votes', _old_votes),
  (screening.Usual, 'limits', _no_least),
  (screening.Screening, '_forget_if_wrong', _nothing),
  machine=WithoutGrace,
)
mutant(
  'D5',
  'The limit of norms grows with the claimed steps.',
  5,
  60,
  (PLAUSIBILITY, '_contribution', _believes),
  (screening, 'GROWTH', lambda original: 2**64),
  (screening, 'LONGER', lambda original: 2**64),
)
mutant(
  'D6',
  'The shortest claimed step decides how long the others may take.',
  1,
  300,
  (members.Member, 'inner_step_ns', lambda original: property(lambda self: self.step_ns.value)),
  (pace, 'lower_median', lambda original: lambda values: min(values, default=0)),
)
mutant(
  'D7',
  'A payload stays in its open sync when its sender disowns its tokens.',
  1,
  60,
  (gathering.Gathering, 'decline', _without_withdrawal),
  (gathering.Gathering, '_reject', _without_withdrawal),
  machine=WithoutGrace,
)


SLOW = dict.fromkeys(('D5', 'D6', 'D7'), pytest.mark.full)  # to be found


@pytest.mark.parametrize('name', [pytest.param(name, marks=SLOW.get(name, ())) for name in MUTANTS])
def test_a_removed_defence_is_found(name):
  removed = MUTANTS[name]
  assert removed.cases <= CASES
  with removed.applied(), pytest.raises((AssertionError, processes.MachineCrash)):
    search(removed.cases, removed.seed, removed.machine)
