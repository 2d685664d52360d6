"""Versions of a model side by side: read, and the writer killed, at every moment of their writing.

A moment is before each call that changes the file system, or opens or syncs a file.
"""

import contextlib
import json
import os
import pathlib
import resource
import shutil
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from safetensors import numpy as safetensors

from diloco_jax.api import versions
from diloco_jax.storage import arrays, json_files, states
from diloco_jax.storage import files as files_lib

CALLS = 'open fsync rename replace symlink mkdir unlink rmdir'.split()


@pytest.fixture(name='synced', autouse=True)
def _synced(monkeypatch) -> list[str]:
  """What was synced, in order, without the wait of some thousand times for a disk."""
  paths = []
  record = lambda descriptor: paths.append(os.readlink(f'/proc/self/fd/{descriptor}'))
  monkeypatch.setattr(os, 'fsync', record)
  return paths


class Killed(BaseException):
  """The process ends: no call of it reaches the disk any more."""


@contextlib.contextmanager
def _watched(moment: Callable[[int], None]) -> Iterator[None]:
  """Calls `moment` with the number of each call, before it; what it raises, all later calls raise,
  too."""
  dead, count, watching = [], 0, False

  def watch(call):
    def watched(*args, **more):
      nonlocal count, watching
      if dead:
        raise dead[0]
      if not watching:
        count, watching = count + 1, True
        try:
          moment(count)
        except BaseException as error:
          dead.append(error)
          raise
        finally:
          watching = False
      return call(*args, **more)

    return watched

  with pytest.MonkeyPatch.context() as patch:
    for name in CALLS:
      patch.setattr(os, name, watch(getattr(os, name)))
    yield


def _model(number: int) -> Callable[[pathlib.Path], None]:
  """A model of two files, which tell the same number if they are of one version."""

  def write(folder: pathlib.Path) -> None:
    json_files.write(folder / 'config.json', {'number': number})
    arrays.export(folder / 'model.safetensors', {'a': np.full(9, number, np.float32)}, {})

  return write


def _number(folder: pathlib.Path) -> int:
  """Of a whole version. Raises AssertionError."""
  try:
    number = json.loads((folder / 'config.json').read_text())['number']
    array = safetensors.load_file(folder / 'model.safetensors')['a']
    assert (array == number).all() and states.verify(folder).name == f'version/{number}'
    return number
  except (OSError, KeyError, states.Damaged) as error:
    raise AssertionError(f'{folder} is half a version: {error}') from error


def _read(out: pathlib.Path) -> int:
  """The newest version by the link, or -1; all that has the name of one is whole."""
  for path in (out / 'versions').glob('*-*'):
    _number(path)
  by_link = -1
  if (out / 'latest').is_symlink():
    by_link = _number((out / 'latest').resolve())
  if (out / 'index.json').exists():
    index = json_files.unseal(json_files.read(out / 'index.json'))
    assert _number(out / index['path']) == index['version']
    for name, size, digest in index['files']:
      file = out / index['path'] / name
      assert (file.stat().st_size, states.sha256(file)) == (size, digest)
  return by_link


def _write_all(out: pathlib.Path, numbers: Iterator[int] | range) -> None:
  with contextlib.closing(versions.Versions(out, 2)) as kept:
    for number in numbers:
      kept.add(number, _model(number))
      assert _read(out) == number


def test_a_version_is_whole_at_every_moment_and_two_are_kept(tmp_path):
  """Also where numbers go back, as after a restore, or come again, as after a restart."""
  seen = []
  with _watched(lambda _: seen.append(_read(tmp_path))):
    _write_all(tmp_path, [1, 2, 3, 2])
    _write_all(tmp_path, [2, 5])
  changes = [seen[0], *(new for old, new in zip(seen, seen[1:]) if old != new)]
  assert changes == [-1, 1, 2, 3, 2, 5] and len(seen) > 100
  assert len(list((tmp_path / 'versions').iterdir())) == 2


