"""A state is what was written, or another one is used: by its content, not by where it is."""

import json
import shutil
from concurrent import futures

import jax
import numpy as np
import pytest

from diloco_jax.protocol.tape import codec
from diloco_jax.storage import json_files, states
from diloco_jax.storage import store as store_lib


def _save(folder, value: float = 1.0, run: str = '') -> None:
  states.save(folder, f'node/{folder.name}', {'w': np.full((64, 8), value, 'f')}, {'run': run})


def _read(folder) -> float:
  return states.load_on_host(folder, name=f'node/{folder.name}')[1]['w'][0, 0]


def test_the_newest_that_can_be_read_is_used_and_the_others_are_said(tmp_path):
  for number in (1, 2, 3, 4):
    _save(tmp_path / str(number), number)
  shutil.rmtree(tmp_path / '3')
  shutil.copytree(tmp_path / '2', tmp_path / '3')  # an older one in the place of a newer
  (tmp_path / '4' / states.MANIFEST).unlink()
  passed = {}
  folders = lambda: sorted(tmp_path.iterdir())
  assert states.newest(folders, _read, passed.__setitem__) == 2
  assert "is that of 'node/2'" in str(passed[tmp_path / '3'])
  assert 'has no manifest.json' in str(passed[tmp_path / '4']) and len(passed) == 2
  for number in (1, 2):
    shutil.rmtree(tmp_path / str(number))
  with pytest.raises(states.Damaged, match='4 has no manifest.json'):
    states.newest(folders, _read, passed.__setitem__)
  assert states.newest(list, _read, passed.__setitem__) is None


def test_what_is_removed_while_it_is_read_is_not_damaged(tmp_path):
  """As by the run that goes on: it has saved newer ones meanwhile."""
  for number in (1, 2):
    _save(tmp_path / str(number), number)

  def use(folder):
    if folder.name == '2':
      shutil.rmtree(folder)
      _save(tmp_path / '3', 3)
    return _read(folder)

  passed = []
  folders = lambda: sorted(tmp_path.iterdir(), key=lambda folder: int(folder.name))
  assert states.newest(folders, use, lambda *words: passed.append(words)) == 3
  assert not passed

  def gone(folder):
    _save(folder.with_name(str(int(folder.name) + 1)))
    shutil.rmtree(folder)
    return _read(folder)

  with pytest.raises(states.StateError, match='saves faster than this process reads'):
    states.newest(folders, gone, print)


def test_a_state_of_another_run_is_damaged(tmp_path):
  _save(tmp_path / '1', run='a')
  assert states.read(tmp_path / '1', run='a').run == 'a'
  with pytest.raises(states.Damaged, match="it is of the run 'a', this is the run b"):
    states.read(tmp_path / '1', run='b')


@pytest.mark.parametrize('path', ['../out', '/etc/passwd', 'a//b', 'a/../../b', ''])
def test_a_manifest_that_leads_out_of_its_folder_is_none(path, tmp_path):
  """The store may be from somebody else."""
  store = store_lib.Store(str(tmp_path / 'store'))
  _save(tmp_path / 'made')
  states.put(store, 'copy', tmp_path / 'made', lambda: None)
  values = json_files.unseal(json.loads(store.read(f'copy/{states.MANIFEST}').data))
  values['manifest']['files'][0][0] = path
  store.put(f'copy/{states.MANIFEST}', json.dumps(json_files.seal(values)).encode())
  with pytest.raises(states.Damaged, match=f'it names {codec.short(path)}'):
    states.fetch(store, 'copy', tmp_path / 'fetched')
  assert not (tmp_path / 'fetched').exists() and not (tmp_path / 'out').exists()


def test_each_file_of_a_copy_is_compared(tmp_path):
  store = store_lib.Store(str(tmp_path / 'store'))
  _save(tmp_path / 'made', 7)
  states.put(store, 'copy', tmp_path / 'made', lambda: None)
  states.fetch(store, 'copy', tmp_path / 'fetched')
  assert states.load_on_host(tmp_path / 'fetched')[1]['w'][0, 0] == 7
  objects = {name: store.read(name).data for name in store.names('copy/')}
  largest = max(objects, key=lambda name: len(objects[name]))
  for name in (largest, f'copy/{states.MANIFEST}', 'copy/state/_METADATA'):
    whole = objects[name]
    for data in (b'', whole[: len(whole) // 2], whole[:-1] + bytes([whole[-1] ^ 1])):
      store.put(name, data)
      with pytest.raises(states.Damaged):
        states.fetch(store, 'copy', tmp_path / 'again')
    store.put(name, whole)
  states.fetch(store, 'copy', tmp_path / 'again')


def test_saves_of_one_process_do_not_meet(tmp_path):
  """Two syncers in threads that end together."""
  tree = jax.tree.map(np.asarray, {'a': np.ones(1 << 16, 'f'), 'b': np.zeros(1 << 16, 'f')})
  with futures.ThreadPoolExecutor(4) as pool:
    saves = [pool.submit(states.save, tmp_path / str(k), 'model', tree, {}) for k in range(12)]
    for save in saves:
      save.result()
  for k in range(12):
    states.load_on_host(tmp_path / str(k), name='model')
