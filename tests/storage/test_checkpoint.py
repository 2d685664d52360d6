"""A checkpoint reads back bit for bit, or it is refused and the one before it is used."""

import contextlib
import errno
import logging
import os
import pathlib
import shutil
import signal
import sys
import textwrap
import threading
import types
from collections.abc import Iterator
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint._src.serialization import ocdbt_utils

from diloco_jax.storage import arrays, checkpoint, orbax_context, states, tree_digest
from diloco_jax.train import config as train_config
from diloco_jax.train import decoder
from diloco_jax.train import mesh as mesh_lib
from tests.launch.lib import command_line
from tests.storage.test_tapes import full_disk


def _state(value: float):
  return {'count': jnp.int32(value), 'w': value + jnp.arange(64, dtype=jnp.float32).reshape(8, 8)}


def _shardings(mesh_config: train_config.MeshConfig, like):
  mesh = mesh_lib.make_mesh(mesh_config, jax.devices()[: mesh_config.num_devices])
  return mesh_lib.tree_shardings(mesh, like, decoder.PARTITION)


def _restore(root: pathlib.Path, like=None):
  like = _state(0) if like is None else like
  checkpoints = checkpoint.Checkpoints(str(root))
  try:
    return checkpoints.restore(_shardings(train_config.MeshConfig(), like), like)
  finally:
    checkpoints.close()


def _save(root: pathlib.Path, *steps: int) -> None:
  checkpoints = checkpoint.Checkpoints(str(root))
  for step in steps:
    checkpoints.save(step, _state(step), 10 * step)
  checkpoints.close()


@pytest.fixture(name='checkpoints')
def _checkpoints(tmp_path) -> Iterator[checkpoint.Checkpoints]:
  checkpoints = checkpoint.Checkpoints(str(tmp_path))
  yield checkpoints
  checkpoints.close()


def _assert_holds(restored: checkpoint.Restored, step: int) -> None:
  assert (restored.step, restored.data_state) == (step, 10 * step)
  jax.tree.map(np.testing.assert_array_equal, restored.state, _state(step))


def test_reads_back_the_saved_state(checkpoints):
  checkpoints.save(7, _state(7), 70, {'versions': [3, 4], 'steps': {'0': 1}})
  restored = checkpoints.restore(_shardings(train_config.MeshConfig(), _state(0)), _state(0))
  _assert_holds(restored, 7)
  assert restored.protocol == {'versions': [3, 4], 'steps': {'0': 1}}


def _skipping_the_merge(*args, **kwargs):
  """What Orbax does when it finds no part of a save (ocdbt_utils.merge_ocdbt_per_process_files)."""

  async def nothing() -> None:
    pass

  return nothing()


def test_a_save_that_cannot_be_read_is_none(tmp_path, checkpoints, monkeypatch):
  """The caller would rely on it, and the log would drop what it holds."""
  with monkeypatch.context() as patch:
    patch.setattr(ocdbt_utils, 'merge_ocdbt_per_process_files', _skipping_the_merge)
    with pytest.raises(states.StateError, match='saving .* failed.* no earlier one'):
      checkpoints.save(1, _state(1), 10)()
  assert checkpoints.numbers == []
  checkpoints.save(2, _state(2), 20)()
  _assert_holds(_restore(tmp_path), 2)


def test_an_export_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
  monkeypatch.setattr(ocdbt_utils, 'merge_ocdbt_per_process_files', _skipping_the_merge)
  with pytest.raises(states.StateError, match='cannot write .*model'):
    states.save(tmp_path / 'model', 'model', _state(1), {})
  assert not list(tmp_path.iterdir())  # a full disk needs the space


def test_a_state_is_read_in_parts_and_each_is_verified(tmp_path, monkeypatch):
  monkeypatch.setattr(states, '_PART_BYTES', 100)
  kinds = {'a': bool, 'b': jnp.bfloat16, 'c': np.int8, 'd': np.float64, 'e': np.float32}
  values = np.random.default_rng(0).normal(size=(6, 5))
  tree = {name: values.astype(kind) for name, kind in kinds.items()} | {'n': np.array(3, np.int32)}
  with jax.enable_x64(True):
    assert tree_digest.digests_of_host(tree) == tree_digest.digests(tree)
  load, parts = orbax_context.ocp.load, []

  def spy(folder, like):
    parts.append(like)
    return load(folder, like)

  monkeypatch.setattr(orbax_context.ocp, 'load', spy)
  states.save(tmp_path / 'model', 'model', tree, {})
  assert len(parts) == 5
  loaded = states.load_on_host(tmp_path / 'model')[1]
  jax.tree.map(np.testing.assert_array_equal, loaded, tree)
  assert len(parts) == 10


