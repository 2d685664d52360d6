"""Real processes, two of them on faulty hosts: NaN, and values far too large, behind the encoder.

`tiny` with three learners. The syncer refuses the payloads of l1 and l2 until each has three
refusals in a row; then its process exits with 42 and is not restarted, and l0 trains alone. The
tests read the records of the processes, and the judge reads their tapes.
"""

import math
import pathlib
import socket

import pytest

from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.report import records
from diloco_jax.verification.faults import chaos_report
from tests.runs.lib import conductor, faulty_learner, promises

DEADLINE_S = 240
pytestmark = pytest.mark.full  # tests/syncer/test_screening.py refuses the same payloads
SPOILED = {'l1': 'nan:3', 'l2': 'huge:120'}  # l2 after the warm-up of every fragment
OVERRIDES = {
  'train.steps': 1_000_000,
  'train.log_every': 1_000,
  'train.eval_every': 40,
  'train.checkpoint_every_steps': 1_000,
}


@pytest.mark.parametrize('text', ['nan', 'nan:', 'flip:3', 'huge:x'])
def test_a_misspelt_fault_is_refused(text):
  with pytest.raises(ValueError, match='it must be nan:N or huge:N'):
    faulty_learner.Spoiler(text)


class Conductor(conductor.Conductor):
  """Ends the run once both are in quarantine and l0 has continued for a while."""

  def __init__(self, workdir: pathlib.Path, recorder: records.Recorder):
    super().__init__(workdir, recorder, OVERRIDES, change=_spoiled)

  async def carry_out(self) -> None:
    statuses = self.supervisor.statuses
    await self.until(lambda: all(statuses[name].state == 'refused' for name in SPOILED))
    self.look()
    outer, steps = self.count('syncer', 'outer') + 8, self.count('l0', 'step') + 8
    await self.until(lambda: self.count('syncer', 'outer') >= outer)
    await self.until(lambda: self.count('l0', 'step') >= steps)
    self.supervisor.retire()


def _spoiled(program: supervisor_lib.Program) -> supervisor_lib.Program:
  if program.name not in SPOILED:
    return conductor.paced(program)
  return faulty_learner.instead(program, f'--spoil={SPOILED[program.name]}')


@pytest.fixture(scope='module', name='run')
def _run(tmp_path_factory) -> conductor.Run:
  _, run = conductor.play(tmp_path_factory.mktemp('bad'), Conductor, DEADLINE_S)
  return run


def test_a_quarantined_learner_exits_with_42_and_is_not_restarted(run):
  for name in SPOILED:
    codes = [fact['code'] for fact in run.of('supervisor', 'exit') if fact['child'] == name]
    assert codes == [42], '\n'.join(run.said)
    assert run.outcome.statuses[name].starts == 1
    assert f'Learner "{name}" is in quarantine' in run.outcome.statuses[name].last_error


def test_the_console_names_the_bad_payload_and_its_host(run):
  host = socket.gethostname()
  for name, what in (('l1', 'NaN or Inf'), ('l2', 'usual is')):
    lines = [line for line in run.said if f'Learner {name} on {host} sent' in line]
    assert lines and all('[syncer]' in line and what in line for line in lines), run.said
    assert all('Check that host for faulty hardware.' in line for line in lines)


def test_refused_payloads_are_not_in_the_model(run):
  refused = run.of('syncer', 'refused')
  for name, why in (('l1', 'NaN'), ('l2', 'norm')):
    assert [one['why'].split()[0] for one in refused if one['learner'] == name][-3:] == [why] * 3
  assert not any(one['learner'] == 'l0' for one in refused)
  assert all(math.isfinite(one['norm']) and one['norm'] < 100 for one in run.of('syncer', 'outer'))
  losses = [one['loss'] for one in run.of('syncer', 'eval')]
  assert losses and all(math.isfinite(loss) for loss in losses)
  assert losses[-1] <= losses[0], losses


def test_the_honest_learner_continues_and_is_merged(run):
  out_ns = max(fact['t_ns'] for fact in run.of('supervisor', 'exit') if fact['child'] in SPOILED)
  steps = [fact['t_ns'] for fact in run.of('l0', 'step')]
  assert chaos_report.within(steps, out_ns, steps[-1]) >= 8
  later = [one for one in run.of('syncer', 'synced') if one['t_ns'] > out_ns]
  assert later and all(one['participants'] == ['l0'] for one in later)
  assert run.outcome.statuses['l0'].state == 'done' and run.outcome.code == 0


def test_the_ledger_adds_up(run):
  """The unsettled tokens of quarantined learners are those of dead processes: they are lost once
  another process has the id, or at the end of the run; this run was stopped before."""
  ledger = run.of('syncer', 'ledger')[-1]
  row = ledger['learners']['l0']
  assert ledger['fragments'] * row['tokens'] == row['merged'] + row['discarded']
  assert row['tokens'] == run.of('l0', 'step')[-1]['tokens']
  assert ledger['discarded']['bad_value'] == sum(
    one['tokens'] for one in run.of('syncer', 'refused')
  )


def test_the_run_keeps_every_promise(run):
  promises.check(run)
