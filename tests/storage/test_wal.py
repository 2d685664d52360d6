"""The write-ahead log on a disk that tears and loses writes, fills up and fails.

Most of these tests check one statement: after any failure the log returns a prefix of the appended
records, byte for byte, with all committed records; or the log is refused, by name, and no byte of
it has changed.
"""

import errno
import hashlib
import random
import struct

import numpy as np
import pytest

from diloco_jax.protocol.tape import codec
from diloco_jax.storage import outer_log, wal
from diloco_jax.verification.sim import disk as disk_lib

RUN = 'torture'
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
    self.full_errno = errno.ENOSPC

  def copy(self) -> dict[str, bytes]:
    return {name: bytes(file.data) for name, file in self._files.items()}

  def put(self, name: str, data: bytes) -> None:
    """Replaces the bytes of a file without a call of a process."""
    self._files[name].data[:] = data

  def read(self, name: str, offset: int = 0, count: int | None = None) -> bytes:
    self._turn('read', lambda: None)
    return super().read(name, offset, count)

  def write(self, name: str, *buffers: bytes) -> None:
    data = b''.join(buffers)
    part = data[: self._draw.randrange(len(data) + 1)]
    write = super().write
    self._turn('write', lambda: write(name, data), lambda: write(name, part))

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
    if fault is None:
      whole()
    elif fault in DEATHS:
      part() if fault.endswith('within') else whole()
      raise PowerLoss if fault.startswith('power lost') else Killed
    elif fault == 'disk full':
      part()
      raise OSError(self.full_errno, 'No space left on device')
    else:
      assert fault == 'I/O error'
      (failed or part)()
      raise OSError(errno.EIO, 'Input/output error')


DEATHS = ['power lost within', 'power lost after', 'killed within', 'killed after']
FAULTS = {
  'read': ['I/O error'],
  'write': ['I/O error', 'disk full', *DEATHS],
  'fsync': ['I/O error', 'disk full', *DEATHS],
  'rename': ['I/O error', 'disk full', *DEATHS],
  'remove': ['I/O error', *DEATHS],
  'fsync_names': ['I/O error', *DEATHS],
}


def payload(number: int) -> bytes:
  return random.Random(number).randbytes(1 + number * 7 % 40)


def chain_after(records: list[tuple[int, bytes]]) -> bytes:
  """The hash of a history, by the definition in wal.py."""
  chain = hashlib.sha256(RUN.encode()).digest()
  for number, (kind, data) in enumerate(records, 1):
    head = struct.pack('<IQQ', kind, number, len(data))
    parts = (data[at : at + MIB] for at in range(0, len(data), MIB))
    hashes = b''.join(hashlib.sha256(part).digest() for part in parts)
    chain = hashlib.sha256(chain + head + hashes).digest()
  return chain


def write_log(disk: Storage, last: int, **after) -> wal.Wal:
  """A log with records up to the last; `after`: of the first, by open_log."""
  log = wal.open_log(disk, RUN, **after)
  for number in range(log.committed + 1, last + 1):
    assert log.append(1, payload(number)) == number
    assert log.commit() == number
  return log


def read_log(log: wal.Wal, after: int = 0) -> list[tuple[int, bytes]]:
  return [(record.kind, bytes(record.payload)) for record in log.records(after)]


def expected(count: int) -> list[tuple[int, bytes]]:
  return [(1, payload(number)) for number in range(1, count + 1)]


def refused(disk: Storage, kind: type = wal.WalDamaged, **kwargs) -> str:
  before = disk.copy()
  with pytest.raises(kind) as error:
    wal.open_log(disk, **{'run': RUN} | kwargs)
  assert disk.copy() == before
  return str(error.value)


# --- The purpose ----------------------------------------------------------------------------------


def test_committed_records_are_read_back():
  disk = Storage()
  update = np.arange(1000, dtype=np.float32).reshape(10, 100)
  log = wal.open_log(disk, RUN)
  assert log.append(7, *outer_log.pack({'sync': 24, 'fragment': 3}, update)) == 1
  assert log.committed == 0
  assert log.commit() == log.commit() == 1
  assert log.append(8) == 2  # only its kind
  assert log.commit() == 2

  log = wal.open_log(disk, RUN)
  assert (log.first, log.committed, log.words) == (0, 2, ())
  merged, nothing = log.records()
  header, data = outer_log.unpack(merged.payload)
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