@pytest.mark.parametrize('letter', list('[]*?\\'))
def test_a_path_in_which_orbax_finds_nothing_is_refused(letter, tmp_path):
  folder = tmp_path / f'lr{letter}1' / 'run'
  link = tmp_path / 'link'
  link.symlink_to(folder.parent)
  for path in (folder, link / 'run'):
    for call in (
      lambda path=path: checkpoint.Checkpoints(str(path)),
      lambda path=path: states.save(path, 'model', _state(1), {}),
      lambda path=path: arrays.load(path),
    ):
      with pytest.raises(ValueError, match='could be read. Nothing was changed. Choose another f'):
        call()
  assert not folder.parent.exists()


def test_the_next_process_removes_a_checkpoint_that_a_killed_one_was_deleting(tmp_path):
  _save(tmp_path, 5, 7)
  (tmp_path / 'old_3' / 'state').mkdir(parents=True)
  _save(tmp_path, 8)
  assert {path.name for path in tmp_path.iterdir() if path.name.isdecimal()} == {'7', '8'}
  _assert_holds(_restore(tmp_path), 8)


def test_an_old_checkpoint_that_cannot_be_removed_costs_no_new_one(tmp_path, monkeypatch, caplog):
  _save(tmp_path, 1, 2)
  rmtree = shutil.rmtree

  def fails(path, *args, **options) -> None:
    if pathlib.Path(path).name == 'old_1':
      raise OSError(errno.EIO, 'Input/output error', str(path))
    rmtree(path, *args, **options)

  monkeypatch.setattr(shutil, 'rmtree', fails)
  checkpoints = checkpoint.Checkpoints(str(tmp_path))
  assert checkpoints.save(3, _state(3), 30)() == 3
  assert 'an old checkpoint cannot be removed' in caplog.text
  checkpoints.close()
  _assert_holds(_restore(tmp_path), 3)


def test_the_first_of_every_interval_is_kept_also_by_a_later_process(tmp_path):
  for steps in ((3, 8, 10), (11, 19, 20, 21), (24, 29, 41)):
    checkpoints = checkpoint.Checkpoints(str(tmp_path), keep_every=10)
    for step in steps:
      checkpoints.save(step, _state(step), 0)()
    checkpoints.close()
  assert checkpoint.Checkpoints(str(tmp_path)).numbers == [3, 10, 20, 29, 41]
  assert [states.read(tmp_path / f'{number}').record['step'] for number in (3, 41)] == [3, 41]


def test_a_save_at_a_clock_that_has_one_takes_the_next_number(tmp_path, checkpoints):
  assert checkpoints.save(5, _state(1), 1)() == 5
  assert checkpoints.save(5, _state(5), 50)() == 6
  assert checkpoints.save(4, _state(4), 40)() == 7
  assert checkpoints.numbers == [6, 7]
  _assert_holds(_restore(tmp_path), 4)


def test_a_donation_after_save_does_not_change_the_checkpoint(tmp_path, checkpoints):
  add_one = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
  state = add_one(_state(1))
  checkpoints.save(2, state, 20)
  for _ in range(20):
    state = add_one(state)
  checkpoints.wait()
  _assert_holds(_restore(tmp_path), 2)


@pytest.mark.parametrize('what', ['checkpoint', 'arrays'])
def test_what_was_saved_is_durable(tmp_path, checkpoints, monkeypatch, what):
  """The log drops its records on the strength of a checkpoint, and a model is written but once."""
  durable, fsync = set(), os.fsync

  def spy(descriptor: int) -> None:
    fsync(descriptor)
    durable.add(os.fstat(descriptor).st_ino)

  monkeypatch.setattr(os, 'fsync', spy)
  if what == 'checkpoint':
    checkpoints.save(7, _state(7), 70)()
  else:
    states.save(tmp_path / '7', '7', _state(7), {})
  paths = tmp_path, tmp_path / '7', *(tmp_path / '7').rglob('*')
  assert {path.stat().st_ino for path in paths} <= durable


