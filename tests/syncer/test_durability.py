"""A syncer's work on a real disk: recovery repeats committed outer steps bit for bit, or refuses.

The model is `tiny` with int8, RDA and Nesterov. A `Rig` is one process of the syncer's work without
machine and transport; a crash only closes its log. Outer steps are requested as the machine does,
with a machine state that differs for each record.
"""

import contextlib
import copy
import dataclasses
import errno
import functools
import os
import pathlib
import queue
import re
import subprocess
import threading
import types

import jax
import numpy as np
import pytest

from diloco_jax.config import build
from diloco_jax.configs import stdlib_lm
from diloco_jax.launch import cli
from diloco_jax.node import loop
from diloco_jax.numerics import codecs
from diloco_jax.process import exits
from diloco_jax.protocol import actions, events
from diloco_jax.protocol.syncer import ledger as ledger_lib
from diloco_jax.protocol.tape import tape as tape_lib
from diloco_jax.report import facts as report_facts
from diloco_jax.report import records as records_lib
from diloco_jax.storage import checkpoint, outer_log, states, wal
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import lineage as lineage_lib
from diloco_jax.syncer import commit, global_model, stored
from diloco_jax.syncer import node as syncer_node
from diloco_jax.syncer import work as syncer_work
from diloco_jax.transport import in_process
from diloco_jax.transport import payloads as payloads_lib

DEADLINE_S = 120
NAMES = ('l0', 'l1', 'l2')
TOKENS, STEPS = 128, 4
REFUSED = 4  # the sync whose payloads are not finite
SYNCS = 7


@pytest.fixture(scope='module', name='assembled')
def _assembled() -> build.Assembly:
  config = stdlib_lm.get_config('tiny')
  config.sync.fragments = config.sync.period = 2  # two to compile
  config.sync.overlap = config.train.eval_every = 0
  config.validate()
  assert (config.sync.codec_up, config.sync.merge) == ('int8', 'rda')
  assert config.sync.outer.startswith('nesterov')
  return build.assemble(config)


class Disk(files_lib.Files):
  """A real folder; `full` writes a part and then fails, `broken` cannot fsync."""

  full = broken = False

  def __init__(self, path: pathlib.Path):
    super().__init__(path)
    self.refused: queue.SimpleQueue[str] = queue.SimpleQueue()

  def write(self, name, *pieces):
    if self.full:
      super().write(name, memoryview(pieces[0])[:7])
      self.refused.put(name)
      raise OSError(errno.ENOSPC, 'No space left on device')
    super().write(name, *pieces)

  def fsync(self, name):
    if self.broken:
      raise OSError(errno.EIO, 'Input/output error')
    super().fsync(name)


class Records:
  """Collects lines and facts."""

  def __init__(self):
    self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    self.reported: list[object] = []

  def say(self, text: str) -> None:
    self.lines.put(text)

  def report(self, fact: object) -> None:
    self.reported.append(fact)


