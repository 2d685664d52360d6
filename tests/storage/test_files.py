"""The real files under the write-ahead log: limits, locks, and killed processes."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import random
import subprocess
import sys

import pytest

from diloco_jax.storage import files as files_lib
from diloco_jax.storage import json_files, wal

RUN = 'files'


# --- The port -------------------------------------------------------------------------------------


def test_names_sizes_and_parts(tmp_path: pathlib.Path):
  files = files_lib.Files(tmp_path / 'new' / 'state')
  assert files.names() == []
  files.write('a', b'01', memoryview(b'2345'), b'', bytearray(b'67'))
  assert (files.names(), files.size('a'), files.read('a')) == (['a'], 8, b'01234567')
  assert files.read('a', 2, 3) == b'234'
  assert files.read('a', 6, 10) == b'67'
  assert files.read('a', 9) == files.read('a', 9, 2) == b''
  files.write('b', b'another')
  files.rename('a', 'b')
  files.fsync_names()
  assert (files.names(), files.read('b')) == (['b'], b'01234567')
  files.write('b')
  files.fsync('b')
  assert files.size('b') == 0
  files.remove('b')
  assert files.names() == []
  with pytest.raises(FileNotFoundError):
    files.read('b')
  files.close()


def test_no_descriptor_stays_open_behind_a_rename_a_removal_or_a_read(tmp_path: pathlib.Path):
  """A log may have a file for each outer step."""
  files = files_lib.Files(tmp_path)
  log = wal.open_log(files, RUN)

  def opened() -> int:
    """In this folder: others of the process may be closed meanwhile."""
    count = 0
    for name in os.listdir('/proc/self/fd'):
      with contextlib.suppress(FileNotFoundError):
        count += os.readlink(f'/proc/self/fd/{name}').startswith(str(tmp_path))
    return count

  before = opened()
  for number in range(1, 51):
    log.append(1, bytes(number))
    log.commit()
  assert opened() == before
  assert wal.open_log(files, RUN).committed == sum(1 for _ in log.records()) == 50
  assert opened() == before
  log.append(1, b'unfinished')
  assert opened() == before + 1
  wal.open_log(files, RUN)  # removes it
  assert opened() == before
  files.close()
  assert opened() == before - 1


def test_large_and_many_buffers_go_out_in_parts(tmp_path: pathlib.Path, monkeypatch):
  """A partial write is continued."""
  written, writev = [], os.writev

  def some(descriptor: int, buffers: list[memoryview]) -> int:
    written.append(sum(map(len, buffers)))
    return writev(descriptor, [b''.join(buffers)[:700_001]])

  monkeypatch.setattr(os, 'writev', some)
  files = files_lib.Files(tmp_path)
  buffers = [b'small', bytes(range(256)) * 12_000, *(bytes([n % 256]) * n for n in range(300))]
  files.write('a', *buffers)
  assert files.read('a') == b''.join(buffers)
  assert len(written) > 4
  monkeypatch.setattr(os, 'writev', lambda descriptor, buffers: 0)
  with pytest.raises(OSError, match='took nothing'):
    files.write('a', b'more')
  files.close()


@pytest.mark.parametrize('allowed', [True, False])
def test_large_files_go_around_the_page_cache(tmp_path: pathlib.Path, monkeypatch, allowed: bool):
  """Whole blocks; on a file system without such writes they do not."""
  control, write, blocks = fcntl.fcntl, os.write, []

  def refuse(descriptor: int, command: int, flags: int = 0) -> int:
    if command == fcntl.F_SETFL and flags & os.O_DIRECT and not allowed:
      raise OSError(errno.EINVAL, 'no direct writes')
    return control(descriptor, command, flags)

  def direct(descriptor: int, data: memoryview) -> int:
    blocks.append(len(data))
    half = len(data) // 2 // files_lib.BLOCK * files_lib.BLOCK  # a partial write ends them
    return write(descriptor, data[:half] if len(blocks) % 7 == 0 else data)

  monkeypatch.setattr(fcntl, 'fcntl', refuse)
  monkeypatch.setattr(os, 'write', direct)
  files, large = files_lib.Files(tmp_path), files_lib.DIRECT_BYTES
  for size in (1, large, 4095, large + 1, 4096 * 3, large + 8191, large - 1, 5, large):
    data = random.Random(size).randbytes(size)
    files.write('a', data[: size // 3], b'', data[size // 3 : size // 2], data[size // 2 :])
    files.fsync('a')
    assert files.size('a') == size and files.read('a') == data
  assert bool(blocks) == allowed
  assert all(0 < size <= files_lib.MOST_BYTES and not size % files_lib.BLOCK for size in blocks)
  files.close()


# --- The start ------------------------------------------------------------------------------------

HOLD = """
import sys
from diloco_jax.storage import files
held = files.Files(sys.argv[1])
held.lock()
print('held', flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path: pathlib.Path):
  command = [sys.executable, '-c', HOLD, str(tmp_path)]
  (tmp_path / files_lib.LOCK).write_text('{"role": "of a process before, with a long name"}' * 9)
  pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE}
  holder = subprocess.Popen(command, text=True, **pipes)
  try:
    assert holder.stdout.readline() == 'held\n'
    files = files_lib.Files(tmp_path)
    with pytest.raises(files_lib.DirectoryError) as error:
      files.lock()
    host = json.loads((tmp_path / files_lib.LOCK).read_text())['host']
    assert f'{tmp_path} is already used by syncer pid {holder.pid} on {host}.' in str(error.value)
  finally:
    holder.kill()
    holder.communicate()
  files.lock()
  other = files_lib.Files(tmp_path)
  itself = f'pid {os.getpid()} on .*, which is this process itself.* restart the program'
  with pytest.raises(files_lib.DirectoryError, match=itself):
    other.lock()  # nor twice in one process
  files.close()
  other.lock()
  other.close()


