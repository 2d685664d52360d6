"""A file is known by what is in it; what is remembered of it is never of other bytes."""

import mmap
import os
import subprocess
import time

import pytest

from diloco_jax.storage import folders
from diloco_jax.train import fingerprint


@pytest.fixture(name='path')
def _path(tmp_path, monkeypatch) -> str:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  (tmp_path / 'a.txt').write_bytes(b'one')
  os.utime(tmp_path / 'a.txt', (0, 0))
  return str(tmp_path / 'a.txt')


@pytest.fixture(name='read')
def _read(monkeypatch) -> list[str]:
  """The files that are read."""
  read, usual = [], fingerprint._sha256
  monkeypatch.setattr(fingerprint, '_sha256', lambda path: [usual(path), read.append(path)][0])
  return read


def _write_again(path: str, content: bytes) -> None:
  """Equal size and time of change."""
  time.sleep(0.02)  # a tick of the clock of any file system
  with open(path, 'r+b') as file:
    file.write(content)
  os.utime(path, (0, 0))


def test_a_file_is_read_once_and_again_if_a_byte_changes(path, read, monkeypatch):
  digests = [fingerprint.of([('a', path)]) for _ in range(2)]
  assert len(read) == 2, 'it is young, and may change unseen'
  monkeypatch.setattr(fingerprint, '_YOUNG_NS', -(10**9))
  digests += [fingerprint.of([('a', path)]) for _ in range(3)]
  assert len(read) == 3 and len(set(digests)) == 1
  _write_again(path, b'two')
  digests += [fingerprint.of([(name, path)]) for name in 'aabb']
  assert len(read) == 5 and len(set(digests)) == 3, 'the name is part of it'
  os.link(path, f'{path}.link')
  assert fingerprint.of([('b', f'{path}.link')]) == digests[-1]
  with pytest.raises(ValueError, match='cannot read .*a.txt.gone: No such file'):
    fingerprint.of([('a', f'{path}.gone')])


def test_what_is_written_to_a_mapping_of_a_file_is_seen(path, monkeypatch):
  monkeypatch.setattr(fingerprint, '_YOUNG_NS', -(10**9))
  with open(path, 'r+b') as file, mmap.mmap(file.fileno(), 0) as mapping:
    digests = set()
    for number in range(3):  # the first write moves the ctime
      mapping[0] = number
      digests.add(fingerprint.of([('a', path)]))
  on_tmpfs = 'tmpfs' in subprocess.check_output(['stat', '-f', '-c', '%T', path], encoding='utf-8')
  assert len(digests) == 3 or on_tmpfs


@pytest.mark.parametrize('damage', ['empty', 'half', 'flipped', 'a time of whole seconds'])
def test_what_is_no_evidence_is_not_believed(path, read, monkeypatch, damage):
  """A damaged memory, and a ctime that no kernel has set: of images, FAT and buckets."""
  monkeypatch.setattr(fingerprint, '_YOUNG_NS', -(10**9))
  usual = fingerprint.key
  if damage == 'a time of whole seconds':
    monkeypatch.setattr(fingerprint, 'key', lambda path: (*usual(path)[:3], 10**18))
  digest = fingerprint.of([('a', path)])
  for memory in (folders.cache() / 'diloco_jax').glob('fingerprints/*'):
    data = memory.read_bytes()
    flipped = bytes([data[0] ^ 1]) + data[1:]
    memory.write_bytes({'empty': b'', 'half': data[:32], 'flipped': flipped}[damage])
  assert fingerprint.of([('a', path)]) == digest and len(read) == 2


def test_a_file_that_changes_while_it_is_read_is_refused(path, monkeypatch):
  usual = fingerprint._sha256
  change = lambda path: [usual(path), _write_again(path, b'two')][0]
  monkeypatch.setattr(fingerprint, '_sha256', change)
  with pytest.raises(ValueError, match='a.txt changed last, .*, while it was read: start again'):
    fingerprint.of([('a', path)])