class Rig:
  """One process of the syncer's work in a folder; `start`: the start of its machine. `store`: of
  the run, opened with `records`."""

  def __init__(
    self,
    assembled: build.Assembly,
    folder: pathlib.Path,
    full_s: float = commit.FULL_S,
    store: stored.Stored | None = None,
    records: Records | None = None,
  ):
    self.assembled = assembled
    self.records = records or Records()
    self.disk = store.log_files if store else Disk(folder / 'wal')
    self.log = commit.CommitLog(
      self.disk, assembled.agreement, self.records.say, retry_s=0.01, full_s=full_s, store=store
    )
    try:
      self.theta = global_model.Theta(assembled)
      remedy = syncer_node.remedy_if_damaged(folder, self.disk, store)
      self.checkpoints = checkpoint.Checkpoints(str(folder / 'ckpt'), remedy=remedy)
      origin = lineage_lib.read(folder.parent) or lineage_lib.Lineage(run='0' * 16)
      self.start = syncer_node.recover(
        assembled, self.theta, self.checkpoints, self.log, self.records, origin
      )
    except BaseException:
      self.log.close()
      raise
    self.payloads = payloads_lib.PayloadStore()
    self.posted: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
    self.failed: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    self.work = syncer_work.SyncerWork(
      assembled,
      self.theta,
      self.posted.put,
      self.failed.put,
      self.payloads,
      self.records,
      self.checkpoints,
      self.log,
      evaluation=None,
      store=store,
    )
    if store:
      store.begin(assembled.agreement, self.checkpoints, self.failed.put)
    self.work.start()

  def submit(self, sync: int) -> None:
    """Requests the outer step of a sync: its payloads follow from its number."""
    self.work.submit(merge_of(self.assembled, sync, self.payloads))

  def merge(self, sync: int) -> events.MergeDone:
    """Requests it once earlier outer steps have ended, as the machine state says."""
    merge = merge_of(self.assembled, sync, self.payloads)
    merge.machine_state.update(self._published())
    self.work.submit(merge)
    return self.posted.get(timeout=DEADLINE_S)

  def save(self, sync: int) -> events.SaveDone:
    machine_state = books(self.assembled, sync) | self._published()
    machine_state |= {'merging': [], 'run': self.start.run}
    self.work.submit(actions.Save(clock=sync, machine_state=machine_state))
    return self.posted.get(timeout=DEADLINE_S)

  def _published(self) -> dict:
    versions, digests = list(self.theta.versions), [self.theta.digest(p) for p in range(2)]
    return {'versions': versions, 'digests': digests}

  def crash(self) -> None:
    """Closes the log without a save."""
    self.log.close()
    self.work.stop()


@pytest.fixture(name='rig')
def _rig(assembled, tmp_path):
  rigs = []

  def make(merges: int = 0, full_s: float = commit.FULL_S) -> Rig:
    """A process that has merged these first syncs."""
    rigs.append(Rig(assembled, tmp_path, full_s))
    for sync in range(1, merges + 1):
      rigs[-1].merge(sync)
    return rigs[-1]

  yield make
  for rig in rigs:
    rig.crash()
    rig.checkpoints.close()


def merge_of(
  assembled: build.Assembly, sync: int, store: payloads_lib.PayloadStore
) -> actions.Merge:
  """Sync s is of fragment s % 2; two participants in even syncs, three in odd ones."""
  p, names = sync % 2, NAMES[: 2 + sync % 2]
  merged = [s for s in range(1, sync + 1) if s % 2 == p and s != REFUSED]
  version = len(merged) + (sync == REFUSED)
  participants = tuple(
    actions.Participant(
      learner=name,
      incarnation=1,
      tokens=TOKENS + 32 * m,
      steps=STEPS,
      payload_id=store.put(payload(assembled.layout.size(p), 10 * sync + m, sync != REFUSED)),
    )
    for m, name in enumerate(names)
  )
  under_way = books(assembled, sync)
  under_way['merging'] = [sync]
  under_way['data']['moves'] = [[sync, [[name, m, p, sync] for m, name in enumerate(names)]]]
  return actions.Merge(
    sync=sync, fragment=p, version=version, participants=participants, machine_state=under_way
  )


@functools.cache
def payload(size: int, seed: int, finite: bool = True) -> bytes:
  """An encoded pseudo-gradient; the decoder reads an exponent of 255 as NaN."""
  values = np.random.default_rng(seed).normal(scale=1e-2, size=size).astype(np.float32)
  data = bytearray(np.asarray(codecs.get('int8').encode(values)[0]).tobytes())
  if not finite:
    data[0] = 255
  return bytes(data)


