"""The write-ahead log on a disk that tears and loses writes, fills up and fails.

Most of these tests check one statement: after any failure the log returns a prefix of the appended
records, byte for byte, with all committed records; or the log is refused, by name and offset, and
no byte of it has changed.
"""

import errno
import hashlib
import random
import re
import struct
import zlib

import numpy as np
import pytest

from diloco_jax.protocol.tape import codec
from diloco_jax.storage import wal
from diloco_jax.storage import wal_format as fmt
from diloco_jax.verification.sim import disk as disk_lib

RUN = 'torture'
MARK_BYTES = fmt.ENTRY_HEADER_BYTES
MIB = 1 << 20


class PowerLoss(BaseException):
  """The host dies during a call."""


class Killed(BaseException):
  """The process dies during a call; its host does not."""


class Storage(disk_lib.Disk):
  """The simulated disk, with failing calls and deaths during a call.

  Attributes:
    plan: the fault (a word of FAULTS) at each call, by the number of the call.
    calls: the calls so far, by name.
  """

  place = 'state'

  def __init__(self, seed: int = 0, files: dict[str, bytes] | None = None):
    super().__init__(random.Random(seed), files)
    self.plan: dict[int, str] = {}
    self.calls: list[str] = []

  def copy(self) -> dict[str, bytes]:
    return self.contents()

  def read(self, name: str, offset: int = 0, count: int | None = None) -> bytes:
    self._turn('read', lambda: None)
    return super().read(name, offset, count)

  def create(self, name: str) -> None:
    self._turn('create', lambda: super(Storage, self).create(name))

  def append(self, name: str, *pieces: bytes) -> None:
    data = b''.join(pieces)
    part = data[: self._draw.randrange(len(data) + 1)]
    write = super().append
    self._turn('append', lambda: write(name, data), lambda: write(name, part))

  def truncate(self, name: str, size: int) -> None:
    self._turn('truncate', lambda: super(Storage, self).truncate(name, size))

  def fsync(self, name: str) -> None:
    fsync = super().fsync

    def fail() -> None:
      self.failing_fsyncs = 1
      fsync(name)

    self._turn('fsync', lambda: fsync(name), failed=fail)

  def rename(self, old: str, new: str) -> None:
    self._turn('rename', lambda: super(Storage, self).rename(old, new))

  def remove(self, name: str) -> None:
    self._turn('remove', lambda: super(Storage, self).remove(name))

  def fsync_names(self) -> None:
    self._turn('fsync_names', super().fsync_names)

  def _turn(self, call: str, whole, part=lambda: None, failed=None) -> None:
    """Carries out a call wholly, in part or not at all, as planned."""
    fault = self.plan.get(len(self.calls))
    self.calls.append(call)
    match fault:
      case None:
        whole()
      case 'power lost after':
        whole()
        raise PowerLoss
      case 'power lost within':
        part()
        raise PowerLoss
      case 'killed within':
        part()
        raise Killed
      case 'killed after':
        whole()
        raise Killed
      case 'disk full':
        part()
        raise OSError(errno.ENOSPC, 'No space left on device')
      case 'I/O error':
        (failed or part)()
        raise OSError(errno.EIO, 'Input/output error')
      case _:
        raise ValueError(fault)


DEATHS = ['power lost within', 'power lost after', 'killed within', 'killed after']
FAULTS = {
  'read': ['I/O error'],
  'create': ['I/O error', 'disk full', *DEATHS],
  'append': ['I/O error', 'disk full', *DEATHS],
  'truncate': ['I/O error', *DEATHS],
  'fsync': ['I/O error', *DEATHS],
  'rename': ['I/O error', 'disk full', *DEATHS],
  'remove': ['I/O error', *DEATHS],
  'fsync_names': ['I/O error', *DEATHS],
}


def payload(number: int) -> bytes:
  return random.Random(number).randbytes(1 + number * 7 % 40)


def chain_after(records: list[tuple[int, bytes]]) -> bytes:
  """The hash of a history, by the definition in wal_format."""
  chain = hashlib.sha256(RUN.encode()).digest()
  for number, (kind, data) in enumerate(records, 1):
    head = struct.pack('<IQQ', kind, number, len(data))
    pieces = (data[at : at + MIB] for at in range(0, len(data), MIB))
    hashes = b''.join(hashlib.sha256(piece).digest() for piece in pieces)
    chain = hashlib.sha256(chain + head + hashes).digest()
  return chain


