"""Tapes on disk: processes and segments, kills and full disks, and the replay of a real run."""

import contextlib
import gzip
import os
import pathlib
import re
import resource
import sys

import jax
import pytest

from diloco_jax.protocol import events
from diloco_jax.protocol.tape import tape as tape_lib
from diloco_jax.storage import tapes
from diloco_jax.verification.replay import tape_files
from tests.launch.lib import command_line

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / 'tests' / 'protocol' / 'tape' / 'golden'


def golden() -> tuple[tape_lib.Start, list[tape_lib.Record]]:
  """A real learner's start and turns, for writing again."""
  with open(GOLDEN / 'learner.jsonl', 'rb') as file:
    reader = tape_lib.Reader(file)
    return reader.header.start, list(reader)


def write(workdir: pathlib.Path, segment_bytes: int = tapes.SEGMENT_BYTES) -> tape_lib.Record:
  """Writes the whole tape of one process; returns its last turn."""
  start, turns = golden()
  said: list[str] = []
  with contextlib.closing(tapes.Tape(workdir, start, said.append, {'a': 1}, segment_bytes)) as out:
    for turn in turns:
      out.record(turn.now_ns, turn.event, turn.actions)
    assert not out.ended and not said
  return turns[-1]


def names(workdir: pathlib.Path) -> list[str]:
  return sorted(path.name for path in (workdir / tapes.TAPES).iterdir())


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
  """Some megabytes of gzip are gigabytes of one line; a tape may be from elsewhere."""
  monkeypatch.setattr(tape_files, 'MAX_LINE_BYTES', 1 << 16)
  path = tmp_path / 'l1.1.0.jsonl.gz'
  with gzip.open(path, 'wb') as file:
    file.write(b' ' * (1 << 20))
  for read in (tape_files.replay, tape_files.read):
    with pytest.raises(
      tape_lib.TapeError, match='l1.1.0.jsonl.gz, line 1: it is longer than 65536'
    ):
      read(tape_files.find(tmp_path)[0])


# --- Processes and segments -----------------------------------------------------------------------


def test_every_process_has_its_own_tape(tmp_path):
  for _ in range(3):
    last = write(tmp_path)
  assert names(tmp_path) == ['l1.1.0.jsonl', 'l1.2.0.jsonl', 'l1.3.0.jsonl']
  found = tape_files.find(tmp_path)
  assert found == tape_files.find(tmp_path / tapes.TAPES)
  assert [life.number for life in found] == [1, 2, 3]
  for life in found:
    result = tape_files.replay(life)
    assert (result.identical, result.events, result.end) == (True, last.index + 1, 'exit')


def test_the_header_names_the_versions_that_wrote_it(tmp_path):
  write(tmp_path)
  header = tape_files.read(tape_files.find(tmp_path)[0]).header
  assert header.versions['jax'] == jax.__version__
  assert header.versions['python'].startswith('.'.join(map(str, sys.version_info[:2])))
  assert re.fullmatch('[0-9a-f]{64}', header.config_digest)
  assert header.commit == tapes.commit()
  assert (header.role, header.node, header.segment) == ('learner', 'l1', 0)


def test_full_segments_are_packed_and_read_as_one(tmp_path):
  last = write(tmp_path, segment_bytes=12_000)
  *packed, newest = names(tmp_path)
  assert len(packed) >= 3 and newest == f'l1.1.{len(packed)}.jsonl'
  assert packed == [f'l1.1.{n}.jsonl.gz' for n in range(len(packed))]
  for name in packed:
    with gzip.open(tmp_path / tapes.TAPES / name) as file:
      assert 12_000 <= len(file.read()) < 12_000 + 30_000
  for path in (tmp_path, *(tmp_path / tapes.TAPES).iterdir()):  # any segment names the whole tape
    [life] = tape_files.find(path)
    assert len(life.segments) == len(packed) + 1
    result = tape_files.replay(life)
    assert (result.identical, result.events, result.end) == (True, last.index + 1, 'exit')