def test_the_hash_depends_on_the_history_only():
  """Restarts, unfinished records and dropped ones are not part of the history (I10)."""
  plain = write_log(Storage(), 20)
  other = Storage()
  log = write_log(other, 9)
  log.drop_before(5)
  log.append(1, b'unfinished')
  log = write_log(other, 20, after=9)
  assert log.chain == plain.chain == chain_after(expected(20))


def test_golden_bytes():
  """Format version 4. If this fails, old logs are no longer readable: raise the version."""
  disk = Storage()
  log = wal.open_log(disk, RUN)
  log.append(1, b'seven', b' bytes')
  log.commit()
  base, record = disk.names()
  assert (base, record) == ('00000000000000000000.rec', '00000000000000000001.rec')
  assert {name: data.hex() for name, data in disk.copy().items()} == {base: BASE, record: RECORD}


RUN_HEX = '746f7274757265' + '00' * 57
BASE = (
  '444a41585245430a'  # magic
  '04000000'  # version
  '00000000'  # kind
  '0000000000000000'  # number
  '0000000000000000'  # payload bytes
  '9270c8c38be2579a7e73a7f2eb3584a363824074311d4f5c26ab8ceb96901d5a'  # chain
  f'{RUN_HEX}00000000'
  'fa985a9c'
)
RECORD = (
  '444a41585245430a'
  '04000000'
  '01000000'
  '0100000000000000'
  '0b00000000000000'
  '5e25bafc0c3aa916222406dd8dee6c6126b5d4047caa3fe30a149a5c7649cfe8'
  f'{RUN_HEX}00000000'
  '31cca357'
  '736576656e206279746573'  # payload
)


# --- Every prefix, every byte, every file ---------------------------------------------------------


def test_every_prefix_of_a_file_is_refused_under_its_name():
  """A file has its name only once it is whole and durable: less of it is damage."""
  disk = Storage()
  write_log(disk, 4)
  whole = disk.copy()
  for name, data in whole.items():
    for size in range(len(data)):
      assert name in refused(Storage(files=whole | {name: data[:size]}))
    assert name in refused(Storage(files=whole | {name: data + b'x'}))


def test_every_prefix_of_an_unfinished_record_is_removed():
  disk = Storage()
  log = write_log(disk, 4)
  whole = disk.copy()
  log.append(1, payload(5))
  unfinished = disk.copy()[wal.NEW]
  for size in range(len(unfinished) + 1):
    torn = Storage(files=whole | {wal.NEW: unfinished[:size]})
    again = wal.open_log(torn, RUN)
    assert torn.copy() == whole
    assert read_log(again) == expected(4) and again.chain == chain_after(expected(4))
    assert again.words == (
      'WAL state: an unfinished record was removed, it was never acknowledged. The log ends with '
      f'record 4, hash {again.chain.hex()[:16]}.',
    )
  assert again.append(1, payload(5)) == 5
  again.commit()
  assert read_log(wal.open_log(torn, RUN)) == expected(5)


@pytest.mark.parametrize('flip', [0x01, 0xFF])
def test_no_flipped_byte_changes_what_is_read_back(flip: int):
  disk = Storage()
  write_log(disk, 6)
  whole = disk.copy()
  for number, (name, data) in enumerate(whole.items()):
    for place in range(len(data)):
      bad = bytearray(data)
      bad[place] ^= flip
      words = refused(Storage(files=whole | {name: bytes(bad)}))
      assert f'WAL state/{name} is damaged' in words
      some = f'records 1 to {number - 1} are whole'
      assert (some if number > 1 else 'no record is whole') in words


def test_a_flip_in_what_the_checkpoint_holds_is_no_damage():
  """Of the newest record that it holds, the base of those behind it, only the header counts. Damage
  is said."""
  disk = Storage()
  write_log(disk, 6).drop_before(1)
  for number in (1, 2, 3):
    data = disk.copy()[wal.name_of(number)]
    disk.put(wal.name_of(number), data[:-1] + bytes([data[-1] ^ 1]))
  log = wal.open_log(disk, RUN, after=3)
  assert read_log(log, after=3) == expected(6)[3:]
  (line,) = log.words
  assert f'{wal.name_of(2)} is damaged' in line and line.endswith('is lost: check the disk.')
  disk.put(wal.name_of(3), data[:40] + bytes([data[40] ^ 1]) + data[41:])
  assert f'{wal.name_of(3)} is damaged: its header' in refused(disk, after=3)