def test_killed_in_the_middle_of_a_save(tmp_path):
  """SIGKILL during the second save: the first checkpoint is the newest one, and whole."""
  child = textwrap.dedent("""
      import os, pathlib, signal, sys
      import jax.numpy as jnp
      from diloco_jax.storage import checkpoint
      root = pathlib.Path(sys.argv[1])
      checkpoints = checkpoint.Checkpoints(str(root))
      values = {f'leaf{i}': jnp.arange(2**19, dtype=jnp.float32) for i in range(32)}
      checkpoints.save(1, values, 10)
      checkpoints.wait()
      checkpoints.save(2, values, 20)
      while not list(root.glob('*_2*tmp*')):
        pass
      os.kill(os.getpid(), signal.SIGKILL)
      """)
  died = command_line.python('-c', child, tmp_path)
  assert died.returncode == -signal.SIGKILL, died.stderr
  assert list(tmp_path.glob('*_2*tmp*')), 'the save was over before the kill'

  like = {f'leaf{i}': jax.ShapeDtypeStruct((2**19,), jnp.float32) for i in range(32)}
  restored = _restore(tmp_path, like)
  assert (restored.step, restored.data_state) == (1, 10)
  for leaf in restored.state.values():
    np.testing.assert_array_equal(leaf, np.arange(2**19, dtype=np.float32))

  with contextlib.closing(checkpoint.Checkpoints(str(tmp_path))) as checkpoints:
    checkpoints.save(2, restored.state, 20)
  assert _restore(tmp_path, like).step == 2


def test_a_damaged_checkpoint_is_set_aside(tmp_path, caplog):
  _save(tmp_path, 1)
  for _ in range(2):  # the second takes the place of the first
    _save(tmp_path, 2)
    for file in (tmp_path / '2' / 'state').glob('**/d/*'):  # where Orbax keeps the arrays
      file.write_bytes(file.read_bytes()[:-20])
    with caplog.at_level(logging.WARNING, logger=checkpoint.__name__):
      _assert_holds(_restore(tmp_path), 1)
  assert 'does not read back' in caplog.text and 'unreadable-2' in caplog.text
  _save(tmp_path, 2)
  _assert_holds(_restore(tmp_path), 2)


def _noise():
  return {'noise': jnp.asarray(np.random.default_rng(0).standard_normal(2**20, np.float32))}


def test_opening_starts_no_thread(tmp_path, monkeypatch):
  """One of Orbax, which looked for old saves, printed its traceback below the error of a process
  that ended at once."""
  jax.devices()  # starts some
  monkeypatch.setattr(threading.Thread, 'start', lambda thread: pytest.fail(thread.name))
  checkpoint.Checkpoints(str(tmp_path)).close()


def test_failing_saves_are_warned_of_once_a_minute_and_leave_nothing(tmp_path, checkpoints, caplog):
  """With a wait for each save its caller gets the error; without one there is one warning."""
  checkpoints.save(1, _state(1), 10)()
  (tmp_path / 'new_1.orbax-checkpoint-tmp').mkdir()  # threads of an earlier save have written on
  with full_disk(2**20):
    for step in range(2, 5):
      with pytest.raises(states.StateError, match=f'saving .*/{step} failed'):
        checkpoints.save(step, _noise(), 20)()
  _assert_holds(_restore(tmp_path), 1)
  checkpoints.save(5, _state(5), 50)()
  assert not caplog.text
  with full_disk(2**20):
    for step in range(6, 9):
      checkpoints.save(step, _noise(), 20)
    with pytest.raises(states.StateError, match='saving .* failed'):
      checkpoints.wait()
  checkpoints.close()
  assert caplog.text.count('failed') == 1 and 'Traceback' not in caplog.text
  assert sorted(path.name for path in tmp_path.iterdir()) == ['1', '5']
  _assert_holds(_restore(tmp_path), 5)


def test_threads_of_a_failed_save_print_no_traceback(monkeypatch):
  printed = []
  monkeypatch.setattr(sys, 'unraisablehook', lambda error: printed.append(str(error.exc_value)))
  orbax_context._hide_errors_of_saves()
  for text in ('Event loop is closed', 'another'):
    sys.unraisablehook(types.SimpleNamespace(exc_value=RuntimeError(text), object=None))
  assert printed == ['another']


def test_the_end_of_a_save_can_be_awaited_in_another_thread(checkpoints):
  with futures.ThreadPoolExecutor(4) as pool:
    ends = [pool.submit(checkpoints.save(step, _state(step), 10 * step)) for step in range(1, 5)]
    assert len({end.result() for end in ends}) == 4
  assert checkpoints.numbers == [3, 4]


