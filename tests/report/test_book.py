"""The time of every learner has one category."""

import collections

import pytest

from diloco_jax.protocol import actions, events, facts
from diloco_jax.protocol.tape import observers
from diloco_jax.report import book as book_lib
from diloco_jax.report import facts as report_facts
from diloco_jax.verification import plans
from diloco_jax.verification.sim import engine as engine_lib
from diloco_jax.verification.sim import faults as faults_lib
from diloco_jax.verification.sim import world as world_lib
from tests.protocol import transcript
from tests.report import rows

MS, SECOND = engine_lib.MS, engine_lib.SECOND


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


def simulate(plan=(), until_s=20, **settings):
  """A world with three learners; returns its book, and the world."""
  config = transcript.make_config(total_steps=10_000, **settings)
  book = book_lib.Book(config.quorum, config.period / config.fragments)
  world = world_lib.World(config, watchers=[Turns(book)])
  faults_lib.Nemesis(world, plan, odds=faults_lib.Odds(0, 0, 0))
  for name in ('l0', 'l1', 'l2'):
    world.start(name)
  world.run(until_s * SECOND)
  return book, world


KILLS = [
  plans.Fault(at_ns=5_050 * MS, kind='kill', node='l1', for_ns=3 * SECOND),
  plans.Fault(at_ns=10_050 * MS, kind='kill', node='l2', for_ns=2 * SECOND),
]


def test_the_time_of_every_learner_adds_up_to_the_whole():
  book, world = simulate(KILLS, learners=3)
  for name in ('l0', 'l1', 'l2'):
    spent_ns = book.partition(name, world.now_ns)
    assert sum(spent_ns.values()) == pytest.approx(world.now_ns, rel=1e-9)
    assert all(ns >= 0 for ns in spent_ns.values()) and not spent_ns[book_lib.OTHER]
  shares = {name: book.summary(world.now_ns)['learners'][name]['shares'] for name in book.learners}
  assert shares['l0'][book_lib.MERGED] > 0.9 and book_lib.DOWN not in shares['l0']
  assert shares['l1'][book_lib.DOWN] == pytest.approx(3 / 20, abs=1e-3)
  assert shares['l2'][book_lib.DOWN] == pytest.approx(2 / 20, abs=1e-3)
  figures = book.figures(world.now_ns)
  assert figures.training == pytest.approx(1 - 5 / 60, abs=0.02)
  assert figures.merged + sum(figures.discarded.values()) == pytest.approx(1)
  assert figures.token == pytest.approx(figures.training_since_joined * figures.merged, abs=0.005)
  assert figures.uptime == figures.system_uptime == 1


def test_in_lock_step_learners_wait_for_what_is_missing():
  """K = 3: a learner that is down stops the others; a slow one keeps them waiting; so does a syncer
  that is down."""
  plan = [
    *KILLS[:1],
    plans.Fault(at_ns=10_050 * MS, kind='slow', node='l2', for_ns=3 * SECOND, amount=3),
    plans.Fault(at_ns=14_050 * MS, kind='preempt', node='syncer', for_ns=3 * SECOND, amount=SECOND),
  ]
  book, world = simulate(plan, learners=3, quorum=3, max_lag=0, overlap=0)
  spent_ns = book.partition('l0', world.now_ns)
  assert sum(spent_ns.values()) == pytest.approx(world.now_ns, rel=1e-9)
  assert 2 < spent_ns[book_lib.QUORUM] / SECOND < 6
  assert 1 < spent_ns[book_lib.STRAGGLER] / SECOND
  assert 1 < spent_ns[book_lib.SYNCER_DOWN] / SECOND < 4
  figures = book.figures(world.now_ns)
  assert figures.uptime < 1 - 2 / 20 and figures.system_uptime < 1 - 4 / 20


def test_a_wait_that_has_not_ended_is_booked_by_what_was_awaited():
  book = book_lib.Book(quorum=1)
  book.waits('l0', 0)
  book.take('', 60, facts.Member(learner='l1', state='joined', incarnation=1))
  spent_ns = book.partition('l0', 100)
  assert (spent_ns[book_lib.QUORUM], spent_ns[book_lib.STRAGGLER]) == (60, 40)
  assert book.partition('l0', 100) == spent_ns, 'to ask changes nothing'


def test_outer_steps_at_one_moment_have_no_gaps():
  book = book_lib.Book()
  for _ in range(3):
    book.take('', 5, rows.synced(2, 'l0'))
  assert book.figures(10).system_uptime == 1