def test_a_packed_segment_is_durable_before_the_plain_one_goes(tmp_path, monkeypatch):
  """A loss of power leaves no hole in a tape."""
  durable, fsync = set(), os.fsync

  def spy(descriptor: int) -> None:
    fsync(descriptor)
    durable.add(os.fstat(descriptor).st_ino)

  unlink = pathlib.Path.unlink

  def checked(path: pathlib.Path, missing_ok: bool = False) -> None:
    if path.suffix == '.jsonl':
      packed = path.with_name(f'{path.name}.gz')
      assert {packed.stat().st_ino, path.parent.stat().st_ino} <= durable
    unlink(path, missing_ok)

  monkeypatch.setattr(os, 'fsync', spy)
  monkeypatch.setattr(pathlib.Path, 'unlink', checked)
  (tmp_path / 'l1.1.0.jsonl').write_bytes(b'{}\n' * 100)
  tapes._compress(tmp_path / 'l1.1.0.jsonl')
  assert [path.name for path in tmp_path.iterdir()] == ['l1.1.0.jsonl.gz']


def test_more_than_nine_segments_stay_in_order(tmp_path):
  last = write(tmp_path, segment_bytes=1)
  [life] = tape_files.find(tmp_path)
  assert len(life.segments) == last.index + 2
  assert tape_files.replay(life).identical


def test_a_packed_segment_that_was_not_removed(tmp_path):
  """A kill between packing and removal: no line is read twice."""
  write(tmp_path, segment_bytes=9_000)
  packed = tmp_path / tapes.TAPES / 'l1.1.0.jsonl.gz'
  packed.with_suffix('').write_bytes(gzip.decompress(packed.read_bytes()))
  packed.with_name(f'{packed.name}.new').write_bytes(b'half')
  [life] = tape_files.find(tmp_path)
  assert tape_files.replay(life).identical


@pytest.mark.parametrize('packed', [False, True])
def test_damage_is_reported_with_file_and_line(tmp_path, packed):
  write(tmp_path, segment_bytes=9_000)
  [life] = tape_files.find(tmp_path)
  path = life.segments[1]
  lines = gzip.decompress(path.read_bytes()).splitlines(keepends=True)
  lines[2] = lines[2].replace(b'"now_ns":', b'"now_ns":1')
  if packed:
    path.write_bytes(gzip.compress(b''.join(lines)))
  else:
    path.unlink()
    path = path.with_suffix('')
    path.write_bytes(b''.join(lines))
  with pytest.raises(
    tape_lib.TapeError, match=f'{re.escape(str(path))}, line 3: the hash of the line'
  ):
    tape_files.replay(tape_files.find(path)[0])


def test_a_packed_segment_that_cannot_be_unpacked(tmp_path):
  write(tmp_path, segment_bytes=9_000)
  [life] = tape_files.find(tmp_path)
  path = life.segments[0]
  whole = path.read_bytes()
  for broken in (whole[:-100], b'no gzip', whole[:300] + bytes(80) + whole[380:]):
    path.write_bytes(broken)
    with pytest.raises(tape_lib.TapeError, match='l1.1.0.jsonl.gz, line [0-9]+: '):
      tape_files.replay(life)


# --- Crashes, kills, full disks -------------------------------------------------------------------


def test_a_crash_names_its_tape_and_the_command_reproduces_it(tmp_path):
  start, _ = golden()
  strange = events.MergeDone(  # never an event of a learner
    sync=1, fragment=0, payload_id=None, payload=None, digest=1
  )
  with contextlib.closing(tapes.Tape(tmp_path, start, print)) as out:
    with pytest.raises(TypeError, match='not an event of a learner') as raised:
      start.make().handle(1, strange)
    words = out.crash(1, strange, raised.value)
  path = tmp_path / tapes.TAPES / 'l1.1.0.jsonl'
  assert words.split('diloco replay ')[1] == str(path)
  done = command_line.diloco('replay', path)
  assert done.returncode == 0 and 'identical: 1 events' in done.stdout, done
  assert 'crashes as recorded' in done.stdout and 'TypeError: not an event' in done.stdout
  assert 'machine.py", line' in done.stdout