def books(assembled: build.Assembly, sync: int) -> dict:
  """A machine state of a sync: every learner has an account."""
  start = tape_lib.Start(
    role='syncer',
    node='syncer',
    config=assembled.protocol,
    digests=(0,) * 2,
    payload_bytes=assembled.payload_bytes,
  )
  machine_state = start.make().state()
  machine_state['opened'], machine_state['next'] = sync, sync + 1
  account = dataclasses.asdict(ledger_lib.Account([0, 0], merged=sync * 1000))
  machine_state['ledger'] = [[name, 1, account] for name in NAMES]
  member = {'clock': 0, 'left': False, 'strikes': 0, 'spoiled': [], 'max_strikes': 0}
  machine_state['members'] = [
    {'learner': name, 'shard': m, 'incarnation': 1, **member} for m, name in enumerate(NAMES)
  ]
  return machine_state


def bits(theta: global_model.Theta) -> list:
  """All of Theta, exactly."""
  leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(theta.arrays())]
  return [*leaves, list(theta.versions), [theta.digest(p) for p in range(2)]]


@pytest.fixture(scope='module', name='expected')
def _expected(assembled) -> list[list]:
  """Theta after 0, 1, ... outer steps of a syncer that never crashed."""
  theta, store = global_model.Theta(assembled), payloads_lib.PayloadStore()
  after = [bits(theta)]
  for sync in range(1, SYNCS + 1):
    merge = merge_of(assembled, sync, store)
    payloads = [store.get(participant.payload_id) for participant in merge.participants]
    refused = NAMES if sync == REFUSED else ()
    merged = theta.merge(merge.fragment, merge.participants, payloads, refused)
    assert bool(merged.failed) == (sync == REFUSED), merged
    after.append(bits(theta))
  assert len({str(state) for state in after}) == SYNCS  # each differs, but for the refused one
  return after


# --- Records --------------------------------------------------------------------------------------


def ended(merge: actions.Merge, digest: int) -> events.MergeDone:
  return events.MergeDone(
    sync=merge.sync, fragment=merge.fragment, payload_id=None, payload=None, digest=digest
  )


@pytest.mark.parametrize('damage', [lambda data: data[:-1], lambda data: data + b'x'])
def test_a_record_of_another_length_is_refused(damage, assembled):
  merge = merge_of(assembled, 1, payloads_lib.PayloadStore())
  step = outer_log.OuterStep(merge, ended(merge, 1), b'12345678')
  data = b''.join(outer_log.encode(step))
  with pytest.raises(ValueError, match='bytes are no gradient of'):
    outer_log.decode(memoryview(damage(data)))


# --- Recovery -------------------------------------------------------------------------------------


def test_theta_recovers_bit_for_bit_after_any_kill(rig, expected, assembled):
  """One process per outer step, two saves, and one refused outer step."""
  for sync in range(1, SYNCS + 1):
    life = rig()
    assert bits(life.theta) == expected[sync - 1]
    done = life.merge(sync)
    assert bool(done.failed) == (sync == REFUSED)
    assert bits(life.theta) == expected[sync]
    if sync in (2, 5):
      assert not life.save(sync).error
    life.crash()
  last = rig()
  assert bits(last.theta) == expected[SYNCS]
  assert last.theta.versions == last.start.state['versions'] == [2, 4]
  assert last.start.state['digests'] == [last.theta.digest(p) for p in range(2)]
  assert last.start.state['opened'] == SYNCS
  assert last.start.make().clock == SYNCS


def test_the_refused_outer_step_has_settled_its_tokens(rig):
  life = rig(REFUSED)
  life.crash()
  ledger = {name: fields for name, _, fields in rig().start.state['ledger']}
  assert ledger['l1']['merged'] == REFUSED * 1000 - TOKENS - 32
  assert ledger['l1']['discarded'] == {'bad_value': TOKENS + 32}
  assert ledger['l2']['merged'] == REFUSED * 1000 and not ledger['l2']['discarded']  # took no part


