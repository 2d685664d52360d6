"""A run in two parts, as on two machines: a folder for each `diloco launch`, and mutual TLS."""

import signal

import pytest

from diloco_jax.certs import authority, proofs
from diloco_jax.report import records as records_lib
from tests import programs
from tests.runs.lib import ray_cluster

_CONFIG = [
  '--config=stdlib_lm:tiny',
  '--config.sync.learners=2',
  '--config.sync.quorum=2',
  '--config.train.steps=60',
]


@pytest.fixture(name='launch')
def _launch():
  with programs.starting() as start:
    yield lambda folder, *words: start(*programs.diloco('launch', f'--workdir={folder}', *words))


@pytest.mark.full
def test_a_learner_elsewhere_trains_with_the_syncer_and_a_learner_here(launch, tmp_path):
  tls = f'--tls={ray_cluster.certify(tmp_path / "certs", "l0", "l1")}'
  here, away = tmp_path / 'here', tmp_path / 'there'
  first = launch(here, *_CONFIG, tls, '--only=syncer,l0', '--listen=127.0.0.1:0')
  address = first.wait_for('the syncer listens on').rpartition(' ')[2]
  second = launch(away, *_CONFIG, tls, '--only=l1', f'--syncer={address}')
  assert second.end() == 0, second
  assert first.end() == 0, first
  merged = [fact for fact in records_lib.records(here) if fact['name'] == 'synced']
  assert {name for fact in merged for name in fact['participants']} == {'l0', 'l1'}
  assert (here / 'model').is_dir() and not (away / 'syncer').exists()
  islands = [[path.name for path in (folder / 'islands').iterdir()] for folder in (here, away)]
  assert islands == [['l0'], ['l1']]


def test_a_syncer_for_loops_of_the_users_own_is_started_and_interrupted(launch, tmp_path):
  """The command that continues the run is for the same part of it, with the same places."""
  authority.init(tmp_path / 'certs', 'own', proofs.utc_now())
  words = '--name=own', f'--tls={tmp_path}/certs', '--listen=127.0.0.1:0', '--only=syncer'
  run = launch(tmp_path / 'run', '--config=own_loop', *words)
  run.wait_for('for the first learner, which brings the model')
  run.send(signal.SIGINT)
  assert run.end() == 130
  assert ' '.join(['launch --resume', f'--workdir={tmp_path}/run', *words]) in run.text
