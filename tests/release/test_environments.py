"""The environments of users: without the extras, and with the lowest and the newest packages that
pyproject.toml allows.

The latter are made once, in .cache, which needs a registry: with --all only.
"""

import hashlib
import importlib.metadata
import itertools
import pathlib
import re
import subprocess
import tomllib

import pytest
import yaml

from diloco_jax.report import records as records_lib
from tests import interpreters
from tests.launch.lib import command_line
from tests.release import releases

ROOT = releases.ROOT
TEXT = (ROOT / 'pyproject.toml').read_text('utf-8')
PROJECT = tomllib.loads(TEXT)['project']
_BARE = """
import importlib.abc, runpy, sys

class Absent(importlib.abc.MetaPathFinder):
  def find_spec(self, name, path=None, target=None):
    if name.partition('.')[0] in ABSENT:
      raise ModuleNotFoundError(f'No module named {name!r}', name=name)

ABSENT = set(sys.argv[1].split(','))
sys.meta_path.insert(0, Absent())
sys.argv[:2] = ['diloco']
if sys.argv[1:]:
  runpy.run_module('diloco_jax', run_name='__main__')
import diloco_jax
print(*(getattr(diloco_jax, name).__name__ for name in diloco_jax.__all__))
"""


# --- Without the extras ---------------------------------------------------------------------------


def _packages(requirements: list[str]) -> set[str]:
  names = (re.match(r'[A-Za-z0-9._-]+', requirement)[0] for requirement in requirements)
  return {re.sub('[._-]+', '-', name).lower() for name in names}


def _optional() -> set[str]:
  """The modules of packages that only extras name."""
  extras = _packages(list(itertools.chain(*PROJECT['optional-dependencies'].values())))
  extras -= _packages(PROJECT['dependencies']) | {'diloco-jax'}
  modules = importlib.metadata.packages_distributions().items()
  return {module for module, names in modules if _packages(names) <= extras}


def _bare(*words: str) -> str:
  done = command_line.python('-c', _BARE, ','.join(_optional()), *words)
  assert done.returncode == 0, done.stderr
  return done.stdout


def test_every_public_name_is_there_without_the_extras():
  assert {'safetensors', 'tokenizers', 'wandb', 'gcsfs', 'sklearn'} <= _optional()
  assert {'join', 'run', 'Task'} <= set(_bare().split())


@pytest.mark.parametrize('words', [('train', '--help'), ('export', '--help')])
def test_the_command_starts_without_the_extras(words):
  assert 'diloco' in _bare(*words)


# --- The lowest and the newest packages -----------------------------------------------------------


def _environment(resolution: str, python: str) -> pathlib.Path:
  """The Python of an environment with what the package needs and nothing else."""
  about = hashlib.sha256(f'{resolution} {PROJECT["dependencies"]}'.encode()).hexdigest()[:8]
  folder = ROOT / '.cache' / f'{resolution}-{python}-{about}'
  if not (folder / 'made').exists():
    run = lambda *words: subprocess.run(words, cwd=ROOT, check=True)
    run(interpreters.pythons()[python], '-m', 'venv', '--clear', str(folder))
    own_python, versions = str(folder / 'bin' / 'python'), str(folder / 'versions.txt')
    run(own_python, '-m', 'pip', 'install', '--quiet', 'uv')
    uv = own_python, '-m', 'uv', 'pip'
    chosen = '--quiet', f'--resolution={resolution}', f'--python={own_python}'
    run(*uv, 'compile', *chosen, 'pyproject.toml', '-o', versions)
    run(*uv, 'install', '--quiet', f'--python={own_python}', '-r', versions)
    (folder / 'made').touch()
  return folder / 'bin' / 'python'


RESOLUTIONS = 'lowest-direct', 'highest'
PYTHONS = sorted({'3.11', '3.13'} & interpreters.pythons().keys())


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize('python', PYTHONS)
@pytest.mark.parametrize('resolution', RESOLUTIONS)
def test_it_trains_in_the_environment(resolution, python, tmp_path):
  command = releases.command(
    ROOT, 'train', '--config=stdlib_lm:tiny', '--config.train.steps=40', f'--workdir={tmp_path}/run'
  )
  command[0] = str(_environment(resolution, python))
  done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  assert sum(fact['name'] == 'synced' for fact in records_lib.records(tmp_path / 'run')) > 4


def test_the_workflow_tests_both_ends_on_two_pythons():
  text = (ROOT / '.github' / 'workflows' / 'test.yml').read_text('utf-8')
  matrix = yaml.safe_load(text)['jobs']['bounds']['strategy']['matrix']
  assert matrix == {'resolution': list(RESOLUTIONS), 'python': ['3.11', '3.13']}
  assert all('>=' in requirement for requirement in PROJECT['dependencies'])