def test_the_log_begins_at_the_older_checkpoint(rig, expected, tmp_path):
  life = rig()
  firsts = []
  for sync in range(1, SYNCS + 1):
    life.merge(sync)
    if sync % 2 == 0:
      assert not life.save(sync).error
      firsts.append(next(life.log._wal.records()).number)
  assert firsts == [1, 3, 5]  # the first record that is kept after saves of 2, 4 and 6
  life.crash()
  life.checkpoints.close()
  _damage(tmp_path / 'ckpt' / '6')
  again = rig()
  assert bits(again.theta) == expected[SYNCS]
  assert any('checkpoint of sync 4 and 3 later' in line for line in drain_lines(again))


def test_without_its_only_checkpoint_the_log_has_the_run(rig, expected, tmp_path):
  life = rig(3)
  assert not life.save(3).error
  life.crash()
  life.checkpoints.close()
  _damage(tmp_path / 'ckpt' / '3')
  with pytest.raises(states.StateError) as error:
    rig()
  paste(str(error.value))
  assert bits(rig().theta) == expected[3]


def test_a_full_disk_still_gives_up_the_records_that_both_checkpoints_hold(rig):
  life = rig()
  for sync in range(1, 5):
    life.merge(sync)
    life.disk.full = sync == 4
    if sync % 2 == 0:
      assert not life.save(sync).error
  assert next(life.log._wal.records()).number == 3


def test_recovery_holds_one_machine_state(rig, assembled, tmp_path):
  rig(3).crash()
  with contextlib.closing(
    commit.CommitLog(Disk(tmp_path / 'wal'), assembled.agreement, print)
  ) as log:
    ended = log.recover(global_model.Theta(assembled), {})
  assert [bool(merge.machine_state) for merge, _ in ended] == [False, False, True]


def paste(error: str) -> None:
  """Runs the command that an error names."""
  subprocess.run(re.search(r'mv .*(?=;)', error)[0], shell=True, check=True)


def _damage(folder: pathlib.Path) -> None:
  """Flips a bit in the largest file of a checkpoint."""
  path = max(
    (path for path in folder.rglob('*') if path.is_file()), key=lambda path: path.stat().st_size
  )
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


def drain_lines(rig: Rig) -> list[str]:
  lines = []
  while not rig.records.lines.empty():
    lines.append(rig.records.lines.get())
  return lines


def test_a_payload_is_measured_once_before_its_outer_step(rig, expected, assembled):
  """One that was dropped meanwhile harms nothing."""
  life, measured = rig(), []
  lengths = life.theta.lengths
  life.theta.lengths = lambda p, data: measured.append(bytes(data)) or lengths(p, data)
  merge = merge_of(assembled, 1, life.payloads)
  arrived = [participant.payload_id for participant in merge.participants]
  payloads = [bytes(life.payloads.get(payload_id)) for payload_id in arrived]
  for payload_id in [*reversed(arrived), max(arrived) + 1]:
    life.work.submit(actions.Measure(fragment=merge.fragment, payload_id=payload_id))
  life.work.submit(merge)
  assert not life.posted.get(timeout=DEADLINE_S).failed
  assert measured == payloads[::-1]
  assert len(life.payloads) == 1, 'the new version'
  assert bits(life.theta) == expected[1]


def test_a_payload_that_is_lost_with_the_devices_of_its_learner_is_refused(rig, assembled):
  """Within one process it is an array: the others are merged, and the log repeats it."""
  life = rig()
  merge, near = merge_of(assembled, 1, life.payloads), life.theta.near
  lost = life.payloads.get(merge.participants[0].payload_id)

  def gone(p, payload):
    if payload is lost:
      raise jax.errors.JaxRuntimeError('DATA_LOSS: the slice is gone')
    return near(p, payload)

  life.theta.near = gone
  life.work.submit(merge)
  done = life.posted.get(timeout=DEADLINE_S)
  assert (done.failed, done.refused) == ('', (merge.participants[0].learner,))
  merged = bits(life.theta)
  life.crash()
  assert bits(rig().theta) == merged


