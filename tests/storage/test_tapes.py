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

from diloco_jax.process import exits
from diloco_jax.protocol import events
from diloco_jax.protocol.tape import tape as tape_lib
from diloco_jax.storage import tapes
from diloco_jax.verification.commands import replay as replay_command
from diloco_jax.verification.replay import machines as replay_machines
from diloco_jax.verification.replay import tape_files
from tests.launch.lib import command_line

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / 'tests' / 'protocol' / 'tape' / 'golden'


def golden() -> tuple[tape_lib.Start, list[tape_lib.Record]]:
  """A real learner's start and turns, for writing again."""
  with open(GOLDEN / 'learner.jsonl', 'rb') as file:
    reader = tape_lib.Reader(file)
    return reader.header.start, list(reader)


def record(tape: tapes.Tape, turns: list[tape_lib.Record]) -> None:
  for turn in turns:
    tape.record(turn.now_ns, turn.event, turn.actions)


def write(workdir: pathlib.Path, segment_bytes: int = tapes.SEGMENT_BYTES) -> tape_lib.Record:
  """Writes the whole tape of one process; returns its last turn."""
  start, turns = golden()
  lines: list[str] = []
  with contextlib.closing(tapes.Tape(workdir, start, lines.append, {'a': 1}, segment_bytes)) as out:
    record(out, turns)
    assert not out.ended and not lines
  return turns[-1]


def replay(workdir: pathlib.Path) -> replay_machines.Replay:
  """Replays the only tape of a run."""
  [process_tape] = tape_files.find(workdir)
  return tape_files.replay(process_tape)


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
  process_tapes = tape_files.find(tmp_path)
  assert process_tapes == tape_files.find(tmp_path / tapes.TAPES)
  assert [process_tape.number for process_tape in process_tapes] == [1, 2, 3]
  for process_tape in process_tapes:
    result = tape_files.replay(process_tape)
    assert (result.identical, result.events, result.end) == (True, last.index + 1, 'exit')


def test_the_header_names_the_versions_that_wrote_it(tmp_path):
  write(tmp_path)
  header = tape_files.read(tape_files.find(tmp_path)[0]).header
  assert header.versions['jax'] == jax.__version__
  assert header.versions['python'].startswith('.'.join(map(str, sys.version_info[:2])))
  assert re.fullmatch('[0-9a-f]{64}', header.config_digest)
  assert header.commit == tapes.commit()
  assert (header.role, header.node, header.segment) == ('learner', 'l1', 0)


@pytest.mark.parametrize('size', [1, 12_000])  # more than nine segments, and four
def test_full_segments_are_packed_and_read_as_one(tmp_path, size):
  last = write(tmp_path, segment_bytes=size)
  count = len(names(tmp_path)) - 1
  packed = [f'l1.1.{number}.jsonl.gz' for number in range(count)]
  assert count >= 3 and {*names(tmp_path)} == {*packed, f'l1.1.{count}.jsonl'}
  for name in packed:
    with gzip.open(tmp_path / tapes.TAPES / name) as file:
      assert size <= len(file.read()) < size + 30_000
  for path in (tmp_path, tmp_path / tapes.TAPES / packed[1]):  # any segment names the whole tape
    [process_tape] = tape_files.find(path)
    assert len(process_tape.segments) == len(packed) + 1
    result = tape_files.replay(process_tape)
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


def test_a_packed_segment_that_was_not_removed(tmp_path):
  """A kill between packing and removal: no line is read twice."""
  write(tmp_path, segment_bytes=9_000)
  packed = tmp_path / tapes.TAPES / 'l1.1.0.jsonl.gz'
  packed.with_suffix('').write_bytes(gzip.decompress(packed.read_bytes()))
  packed.with_name(f'{packed.name}.new').write_bytes(b'half')
  assert replay(tmp_path).identical


@pytest.mark.parametrize('packed', [False, True])
def test_damage_is_reported_with_file_and_line(tmp_path, packed):
  write(tmp_path, segment_bytes=9_000)
  [process_tape] = tape_files.find(tmp_path)
  path = process_tape.segments[1]
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
  [process_tape] = tape_files.find(tmp_path)
  path = process_tape.segments[0]
  whole = path.read_bytes()
  for broken in (whole[:-100], b'no gzip', whole[:300] + bytes(80) + whole[380:]):
    path.write_bytes(broken)
    with pytest.raises(tape_lib.TapeError, match='l1.1.0.jsonl.gz, line [0-9]+: '):
      tape_files.replay(process_tape)


# --- Crashes, kills, full disks -------------------------------------------------------------------


def test_a_crash_names_its_tape_and_the_command_reproduces_it(tmp_path, capsys):
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
  assert replay_command.main(['replay', str(path)]) == 0
  printed = capsys.readouterr().out
  for part in ('identical: 1 events', 'crashes as recorded', 'TypeError: not an event'):
    assert part in printed
  assert 'machine.py", line' in printed


def test_a_killed_process_loses_no_turn(tmp_path):
  """It has no time to close its tape."""
  start, turns = golden()
  killed = tapes.Tape(tmp_path, start, print)
  record(killed, turns[:100])
  result = replay(tmp_path)
  assert (result.identical, result.events, result.end, result.torn) == (True, 100, 'open', False)
  killed.close()