def test_a_killed_process_loses_no_turn(tmp_path):
  """It has no time to close its tape."""
  start, turns = golden()
  killed = tapes.Tape(tmp_path, start, print)
  for turn in turns[:100]:
    killed.record(turn.now_ns, turn.event, turn.actions)
  [life] = tape_files.find(tmp_path)
  result = tape_files.replay(life)
  assert (result.identical, result.events, result.end, result.torn) == (True, 100, 'open', False)
  killed.close()


@contextlib.contextmanager
def _full(limit: int):
  """A disk that takes no more than so many bytes of a file."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize('limit', [100, 20_000])  # within the header, within a turn
def test_a_full_disk_ends_the_tape_and_not_the_run(tmp_path, limit):
  start, turns = golden()
  said: list[str] = []
  with _full(limit), contextlib.closing(tapes.Tape(tmp_path, start, said.append)) as out:
    for turn in turns[:100]:
      out.record(turn.now_ns, turn.event, turn.actions)
  assert len(said) == 1 and 'the tape ends here, the run continues' in said[0]
  [life] = tape_files.find(tmp_path)
  assert life.segments[0].stat().st_size <= limit
  result = tape_files.replay(life)
  assert (result.identical, result.end, result.torn) == (True, 'open', False)
  assert (0 < result.events < 100) == (limit > 1_000)


def test_a_tape_goes_on_without_a_gap_once_there_is_space_again(tmp_path):
  start, turns = golden()
  said: list[str] = []
  with _full(100):  # less than the header
    out = tapes.Tape(tmp_path, start, said.append, segment_bytes=20_000)
    for turn in turns[:20]:
      out.record(turn.now_ns, turn.event, turn.actions)
  with contextlib.closing(out):
    for turn in turns[20:60]:
      out.record(turn.now_ns, turn.event, turn.actions)
    with _full(out.path.stat().st_size + 9):  # within a turn
      for turn in turns[60:120]:
        out.record(turn.now_ns, turn.event, turn.actions)
    for turn in turns[120:]:
      out.record(turn.now_ns, turn.event, turn.actions)
  [life] = tape_files.find(tmp_path)
  result = tape_files.replay(life)
  assert (result.identical, result.events, result.end) == (True, len(turns), 'exit')
  assert not said and len(life.segments) > 2


def test_an_impossible_folder_is_reported_once(tmp_path):
  (tmp_path / tapes.TAPES).write_text('in the way')
  start, turns = golden()
  said: list[str] = []
  out = tapes.Tape(tmp_path, start, said.append)
  for turn in turns:
    out.record(turn.now_ns, turn.event, turn.actions)
  assert 'ended before this' in out.crash(0, events.Wake(), ValueError('x'))
  out.close()
  assert len(said) == 1 and said[0].startswith('[l1] the tape ends here, the run continues: ')


# --- Retention ------------------------------------------------------------------------------------


def test_the_oldest_tapes_of_a_node_are_removed_first(tmp_path):
  """The tapes of earlier processes take at most half of the limit; other nodes keep theirs."""
  for _ in range(4):
    write(tmp_path)
  size = (tmp_path / tapes.TAPES / 'l1.1.0.jsonl').stat().st_size
  (tmp_path / tapes.TAPES / 'l11.1.0.jsonl').write_bytes(b'of another node')
  tapes.Tape(tmp_path, golden()[0], print, limit_bytes=5 * size).close()
  kept = [f'l1.{life}.0.jsonl' for life in (3, 4, 5)]
  assert names(tmp_path) == [*kept, 'l11.1.0.jsonl']


def test_a_tape_ends_at_its_limit_and_what_is_on_it_replays(tmp_path):
  start, turns = golden()
  said: list[str] = []
  with contextlib.closing(tapes.Tape(tmp_path, start, said.append, limit_bytes=64_000)) as out:
    for turn in turns:
      out.record(turn.now_ns, turn.event, turn.actions)
    assert 'half of what the tapes of a node may take' in out.ended
  assert len(said) == 1 and 'the tape ends here, the run continues: it has' in said[0]
  # A segment ends with the line that fills it; how many are packed by then is a matter of time.
  longest = max(map(len, (GOLDEN / 'learner.jsonl').read_bytes().splitlines(keepends=True)))
  size = sum(path.stat().st_size for path in (tmp_path / tapes.TAPES).iterdir())
  assert size <= 32_000 + 2 * longest  # with the header of the segment
  [life] = tape_files.find(tmp_path)
  result = tape_files.replay(life)
  assert (result.identical, result.end, result.torn) == (True, 'open', False)
  assert 0 < result.events < len(turns)


# --- The commit of a checkout ---------------------------------------------------------------------


def test_the_commit_of_a_checkout_a_worktree_and_neither(tmp_path):
  assert tapes.commit(tmp_path) == tapes.UNKNOWN
  git = tmp_path / '.git'
  (git / 'refs' / 'heads').mkdir(parents=True)
  (git / 'HEAD').write_text('ref: refs/heads/main\n')
  assert tapes.commit(tmp_path) == tapes.UNKNOWN  # no commit yet
  (git / 'packed-refs').write_text('# pack-refs\nbbb refs/heads/other\naaa refs/heads/main\n')
  assert tapes.commit(tmp_path) == 'aaa'
  (git / 'refs' / 'heads' / 'main').write_text('ccc\n')
  assert tapes.commit(tmp_path) == 'ccc'
  worktree = git / 'worktrees' / 'w'
  worktree.mkdir(parents=True)
  (worktree / 'HEAD').write_text('ref: refs/heads/other\n')
  (worktree / 'commondir').write_text('../..\n')
  (tmp_path / 'w').mkdir()
  (tmp_path / 'w' / '.git').write_text(f'gitdir: {worktree}\n')
  assert tapes.commit(tmp_path / 'w') == 'bbb'
  (git / 'HEAD').write_text('ddd\n')
  assert tapes.commit(tmp_path) == 'ddd'


# --- diloco replay -------------------------------------------------------------------------------


def test_the_program_shows_a_divergence_and_continues(tmp_path):
  start, turns = golden()
  write(tmp_path)
  with contextlib.closing(tapes.Tape(tmp_path, start, print)) as out:
    for turn in turns:
      out.record(turn.now_ns, turn.event, turn.actions[1:])
  write(tmp_path)
  (tmp_path / tapes.TAPES / 'l1.4.0.jsonl').write_bytes(b'{}\n')
  done = command_line.diloco('replay', tmp_path)
  assert done.returncode == 1
  assert re.search(r'^l1\.2: diverges at turn \d+:$', done.stdout, re.MULTILINE)
  assert '  recorded  nothing\n  replayed  {' in done.stdout
  assert f'The tape is of commit {tapes.commit()} ' in done.stdout
  assert re.search(r'^l1\.3: identical', done.stdout, re.MULTILINE)
  assert re.search(
    r'^l1\.4: damaged: .*l1\.4\.0\.jsonl, line 1: this is not a line', done.stdout, re.MULTILINE
  )


@pytest.mark.parametrize(
  'words, error',
  [
    ((), 'no tape given'),
    (('/nowhere',), 'there is no tape /nowhere'),
    (('--tape=x',), 'tape'),
    (('tests/runs',), 'there are no tapes in tests/runs'),
  ],
)
def test_the_program_refuses_in_one_line(words, error):
  done = command_line.diloco('replay', *words)
  assert done.returncode == 42 and not done.stdout
  assert done.stderr.startswith('error: ') and error in done.stderr
  assert len(done.stderr.splitlines()) == 1


def test_the_program_starts_without_jax():
  module = 'diloco_jax.verification.commands.replay'
  code = f'import sys, {module}; print({{"jax", "numpy"}} & sys.modules.keys())'
  assert command_line.python('-c', code).stdout == 'set()\n'