def test_an_outer_step_with_another_result_is_refused_by_its_number(rig, tmp_path, assembled):
  life = rig(1)
  merge = merge_of(assembled, 2, life.payloads)
  gradient = life.payloads.get(merge.participants[0].payload_id)
  life.log.write(outer_log.OuterStep(merge, ended(merge, 123), gradient))
  life.crash()
  before = _content(tmp_path / 'wal')
  with pytest.raises(
    exits.NeverRetry,
    match='Record 2 of the log .* sync 2, fragment 0, version '
    '1 has digest [0-9a-f]{16}, was committed with 000000000000007b',
  ) as refusal:
    with exits.log_failures():
      rig()
  assert refusal.value.code == 42
  assert _content(tmp_path / 'wal') == before


def test_the_log_of_another_run_is_refused_and_the_settings_that_differ_are_named(
  rig, assembled, tmp_path
):
  """For example a cell of a notebook, run again with another seed."""
  rig().crash()
  config = copy.deepcopy(assembled.config)
  config.train.seed += 1
  with contextlib.closing(
    commit.CommitLog(files_lib.Files(tmp_path / 'wal'), build.assemble(config).agreement, print)
  ) as other:
    with pytest.raises(exits.NeverRetry, match='belongs to the run') as refusal:
      with exits.log_failures():
        other.recover(None, {})
  assert refusal.value.code == 42
  seed = config.train.seed
  assert str(refusal.value).endswith(f' train.seed is {seed} here, {seed - 1} there')


def _content(folder: pathlib.Path) -> dict[str, bytes]:
  return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != 'lock'}


# --- Disks ----------------------------------------------------------------------------------------


def test_a_full_disk_commits_nothing_until_there_is_space(rig, expected):
  life = rig(1)
  drain_lines(life)
  life.disk.full = True
  for sync in (2, 3):
    life.submit(sync)
  line = life.records.lines.get(timeout=DEADLINE_S)
  assert line.startswith('No space') and 'record 1 is safe' in line
  for _ in range(3):  # it is tried again, and not talked about again
    life.disk.refused.get(timeout=DEADLINE_S)
  assert life.posted.empty() and life.records.lines.empty() and life.failed.empty()
  outer = [fact.sync for fact in life.records.reported if isinstance(fact, report_facts.Outer)]
  assert outer == [1], 'no metric before the fsync'
  life.disk.full = False
  assert [life.posted.get(timeout=DEADLINE_S).sync for _ in range(2)] == [2, 3]
  assert 'space' in life.records.lines.get(timeout=DEADLINE_S)
  assert bits(life.theta) == expected[3]
  life.crash()
  assert bits(rig().theta) == expected[3]


def test_each_time_that_the_disk_is_full_has_its_own_patience(rig, expected, monkeypatch):
  """Two stalls of 200 s are not one of more than 300 s, however long they take together."""
  life, now = rig(), [0.0]
  monkeypatch.setattr(commit.time, 'monotonic', lambda: now[0])
  write = type(life.disk).write

  def slow(name, *pieces):
    now[0] += 50
    life.disk.full = now[0] % 250 != 0
    write(life.disk, name, *pieces)

  monkeypatch.setattr(life.disk, 'write', slow)
  for sync in (1, 2):
    assert not life.merge(sync).failed
  assert now[0] == 500 and bits(life.theta) == expected[2]


def test_a_disk_that_stays_full_ends_the_process_with_74(rig, expected):
  """Learners would train for nothing."""
  life = rig(1, full_s=0.0)
  life.disk.full = True
  life.submit(2)
  error = life.failed.get(timeout=DEADLINE_S)
  assert isinstance(error, wal.WalFull) and life.posted.empty()
  with pytest.raises(exits.DiskFailed, match='record 1 is safe.*make space and start it again'):
    with exits.log_failures():
      raise error
  life.crash()
  assert bits(rig().theta) == expected[1]