def test_a_closed_folder_takes_no_save(tmp_path, checkpoints):
  """Another process may have it by then."""
  checkpoints.close()
  with pytest.raises(states.StateError, match='is closed'):
    checkpoints.save(1, _state(1), 10)
  assert not list(tmp_path.iterdir())
  _save(tmp_path, 2)
  _assert_holds(_restore(tmp_path), 2)


def test_one_changed_bit_and_signs_that_change_together_are_detected():
  """One flipped bit of a compressed file changes several signs."""
  values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
  changed = [values.copy() for _ in range(5)]
  changed[0][34] = np.nextafter(values[34], np.float32(9))
  for count in (1, 2, 4):
    changed[count][7 : 7 + 90 * count : 90] *= -1
  digests = {tree_digest.digests_of_host({'w': array})['w'] for array in changed}
  assert len(digests) == 5  # changed[3] is as it was


def test_arrays_of_another_checkpoint_are_not_restored(tmp_path):
  """Whole files in the wrong place, which Orbax reads: only the digests of the record tell."""
  _save(tmp_path, 1, 2)
  shutil.rmtree(tmp_path / '2' / 'state')
  shutil.copytree(tmp_path / '1' / 'state', tmp_path / '2' / 'state')
  _assert_holds(_restore(tmp_path), 1)


def test_a_failure_to_read_sets_nothing_aside_and_no_checkpoint_is_no_failure(
  tmp_path, monkeypatch
):
  """The cause may pass: here no file can be opened."""
  root = tmp_path / 'ckpt'
  assert _restore(root) is None
  _save(root, 1, 2)

  def fail(*args):
    raise OSError(errno.EMFILE, 'Too many open files')

  with monkeypatch.context() as patch:
    patch.setattr(states.json_files, 'read_bytes', fail)
    for _ in range(2):  # the second process does not start over either
      with pytest.raises(states.StateError, match=r'\[1, 2\] .*/2/.*Too many open files'):
        _restore(root)
  assert sorted(path.name for path in root.iterdir()) == ['1', '2']
  _assert_holds(_restore(root), 2)


def test_another_model_is_refused_and_nothing_is_set_aside(tmp_path):
  _save(tmp_path, 1)
  wider = _state(0) | {'w': jnp.zeros((8, 9))}
  differ = r'w was saved as \[\[8, 8\].*this program has \[\[8, 9\].*it was saved with'
  with pytest.raises(ValueError, match=differ):
    _restore(tmp_path, wider)
  with pytest.raises(ValueError, match='w was saved as .* no such array'):
    _restore(tmp_path, {'count': jnp.int32(0)})
  _assert_holds(_restore(tmp_path), 1)


def test_a_small_array_in_a_large_chunk_is_measured_by_its_chunk():
  """Zeros take no space on a disk."""
  chunk = types.SimpleNamespace(chunk_shape=(1 << 20,))
  leaf = types.SimpleNamespace(shape=(1,), dtype=np.dtype('f4'), storage_metadata=chunk)
  with pytest.raises(ValueError, match=f'take {4 << 20} bytes'):
    tree_digest.require_size([leaf], 1 << 20)


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(ValueError, match='cannot write checkpoints under .*choose a folder'):
    checkpoint.Checkpoints(str(tmp_path / 'file' / 'checkpoints'))


def test_a_protocol_record_that_is_not_json_fails_at_once(tmp_path, checkpoints):
  with pytest.raises(TypeError, match='JSON'):
    checkpoints.save(1, _state(1), 0, protocol={'anchors': np.zeros(2)})
  assert _restore(tmp_path) is None


def test_emulated_devices_have_one_digest_under_way(monkeypatch):
  """Dozens of all-reduces on the few threads of a CPU waited for each other until XLA aborted."""
  sharding = jax.sharding.NamedSharding(
    jax.make_mesh((2,), ('x',)), jax.sharding.PartitionSpec('x')
  )
  leaves = [jax.device_put(np.ones((2, 1 << 20), np.float32), sharding) for _ in range(8)]
  numbers, compute = [], tree_digest._digest_leaf

  def digest(leaf):
    assert all(number.is_ready() for number in numbers)
    numbers.append(compute(leaf))
    return numbers[-1]

  monkeypatch.setattr(tree_digest, '_digest_leaf', digest)
  assert len(tree_digest.digests(leaves)) == len(numbers) == 8