def test_a_closed_directory_takes_nothing_more(tmp_path: pathlib.Path):
  """Another process may have its lock."""
  files = files_lib.Files(tmp_path)
  files.lock()
  files.write('a')
  files.close()
  for call in (
    lambda: files.write('a', b'x'),
    lambda: files.read('a'),
    lambda: files.fsync('a'),
    lambda: files.rename('a', 'b'),
    lambda: files.remove('a'),
    lambda: files.fsync_names(),
  ):
    with pytest.raises(OSError) as refused:
      call()
    assert refused.value.errno == errno.EBADF
  with pytest.raises(files_lib.DirectoryError):
    files.lock()
  assert (tmp_path / 'a').read_bytes() == b''
  files.close()


@pytest.mark.parametrize(
  'holder, words',
  [
    ([], 'used by another process'),
    # In containers with a common folder all may have one pid.
    (
      {'role': 'learner', 'pid': os.getpid(), 'host': 'pod-7'},
      'on pod-7. Nothing .* Stop that process',
    ),
  ],
)
def test_a_lock_file_without_a_name_or_with_that_of_another_host_locks(tmp_path, holder, words):
  files, other = files_lib.Files(tmp_path), files_lib.Files(tmp_path)
  files.lock()
  (tmp_path / files_lib.LOCK).write_text(json.dumps(holder))
  with pytest.raises(files_lib.DirectoryError, match=words):
    other.lock()
  files.close()
  other.close()


def test_an_unwritable_directory_is_one_line(tmp_path: pathlib.Path, monkeypatch):
  (tmp_path / 'file').write_text('')
  with pytest.raises(files_lib.DirectoryError, match='file is no directory to write in'):
    files_lib.Files(tmp_path / 'file')
  files = files_lib.Files(tmp_path / 'state')
  (tmp_path / 'state' / files_lib.PROBE).mkdir()  # refuses every user, also root
  with pytest.raises(files_lib.DirectoryError, match='state is not writable: .*Not started') as e:
    files.probe()
  assert '\n' not in str(e.value)
  files.close()


# --- Files that are replaced as a whole -----------------------------------------------------------


def test_a_replaced_file_is_durable_before_it_has_its_name_and_its_name_on_return(
  tmp_path, monkeypatch
):
  """After a loss of power the file is the old one or the new one, and once the call has returned
  the new one."""
  path, events = tmp_path / 'a' / 'note.json', []
  fsync, replace = os.fsync, os.replace

  def spy_fsync(descriptor: int) -> None:
    fsync(descriptor)
    where = pathlib.Path(os.readlink(f'/proc/self/fd/{descriptor}'))
    events.append(('fsync', where.name, where.read_bytes() if where.is_file() else b''))

  def spy_replace(*names) -> None:
    replace(*names)
    events.append(('replace', *(pathlib.Path(name).name for name in names)))

  monkeypatch.setattr(os, 'fsync', spy_fsync)
  monkeypatch.setattr(os, 'replace', spy_replace)
  json_files.write(path, {'a': 1})
  data = path.read_bytes()
  assert json.loads(data) == {'a': 1}
  assert events == [
    ('fsync', 'note.json.new', data),
    ('replace', 'note.json.new', 'note.json'),
    ('fsync', 'a', b''),
  ]


def test_a_replacement_that_fails_leaves_the_file_and_nothing_else(tmp_path):
  def pieces():
    yield b'half'
    raise OSError(errno.ENOSPC, 'no space')

  path = tmp_path / 'note.json'
  json_files.write(path, {'a': 1})
  with pytest.raises(OSError, match='no space'):
    json_files.replace(path, pieces())
  assert list(tmp_path.iterdir()) == [path] and json_files.read(path) == {'a': 1}
