"""Configs by name: of a file, of the package, of a run; an error in a file is one line."""

import pathlib
import re
import sys

import pytest

from diloco_jax.config import load
from diloco_jax.configs import stdlib_lm

GOOD = """
from diloco_jax.configs import stdlib_lm

def get_config(variant='tiny'):
  config = stdlib_lm.get_config(variant)
  config.sync.gamma = 0.5
  return config
"""


@pytest.fixture(name='file')
def _file(tmp_path) -> pathlib.Path:
  return tmp_path / 'mine.py'


def test_a_file_with_and_without_a_variant(file):
  file.write_text(GOOD)
  assert (load.load(str(file)).name, load.load(f'{file}:cpu').name) == ('tiny', 'cpu')
  assert load.load(f'{file}:cpu').sync.gamma == 0.5


def test_a_file_may_import_one_beside_it(file, monkeypatch):
  monkeypatch.setattr(sys, 'path', [*sys.path])
  file.write_text('import beside_the_config\n' + GOOD)
  file.with_name('beside_the_config.py').write_text('')
  assert load.load(str(file)).name == 'tiny'


def test_a_config_of_the_package():
  assert load.load('stdlib_lm:tiny') == stdlib_lm.get_config('tiny')


def test_the_config_of_a_run(tmp_path):
  config = stdlib_lm.get_config('tiny')
  config.sync.gamma = 0.25
  load.write(tmp_path, config)
  assert load.load(str(tmp_path)) == config


@pytest.mark.parametrize(
  'text, line, words',
  [
    ('def get_config(:', 1, 'SyntaxError: invalid syntax'),
    ('import nothing_of_this_name', 1, "No module named 'nothing_of_this_name'"),
    ('def get_config():\n  return 1 / 0', 2, 'ZeroDivisionError: division by zero'),
    (GOOD.replace('gamma', 'gmama'), 6, "no attribute 'gmama'"),
    ('open("/nonexistent")', 1, 'FileNotFoundError'),
    ('x = 1', None, "no attribute 'get_config'"),
    ('def get_config():\n  return {}', None, 'get_config returned dict, it must return'),
    ('def get_config(): pass', None, 'get_config returned NoneType, it must return'),
  ],
)
def test_an_error_in_a_file_names_the_file_and_the_line(file, text, line, words):
  file.write_text(text)
  place = f'{file}:{line}: ' if line else f'{file}: '
  with pytest.raises(ValueError, match=f'^{re.escape(place)}.*{re.escape(words)}'):
    load.load(str(file))


def test_an_error_in_a_file_named_from_here_has_its_line(file, monkeypatch):
  file.write_text('def get_config():\n  return 1 / 0')
  monkeypatch.chdir(file.parent)
  with pytest.raises(ValueError, match=f'^{re.escape(file.name)}:2: ZeroDivisionError'):
    load.load(file.name)


@pytest.mark.parametrize('name', ['stdlib_ml:tiny', 'nowhere.py', 'no/folder'])
def test_a_name_of_nothing_says_what_there_is(name):
  with pytest.raises(ValueError, match='there is no config .* stdlib_lm$'):
    load.load(name)


def test_a_run_of_another_version_is_refused(tmp_path):
  load.write(tmp_path, stdlib_lm.get_config('tiny'))
  path = tmp_path / load.FILE
  path.write_text(path.read_text().replace('"quorum"', '"quorums"'))
  with pytest.raises(ValueError, match=r'config.json: .*SyncConfig: missing quorum'):
    load.load(str(tmp_path))


def test_a_file_that_defines_a_flag_of_the_program_is_told_to_rename_it(tmp_path):
  (tmp_path / 'own.py').write_text(
    "from absl import flags\nflags.DEFINE_string('verbosity', '', 'one of the program')\n"
  )
  match = 'defines the flag --verbosity, which the program has, too: give it another name'
  with pytest.raises(ValueError, match=match):
    load.module(tmp_path / 'own.py')