@pytest.mark.parametrize('missing', range(6))
def test_a_gap_behind_the_checkpoint_is_refused(missing: int):
  disk = Storage()
  write_log(disk, 6)
  files = disk.copy()
  del files[wal.name_of(missing)]
  for after in range(missing + 1):
    assert f'begins with record {missing + 2}, in state' in refused(
      Storage(files=files), after=after
    )
  for after in range(missing + 1, 7):
    gap = Storage(files=files)
    log = wal.open_log(gap, RUN, after=after)
    assert (log.first, read_log(log, after)) == (missing + 1, expected(6)[after:])
    assert gap.copy() == files  # recovery removes no record
    said = f'record {missing} is missing, the files before it do not count' in ' '.join(log.words)
    assert said == (missing > 0)


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
      except wal.WalBroken:
        self.check_broken()
        self.log = None
        self.broken += 1
      except wal.WalFull:
        assert wal.NEW not in self.disk.names()  # it takes no space
        del self.history[self.committed :]  # the record was not taken
    raise AssertionError('never finished')

  def recover(self) -> None:
    """Checks that the log has every committed record and only appended records."""
    log = wal.open_log(self.disk, RUN, after=self.snapshot)
    assert self.committed <= log.committed <= len(self.history)
    self.committed = log.committed
    assert log.first <= self.snapshot
    assert read_log(log) == self.history[log.first : log.committed]
    del self.history[log.committed :]
    assert wal.NEW not in self.disk.names()
    assert log.chain == chain_after(self.history)
    self.log = log

  def step(self) -> None:
    """Appends a record and commits; sometimes makes a checkpoint and drops records."""
    log = self.log
    number = log.committed + 1
    self.history[number - 1 :] = [(1 + number % 5, payload(number + len(self.disk.calls)))]
    log.append(*self.history[-1])
    log.commit()
    self.committed = log.committed
    if self.committed % 3 == 0:
      self.snapshot = self.committed
      log.drop_before(self.snapshot)

  def check_broken(self) -> None:
    if self.log is not None:
      with pytest.raises(wal.WalBroken):
        self.log.append(1, b'more')
      with pytest.raises(wal.WalBroken):
        self.log.commit()
      assert self.log.committed == self.committed


def quiet() -> list[str]:
  """The calls of a process without faults."""
  story = Story(Storage())
  story.run()
  story.recover()
  assert set(story.disk.calls) == set(FAULTS)
  return story.disk.calls


CALLS = quiet()


@pytest.mark.parametrize('fault', sorted({word for words in FAULTS.values() for word in words}))
def test_every_call_failing(fault: str):
  """One fault at each call in turn, then a second one at a later call, then a power loss."""
  broken = 0
  for call in (call for call, name in enumerate(CALLS) if fault in FAULTS[name]):
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


