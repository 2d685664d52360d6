"""Learners that rejoin a run of real processes, and the source of their moments.

One run serves all tests. l2 is killed repeatedly and rejoins, while its donor, l2 itself, or all
learners are killed when 10, 50 or 90 % of the moments have been sent (faulty_learner.py kills at
that chunk, not at a time; donors pace the chunks). In every case l2 trains again, and reports the
source of its moments. The tests read the records of the processes, and the judge reads their tapes.
"""

import dataclasses
import pathlib
import signal

import pytest

from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.report import records
from tests.runs.lib import conductor, faulty_learner, promises

DEADLINE_S = 900
pytestmark = [pytest.mark.full, pytest.mark.timeout(960)]  # some fifteen starts of processes
LEARNERS = ('l0', 'l1', 'l2')
OVERRIDES = {  # 13 MiB of moments: 13 chunks; H is long, so that a slow donation is not stale
  'model.num_layers': 4,
  'model.embed_dim': 128,
  'model.hidden_dim': 768,
  'sync.fragments': 16,
  'sync.period': 400,
  'sync.donor_rate_mib_s': 16,
  **conductor.ENDLESS,
  'train.checkpoint_every_steps': 25,
}


@dataclasses.dataclass
class Return:
  """One rejoin of a learner: the deaths meanwhile, and how it recovered."""

  places: tuple[str, ...]
  learner: str
  deaths: list[str]
  recovered: dict


@dataclasses.dataclass
class Run(conductor.Run):
  """Also has every rejoin."""

  returns: list[Return]


class Conductor(conductor.Conductor):
  """Kills learners, also at places of a donation, and waits for facts."""

  def __init__(self, workdir: pathlib.Path, recorder: records.Recorder):
    self.armed = workdir / 'kills'
    self.armed.mkdir()
    self.returns: list[Return] = []
    super().__init__(workdir, recorder, OVERRIDES, change=self._mortal)

  def _mortal(self, program: supervisor_lib.Program) -> supervisor_lib.Program:
    if program.name == 'syncer':
      return program
    return faulty_learner.instead(program, f'--kills={self.armed}')

  def deaths(self, at: int) -> list[str]:
    return [
      fact['child']
      for fact in self.since('supervisor', 'exit', at)
      if fact['code'] == -signal.SIGKILL
    ]

  async def carry_out(self) -> None:
    await self.until(lambda: self.since('syncer', 'outer'))  # the run has begun
    for percent in (10, 50):
      await self.rejoin(['l2'], f'donation.sent_{percent}')
    await self.rejoin(['l2'], 'donation.sent_90', 'donation.sent_90')
    await self.rejoin(['l2'], *(f'donation.got_{percent}' for percent in faulty_learner.PERCENTS))
    await self.rejoin(['l1', 'l2'])
    self.supervisor.retire()

  async def steps(self, learners, at: int) -> None:
    """Waits until each learner has taken a few steps since, not only its first, which compiles."""
    await self.until(lambda: all(len(self.since(one, 'step', at)) >= 10 for one in learners))

  async def rejoin(self, learners: list[str], *places: str) -> None:
    """Kills learners, with these places armed; waits until all dead learners train again."""
    self.look()
    at = len(self.facts)
    for number, place in enumerate(places):
      (self.armed / f'{place}.{number}').touch()
    for name in learners:
      assert self.supervisor.bring_down(name, 0.1, f'killed by the test, then {places}')
    await self.until(lambda: len(self.deaths(at)) >= len(learners) + len(places))
    dead = self.deaths(at)
    for name in set(dead):
      last = [
        n
        for n, (who, fact) in enumerate(self.facts)
        if who == 'supervisor' and fact['name'] == 'exit' and fact['child'] == name
      ][-1]
      await self.until(lambda: self.since(name, 'moments', last))
      await self.steps([name], last)
      if name in learners:
        self.returns.append(Return(places, name, dead, self.since(name, 'moments', last)[-1]))


@pytest.fixture(scope='module', name='run')
def _run(tmp_path_factory) -> Run:
  conducted, left = conductor.play(tmp_path_factory.mktemp('donations'), Conductor, DEADLINE_S)
  return Run(**vars(left), returns=conducted.returns)


def returns(run: Run, *places: str) -> list[Return]:
  return [one for one in run.returns if set(one.places) == set(places)]


def test_the_run_succeeds_and_every_learner_recovers(run):
  assert run.outcome.code == 0, '\n'.join(run.said)
  assert len(run.returns) == 6


def test_one_donor_serves_two_joiners(run):
  both = returns(run)
  assert {one.learner for one in both} == {'l1', 'l2'}
  assert {one.recovered['by'] for one in both} == {'donor'}


@pytest.mark.parametrize('percent', [10, 50])
def test_another_donor_replaces_a_killed_donor(run, percent):
  (back,) = returns(run, f'donation.sent_{percent}')
  [donor] = set(back.deaths) - {'l2'}
  assert back.recovered['by'] == 'donor'
  assert back.recovered['donor'] not in (donor, 'l2')


def test_a_joiner_killed_repeatedly_gets_moments_in_the_end(run):
  (back,) = returns(run, *(f'donation.got_{percent}' for percent in faulty_learner.PERCENTS))
  assert back.deaths == ['l2'] * 4
  assert back.recovered['by'] == 'donor'


def test_without_donors_the_joiner_trains_with_its_own_moments(run):
  (back,) = returns(run, 'donation.sent_90')
  assert sorted(back.deaths) == ['l0', 'l1', 'l2']
  assert back.recovered['by'] in ('checkpoint', 'fragments')
  assert back.recovered['reason'] == 'no learner can donate'
  assert any(f'recovered by: {back.recovered["by"]}' in line for line in run.said)


def test_the_syncer_records_how_each_joiner_got_its_moments(run):
  told = [
    (fact['learner'], fact['by'])
    for fact in run.of('syncer', 'member')
    if fact['state'] == 'recovered'
  ]
  for back in run.returns:
    assert (back.learner, back.recovered['by']) in told


def test_the_run_keeps_every_promise(run):
  promises.check(run)
  assert run.of('syncer', 'ledger')[-1]['unsettled'] == 0
