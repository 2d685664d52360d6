"""What the syncer measures of a link, and what it asks of it."""

import collections
import dataclasses

import pytest

from diloco_jax.protocol import actions, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import schedule as schedule_lib
from diloco_jax.protocol import tempo as tempo_lib
from diloco_jax.protocol.syncer import books as books_lib
from diloco_jax.protocol.syncer import links as links_lib
from diloco_jax.protocol.syncer import sync as sync_lib
from tests.protocol import single

SLOT_NS, SIZE, P = 1_000_000, 4 << 10, 12


class Syncer:
  """Links of two learners; l0's link is good. Time passes in slots."""

  def __init__(self, **settings):
    config = config_lib.ProtocolConfig(period=P, fragments=P, **settings)
    books = books_lib.Books(config)
    self.out, self.tempo = books.out, books.tempo
    for session, name in enumerate(('l0', 'l1')):
      books.members.bind(name, session, 1, session, 0)
    self.links = links_lib.Links(books, (SIZE,) * P, measured=True)
    self.member = books.members.by_id['l1']
    self.sync = self.tokens = 0
    for _ in range(P):
      self.opens()

  def opens(self, slots: float = 1.0) -> None:
    self.links.now_ns += round(slots * SLOT_NS)
    self.sync += 1
    self.links.opened(sync_lib.Sync(self.sync, (self.sync - 1) % P))

  def payload(self, slots: float, idle: float = 0.0, size: int = SIZE) -> None:
    """A payload of l1 arrives, `slots` after it was due; before that the link had nothing."""
    self.links.now_ns += round(idle * SLOT_NS)
    self.sync, self.tokens = self.sync + 1, self.tokens + 10
    self.links.asked(self.member, self.sync)
    self.links.reported(self.member, self.tokens)
    self.links.now_ns += round(slots * SLOT_NS)
    self.arrives(size)

  def arrives(self, size: int = SIZE) -> None:
    contribution = single.contribution(self.sync, self.tokens - 10, self.tokens)
    payload = messages.Payload(size_bytes=size, crc32=0)
    self.links.arrived(self.member, dataclasses.replace(contribution, payload=payload))

  @property
  def r(self) -> int:
    return self.member.up.periods


def test_a_link_that_carries_less_is_asked_less_at_once_and_again_when_it_recovers():
  syncer = Syncer()
  for _ in range(3):
    syncer.payload(0.1)
  assert syncer.r == 1
  syncer.payload(4.0)
  assert syncer.r == 1, 'one stall is no slow link'
  syncer.payload(4.0)
  assert syncer.r == 5, 'a quarter more than a payload takes'
  syncer.payload(0.1)
  syncer.payload(0.1)
  assert syncer.r == 1
  acts = syncer.out.take()
  assert [action.fact.periods for action in single.of(acts, actions.Report)] == [5, 1]
  [line] = [action.text for action in single.of(acts, actions.Say)]
  assert 'slow link' in line


def asked_in(syncer: Syncer, periods: int, answers: bool) -> list[int]:
  """The places of the syncs, of so many periods, for which l1 is pulled."""
  pulled = []
  for sync in range(syncer.sync + 1, syncer.sync + 1 + periods * P):
    if syncer.links.pulls(syncer.member, sync):
      syncer.links.asked(syncer.member, sync)
      pulled.append(sync - 1)
      if answers:
        syncer.links.answered(syncer.member, sync)
  return pulled


def test_a_slow_link_is_asked_for_each_fragment_once_in_r_periods():
  syncer = Syncer()
  assert len(asked_in(syncer, 5, answers=True)) == 5 * P
  for _ in range(3):
    syncer.payload(4.0)
  assert syncer.r == 5
  asked = asked_in(syncer, 2 * syncer.r, answers=True)
  assert collections.Counter(place % P for place in asked) == dict.fromkeys(range(P), 2)
  assert all(b - a in (4, 5) for a, b in zip(asked, asked[1:])), 'they do not queue on the link'


def test_a_slow_link_that_answers_nothing_is_asked_for_little():
  syncer = Syncer()
  for _ in range(3):
    syncer.payload(4.0)
  assert syncer.r == 5
  asked = asked_in(syncer, 2, answers=False)
  assert 2 <= len(asked) <= 3, 'two under way, and what may be announced'


def test_a_link_of_which_no_fragment_has_its_turn_is_asked_once_in_a_period():
  syncer = Syncer()
  syncer.member.up.periods = links_lib.MOST_PERIODS
  asked = asked_in(syncer, links_lib.MOST_PERIODS, answers=True)
  assert max(b - a for a, b in zip(asked, asked[1:])) <= P, 'or its recovery would show late'