def write_log(disk: Storage, records: int, group: int = 2, segment_bytes: int = 1 << 20) -> wal.Wal:
  """Writes `records` records and commits them in groups."""
  log = wal.open_log(disk, RUN, segment_bytes=segment_bytes)
  for number in range(1, records + 1):
    assert log.append(1, payload(number)) == number
    if number % group == 0 or number == records:
      assert log.commit() == number
  return log


def read_log(log: wal.Wal, after: int = 0) -> list[tuple[int, bytes]]:
  return [(record.kind, bytes(record.payload)) for record in log.records(after)]


def expected(count: int) -> list[tuple[int, bytes]]:
  return [(1, payload(number)) for number in range(1, count + 1)]


def marks(disk: Storage, name: str) -> list[int]:
  """The offsets of the marks of a segment."""
  return [
    place for place, entry in fmt.entries_in(disk.copy()[name]) if entry.kind == fmt.COMMIT_MARK
  ]


# --- The purpose ----------------------------------------------------------------------------------


def test_committed_records_are_read_back():
  disk = Storage()
  update = np.arange(1000, dtype=np.float32).reshape(10, 100)
  log = wal.open_log(disk, RUN)
  assert log.append(7, *fmt.pack({'sync': 24, 'fragment': 3}, update)) == 1
  assert log.append(8) == 2  # only its kind
  assert (log.last, log.committed) == (2, 0)
  assert log.commit() == 2

  log = wal.open_log(disk, RUN)
  assert log.recovered == wal.Recovered(cut_bytes=0, words=())
  merged, nothing = log.records()
  header, data = fmt.unpack(merged.payload)
  assert (merged.number, merged.kind, header) == (1, 7, {'sync': 24, 'fragment': 3})
  np.testing.assert_array_equal(np.frombuffer(data, np.float32).reshape(10, 100), update)
  assert (nothing.number, nothing.kind, len(nothing.payload)) == (2, 8, 0)
  assert nothing.chain == log.chain
  assert [record.number for record in log.records(after=1)] == [2]


