"""A run of real processes whose store fails all the time: all of them are killed, and it ends on an
empty disk without the loss of an outer step that a learner had seen."""

import contextlib
import pathlib
import subprocess
import sys

import psutil
import pytest

from diloco_jax.launch import local_run
from diloco_jax.report import records as records_lib
from diloco_jax.storage import store as store_lib
from tests.storage import fake_gcs

ROOT = pathlib.Path(__file__).resolve().parents[3]
DEADLINE_S = 600
RATE, FAILURES = 0.15, 100
FLAGS = (
  '--config=stdlib_lm:tiny',
  '--config.train.steps=500',
  '--config.train.store_log=true',
  '--config.train.checkpoint_every_steps=20',
  '--config.train.eval_every=0',
  '--config.sync.checkpoint_every_syncs=8',
)
pytestmark = [pytest.mark.full, pytest.mark.timeout(2 * DEADLINE_S)]


@contextlib.contextmanager
def _training(workdir: pathlib.Path, store: str):
  words = [sys.executable, '-m', 'diloco_jax', 'train', *FLAGS]
  with open(workdir.with_suffix('.log'), 'w', encoding='utf-8') as output:
    process = subprocess.Popen(
      [*words, f'--config.train.store={store}', f'--workdir={workdir}'],
      cwd=ROOT,
      env=local_run.environment(2),
      stdout=output,
      stderr=subprocess.STDOUT,
    )
    try:
      yield process
    finally:
      _kill_all(process)


def _kill_all(process: subprocess.Popen) -> None:
  with contextlib.suppress(psutil.NoSuchProcess):
    for one in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
      with contextlib.suppress(psutil.NoSuchProcess):
        one.kill()
  process.wait()


def _facts(workdir: pathlib.Path, name: str) -> list[dict]:
  found = []
  for path in (workdir / records_lib.RECORDS).glob('*.jsonl'):
    found += [fact for fact in records_lib.Tail(path).read() if fact['name'] == name]
  return found


def test_a_run_on_a_store_that_fails_ends_on_another_machine(bucket, tmp_path):
  store, first, second = f'{bucket.url}/run', tmp_path / 'first', tmp_path / 'second'
  faults = bucket.door.faults = fake_gcs.Faults(1, RATE)
  with _training(first, store) as process:
    while faults.injected.total() < FAILURES // 2 or len(_facts(first, 'synced')) < 40:
      with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    _kill_all(process)
  with _training(second, store) as process:
    assert process.wait(DEADLINE_S) == 0, second.with_suffix('.log').read_text()[-3_000:]
  assert faults.injected.total() >= FAILURES
  assert faults.injected.keys() == set(fake_gcs.KINDS)
  (recovered,) = _facts(second, 'recovered')
  for fact in _facts(first, 'adopted'):
    assert fact['version'] <= recovered['versions'][fact['fragment']]
  joined = [fact for fact in _facts(second, 'state') if fact['state'] == 'joined']
  assert joined and all(fact['incarnation'] == 2 for fact in joined)
  assert 42 not in {fact['code'] for fact in _facts(second, 'exit')}  # a failure is no refusal
  said = second.with_suffix('.log').read_text()
  assert 'Traceback' not in said and ' are gone' not in said
  bucket.door.faults = None
  model = [path for path in (second / 'model').rglob('*') if path.is_file()]
  names = {path.relative_to(second).as_posix() for path in model}
  assert names == set(store_lib.Store(store).names('model/'))
