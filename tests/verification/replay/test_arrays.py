"""Rebuilds the arrays of a run from its log, and reports every difference."""

import dataclasses
import itertools
import shutil
from unittest import mock

import pytest

from diloco_jax.api import load_params, single_controller
from diloco_jax.config import build, load, run_config
from diloco_jax.configs import stdlib_lm
from diloco_jax.protocol import actions, events, tempo
from diloco_jax.protocol.syncer import links
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import outer_log, tapes, wal
from diloco_jax.verification.replay import arrays as rebuild
from diloco_jax.verification.replay import tape_files


def _config(keep_log: bool) -> run_config.Config:
  """One learner, two fragments, a sync every other step, a checkpoint every other sync."""
  config = stdlib_lm.get_config('tiny')
  sync = config.sync
  sync.learners = sync.quorum = 1
  sync.fragments, sync.period, sync.overlap = 2, 4, 0
  sync.checkpoint_every_syncs, sync.keep_log = 2, keep_log
  config.train.steps, config.train.eval_every = 16, 0
  config.train.checkpoint_every_steps = 0
  config.validate()
  return config


def _run(config: run_config.Config, folder) -> None:
  single_controller.run(config, folder)
  load.write(folder, config)


@pytest.fixture(scope='module', name='config')
def _kept() -> run_config.Config:
  return _config(keep_log=True)


@pytest.fixture(scope='module', name='run')
def _whole(tmp_path_factory, config):
  """Every other payload or so is narrow."""
  folder, narrow = tmp_path_factory.mktemp('run'), itertools.cycle([False, False, True])
  with (
    mock.patch.object(tempo, 'LEAST_BYTES', 0),
    mock.patch.object(links.Links, 'narrow', lambda self, member: next(narrow)),
  ):
    _run(config, folder)
  return folder


@pytest.fixture(name='copy')
def _copy(tmp_path, run):
  """A copy of the run, to damage."""
  return shutil.copytree(run, tmp_path / 'copy')


def _rebuild(folder) -> rebuild.Rebuilt:
  return rebuild.rebuild(load_params.assemble(folder, data=True), folder)


def _syncer(folder) -> tuple[tapes.ProcessTape, list]:
  life = next(one for one in tape_files.find(folder) if one.node == 'syncer')
  return life, list(tape_files.read(life))


def test_a_rebuild_makes_every_version_of_a_run(run):
  rebuilt = _rebuild(run)
  made = [turn.event for turn in _syncer(run)[1] if isinstance(turn.event, events.MergeDone)]
  assert rebuilt.outer_steps == len(made) >= 6, 'a sync is due every other step'
  assert rebuilt.refused == 0
  merges = [
    action
    for turn in _syncer(run)[1]
    for action in turn.actions
    if isinstance(action, actions.Merge)
  ]
  assert {one.narrow for merge in merges for one in merge.participants} == {False, True}
  assert rebuilt.on_tape == len(made) + 2, 'and the two fragments of version 0'
  last = {done.fragment: done.digest for done in made}
  assert rebuilt.digests == (last[0], last[1])
  assert rebuilt.text().startswith(f'identical: {len(made)} outer steps, {len(made) + 2} versions')


def test_an_empty_tape_is_passed_over(copy):
  """Of a syncer that started on a full disk."""
  (copy / 'tapes' / 'syncer.9.0.jsonl').touch()
  assert _rebuild(copy).outer_steps


def test_a_folder_without_a_log_is_refused_and_gets_none(copy):
  shutil.rmtree(copy / 'syncer' / 'wal')
  with pytest.raises(ValueError, match='there is no log in'):
    _rebuild(copy)
  assert not (copy / 'syncer' / 'wal').exists()


def test_another_value_on_the_tape_is_a_difference(copy):
  life, turns = _syncer(copy)
  asked = next(one for turn in turns for one in turn.actions if isinstance(one, actions.Merge))
  done = next(turn.event for turn in turns if isinstance(turn.event, events.MergeDone))
  tape = tapes.Tape(copy, tape_files.read(life).header.start, print, None)  # a second life
  tape.record(1, events.Wake(), [asked])
  tape.record(2, dataclasses.replace(done, digest=done.digest ^ 1), [])
  tape.close()
  with pytest.raises(rebuild.Differs, match='version 1 of fragment 0 is .*, but the tape has'):
    _rebuild(copy)


def test_a_version_missing_in_the_log_is_a_difference(copy, config):
  """The log lacks its newest record: a version on the tape was lost."""
  _rewrite(copy, config, lambda payloads: payloads[:-1])
  with pytest.raises(rebuild.Differs, match='is on the tape but not in the log'):
    _rebuild(copy)


@pytest.mark.parametrize('at', [5, -5], ids=['gradient', 'payload'])
def test_a_changed_byte_is_noticed(copy, config, at):
  def spoiled(payloads):
    header, arrays = outer_log.unpack(memoryview(payloads[1]))
    arrays = bytearray(arrays)
    arrays[at] ^= 0x40
    return [payloads[0], b''.join(map(bytes, outer_log.pack(header, arrays))), *payloads[2:]]

  _rewrite(copy, config, spoiled)
  with pytest.raises(outer_log.NotReproduced, match='Record 2 .* gives another result than before'):
    _rebuild(copy)


def _rewrite(folder, config: run_config.Config, change) -> None:
  """Another log of the same run, without damage."""
  place, run = folder / 'syncer' / 'wal', outer_log.run_of(build.assemble(config).agreement)
  before = [bytes(one.payload) for one in wal.read_log(files_lib.Files(place), run).records()]
  shutil.rmtree(place)
  log = wal.begin(files_lib.Files(place), run)
  for payload in change(before):
    log.append(outer_log.OUTER_STEP, payload)
    log.commit()


def test_reading_changes_nothing(run):
  place = run / 'syncer' / 'wal'
  before = {path.name: path.read_bytes() for path in place.iterdir()}
  _rebuild(run)
  assert {path.name: path.read_bytes() for path in place.iterdir()} == before


def test_a_dropped_log_is_refused_with_the_setting_that_keeps_it(tmp_path):
  _run(_config(keep_log=False), tmp_path)
  with pytest.raises(ValueError, match=r'begins with record \d+.*sync.keep_log=true'):
    _rebuild(tmp_path)