@pytest.mark.parametrize('size', [MIB - 40, MIB, MIB + 1, 3 * MIB + 5])
def test_a_large_record_has_the_same_hash_however_its_buffers_are_cut(size):
  data = np.random.default_rng(size).bytes(size)
  for cuts in ((), (24,), (0, 24, MIB, MIB + 1), (MIB // 2, size - 1)):
    disk, edges = Storage(), [0, *cuts, size]
    log = wal.open_log(disk, RUN)
    log.append(1, *(data[start:stop] for start, stop in zip(edges, edges[1:])))
    log.commit()
    assert log.chain == chain_after([(1, data)])
    assert read_log(wal.open_log(disk, RUN)) == [(1, data)]

    ((name, whole),) = disk.copy().items()
    broken = bytearray(whole)
    broken[len(whole) - MARK_BYTES - 1] ^= 1  # the last byte of the payload
    disk.put(name, bytes(broken))
    with pytest.raises(fmt.WalDamaged, match='payload of record 1 is damaged'):
      wal.open_log(disk, RUN)


def test_one_fsync_commits_many_records():
  disk = Storage()
  log = wal.open_log(disk, RUN)
  before = disk.calls.count('fsync')
  for number in range(1, 51):
    log.append(1, payload(number))
  assert disk.calls.count('fsync') == before
  assert log.commit() == 50
  assert log.commit() == 50  # no new record
  assert disk.calls.count('fsync') == before + 1


def test_the_hash_depends_on_the_history_only():
  """Groups, segments, restarts and torn tails are not part of the history (I10)."""
  plain = write_log(Storage(), 20, group=20)
  other = Storage()
  write_log(other, 9, group=1, segment_bytes=300)
  other.append(other.names()[-1], b'torn')
  log = wal.open_log(other, RUN, segment_bytes=300)
  for number in range(10, 21):
    log.append(1, payload(number))
  log.commit()
  assert log.chain == plain.chain == chain_after(expected(20))


def test_golden_bytes():
  """Format version 2. If this fails, old logs are no longer readable: raise the version."""
  disk = Storage()
  log = wal.open_log(disk, RUN)
  log.append(1, b'seven', b' bytes')
  log.commit()
  (data,) = disk.copy().values()
  assert data.hex() == GOLDEN
  assert disk.names() == ['00000000000000000001.wal']
  (record,) = wal.open_log(Storage(files={disk.names()[0]: bytes.fromhex(GOLDEN)}), RUN).records()
  assert bytes(record.payload) == b'seven bytes'


GOLDEN = (
  '444a415857414c0a'  # magic
  '02000000'  # version
  '541a19e1'  # its CRC
  '0100000000000000'  # first record
  '9270c8c38be2579a7e73a7f2eb3584a363824074311d4f5c26ab8ceb96901d5a'  # chain before
  '746f7274757265'
  + '00'
  * 57  # run
  + '00000000'  # zeros
  '235859bc'  # CRC
  'd157ec0a'  # record: found by
  '01000000'  # kind
  '0100000000000000'  # number
  '0000000000000000'  # proven
  '0b00000000000000'  # length
  '5e25bafc0c3aa916222406dd8dee6c6126b5d4047caa3fe30a149a5c7649cfe8'  # chain
  'e862afa1'  # CRC of the payload's hashes
  'd1557e27'  # CRC
  '736576656e206279746573'  # payload
  'd157ec0a'  # mark: found by
  '00000000'  # kind
  '0100000000000000'  # number
  '0100000000000000'  # proven
  '0000000000000000'  # length
  '5e25bafc0c3aa916222406dd8dee6c6126b5d4047caa3fe30a149a5c7649cfe8'  # chain
  '00000000'  # CRC of no hashes
  '7f4c19e5'  # CRC
)


# --- Every prefix, every byte ---------------------------------------------------------------------


def test_every_prefix_of_a_log_is_a_prefix_of_its_records():
  disk = Storage()
  write_log(disk, 20)
  ((name, data),) = disk.copy().items()
  seen = set()
  for size in range(len(data)):
    torn = Storage(files={name: data[:size]})
    if size < fmt.SEGMENT_HEADER_BYTES:
      with pytest.raises(fmt.WalDamaged, match='header'):
        wal.open_log(torn, RUN)
      assert torn.copy() == {name: data[:size]}
      continue
    log = wal.open_log(torn, RUN)
    assert read_log(log) == expected(log.last)
    assert log.chain == chain_after(expected(log.last))
    assert bool(log.recovered.words) == bool(log.recovered.cut_bytes)
    seen.add(log.last)
  assert seen == set(range(21))


@pytest.mark.parametrize('lost', ['the end', 'a middle'])
def test_a_payload_that_looks_like_a_later_header_does_not_make_a_tear_damage(lost):
  """Payloads come from learners. This one claims that its own record was durable."""
  disk = Storage()
  log = write_log(disk, 3, group=1)
  ((name, before),) = disk.copy().items()
  claim = fmt.Entry(kind=1, number=9, proven=1 << 40, length=0, chain=bytes(32), crc=0)
  log.append(1, bytes(50) + fmt.pack_entry(claim) + bytes(50))
  ((_, data),) = disk.copy().items()
  if lost == 'the end':
    data = data[:-20]
  else:
    data = data[:-20] + b'x' * 10 + data[-10:]
  assert any(entry.proven == 1 << 40 for _, entry in fmt.entries_in(data))
  torn = wal.open_log(Storage(files={name: data}), RUN)
  assert read_log(torn) == expected(3) and torn.recovered.cut_bytes == len(data) - len(before)


def test_a_cut_log_continues():
  disk = Storage()
  write_log(disk, 4)
  ((name, data),) = disk.copy().items()
  cut = Storage(files={name: data[: -MARK_BYTES - 1]})  # the last byte of record 4 and its mark
  log = wal.open_log(cut, RUN)
  assert log.last == 3
  assert 'ended in an unfinished record' in log.recovered.words[0]
  assert f'{log.recovered.cut_bytes} bytes dropped' in log.recovered.words[0]
  assert log.append(1, payload(4)) == 4
  log.commit()
  assert read_log(wal.open_log(cut, RUN)) == expected(4)


def test_a_cut_tail_does_not_come_back_once_the_log_goes_on_in_a_new_segment():
  """A segment that is not the last one may not end in a torn record: that is damage."""
  cut = 0
  for seed in range(60):
    disk = Storage(seed)
    log = write_log(disk, 3, group=1)
    disk.plan[len(disk.calls)] = 'killed within'
    with pytest.raises(Killed):
      log.append(1, payload(4))
    log = wal.open_log(disk, RUN)
    cut += bool(log.recovered.cut_bytes)
    log.roll()
    disk.crash()
    assert read_log(wal.open_log(disk, RUN)) == expected(log.last)
  assert cut > 30


@pytest.mark.parametrize('flip', [0x01, 0xFF])
@pytest.mark.parametrize('segment_bytes', [1 << 20, 600])
def test_no_flipped_byte_changes_what_is_read_back(segment_bytes: int, flip: int):
  """A damaged record or header is refused; a damaged mark loses nothing."""
  disk = Storage()
  write_log(disk, 20, segment_bytes=segment_bytes)
  whole = disk.copy()
  assert (len(whole) == 1) == (segment_bytes > 600)
  for name, data in whole.items():
    in_marks = {at + i for at in marks(disk, name) for i in range(MARK_BYTES)}
    for place in range(len(data)):
      bad = bytearray(data)
      bad[place] ^= flip
      damaged = Storage(files=whole | {name: bytes(bad)})
      if place in in_marks:
        log = wal.open_log(damaged, RUN)
        assert read_log(log) == expected(20)
        assert log.recovered.words
        continue
      with pytest.raises(fmt.WalDamaged) as error:
        wal.open_log(damaged, RUN)
      assert damaged.copy() == whole | {name: bytes(bad)}
      text = str(error.value)
      offset = re.search(f'/{name} is damaged at byte ([0-9]+), before its end', text)[1]
      last = re.search('records 1 to ([0-9]+) are whole|no record is whole', text)[1]
      assert int(offset) <= place and int(last or 0) < 20


def test_without_a_mark_a_flip_in_the_last_record_is_a_torn_tail():
  """The window that wal_recovery documents: a power loss before the last mark is on disk."""
  disk = Storage()
  write_log(disk, 5, group=1)
  ((name, data),) = disk.copy().items()
  data = data[:-MARK_BYTES]
  for place in range(marks(disk, name)[3] + MARK_BYTES, len(data)):
    bad = bytearray(data)
    bad[place] ^= 0x10
    log = wal.open_log(Storage(files={name: bytes(bad)}), RUN)
    assert read_log(log) == expected(4)
    with pytest.raises(fmt.WalDamaged, match='checkpoint holds all records up to 5'):
      wal.open_log(Storage(files={name: bytes(bad)}), RUN, after=5)


def test_recovery_proves_the_recovered_records():
  disk = Storage()
  write_log(disk, 5, group=1)
  ((name, data),) = disk.copy().items()
  unmarked = Storage(files={name: data[:-MARK_BYTES]})
  assert wal.open_log(unmarked, RUN).last == 5
  assert unmarked.copy() == {name: data}
  bad = data[: -MARK_BYTES - 1] + bytes([data[-MARK_BYTES - 1] ^ 1]) + data[-MARK_BYTES:]
  with pytest.raises(fmt.WalDamaged, match='payload of record 5'):
    wal.open_log(Storage(files={name: bad}), RUN)


# --- Every call that fails ------------------------------------------------------------------------


class Story:
  """A syncer on a disk, over all its crashes: its appended, committed and dropped records."""

  STEPS = 14

  def __init__(self, disk: Storage):
    self.disk = disk
    self.history: list[tuple[int, bytes]] = []  # every begun append, by number
    self.committed = 0
    self.snapshot = 0  # verified, on another disk
    self.log: wal.Wal | None = None
    self.broken = 0

  def run(self) -> None:
    """Runs until all steps are committed; recovers after every death."""
    for _ in range(100):
      try:
        if self.log is None:
          self.recover()
        while self.committed < self.STEPS:
          self.step()
        return
      except PowerLoss:
        self.disk.crash()
        self.log = None
      except Killed:
        self.log = None
      except fmt.WalBroken:
        self.check_broken()
        self.log = None
        self.broken += 1
      except fmt.WalFull:
        if self.log is not None and self.log.last < len(self.history):
          del self.history[self.log.last :]  # the record was not taken
    raise AssertionError('never finished')

  def recover(self) -> None:
    """Checks that the log has every committed record and only appended records."""
    log = wal.open_log(self.disk, RUN, after=self.snapshot, segment_bytes=300)
    assert self.committed <= log.last <= len(self.history)
    self.committed = log.last
    assert log.first <= self.snapshot + 1
    assert read_log(log) == self.history[log.first - 1 : log.last]
    del self.history[log.last :]
    assert log.chain == chain_after(self.history)
    self.log = log

  def step(self) -> None:
    """Appends one to three records and commits; sometimes makes a checkpoint and drops segments."""
    log = self.log
    for _ in range(1 + len(self.history) % 3):
      number = log.last + 1
      self.history[number - 1 :] = [(1 + number % 5, payload(number + len(self.disk.calls)))]
      log.append(*self.history[-1])
    log.commit()
    self.committed = log.last
    if self.committed % 2 == 0:
      self.snapshot = self.committed
      log.drop_before(self.snapshot + 1)

  def check_broken(self) -> None:
    if self.log is not None:
      with pytest.raises(fmt.WalBroken):
        self.log.append(1, b'more')
      with pytest.raises(fmt.WalBroken):
        self.log.commit()
      assert self.log.committed == self.committed


def quiet() -> list[str]:
  """The calls of a process without faults."""
  story = Story(Storage())
  story.run()
  story.recover()
  return story.disk.calls


CALLS = quiet()


def test_the_story_uses_every_call_but_truncate():
  assert set(CALLS) == set(FAULTS) - {'truncate'}  # only after a fault, or never


@pytest.mark.parametrize('fault', sorted({word for words in FAULTS.values() for word in words}))
def test_every_call_failing(fault: str):
  """One fault at each call in turn, then a second one at a later call, then a power loss."""
  broken = 0
  for call, name in enumerate(CALLS):
    if fault not in FAULTS[name]:
      continue
    disk = Storage(seed=call)
    disk.plan[call] = fault
    second = call + random.Random(call).randrange(1, 40)
    disk.plan[second] = random.Random(call).choice(DEATHS)
    story = Story(disk)
    story.run()
    disk.plan.clear()
    disk.crash()
    story.recover()
    broken += story.broken
  assert (broken > 0) == (fault == 'I/O error')


@pytest.mark.parametrize('seed', range(6))
def test_many_faults_at_random(seed: int):
  draw = random.Random(seed)
  for number in range(100):
    disk = Storage(seed=1000 * seed + number)
    disk.plan = {draw.randrange(250): draw.choice([*DEATHS, 'I/O error']) for _ in range(6)}
    story = Story(disk)
    story.run()
    disk.plan.clear()
    if draw.randrange(2):
      disk.crash()
    story.recover()


def test_a_full_disk_accepts_the_record_later():
  disk = Storage()
  log = write_log(disk, 3)
  disk.plan[len(disk.calls)] = 'disk full'
  with pytest.raises(fmt.WalFull, match='record 3 is safe'):
    log.append(1, payload(4))
  assert log.append(1, payload(4)) == 4
  assert log.commit() == 4
  assert read_log(wal.open_log(disk, RUN)) == expected(4)


def test_a_full_disk_that_cannot_be_cut_back_breaks_the_log():
  disk = Storage()
  log = write_log(disk, 3)
  disk.plan |= {len(disk.calls): 'disk full', len(disk.calls) + 1: 'I/O error'}
  with pytest.raises(fmt.WalBroken, match='No space'):
    log.append(1, payload(4))
  assert read_log(wal.open_log(disk, RUN)) == expected(3)


def test_a_mark_without_space_does_not_fail_the_commit():
  disk = Storage()
  log = wal.open_log(disk, RUN)
  log.append(1, payload(1))
  disk.plan[len(disk.calls) + 1] = 'disk full'  # after the fsync
  assert log.commit() == 1
  log.append(1, payload(2))
  log.commit()
  assert read_log(wal.open_log(disk, RUN)) == expected(2)


def test_a_failed_fsync_ends_the_log():
  disk = Storage()
  log = write_log(disk, 3)
  log.append(1, payload(4))
  disk.plan[len(disk.calls)] = 'I/O error'
  with pytest.raises(fmt.WalBroken, match='^fsync of .* failed .* up to record 3'):
    log.commit()
  assert log.committed == 3
  with pytest.raises(fmt.WalBroken, match='fsync'):
    log.append(1, payload(5))
  with pytest.raises(fmt.WalBroken, match='fsync'):
    log.commit()


def test_records_of_a_failed_fsync_are_written_again():
  """The next process reads pages that never reached the disk, and no fsync will write them."""
  disk = Storage()
  log = write_log(disk, 3)
  log.append(1, payload(4))
  disk.plan[len(disk.calls)] = 'I/O error'
  with pytest.raises(fmt.WalBroken):
    log.commit()
  log = wal.open_log(disk, RUN)
  assert log.last == 4  # and acknowledged from now on
  log.append(1, payload(5))
  log.commit()
  disk.crash()
  assert read_log(wal.open_log(disk, RUN)) == expected(5)


# --- What is refused ------------------------------------------------------------------------------


def refused(disk: Storage, kind: type = fmt.WalDamaged, **kwargs) -> str:
  before = disk.copy()
  with pytest.raises(kind) as error:
    wal.open_log(disk, **{'run': RUN} | kwargs)
  assert disk.copy() == before
  return str(error.value)


def test_a_missing_segment_is_refused():
  disk = Storage()
  write_log(disk, 20, segment_bytes=600)
  files = disk.copy()
  names = sorted(files)
  assert len(names) >= 4
  gap = Storage(files={name: files[name] for name in names if name != names[1]})
  words = refused(gap)
  assert f'{names[2]} is damaged at byte 0' in words
  assert f'records 1 to {fmt.first_of(names[1]) - 1} are whole' in words
  headless = Storage(files={name: files[name] for name in names[1:]})
  assert f'begins with record {fmt.first_of(names[1])}' in refused(headless)


def test_damage_names_file_offset_and_what_helps():
  disk = Storage()
  write_log(disk, 5, group=1)
  ((name, data),) = disk.copy().items()
  place = marks(disk, name)[1] + MARK_BYTES
  bad = data[:place] + b'\0' + data[place + 1 :]
  words = refused(Storage(files={name: bad}))
  assert words == (
    f'WAL state/{name} is damaged at byte {place}, before its end: the header of an entry is '
    'damaged. Nothing was changed; records 1 to 2 are whole. Put the file back, or go back to the '
    'newest checkpoint with diloco restore --to=checkpoint: it moves the log aside, and the run '
    'repeats the outer steps behind that checkpoint.'
  )


def test_damage_before_the_first_record_leaves_none_that_is_whole():
  disk = Storage()
  write_log(disk, 5, group=1)
  ((name, data),) = disk.copy().items()
  place = fmt.SEGMENT_HEADER_BYTES
  bad = data[:place] + b'\0' + data[place + 1 :]
  assert '; no record is whole. Put' in refused(Storage(files={name: bad}))


def test_a_log_of_another_version_is_refused_with_both():
  disk = Storage()
  write_log(disk, 1)
  ((name, data),) = disk.copy().items()
  older = struct.pack('<8sI', b'DJAXWAL\n', 0)
  older += struct.pack('<I', zlib.crc32(older)) + b'of another layout'
  words = refused(Storage(files={name: older}), fmt.WalUnsupported)
  assert 'format version 0, this package reads 2' in words


def test_a_log_of_another_run_is_refused():
  disk = Storage()
  write_log(disk, 1)
  assert '"torture", not to "other"' in refused(disk, fmt.WalUnsupported, run='other')


def test_a_record_of_another_history_is_refused():
  """A whole record at its place whose hash does not follow from the record before."""
  disk, other = Storage(), Storage()
  write_log(disk, 2)
  log = wal.open_log(other, RUN)
  log.append(2, payload(1))  # another kind
  log.append(1, payload(2))
  log.commit()
  (name, mine), (theirs,) = *disk.copy().items(), other.copy().values()
  second = fmt.SEGMENT_HEADER_BYTES + fmt.ENTRY_HEADER_BYTES + len(payload(1))
  words = refused(Storage(files={name: mine[:second] + theirs[second:]}))
  assert 'chain hash of record 2 does not follow' in words


def test_a_segment_of_another_history_is_refused():
  disk, other = Storage(), Storage()
  write_log(disk, 4).roll()
  log = write_log(other, 3)
  log.append(2, b'another record 4')
  log.commit()
  log.roll()
  first, second = disk.names()
  assert other.names() == [first, second]
  words = refused(Storage(files={first: disk.copy()[first], second: other.copy()[second]}))
  assert f'{second} is damaged at byte 0' in words
  assert 'chain hash does not follow' in words


def test_log_and_snapshot_are_of_one_history():
  disk = Storage()
  chain = write_log(disk, 4).chain
  assert wal.open_log(disk, RUN, after=4, chain=chain).last == 4
  assert 'another history' in refused(disk, after=3, chain=chain)
  assert 'ends with record 4' in refused(disk, after=5)
  assert 'there is no log' in refused(Storage(), after=5)
  fresh = wal.begin(Storage(), RUN, after=4, chain=chain)
  assert fresh.append(1, payload(5)) == 5
  fresh.commit()
  assert fresh.chain == chain_after(expected(5))


def test_a_programming_error_writes_nothing():
  disk = Storage()
  log = write_log(disk, 1)
  before = disk.copy()
  for kind in (0, -1, 1 << 32):
    with pytest.raises(ValueError, match='kind'):
      log.append(kind, b'')
  with pytest.raises(ValueError, match='there is a log'):
    wal.begin(disk, RUN)
  with pytest.raises(ValueError, match='64 bytes'):
    wal.open_log(Storage(), 'r' * 65)
  assert disk.copy() == before
  log.append(1, b'')
  with pytest.raises(ValueError, match='not committed'):
    log.roll()


def test_a_change_under_an_open_log_is_never_skipped():
  disk = Storage()
  write_log(disk, 3, group=1)
  ((name, data),) = disk.copy().items()
  log = wal.open_log(disk, RUN)
  for place in range(fmt.SEGMENT_HEADER_BYTES, len(data) - MARK_BYTES):
    if any(at <= place < at + MARK_BYTES for at in marks(disk, name)):
      continue
    bad = bytearray(data)
    bad[place] ^= 4
    disk.put(name, bytes(bad))
    with pytest.raises(fmt.WalDamaged, match='has changed'):
      read_log(log)
    disk.put(name, data)


# --- Compaction -----------------------------------------------------------------------------------


def test_compaction_keeps_every_record_from_the_number_on():
  for number in range(1, 23):
    disk = Storage()
    log = write_log(disk, 20, segment_bytes=600)
    files = disk.names()
    before = len(disk.calls)
    dropped = log.drop_before(number)
    assert disk.calls[before:] == ['remove', 'fsync_names'] * len(dropped)  # never a gap
    assert disk.names() == [name for name in files if name not in dropped]
    assert log.first <= min(number, 20)
    assert read_log(log, after=number - 1) == expected(20)[number - 1 :]
    again = wal.open_log(disk, RUN, after=number - 1 if number <= 21 else 20)
    assert read_log(again, after=number - 1) == expected(20)[number - 1 :]


def test_behind_a_snapshot_of_everything_only_an_empty_segment_is_left():
  disk = Storage()
  log = write_log(disk, 20)
  log.roll()
  log.roll()  # nothing new
  assert log.drop_before(21) == ['00000000000000000001.wal']
  assert (log.first, log.last) == (21, 20)
  log = wal.open_log(disk, RUN, after=20, chain=chain_after(expected(20)))
  assert log.append(1, payload(21)) == 21
  log.commit()
  assert log.chain == chain_after(expected(21))


# --- The payload's own form -----------------------------------------------------------------------


def test_packed_arrays_are_aligned_and_headers_are_canonical():
  for text in ('', 'a', 'ab' * 5):
    buffers = fmt.pack({'text': text}, b'array')
    header, data = fmt.unpack(b''.join(buffers))
    assert (header, bytes(data)) == ({'text': text}, b'array')
    assert len(buffers[0]) % 8 == 0
  with pytest.raises(codec.TapeError):
    fmt.pack({'loss': float('nan')})
