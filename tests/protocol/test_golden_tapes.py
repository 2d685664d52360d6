"""Tapes of a real run replay identically: here, under other hash seeds, on other Pythons.

The run: `tiny` in lock step on processes of its own; l1 is killed half-way and comes back from its
checkpoint. `golden/syncer.jsonl` is the syncer's tape, `golden/learner.jsonl` that of l1's second
life. A change of what a machine does, or of the tape's schema, makes them diverge. If that was
meant, record them anew, look at what diverged, and say in the commit why it had to::

    python -m tests.protocol.test_golden_tapes --record
"""

import functools
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest

from diloco_jax.protocol import messages, tape

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = pathlib.Path(__file__).resolve().parent / 'golden'
TAPES = (GOLDEN / 'syncer.jsonl', GOLDEN / 'learner.jsonl')
DEADLINE_S = 120
OLDEST, NEWEST = (3, 11), (3, 15)
SEEDS = ('0', '1', '4242')

# No site-packages (-S), nothing but the protocol: what a bare Python can do.
REPLAY = '''
import pathlib, sys
sys.path.insert(0, sys.argv[1])
from diloco_jax.protocol import tape
for path in sys.argv[2:]:
  with open(path, 'rb') as file:
    print(tape.replay(file).text())
print(hash('tape'), *sys.version_info[:2])
'''

RUN = (
  '--config=experiments/configs/stdlib_lm.py:tiny', '--config.train.steps=36',
  '--config.train.eval_every=0', '--config.sync.quorum=3', '--config.sync.max_lag=1',
  '--config.chaos.enabled=true', '--config.chaos.kills[0].victim=l1',
  '--config.chaos.kills[0].at_fraction=0.5', '--config.chaos.kills[0].down_s=0.2',
)


# --- Which Pythons --------------------------------------------------------------------------------


def _candidates() -> list[str]:
  """The running Python first, its siblings (pyenv, uv, setup-python), then those on PATH."""
  beside = pathlib.Path(sys.base_prefix).parent
  siblings = [*beside.glob('*/bin/python3'), *beside.parent.glob('*/*/bin/python3')]
  named = [shutil.which(f'python3.{minor}') for minor in range(OLDEST[1], NEWEST[1] + 1)]
  return [sys.executable, *map(str, sorted(siblings)), *filter(None, named)]


def _environment(**more: str) -> dict[str, str]:
  """This one without what it tells Python."""
  return {name: value for name, value in os.environ.items() if not name.startswith('PYTHON')} | more


def _version(python: str) -> tuple[int, int] | None:
  """None for one that does not start (a shim of what is not installed)."""
  try:
    done = subprocess.run(
      [python, '-S', '-c', 'import sys; print(*sys.version_info[:2])'], capture_output=True,
      text=True, timeout=DEADLINE_S, check=True, env=_environment(),
    )
    major, minor = done.stdout.split()
  except (OSError, subprocess.SubprocessError, ValueError):
    return None
  return int(major), int(minor)


@functools.cache
def pythons() -> dict[str, str]:
  """One Python of each version from 3.11 on that is found, by version; the running one always."""
  found: dict[tuple[int, int], str] = {}
  for python in dict.fromkeys(_candidates()):
    version = _version(python)
    if version is not None and version >= OLDEST:
      found.setdefault(version, python)
  return {f'{major}.{minor}': found[major, minor] for major, minor in sorted(found)}


# --- Tests ----------------------------------------------------------------------------------------


def replay(path: pathlib.Path) -> tape.Replay:
  with open(path, 'rb') as file:
    return tape.replay(file)


@pytest.mark.parametrize('path', TAPES, ids=lambda path: path.stem)
def test_a_golden_tape_replays(path: pathlib.Path):
  result = replay(path)
  assert result.identical, result.text()
  assert (result.end, result.torn, result.header.role) == ('exit', False, path.stem)
  assert result.events > 100


def test_the_golden_run_has_a_kill_and_a_return():
  with open(TAPES[0], 'rb') as file:
    turns = list(tape.Reader(file))
  joins = [turn.event.message for turn in turns
           if isinstance(getattr(turn.event, 'message', None), messages.Join)]
  assert len({join.nonce for join in joins if join.learner == 'l1'}) == 2
  assert replay(TAPES[1]).header.start.snapshot['learner'] == 'l1'


def test_the_running_python_is_among_those_used():
  assert sys.executable in pythons().values()
  assert sys.version_info[:2] >= OLDEST


@pytest.mark.parametrize('seed', SEEDS)
@pytest.mark.parametrize('version', pythons())
def test_another_process_replays_the_same(version: str, seed: str):
  """Same actions, same hash: no order of a set or a dict, no version of Python gets in."""
  done = subprocess.run(
    [pythons()[version], '-S', '-B', '-c', REPLAY, str(ROOT), *map(str, TAPES)],
    capture_output=True, text=True, timeout=DEADLINE_S, env=_environment(PYTHONHASHSEED=seed),
  )
  assert done.returncode == 0, done.stderr
  *lines, told = done.stdout.splitlines()
  assert lines == [replay(path).text() for path in TAPES]
  assert told.split()[1:] == version.split('.')


# --- Recording ------------------------------------------------------------------------------------


def record() -> None:
  """Runs the run, checks its tapes and puts two of them here."""
  with tempfile.TemporaryDirectory() as folder:
    subprocess.run(
      [sys.executable, '-m', 'experiments.local', *RUN, f'--workdir={folder}'], cwd=ROOT,
      env={**os.environ, 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'}, check=True,
    )
    subprocess.run([sys.executable, '-m', 'experiments.replay', folder], cwd=ROOT, check=True)
    for name, target in zip(('syncer.1.0.jsonl', 'l1.2.0.jsonl'), TAPES):
      shutil.copyfile(pathlib.Path(folder) / 'tapes' / name, target)


if __name__ == '__main__':
  if sys.argv[1:] != ['--record']:
    sys.exit(__doc__)
  record()
