"""Tapes of a real run replay identically: here, under other hash seeds, on other Pythons.

The run: `tiny` in lock step on real processes; l1 is killed half-way and restarts from its
checkpoint. `golden/syncer.jsonl` is the syncer's tape, `golden/learner.jsonl` that of l1's second
process. A change of a machine's behaviour, or of the tape's schema, makes them diverge. If the
change is intended, record them again, look at the difference, and give its reason in the commit::

    python -m tests.protocol.tape.test_golden_tapes --record
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest

from diloco_jax.protocol import messages
from diloco_jax.protocol.tape import tape as tape_lib
from diloco_jax.verification.replay import machines as replay_machines
from tests import interpreters

ROOT = pathlib.Path(__file__).resolve().parents[3]
GOLDEN = pathlib.Path(__file__).resolve().parent / 'golden'
TAPES = (GOLDEN / 'syncer.jsonl', GOLDEN / 'learner.jsonl')
# No site-packages (-S), only the protocol: it runs on a bare Python.
REPLAY = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
from diloco_jax.verification.replay import machines as replay
for path in sys.argv[2:]:
  with open(path, 'rb') as file:
    print(replay.replay(file).text())
print(hash('tape'), *sys.version_info[:2])
"""

RUN = (
  '--config=stdlib_lm:tiny',
  '--config.train.steps=36',
  '--config.train.checkpoint_every_steps=4',  # also on a busy machine one is done before the kill
  '--config.train.eval_every=0',
  '--config.sync.quorum=3',
  '--config.sync.max_lag=1',
  '--kill=l1@0.5+0.2',
)


# --- Tests ----------------------------------------------------------------------------------------


def replay(path: pathlib.Path) -> replay_machines.Replay:
  with open(path, 'rb') as file:
    return replay_machines.replay(file)


@pytest.mark.parametrize('path', TAPES, ids=lambda path: path.stem)
def test_a_golden_tape_replays(path: pathlib.Path):
  result = replay(path)
  assert result.identical, result.text()
  assert (result.end, result.torn, result.header.role) == ('exit', False, path.stem)
  assert result.events > 100


def test_the_golden_run_has_a_kill_and_a_restart():
  with open(TAPES[0], 'rb') as file:
    turns = list(tape_lib.Reader(file))
  joins = [
    turn.event.message
    for turn in turns
    if isinstance(getattr(turn.event, 'message', None), messages.Join)
  ]
  assert len({join.nonce for join in joins if join.learner == 'l1'}) == 2
  assert replay(TAPES[1]).header.start.state['learner'] == 'l1'


def test_the_running_python_is_one_of_those_tested():
  assert sys.executable in interpreters.pythons().values()


@pytest.mark.parametrize('hash_seed', interpreters.HASH_SEEDS)
@pytest.mark.parametrize('version', interpreters.pythons())
def test_another_process_replays_identically(version: str, hash_seed: str):
  """Same actions, same hash: neither the order of a set or a dict nor the Python matters."""
  *lines, python = interpreters.run_bare(version, hash_seed, REPLAY, str(ROOT), *map(str, TAPES))
  assert lines == [replay(path).text() for path in TAPES]
  assert python.split()[1:] == version.split('.')


# --- Recording ------------------------------------------------------------------------------------


def record() -> None:
  """Runs the run, checks its tapes and copies two of them here."""
  with tempfile.TemporaryDirectory() as folder:
    subprocess.run(
      [sys.executable, '-m', 'diloco_jax', 'train', *RUN, f'--workdir={folder}'],
      cwd=ROOT,
      env={**os.environ, 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'},
      check=True,
    )
    subprocess.run([sys.executable, '-m', 'diloco_jax', 'replay', folder], cwd=ROOT, check=True)
    for name, target in zip(('syncer.1.0.jsonl', 'l1.2.0.jsonl'), TAPES):
      shutil.copyfile(pathlib.Path(folder) / 'tapes' / name, target)


if __name__ == '__main__':
  if sys.argv[1:] != ['--record']:
    sys.exit(__doc__)
  record()