def test_neither_an_idle_link_nor_small_payloads_make_it_slow():
  syncer = Syncer()
  for _ in range(4):
    syncer.payload(0.5, idle=50)
    syncer.payload(3.0, size=SIZE // 10)
  assert syncer.r == 1


def slow_links_of_all(syncer: Syncer, slots: float) -> None:
  """Payloads of both learners take so many slots, and steps one."""
  for member in syncer.links._members.by_id.values():
    member.step_ns.add(SLOT_NS)
    member.report_ns.add(SLOT_NS)
    member.up.samples = [round(slots * SLOT_NS) * links_lib.KIB // SIZE] * 3


def test_where_most_links_are_slow_the_period_of_the_run_grows_and_shrinks_again():
  syncer = Syncer()
  slow_links_of_all(syncer, 0.8)
  assert not syncer.links.retime()
  slow_links_of_all(syncer, 4.0)
  assert syncer.links.retime() and syncer.tempo.period == 5 * P, 'a quarter more than it takes'
  *_, line = (action.text for action in syncer.out.take() if isinstance(action, actions.Say))
  assert f'every {5 * P} inner steps' in line and 'Nothing is lost' in line
  slow_links_of_all(syncer, 4.4)
  assert not syncer.links.retime(), 'a small change changes nothing'
  slow_links_of_all(syncer, 0.3)
  assert syncer.links.retime() and syncer.tempo.period == P
  assert syncer.r == 1, 'no learner alone is asked less'


def test_until_the_down_link_is_measured_a_byte_takes_as_long_on_it_as_on_the_up_link():
  syncer = Syncer()
  syncer.links._delta_bytes = dict.fromkeys(range(P), 2 * SIZE)  # as int8 down and int4 up
  slow_links_of_all(syncer, 4.0)
  assert syncer.links.retime() and syncer.tempo.period == 10 * P
  for member in syncer.links._members.by_id.values():
    member.down.samples = [(2 * SLOT_NS, 2 * SIZE)] * 4
  assert syncer.links.retime() and syncer.tempo.period == 5 * P


def test_one_slow_link_of_two_does_not_change_the_period_and_a_bound_ends_it():
  syncer = Syncer(longest_period=3 * P + 1)
  slow_links_of_all(syncer, 4.0)
  syncer.links._members.by_id['l0'].up.samples = [1] * 3
  assert not syncer.links.retime()
  slow_links_of_all(syncer, 40.0)
  assert syncer.links.retime() and syncer.tempo.period == 3 * P


def test_where_an_answer_takes_many_steps_syncs_wait_for_it_and_the_period_is_longer_than_it():
  syncer = Syncer(overlap=3)
  slow_links_of_all(syncer, 0.1)
  step_ns = tempo_lib.LEAST_DELAY_NS  # of shorter ones a delay may be that of busy cores
  for member in syncer.links._members.by_id.values():
    member.step_ns.value = member.report_ns.value = step_ns
    member.round_trip_ns = 16 * step_ns
  assert syncer.links.retime()
  assert (syncer.tempo.delay, syncer.tempo.period) == (16, 2 * P)
  for member in syncer.links._members.by_id.values():
    member.down.delays = [2 * step_ns]  # the process was busy when it joined
  assert syncer.links.retime()
  assert (syncer.tempo.delay, syncer.tempo.period) == (2, P)


@pytest.mark.parametrize(
  'settings, asked_less', [({}, True), ({'adopt': 0}, 0), ({'overlap': 0}, 0)]
)
def test_where_learners_wait_or_drop_their_steps_links_change_nothing(settings, asked_less):
  syncer = Syncer(**settings)
  for _ in range(4):
    syncer.payload(4.0)
  assert syncer.r == (5 if asked_less else 1)
  syncer = Syncer(**settings)
  slow_links_of_all(syncer, 4.0)
  assert bool(syncer.links.retime()) == bool(asked_less)


@pytest.mark.parametrize('fragments', [1, 2, 4, 12, 30])
@pytest.mark.parametrize('r', [2, 3, 5, 12, 16])
def test_each_fragment_has_one_turn_in_r_periods_and_turns_are_spread(fragments, r):
  cycle = fragments * r
  turns = [n for n in range(2 * cycle) if schedule_lib.turn(n, fragments, r) is not None]
  counts = collections.Counter(n % fragments for n in turns)
  assert counts == dict.fromkeys(range(fragments), 2)
  assert min(b - a for a, b in zip(turns, turns[1:])) >= r - 1


def test_a_payload_that_comes_twice_is_measured_once():
  syncer = Syncer()
  for _ in range(3):
    syncer.payload(0.1)
  before = list(syncer.member.up.samples)
  syncer.links.now_ns += 99 * SLOT_NS
  syncer.arrives()
  assert syncer.member.up.samples == before