@pytest.mark.parametrize('calls', range(3))
@pytest.mark.parametrize('full', [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_accepts_the_record_later(calls: int, full: int):
  """Whether it is full at the write, at the fsync or at the rename."""
  disk = Storage()
  disk.full_errno = full
  log = write_log(disk, 3)
  before = disk.copy()
  disk.plan[len(disk.calls) + calls] = 'disk full'
  with pytest.raises(wal.WalFull, match='No space on state .* record 3 is safe'):
    log.append(1, payload(4))
    log.commit()
  assert disk.copy() == before
  assert log.append(1, b'another record 4') == 4
  assert log.commit() == 4
  assert read_log(wal.open_log(disk, RUN)) == [*expected(3), (1, b'another record 4')]


@pytest.mark.parametrize(
  'call, doing',
  [
    (0, 'writing a record'),
    (1, 'fsync of a record'),
    (2, 'naming a record'),
    (3, 'fsync of the directory'),
  ],
)
def test_a_failed_call_ends_the_log(call: int, doing: str):
  disk = Storage()
  log = write_log(disk, 3)
  disk.plan[len(disk.calls) + call] = 'I/O error'
  with pytest.raises(wal.WalBroken, match=f'^{doing} failed .* Safe up to record 3'):
    log.append(1, payload(4))
    log.commit()
  assert log.committed == 3
  for call in (lambda: log.append(1, b''), log.commit, lambda: log.drop_before(2)):
    with pytest.raises(wal.WalBroken, match=doing):
      call()


# --- What is refused ------------------------------------------------------------------------------


def test_a_log_of_another_version_or_run_is_refused_with_both(monkeypatch):
  disk = Storage()
  with monkeypatch.context() as older:
    older.setattr(wal, 'VERSION', 3)
    write_log(disk, 1)
  words = refused(disk, wal.WalUnsupported)
  assert 'has log format 3, diloco_jax' in words and 'reads 4. Nothing was changed' in words
  disk = Storage()
  write_log(disk, 1)
  assert '"torture", not to "other"' in refused(disk, wal.WalUnsupported, run='other')


def test_a_record_of_another_history_or_another_number_is_refused():
  """A whole record whose hash does not follow from the record before, or that has another name."""
  disk, other = Storage(), Storage()
  write_log(disk, 2)
  log = wal.open_log(other, RUN)
  for record in ((2, payload(1)), (1, payload(2))):  # the first has another kind
    log.append(*record)
    log.commit()
  name = wal.name_of(2)
  words = refused(Storage(files=disk.copy() | {name: other.copy()[name]}))
  assert f'{name} is damaged' in words and 'does not follow from the records before it' in words
  words = refused(Storage(files=disk.copy() | {name: disk.copy()[wal.name_of(1)]}))
  assert f'{name} is damaged: it is record 1' in words


def test_log_and_snapshot_are_of_one_history():
  disk = Storage()
  chain = write_log(disk, 4).chain
  assert wal.open_log(disk, RUN, after=4, chain=chain).committed == 4
  assert 'another history' in refused(disk, after=3, chain=chain)
  assert 'ends with record 4' in refused(disk, after=5)
  assert 'there is no log' in refused(Storage(), after=5)
  fresh = Storage()
  wal.begin(fresh, RUN, after=4, chain=chain)
  write_log(fresh, 5, after=4, chain=chain)
  again = wal.open_log(fresh, RUN, after=4, chain=chain)
  assert again.chain == chain_after(expected(5)) and read_log(again) == [(1, payload(5))]
  assert 'another history' in refused(fresh, after=4, chain=bytes(32))
  assert 'begins with record 5' in refused(fresh)


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
  with pytest.raises(ValueError, match='record 2 is not committed'):
    log.append(1, b'')


def test_a_change_under_an_open_log_is_never_skipped():
  disk = Storage()
  write_log(disk, 3)
  log = wal.open_log(disk, RUN)
  for name, data in list(disk.copy().items())[1:]:
    for place in range(len(data)):
      bad = bytearray(data)
      bad[place] ^= 4
      disk.put(name, bytes(bad))
      with pytest.raises(wal.WalDamaged, match=f'{name} is damaged'):
        read_log(log)
    disk.put(name, data)


# --- Compaction -----------------------------------------------------------------------------------


def test_compaction_keeps_every_record_behind_the_number():
  for number in range(23):
    disk = Storage()
    log = write_log(disk, 20)
    before, base = len(disk.calls), min(number, 20)
    log.drop_before(number)
    assert disk.calls[before:] == ['remove'] * base
    assert wal.numbers(disk) == list(range(base, 21)) and log.first == base
    assert read_log(log) == expected(20)[base:]
    again = write_log(disk, 21, after=base, chain=chain_after(expected(base)))
    assert read_log(again) == expected(21)[base:]
    assert again.chain == chain_after(expected(21))


# --- The payload's own form -----------------------------------------------------------------------


def test_packed_arrays_are_aligned_and_headers_are_canonical():
  for text in ('', 'a', 'ab' * 5):
    buffers = outer_log.pack({'text': text}, b'array')
    header, data = outer_log.unpack(b''.join(buffers))
    assert (header, bytes(data)) == ({'text': text}, b'array')
    assert len(buffers[0]) % 8 == 0
  with pytest.raises(codec.TapeError):
    outer_log.pack({'loss': float('nan')})
