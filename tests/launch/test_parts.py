"""A run in two parts, as on two machines: a folder for each `diloco launch`, and mutual TLS."""

import pathlib
import signal
import subprocess
import sys

import pytest

from diloco_jax.certs import authority, proofs
from diloco_jax.report import records as records_lib
from tests.launch.lib import command_line

_CONFIG = [
  '--config=stdlib_lm:tiny',
  '--config.sync.learners=2',
  '--config.sync.quorum=2',
  '--config.train.steps=60',
]


class Launch:
  """`diloco launch` and its output, line by line."""

  def __init__(self, folder: pathlib.Path, *words: str):
    self.process = subprocess.Popen(
      [sys.executable, '-m', 'diloco_jax', 'launch', f'--workdir={folder}', *words],
      cwd=command_line.ROOT,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    self.said: list[str] = []

  def until(self, words: str) -> str:
    for line in self.process.stdout:
      self.said.append(line)
      if words in line:
        return line.strip()
    raise AssertionError(''.join(self.said))

  def end(self) -> int:
    with self.process as process:
      self.said += process.stdout
    return process.returncode


@pytest.mark.full
def test_a_learner_elsewhere_trains_with_the_syncer_and_a_learner_here(tmp_path):
  owner = authority.init(tmp_path / 'certs', 'apart', proofs.utc_now())
  for name in ('l0', 'l1'):
    owner.issue(name, proofs.utc_now())
  tls = f'--tls={tmp_path}/certs'
  here, away = tmp_path / 'here', tmp_path / 'there'
  first = Launch(here, *_CONFIG, tls, '--only=syncer,l0', '--listen=127.0.0.1:0')
  address = first.until('the syncer listens on').rpartition(' ')[2]
  second = Launch(away, *_CONFIG, tls, '--only=l1', f'--syncer={address}')
  assert second.end() == 0, second.said
  assert first.end() == 0, first.said
  merged = [fact for fact in records_lib.records(here) if fact['name'] == 'synced']
  assert {name for fact in merged for name in fact['participants']} == {'l0', 'l1'}
  assert (here / 'model').is_dir() and not (away / 'syncer').exists()
  islands = [[path.name for path in (folder / 'islands').iterdir()] for folder in (here, away)]
  assert islands == [['l0'], ['l1']]


def test_a_syncer_for_loops_of_the_users_own_is_started_and_interrupted(tmp_path):
  """The command that continues the run is for the same part of it, with the same places."""
  authority.init(tmp_path / 'certs', 'own', proofs.utc_now())
  words = '--name=own', f'--tls={tmp_path}/certs', '--listen=127.0.0.1:0', '--only=syncer'
  run = Launch(tmp_path / 'run', '--config=own_loop', *words)
  run.until('for the first learner, which brings the model')
  run.process.send_signal(signal.SIGINT)
  assert run.end() == 130
  assert ' '.join(['launch --resume', f'--workdir={tmp_path}/run', *words]) in ''.join(run.said)
