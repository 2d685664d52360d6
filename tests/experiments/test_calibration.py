"""The simulator takes its times from the tapes of a real run, and predicts that run again.

The run: three learners on real processes; l1 is killed. `golden/` holds its tapes, packed, and its
records. They must fit the schema of tapes; record them again after a change of it::

    python -m tests.experiments.test_calibration --record
"""

import gzip
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest

from diloco_jax.report import records
from diloco_jax.storage import tapes
from diloco_jax.verification.sim import engine
from experiments.goodput import calibration, measured, tape_times

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = pathlib.Path(__file__).resolve().parent / 'golden'
SECOND = engine.SECOND
RUN = (
  '--config=stdlib_lm:cpu',
  '--config.train.steps=160',
  '--config.train.eval_every=0',
  '--config.train.checkpoint_every_steps=20',
  '--config.sync.learners=3',
  '--config.sync.fragments=2',
  '--config.sync.period=8',
  '--kill=l1@0.15+1',
)


@pytest.fixture(name='source', scope='module')
def _source() -> tape_times.Source:
  return tape_times.read(GOLDEN)


def test_a_run_tells_how_long_everything_took(source):
  steps = measured.account(GOLDEN, source.config, source.over_ns).learners
  for name in ('l0', 'l1', 'l2'):
    times = source.times
    firsts = len(times['first step', name])
    assert firsts == (2 if name == 'l1' else 1) == len(source.starts[name])
    # Of each process one step may have no record: a killed one could not write it, and one whose
    # clock an adoption moved to the end writes it after the last step (docs/protocol.md: StepDone).
    lost = len(times['step', name]) + firsts - steps[name].times.count
    assert 0 <= lost <= firsts
    for kind in ('encode', 'adopt', 'payload up', 'payload down', 'control up', 'control down'):
      assert len(times[kind, name]), (kind, name)
  assert len(source.times['merge', '']) >= 20
  (kill,) = source.kills
  assert kill.learner == 'l1' and 0 < kill.at_ns < source.length_ns
  assert 1 < kill.down_ns / SECOND < 5
  assert max(training for _, (_, training) in source.states) == 3


def test_the_simulator_predicts_the_run_from_which_its_times_are(source):
  found = calibration.outcome(GOLDEN, source)
  again = calibration.predict(source, source.config, source.kills, source.length_ns)
  assert again.training_since_joined == pytest.approx(found.training_since_joined, abs=0.05)
  assert again.merged == pytest.approx(found.merged, abs=0.1)
  # Without a kill less is lost.
  better = calibration.predict(source, source.config, (), source.length_ns)
  assert better.training_since_joined > again.training_since_joined
  assert not better.discarded.get('lost_with_process')


def test_one_seed_gives_one_prediction(source):
  kills = calibration.drawn_kills(source.config, 5.0, 0.5, 10 * SECOND, seed=1)
  assert kills and {kill.learner for kill in kills} <= {'l0', 'l1', 'l2'}
  first, again = (
    calibration.predict(source, source.config, kills, 10 * SECOND, seed=1) for _ in range(2)
  )
  assert first == again


def test_the_table_has_a_column_for_each_kind_of_figures(source):
  found = calibration.outcome(GOLDEN, source)
  lines = calibration.text({'measured': [found], 'simulated': [found, found]}).splitlines()
  assert lines[0].split() == ['measured', 'simulated']
  share = f'{100 * found.training_since_joined:.1f}'
  assert lines[2].split() == ['goodput', 'since', 'joined', share, share]


def record() -> None:
  """Makes the run, and keeps its tapes and records."""
  with tempfile.TemporaryDirectory() as folder:
    workdir = pathlib.Path(folder)
    subprocess.run(
      [sys.executable, '-m', 'diloco_jax', 'train', *RUN, f'--workdir={workdir}'],
      cwd=ROOT,
      env={**os.environ, 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'},
      check=True,
    )
    shutil.rmtree(GOLDEN, ignore_errors=True)
    (GOLDEN / tapes.TAPES).mkdir(parents=True)
    shutil.copytree(workdir / records.RECORDS, GOLDEN / records.RECORDS)
    for path in (workdir / tapes.TAPES).iterdir():
      with gzip.GzipFile(GOLDEN / tapes.TAPES / f'{path.name}.gz', 'wb', mtime=0) as packed:
        packed.write(path.read_bytes())


if __name__ == '__main__':
  if sys.argv[1:] != ['--record']:
    sys.exit(__doc__)
  record()
