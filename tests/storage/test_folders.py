"""Where a user's caches are: also of one without a home."""

import os
import pathlib
import pwd
import stat

import pytest

from diloco_jax.storage import folders
from diloco_jax.train import corpus_files


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
  monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
  monkeypatch.setattr(folders.tempfile, 'tempdir', str(tmp_path))


def _without_home(monkeypatch):
  def getpwuid(number):
    raise KeyError(number)

  monkeypatch.delenv('HOME', raising=False)
  monkeypatch.setattr(pwd, 'getpwuid', getpwuid)


def test_the_environment_is_first_and_then_the_home(monkeypatch, tmp_path):
  monkeypatch.setenv('HOME', str(tmp_path / 'home'))
  (tmp_path / 'home').mkdir()
  assert folders.cache({'XDG_CACHE_HOME': '/c'}) == pathlib.Path('/c')
  assert folders.cache() == tmp_path / 'home' / '.cache'


@pytest.mark.parametrize('home', ['none', 'gone'])
def test_without_a_home_it_is_a_folder_of_this_user_alone(home, monkeypatch, tmp_path):
  if home == 'none':
    _without_home(monkeypatch)
  else:
    monkeypatch.setenv('HOME', str(tmp_path / home))
  cache = folders.cache()
  assert cache == folders.cache() == tmp_path / f'diloco_jax-{os.getuid()}'
  assert stat.S_IMODE(cache.stat().st_mode) == 0o700
  (tmp_path / 'text').write_text('abc', 'utf-8')
  corpus = corpus_files.build_once('it', str(tmp_path / 'text'), lambda folder: None)
  assert cache in corpus.parents


@pytest.mark.parametrize('kind', ['file', 'dangling link'])
def test_a_name_that_is_taken_hinders_nobody(kind, monkeypatch, tmp_path):
  """Every user of the machine can take it."""
  _without_home(monkeypatch)
  path = tmp_path / f'diloco_jax-{os.getuid()}'
  path.write_text('', 'utf-8') if kind == 'file' else path.symlink_to(tmp_path / 'nothing')
  assert folders.cache().is_dir() and folders.cache() != path


def test_a_folder_of_another_user_is_not_trusted(monkeypatch, tmp_path):
  """Its name can be guessed, and compiled programs are read from there."""
  _without_home(monkeypatch)
  user = os.getuid()
  (tmp_path / f'diloco_jax-{user + 1}').mkdir()  # its owner is `user`
  monkeypatch.setattr(folders.os, 'getuid', lambda: user + 1)
  cache = folders.cache()
  assert cache.name.startswith('diloco_jax-') and cache.parent == tmp_path
  assert cache.name != f'diloco_jax-{user + 1}'


def test_what_is_moved_aside_gets_a_new_folder_also_if_an_older_one_is_gone(tmp_path):
  for name in ('aside-2', 'aside-10'):
    (tmp_path / name).mkdir()
  assert folders.new_aside(tmp_path).name == 'aside-11'
