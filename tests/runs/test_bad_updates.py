"""Real processes, two of them on faulty hosts: NaN, and values far too large, behind the encoder.

`tiny` with three learners. The syncer refuses the payloads of l1 and l2 until each has three
refusals in a row; then its process exits with 42 and is not restarted, and l0 trains alone. The
tests read the records of the processes, and the judge reads their tapes.
"""

import math
import pathlib
import socket

import jax
import numpy as np
import pytest

from diloco_jax.config import build
from diloco_jax.configs import stdlib_lm
from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.proof.faults import chaos_report
from diloco_jax.protocol import actions
from diloco_jax.protocol.syncer import screening
from diloco_jax.report import records
from diloco_jax.syncer import global_model as global_model_lib
from tests.runs.lib import conductor, faulty_learner, promises

DEADLINE_S = 240
SPOILED = {'l1': 'nan:3', 'l2': 'huge:33'}  # l2 after the warm-up of every fragment
OVERRIDES = {
  'sync.norm_warmup': 2,
  'train.steps': 1_000_000,
  'train.log_every': 1_000,
  'train.eval_every': 40,
  'train.checkpoint_every_steps': 1_000,
}


# --- Payloads, one by one -------------------------------------------------------------------------


@pytest.fixture(scope='module', name='assembled')
def _assembled() -> build.Assembly:
  config = stdlib_lm.get_config('tiny')
  config.sync.fragments, config.sync.period, config.sync.overlap = 1, 3, 2
  config.validate()
  return build.assemble(config)


def test_a_refused_payload_changes_no_bit_of_the_merge(assembled):
  """As if the learner had been absent."""
  size = assembled.layout.size(0)

  def encoded(seed):
    values = np.random.default_rng(seed).normal(scale=1e-2, size=size).astype(np.float32)
    return bytes(jax.jit(assembled.codec_up.encode)(values)[0])

  payloads = [
    encoded(0),
    bytes(faulty_learner.Spoiler('nan:1')(encoded(1))),
    encoded(2),
    bytes(faulty_learner.Spoiler('huge:1')(encoded(3))),
  ]
  limit = 10 * 10**-2 * math.sqrt(size) * screening.UNIT
  participants = [
    actions.Participant(
      learner=f'l{m}', incarnation=1, payload_id=m, tokens=64, steps=4, limit=int(limit)
    )
    for m in range(4)
  ]
  theta, without = global_model_lib.Theta(assembled), global_model_lib.Theta(assembled)
  screened = theta.screen(participants, np.stack([theta.lengths(0, one) for one in payloads]))
  assert screened.refused == ('l1', 'l3')
  assert screened.norms[1] == screening.NOT_FINITE and screened.norms[3] > 1000 * limit
  honest = 1e-2 * math.sqrt(size) * screening.UNIT
  assert all(math.isclose(screened.norms[m], honest, rel_tol=0.1) for m in (0, 2))
  merged = theta.merge(0, participants, payloads, ('l1', 'l3'))
  assert merged.digest == without.merge(0, participants[:3], payloads[:3], ('l1',)).digest
  all_refused = theta.merge(0, participants, payloads, ('l0', 'l1', 'l2', 'l3'))
  assert all_refused.failed == global_model_lib.ALL_REJECTED
  assert all_refused.digest == theta.digest(0)


@pytest.mark.parametrize('text', ['nan', 'nan:', 'flip:3', 'huge:x'])
def test_a_misspelt_fault_is_refused(text):
  with pytest.raises(ValueError, match='it must be nan:N or huge:N'):
    faulty_learner.Spoiler(text)


# --- A run ----------------------------------------------------------------------------------------


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
