"""A folder with the newest versions of a run, written by one process while another one reads it."""

import json
import pathlib
import re
import resource
import sys

import pytest

from diloco_jax.storage import arrays, hugging_face
from experiments.examples import pretrained
from tests import programs
from tests.runs.lib import reads_versions

MODEL = programs.ROOT / 'tests' / 'storage' / 'hugging_face' / 'llama'
SETTINGS = {
  'data.seq_len': 32,
  'data.batch_size': 2,
  'data.eval_batches': 1,
  'sync.learners': 1,
  'sync.fragments': 2,
  'sync.period': 2,
  'sync.overlap': 0,
  'optimizer.warmup_steps': 4,
  'optimizer.learning_rate': 1e-3,
}
KEPT = 30
pytestmark = pytest.mark.long


def _starts(start, run: pathlib.Path, steps: int) -> list[programs.Program]:
  """A syncer and its learner, from the model in the Hugging Face folder."""
  text = run.with_name('text.py')
  text.write_text(''.join(f'def f{n}(x):\n  return x + {n}\n\n\n' for n in range(20_000)))
  settings = SETTINGS | {'data.corpus': str(text)}
  words = [f'--config.{name}={value}' for name, value in settings.items()]
  words += [f'--config={pretrained.__file__}:{MODEL}', f'--config.train.steps={steps}']
  words.append(f'--workdir={run}')
  syncer = start(*programs.diloco('syncer', *words))
  syncer.wait_for('the syncer listens on')
  learner = '--learner=l0', f'--syncer=file:{run}/syncer/address'
  return [syncer, start(*programs.diloco('learner', *words, *learner))]


def _follower(start, run: pathlib.Path, out: pathlib.Path) -> programs.Program:
  flags = '--follow', '--every_s=0', f'--keep={KEPT}', f'--workdir={run}', f'--out={out}'
  return start(*programs.diloco('export', *flags))


def _count(*followers: programs.Program) -> int:
  return sum(line.startswith('version ') for follower in followers for line in follower.lines)


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(
  ('library', 'versions'),
  [('safetensors', 60), pytest.param('transformers', 200, marks=pytest.mark.full)],
)
def test_a_reader_finds_each_version_whole_past_a_kill_and_a_full_disk(
  library, versions, tmp_path, request
):
  run, out, stop = tmp_path / 'run', tmp_path / 'out', tmp_path / 'stop'
  python = request.getfixturevalue('reference') if library == 'transformers' else sys.executable
  with programs.starting() as start:
    _starts(start, run, 1_000_000)
    execs = 'import os, sys; os.execv(sys.argv[1], sys.argv[1:])'
    reader = start('-c', execs, python, reads_versions.__file__, out, stop, library, MODEL)
    reader.wait_for('ready')
    follower = _follower(start, run, out)
    programs.until(lambda: _count(follower) > versions // 3, follower, reader)
    infinite = resource.RLIM_INFINITY
    resource.prlimit(follower.process.pid, resource.RLIMIT_FSIZE, (100_000, infinite))
    refused = follower.wait_for('not written: ')
    text = r'File too large.*out/latest is what it was; the next version is tried'
    assert re.search(text, refused)
    resource.prlimit(follower.process.pid, resource.RLIMIT_FSIZE, (infinite, infinite))
    programs.until(lambda: _count(follower) > versions // 2, follower, reader)
    follower.kill()
    follows = _follower(start, run, out)
    written = lambda: _count(follower, follows) - follower.text.count('not written')
    programs.until(lambda: written() >= versions, follows, reader)
    follows.kill()
    last = json.loads((out / 'index.json').read_text('utf-8'))['version']
    programs.until(lambda: str(last) in reader.lines or not reader.running, reader)
    stop.touch()
    assert reader.end() == 0, reader
  read = [int(line) for line in reader.lines if line.isdigit()]  # beside warnings of a library
  assert read == sorted(read) and len(set(read)) > versions // 10
  assert len(list((out / 'versions').glob('*-*'))) <= KEPT + 1  # a kill was before a removal
  folder = (out / 'latest').resolve()
  assert pretrained.model_config(folder) == pretrained.model_config(MODEL)


def test_the_versions_end_with_the_run_and_the_last_is_the_model_that_is_exported(tmp_path):
  run, out, end = tmp_path / 'run', tmp_path / 'out', tmp_path / 'end'
  with programs.starting() as start:
    processes = _starts(start, run, 24)
    follower = _follower(start, run, out)
    assert [process.end() for process in (*processes, follower)] == [0, 0, 0], follower
    exported = start(*programs.diloco('export', f'--workdir={run}', f'--out={end}'))
    assert exported.end() == 0, exported
    refused = _follower(start, run, tmp_path / 'm.safetensors')
    assert refused.end() == 42 and 'a folder needs the Hugging Face folder' in refused.text
  numbers = [int(re.match(r'version (\d+): ', line)[1]) for line in follower.lines]
  assert numbers == sorted(set(numbers)) and numbers
  ours, theirs = (arrays.tensors_in(folder / hugging_face.FILE) for folder in (out / 'latest', end))
  assert ours.keys() == theirs.keys()
  assert all((ours[name].map() == theirs[name].map()).all() for name in ours)