def test_a_start_a_save_and_a_wait_for_data_have_their_categories():
  book = book_lib.Book()
  book.starts('l0', 0)
  for at_ns, category in ((10, book_lib.PREP), (15, book_lib.RESTORE), (18, book_lib.COMPILE)):
    book.enters('l0', at_ns, category)
  book.waits('l0', 30)
  book.joined('l0', 32)
  for step in range(10):
    begin_ns = 35 + 20 * step
    book.trains('l0', begin_ns)
    book.stepped('l0', begin_ns + 20, tokens=4, step_ns=15, data_ns=5, saving_ns=2)
  book.died('l0', 240, killed=True)
  book.starts('l0', 250)
  assert book_lib.as_shares(book.partition('l0', 260)) == pytest.approx(
    {
      book_lib.WASTED: (10 * 10 + 5) / 260,  # no ledger has told of a merge; a killed step
      book_lib.DATA: 50 / 260,
      book_lib.COMM: 30 / 260,
      book_lib.SAVE: 20 / 260,
      book_lib.QUORUM: 2 / 260,
      book_lib.INIT: (10 + 10) / 260,
      book_lib.PREP: 5 / 260,
      book_lib.COMPILE: 12 / 260,
      book_lib.RESTORE: (3 + 3) / 260,
      book_lib.DOWN: 10 / 260,
    }
  )


def test_a_rare_long_wait_for_a_batch_makes_no_step_slow():
  """A shuffle buffer is filled again, say: all that it takes is a wait for data."""
  book = book_lib.Book()
  book.trains('l0', 0)
  for step in range(1, 101):
    waits_ns = 1000 * (step % 10 == 0)
    at_ns = book.learners['l0'].at_ns + 50 + waits_ns
    book.stepped('l0', at_ns, tokens=4, step_ns=50 + waits_ns, data_ns=waits_ns)
  shares = book_lib.as_shares(book.partition('l0', at_ns))
  assert shares == pytest.approx({book_lib.WASTED: 1 / 3, book_lib.DATA: 2 / 3})  # none is merged


def test_a_learner_of_an_ended_run_starts_anew_when_the_run_is_given_more_steps():
  book = book_lib.Book(quorum=1)
  for start_ns in (0, 100):
    book.starts('l0', start_ns)
    book.joined('l0', start_ns + 10)
    book.trains('l0', start_ns + 20)
    book.stepped('l0', start_ns + 30, tokens=1, step_ns=10)
    book.trained('l0', start_ns + 30)
    book.died('l0', start_ns + 40, killed=False)
  spent_ns = book.partition('l0', 140)
  categories = book_lib.INIT, book_lib.RESTORE, book_lib.AFTER_END
  assert [spent_ns[category] for category in categories] == [20, 20, 80]
  assert book.figures(140).uptime == 1, 'to start anew is no downtime'


def test_the_fact_of_the_last_step_may_come_after_that_of_the_end():
  """The one is of the thread that steps, the other of the machine's."""
  book = book_lib.Book(quorum=1)
  for name in ('l0', 'l1'):
    book.starts(name, 0)
    book.trains(name, 10)
  book.stepped('l0', 20, tokens=1, step_ns=10)
  book.trained('l0', 21)
  book.trained('l1', 19)
  book.stepped('l1', 20, tokens=1, step_ns=10)
  for name in ('l0', 'l1'):
    book.died(name, 40, killed=False)
    expected = {book_lib.INIT: 10, book_lib.WASTED: 10, book_lib.AFTER_END: 80}
    assert +collections.Counter(book.partition(name, 100)) == expected, name
  assert book.over and book.figures(100).uptime == 1


def test_the_night_before_a_run_is_resumed_is_no_downtime():
  book = book_lib.Book(quorum=1)
  for start_ns in (0, 10_000):
    for name in ('l0', 'l1'):
      book.starts(name, start_ns)
      book.joined(name, start_ns + 10)
      book.trains(name, start_ns + 10)
    for n in range(1, 10):
      book.take('syncer', start_ns + 10 + 10 * n, rows.synced(n, 'l0'))
    for name in ('l0', 'l1'):
      book.stepped(name, start_ns + 110, tokens=1, step_ns=100)
      book.died(name, start_ns + 110, killed=False)
  figures = book.figures(20_000)
  assert (figures.uptime, figures.system_uptime) == (1, 1)


def test_a_process_without_a_recorded_end_was_down_since_its_last_step():
  """The host had failed, say; the run is resumed much later."""
  book = book_lib.Book(quorum=1)
  book.starts('l0', 0)
  book.joined('l0', 10)
  book.trains('l0', 10)
  book.stepped('l0', 30, tokens=4, step_ns=20)
  book.starts('l0', 1000)
  spent_ns = book.partition('l0', 1010)
  assert (spent_ns[book_lib.DOWN], spent_ns[book_lib.INIT]) == (970, 20)
  assert book.figures(1010).uptime == pytest.approx(20 / 1000, abs=0.01)


def test_a_learner_that_failed_for_good_is_down_and_has_not_left():
  book = book_lib.Book()
  book.take('supervisor', 0, report_facts.Process(child='l0', state='starting', text=''))
  book.take('supervisor', 10, report_facts.Exit(child='l0', pid=1, code=1))
  spent_ns = book.partition('l0', 100)
  assert +collections.Counter(spent_ns) == {book_lib.INIT: 10, book_lib.DOWN: 90}