def test_a_writer_that_is_killed_at_any_moment_leaves_whole_versions_and_the_next_goes_on(tmp_path):
  calls, at = [], 0
  while len(calls) == at:  # until it is done before the call at which it would be killed
    calls, at, out = [], at + 1, tmp_path / str(at)
    _write_all(out, [1, 2])

    def moment(count):
      calls.append(count)
      if count == at:
        raise Killed

    kept = versions.Versions(out, 2)
    with contextlib.suppress(Killed), _watched(moment):
      kept.add(3, _model(3))
    kept.close()  # as the kernel does
    assert _read(out) in (2, 3)
    _write_all(out, [3, 4])
    assert {path.name.split('-')[0] for path in (out / 'versions').iterdir()} == {'3', '4'}
  assert at > 30


def test_a_version_is_durable_before_it_has_its_name_and_its_name_before_the_switch(
  tmp_path, synced, monkeypatch
):
  renamed = []

  def rename(source, other):
    if pathlib.Path(source).name == 'new':
      whole = {str(path) for path in (pathlib.Path(source), *pathlib.Path(source).iterdir())}
      # A file that replaces one is synced under the name that it has before.
      assert whole <= {path.removesuffix('.new') for path in synced}
      renamed.append(other)
    rename_(source, other)

  def replace(source, other):
    if pathlib.Path(other).name in ('index.json', 'latest'):
      assert renamed and str(tmp_path / 'versions') in synced
    replace_(source, other)

  rename_, replace_ = os.rename, os.replace
  monkeypatch.setattr(os, 'rename', rename)
  monkeypatch.setattr(os, 'replace', replace)
  _write_all(tmp_path, [1])
  assert len(renamed) == 1 and synced[-1] == str(tmp_path)


def _switched_first(self, number, write):
  link = self._folder / 'latest'
  link.unlink(missing_ok=True)
  link.symlink_to(f'versions/{number}-00000000')
  write(link.resolve())


def _in_its_place(self, number, write):
  add, versions._NEW = ADD, f'{number}-00000000'
  add(self, number, write)


def _replaced(self, number, write):
  shutil.rmtree(self._folder / 'versions', ignore_errors=True)
  ADD(self, number, write)


ADD = versions.Versions.add


@pytest.mark.parametrize('add', [_switched_first, _in_its_place, _replaced])
def test_who_switches_before_a_version_is_written_is_found(add, tmp_path, monkeypatch):
  monkeypatch.setattr(versions, '_NEW', versions._NEW)
  monkeypatch.setattr(versions.Versions, 'add', add)
  with pytest.raises(AssertionError, match='is half a version'):
    with _watched(lambda _: _read(tmp_path)):
      _write_all(tmp_path, [1, 2])


def test_a_full_disk_and_a_model_that_cannot_be_written_leave_the_newest(tmp_path):
  _write_all(tmp_path, [1])
  kept, limits = versions.Versions(tmp_path, 2), resource.getrlimit(resource.RLIMIT_FSIZE)

  def fails(folder):
    _model(2)(folder)
    raise states.Damaged('it does not read back')

  for write, error in ((_model(2), OSError), (fails, states.Damaged)):
    if error is OSError:
      resource.setrlimit(resource.RLIMIT_FSIZE, (30, limits[1]))
    try:
      with pytest.raises(error):
        kept.add(2, write)
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert _read(tmp_path) == 1 and len(list((tmp_path / 'versions').iterdir())) == 1
  kept.add(3, _model(3))
  assert _read(tmp_path) == 3
  with pytest.raises(files_lib.DirectoryError, match='is already used by follower'):
    versions.Versions(tmp_path, 2)
  kept.close()


def test_a_damaged_version_of_an_earlier_process_is_removed(tmp_path):
  _write_all(tmp_path, [1, 2])
  (file,) = tmp_path.glob('versions/1-*/model.safetensors')
  file.write_bytes(file.read_bytes()[:-1])
  _write_all(tmp_path, [3])
  assert sorted(path.name[0] for path in (tmp_path / 'versions').iterdir()) == ['2', '3']