def test_a_failed_fsync_ends_the_process_with_74_and_posts_nothing(rig, expected):
  life = rig(1)
  life.disk.broken = True
  life.submit(2)
  error = life.failed.get(timeout=DEADLINE_S)
  assert life.posted.empty()
  with pytest.raises(exits.DiskFailed, match='Safe up to record 1') as failure:
    with exits.log_failures():
      raise error
  assert failure.value.code == 74
  life.crash()
  # The record may have reached the disk, but it was not published: both are right.
  assert bits(rig().theta) in (expected[1], expected[2])


def test_a_node_that_fails_leaves_no_thread_and_no_lock(assembled, tmp_path):
  """In one process with others: the same folder can be continued there."""
  before = set(threading.enumerate())
  event_queue = loop.EventQueue()
  event_queue.fail(RuntimeError('the node fails'))
  with contextlib.closing(records_lib.Recorder(tmp_path, 'syncer', tensorboard=False)) as records:
    with pytest.raises(RuntimeError, match='the node fails'):
      syncer_node.run(
        dataclasses.replace(assembled, task=None),
        global_model.Theta(assembled),
        tmp_path,
        event_queue,
        in_process.InProcessHub().syncer_transport,
        records,
      )
  left = {thread.name for thread in set(threading.enumerate()) - before}
  assert not left & {'work', 'evaluation', 'save', 'tape'}
  files = files_lib.Files(tmp_path / 'syncer' / 'wal')
  files.lock()
  files.close()


def test_whether_a_restore_has_ended_is_asked_behind_the_lock(assembled, tmp_path):
  """A restore holds the lock: none can begin after the question."""
  lineage_lib.write(tmp_path, lineage_lib.Lineage(changing=lineage_lib.RESTORE))
  records = types.SimpleNamespace(say=print)
  start = lambda: syncer_node.run(assembled, None, tmp_path, None, None, records)
  with contextlib.closing(files_lib.Files(tmp_path / 'syncer' / 'wal')) as files:
    files.lock('restore')
    with pytest.raises(files_lib.DirectoryError, match='already used by restore pid'):
      start()
  for _ in range(2):  # the first one leaves no lock
    with pytest.raises(files_lib.DirectoryError, match='in the middle of a restore'):
      start()


def test_a_stopped_log_writes_no_outer_step(rig, expected):
  life = rig(1)
  life.log.stop()
  life.submit(2)
  assert isinstance(life.failed.get(timeout=DEADLINE_S), commit.Closed)
  life.crash()
  assert bits(rig().theta) == expected[1]


def test_74_and_42_are_exit_codes_with_one_line(capsys, monkeypatch):
  monkeypatch.setattr(os, 'umask', lambda mask: None)  # that of this process stays
  for error, code in (
    (exits.DiskFailed('the disk\nfailed'), 74),
    (exits.NeverRetry('bad'), 42),
  ):

    def main(argv, error=error):
      raise error

    assert cli._call(main, []) == code
  assert capsys.readouterr().err == 'error: the disk failed\nerror: bad\n'


@pytest.mark.parametrize(
  'number, end',
  [
    *((number, exits.DiskFailed) for number in (errno.ENOSPC, errno.EIO, errno.EMFILE)),
    *((number, exits.NeverRetry) for number in (errno.EACCES, errno.EROFS)),
  ],
)
def test_what_a_later_start_may_mend_is_74(assembled, tmp_path, monkeypatch, number, end):
  """And the folder is free again."""
  start = lambda: commit.CommitLog(files_lib.Files(tmp_path), assembled.agreement, print)

  def fails(descriptor: int) -> None:
    raise OSError(number, os.strerror(number))

  with monkeypatch.context() as patch:
    patch.setattr(os, 'fsync', fails)
    with pytest.raises(end, match='is not writable'), exits.never_retry(files_lib.DirectoryError):
      start()
  start().close()