@contextlib.contextmanager
def full_disk(limit: int):
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
  lines: list[str] = []
  with full_disk(limit), contextlib.closing(tapes.Tape(tmp_path, start, lines.append)) as out:
    record(out, turns[:100])
  assert len(lines) == 1 and 'the tape ends here, the run continues' in lines[0]
  [process_tape] = tape_files.find(tmp_path)
  assert process_tape.segments[0].stat().st_size <= limit
  result = tape_files.replay(process_tape)
  assert (result.identical, result.end, result.torn) == (True, 'open', False)
  assert (0 < result.events < 100) == (limit > 1_000)


def test_a_tape_goes_on_without_a_gap_once_there_is_space_again(tmp_path):
  start, turns = golden()
  lines: list[str] = []
  with full_disk(100):  # less than the header
    out = tapes.Tape(tmp_path, start, lines.append, segment_bytes=20_000)
    record(out, turns[:20])
  with contextlib.closing(out):
    record(out, turns[20:60])
    with full_disk(out.path.stat().st_size + 9):  # within a turn
      record(out, turns[60:120])
    record(out, turns[120:])
  [process_tape] = tape_files.find(tmp_path)
  result = tape_files.replay(process_tape)
  assert (result.identical, result.events, result.end) == (True, len(turns), 'exit')
  assert not lines and len(process_tape.segments) > 2


def test_an_impossible_folder_is_reported_once(tmp_path):
  (tmp_path / tapes.TAPES).write_text('in the way')
  start, turns = golden()
  lines: list[str] = []
  out = tapes.Tape(tmp_path, start, lines.append)
  record(out, turns)
  assert 'ended before this' in out.crash(0, events.Wake(), ValueError('x'))
  out.close()
  assert len(lines) == 1 and lines[0].startswith('[l1] the tape ends here, the run continues: ')


# --- Retention ------------------------------------------------------------------------------------


def test_the_oldest_tapes_of_a_node_are_removed_first(tmp_path):
  """The tapes of earlier processes take at most half of the limit; other nodes keep theirs."""
  for _ in range(4):
    write(tmp_path)
  size = (tmp_path / tapes.TAPES / 'l1.1.0.jsonl').stat().st_size
  (tmp_path / tapes.TAPES / 'l11.1.0.jsonl').write_bytes(b'of another node')
  tapes.Tape(tmp_path, golden()[0], print, limit_bytes=5 * size).close()
  kept = [f'l1.{number}.0.jsonl' for number in (3, 4, 5)]
  assert names(tmp_path) == [*kept, 'l11.1.0.jsonl']


def test_a_tape_ends_at_its_limit_and_what_is_on_it_replays(tmp_path):
  start, turns = golden()
  lines: list[str] = []
  with contextlib.closing(tapes.Tape(tmp_path, start, lines.append, limit_bytes=64_000)) as out:
    record(out, turns)
    assert 'half of what the tapes of a node may take' in out.ended
  assert len(lines) == 1 and 'the tape ends here, the run continues: it has' in lines[0]
  # A segment ends with the line that fills it; how many are packed by then is a matter of time.
  longest = max(map(len, (GOLDEN / 'learner.jsonl').read_bytes().splitlines(keepends=True)))
  size = sum(path.stat().st_size for path in (tmp_path / tapes.TAPES).iterdir())
  assert size <= 32_000 + 2 * longest  # with the header of the segment
  result = replay(tmp_path)
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


def test_the_command_shows_a_divergence_and_continues(tmp_path, capsys):
  start, turns = golden()
  write(tmp_path)
  with contextlib.closing(tapes.Tape(tmp_path, start, print)) as out:
    for turn in turns:
      out.record(turn.now_ns, turn.event, turn.actions[1:])
  write(tmp_path)
  (tmp_path / tapes.TAPES / 'l1.4.0.jsonl').write_bytes(b'{}\n')
  assert replay_command.main(['replay', str(tmp_path)]) == 1
  printed = capsys.readouterr().out
  assert '  recorded  nothing\n  replayed  {' in printed
  assert f'The tape is of commit {tapes.commit()} ' in printed
  damaged = r'l1\.4: damaged: .*l1\.4\.0\.jsonl, line 1: this is not a line'
  for line in (r'l1\.2: diverges at turn \d+:$', r'l1\.3: identical', damaged):
    assert re.search(f'^{line}', printed, re.MULTILINE)


@pytest.mark.parametrize(
  'words, error',
  [
    ([], 'no tape given'),
    (['/nowhere'], 'there is no tape /nowhere'),
    ([str(ROOT / 'tests')], 'there are no tapes in .*/tests'),
  ],
)
def test_the_command_refuses_what_is_no_tape(words, error):
  with pytest.raises(exits.NeverRetry, match=error):
    replay_command.main(['replay', *words])


def test_the_command_starts_without_jax():
  module = 'diloco_jax.verification.commands.replay'
  code = f'import sys, {module}; print({{"jax", "numpy"}} & sys.modules.keys())'
  assert command_line.python('-c', code).stdout == 'set()\n'
