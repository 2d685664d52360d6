"""Runs in which every machine is right, though a checker once said otherwise; and what of them a
checker must still notice."""

import pytest

from diloco_jax.protocol import actions, events, facts, messages
from diloco_jax.protocol.syncer import published as published_lib
from diloco_jax.protocol.tape import observers
from diloco_jax.verification.checks import checkers as checkers_lib
from diloco_jax.verification.sim import engine as engine_lib
from diloco_jax.verification.sim import world as world_lib
from tests.protocol import transcript

MS = engine_lib.MS


class Judged(observers.Observer):
  """A run that all checkers see; and what the syncer said: (session, message), (None, fact)."""

  def __init__(self, **settings):
    config = transcript.make_config(**settings)
    self._said: list = []
    self.world = world_lib.World(config, watchers=(self, checkers_lib.Checkers(config)))

  def saw(
    self,
    process: observers.ObservedProcess,
    now_ns: int,
    event: events.Event,
    out: observers.Actions,
  ) -> None:
    for action in out if process.start.role == 'syncer' else ():
      match action:
        case actions.Send(session=session, message=message):
          self._said.append((session, message))
        case actions.Report(fact=fact):
          self._said.append((None, fact))

  def said(self, kind: type) -> list:
    return [(session, what) for session, what in self._said if isinstance(what, kind)]

  def start(self, name: str, step_ms: int) -> None:
    self.world.start(name).island.step_ns = step_ms * MS

  def run(self, until_ms: int) -> None:
    self.world.run(until_ms * MS)


def rejoins_with_wrong_bits(l1_step_ms: int) -> Judged:
  """l0 joins again while it adopts fragment 0, so its Confirm says that it holds version 1. But the
  adopted bits differ, and two other fragments are in flight to it whole when it says so."""
  run = Judged(learners=2, fragments=3, period=3, overlap=1, quorum=1, total_steps=12)
  run.start('l0', 400)
  run.start('l1', 50)
  l0, link = run.world.learners['l0'], run.world.link('l0')
  l0.flips.add(0)
  l0.island.adopt_ns = 500 * MS  # from 430 ms to 930 ms
  run.run(150)
  link.cut.add('down')  # the first versions of fragments 1 and 2 do not come
  run.world.learners['l1'].island.step_ns = l1_step_ms * MS  # after its third step
  run.run(460)
  run.world.network.reset(l0)
  run.world.network.heal(link)
  link.bulk_down_ns = 1000 * MS
  run.run(1300)
  return run


def test_a_repair_waits_while_two_fragments_are_in_flight_and_no_delta_goes_before_it():
  """Simulator, seeds 8866 and 9325."""
  run = rejoins_with_wrong_bits(1000)
  [session] = [session for session, said in run.said(messages.Joined) if said.due == (1, 2)]

  def sent() -> list:
    publishes = [said for to, said in run.said(messages.Publish) if to == session]
    return [(publish.fragment, publish.version, publish.base_version) for publish in publishes]

  assert run.said(messages.Publish)[-1][1].version == 2
  assert sent() == [(1, 1, None), (2, 1, None)], 'to l0, which holds no version 1'
  run.run(3000)
  assert sent()[2] == (0, 2, None)


def test_a_repair_that_waits_and_is_forgotten_is_noticed(monkeypatch):
  """No newer version comes, which would show it, too."""
  replace = published_lib.Published.replace

  def forgets(self, member, fragment):
    if sum(copy.is_whole for copy in member.copies) < messages.MAX_WHOLES:
      replace(self, member, fragment)

  monkeypatch.setattr(published_lib.Published, 'replace', forgets)
  run = rejoins_with_wrong_bits(9000)
  with pytest.raises(checkers_lib.Violation, match='I4b: .* it is left at'):
    run.run(3000)


def test_a_learner_without_a_step_left_is_measured_from_its_pull():
  """Simulator, seed 8433. No sync has its quorum, so l0 sends its last steps again and again. Only
  the Pull that it answers tells the syncer when a payload was due, and pulls take long."""
  run = Judged(learners=2, fragments=4, period=4, overlap=2, quorum=2, total_steps=100, strikes=0)
  run.start('l0', 2)
  run.start('l1', 20)
  l0, l1 = run.world.learners['l0'], run.world.learners['l1']
  for now_ms in range(150, 1000, 10):
    l1.nan.update(range(4))  # its captures
    run.run(now_ms)
    if now_ms == 500:
      run.world.link('l0').down_ns = 150 * MS
      l1.island.step_ns = 200 * MS
  assert l0.machine.clock == 100
  assert run.said(facts.Link)[-1][1].periods > 1, 'the syncer cannot tell the two times apart'
  run.run(60_000)
  assert run.world.finished and run.said(facts.Link)[-1][1].periods == 1
