"""Quickstarts (experiments/examples) in environments of their frameworks, as their users run them.

    ./scripts/test.sh --trainers    # makes the environments, in .cache

Those of frameworks that every test has run in the lane of CI, too.
"""

import hashlib
import json
import pathlib
import re
import subprocess
import sys
import sysconfig

import pytest

from diloco_jax.storage import folders
from tests import interpreters, programs

ROOT = pathlib.Path(__file__).resolve().parents[2]
ONE = ROOT / 'tests' / 'trainers' / 'one.py'
OF_TESTS = ['optax', 'linen', 'nnx']
PACKAGES = {
  'equinox': ['equinox==0.13.8'],
  'haiku': ['dm-haiku==0.0.17'],
  'keras': ['keras==3.15.1'],
  'tunix': ['google-tunix==0.1.7'],
  'maxtext': [  # and what its training imports: its extras are for TPUs and GPUs
    *('maxtext==0.2.5', 'aqtp==0.9.0', 'drjax==0.2.1', 'huggingface_hub==2.4.0', 'jinja2==3.1.6'),
    *('omegaconf==2.4.0', 'pathwaysutils==0.1.13', 'qwix==0.1.8', 'sentencepiece==0.2.3'),
    *('sympy==1.14.0', 'tiktoken==0.14.0', 'tokamax==0.0.17', 'transformers==5.24.0'),
  ],
}
NAMES = [
  *(pytest.param(name, marks=pytest.mark.long) for name in OF_TESTS),
  *(pytest.param(name, marks=[pytest.mark.full, pytest.mark.timeout(1800)]) for name in PACKAGES),
]
DEADLINE_S = 800  # a framework is imported in seconds, or in minutes beside other work
EXEC = 'import os, sys; os.execv(sys.argv[1], sys.argv[1:])'


def python_of(name: str) -> str:
  """The Python of an environment with the packages of the tests and those of a framework."""
  if name in OF_TESTS:
    return sys.executable
  ours, wanted, made_by = sysconfig.get_path('purelib'), PACKAGES[name], sys.executable
  if name == 'maxtext':  # it asks for Python 3.12, whose packages ours may not be
    made_by = interpreters.pythons().get('3.12') or pytest.skip('no Python 3.12 for MaxText')
    ours, wanted = '', [*wanted, '-r', str(ROOT / 'requirements.lock')]
  about = hashlib.sha256(f'{ours} {wanted} {sys.version}'.encode()).hexdigest()[:8]
  folder = ROOT / '.cache' / f'trainer-{name}-{about}'
  if not (folder / 'made').exists():
    subprocess.run([made_by, '-m', 'venv', '--clear', folder], check=True)
    [packages] = folder.glob('lib/python*/site-packages')
    (packages / 'ours.pth').write_text(ours)
    pip = folder / 'bin' / 'python', '-m', 'pip', 'install', '--quiet'
    subprocess.run([*pip, '--disable-pip-version-check', *wanted], check=True)
    (folder / 'made').touch()
  return str(folder / 'bin' / 'python')


@pytest.mark.parametrize('name', NAMES)
def test_one_learner_makes_the_bits_of_the_loop_alone(name, tmp_path):
  done = programs.Program('-c', EXEC, python_of(name), ONE, name, 'same', cwd=tmp_path)
  assert done.end(DEADLINE_S) == 0 and done.lines[-1] == 'the same bits', str(done)


@pytest.mark.parametrize('name', NAMES)
def test_two_are_killed_resumed_and_exported(name, tmp_path):
  """With the commands of its docstring; beside them, its batches are held back until the kill."""
  gate, python = tmp_path / 'gate', python_of(name)
  text = (ROOT / 'experiments' / 'examples' / f'quickstart_{name}.py').read_text()
  [command] = [line for line in text.replace('\\\n', ' ').splitlines() if 'diloco syncer' in line]
  workdir = re.search('--workdir=([^ ]+)', command)[1]
  with programs.starting() as of_this_python:
    start = lambda *words: of_this_python('-c', EXEC, python, *words, cwd=tmp_path)
    learner = lambda which: start(ONE, name, which, gate)
    syncer = start('-P', '-m', 'diloco_jax', *command.split()[1:])
    syncer.wait_for('the first learner, which brings the model')
    first, second = learner('l0'), learner('l1')
    kept = tmp_path / workdir / folders.ISLANDS / 'l1' / folders.CHECKPOINTS
    programs.until(lambda: folders.numbers_in(kept), syncer, first, second, deadline_s=DEADLINE_S)
    second.kill()
    again = learner('l1')
    again.wait_for('l1 continues with the moments of its checkpoint at step', DEADLINE_S)
    again.wait_for('joined the run at clock')
    gate.touch()
    ends = [program.end(DEADLINE_S) for program in (first, again, syncer)]
    assert ends == [0, 0, 0], f'{first}\n{again}'
    out = tmp_path / 'model.safetensors'
    done = start('-P', '-m', 'diloco_jax', 'export', f'--workdir={workdir}', f'--out={out}')
    assert done.end() == 0, str(done)
    [exchanged] = [line for line in again.lines if ' exchanges ' in line]
    size = int.from_bytes(out.read_bytes()[:8], 'little')
    names = json.loads(out.read_bytes()[8 : 8 + size]).keys() - {'__metadata__'}
    assert f') in {len(names)} arrays: ' in exchanged


def test_each_has_at_most_60_lines_and_is_on_the_page():
  page = (ROOT / 'docs' / 'tutorials' / 'own_loop.md').read_text()
  paths = sorted((ROOT / 'experiments' / 'examples').glob('quickstart_*.py'))
  assert {path.stem.partition('_')[2] for path in paths} == {*OF_TESTS, *PACKAGES}
  for path in paths:
    assert len(path.read_text().splitlines()) <= 60, path.name
    assert path.name in page
