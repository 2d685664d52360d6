"""The public names have types: a user's file has the errors that it should have, and no other."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

import diloco_jax
from scripts import config_stub

ROOT = pathlib.Path(__file__).resolve().parents[1]
USER = pathlib.Path('tests/typed/user.py')
PUBLIC = ('__init__.py', 'api', 'config', 'configs', 'report', 'train/data.py', 'train/task.py')
WRONG = {
  number
  for number, line in enumerate((ROOT / USER).read_text().splitlines(), 1)
  if line.endswith('# wrong')
}


def check(*words: str) -> str:
  """What a checker prints."""
  command = [sys.executable, '-m', *words]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert not done.stderr and done.returncode == 1, done.stdout + done.stderr  # it finds the planted
  return done.stdout


@pytest.mark.long
@pytest.mark.parametrize('public', [(), pytest.param(PUBLIC, marks=pytest.mark.full)])
def test_pyright_finds_what_is_wrong_in_a_users_file_and_nothing_in_the_public_modules(public):
  modules = [f'diloco_jax/{name}' for name in public]
  output = json.loads(
    check(
      'pyright',
      '--pythonversion=3.12',  # from which on arrays are buffers
      f'--pythonpath={sys.executable}',
      '--outputjson',
      str(USER),
      *modules,
    )
  )
  errors = [
    (str(pathlib.Path(error['file']).relative_to(ROOT)), error['range']['start']['line'] + 1)
    for error in output['generalDiagnostics']
  ]
  assert set(errors) == {(str(USER), line) for line in WRONG}, output


@pytest.mark.full
def test_mypy_finds_the_same_in_a_users_file(tmp_path: pathlib.Path):
  output = check('mypy', '--follow-imports=silent', f'--cache-dir={tmp_path}', str(USER))
  assert {int(line) for line in re.findall(r'user\.py:(\d+): error', output)} == WRONG, output


def test_the_stub_of_the_protocols_settings_is_that_of_the_table():
  assert config_stub.PATH.read_text() == config_stub.stub(), 'run: python scripts/config_stub.py'


def test_every_public_name_is_imported_for_checkers():
  source = pathlib.Path(diloco_jax.__file__).read_text(encoding='utf-8')
  block = source.partition('if TYPE_CHECKING:')[2].partition('\n_HOME')[0]
  names = {name for line in re.findall(r'import (.*)', block) for name in line.split(', ')}
  assert names == set(diloco_jax.__all__) == diloco_jax._HOME.keys()
