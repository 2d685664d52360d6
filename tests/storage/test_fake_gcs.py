"""What the fake object store promises to the tests that rest on it, seen by its real clients."""

import concurrent.futures
import json
import subprocess
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest
import tensorstore
from etils import epath

from tests.storage import fake_gcs

NOISE = np.random.default_rng(0).bytes(1 << 16)
BYTES = {
  'empty': b'',
  'lines': b'\r\n\n\r--==0==\r',
  'noise': NOISE,
  'ends with CR': b'x\r',
  'ends with LF': b'x\n',
  'json': b'{"a": 1}',
}
ABSENT, NOT_EQUAL = b'\x02', b''  # generations of TensorStore


def _kv(bucket, retries: int = 8) -> tensorstore.KvStore:
  quickly = {'max_retries': retries, 'initial_delay': '1ms', 'max_delay': '10ms'}
  spec = {'driver': 'gcs', 'bucket': bucket.name, 'path': 'kv/'}
  return tensorstore.KvStore.open(spec | {'context': {'gcs_request_retries': quickly}}).result()


def _post(url: str, data: bytes, **headers: str) -> tuple[int, dict[str, str]]:
  request = urllib.request.Request(url, data, headers, method='POST')
  try:
    with urllib.request.urlopen(request) as answer:
      return answer.status, dict(answer.headers)
  except urllib.error.HTTPError as error:
    return error.code, {}


@pytest.mark.parametrize('name', BYTES)
def test_bytes_come_back_through_both_clients(bucket, name):
  data = BYTES[name]
  _kv(bucket).write('a', data).result()
  path = epath.Path(f'{bucket.url}/kv')
  (path / 'b').write_bytes(data)
  assert bucket.objects == {'kv/a': data, 'kv/b': data}
  for key in 'ab':
    assert _kv(bucket).read(key).result().value == data == (path / key).read_bytes()


def test_a_process_needs_nothing_but_the_environment(bucket):
  """No look-up of credentials, no other service: Orbax and TensorStore, as `diloco` uses them."""
  child = f"""
from etils import epath
root = epath.Path('{bucket.url}/run')
(root / 'a' / 'b').mkdir(parents=True)
(root / 'a' / 'x').write_text('1')
(root / 'a' / 'x').rename(root / 'a' / 'y')
assert [one.name for one in (root / 'a').iterdir()] == ['y'] == [p.name for p in root.glob('a/*')]
import numpy as np
from orbax.checkpoint import v1 as ocp
with ocp.training.Checkpointer(root / 'ckpt') as checkpointer:
  for step in (1, 2):
    checkpointer.save_checkpointables(step, {{'state': {{'a': np.arange(9)}}}}, force=True)
  found = checkpointer.load_checkpointables(2)
assert found['state']['a'].tolist() == list(range(9))
(root / 'a').rmtree()
"""
  done = subprocess.run([sys.executable, '-c', child], capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, done.stderr
  assert {name.split('/')[1] for name in bucket.objects} == {'ckpt'}
  assert {name.split('/')[2] for name in bucket.objects} >= {'1', '2'}


def test_a_generation_is_compared_by_tensorstore(bucket):
  kv = _kv(bucket)
  first = kv.write('k', b'1', if_equal=ABSENT).result().generation
  assert kv.write('k', b'2', if_equal=ABSENT).result().generation == NOT_EQUAL
  second = kv.write('k', b'2', if_equal=first).result().generation
  assert kv.write('k', b'3', if_equal=first).result().generation == NOT_EQUAL
  assert kv.write('k', None, if_equal=first).result().generation == NOT_EQUAL
  assert kv.read('k').result().stamp.generation == second
  assert kv.read('k', if_not_equal=second).result().state == 'unspecified'
  assert bucket.objects == {'kv/k': b'2'}
  kv.write('k', None, if_equal=second).result()
  assert kv.read('k').result().state == 'missing' and bucket.objects == {}


def test_a_generation_is_compared_in_every_kind_of_upload(bucket):
  url = f'{bucket.door.url}/upload/storage/v1/b/{bucket.name}/o?name=k&uploadType='
  parts = b'--==\r\nA: b\r\n\r\n{"name": "k"}\r\n--==\r\nA: b\r\n\r\nmultipart\r\n--==--'
  multipart = {'Content-Type': 'multipart/related; boundary="=="'}
  one = {'Content-Range': 'bytes 0-8/9'}
  absent, location = '&ifGenerationMatch=0', lambda answer: answer[1]['Location']
  early = location(_post(f'{url}resumable{absent}', b''))
  late = location(_post(f'{url}resumable{absent}', b''))
  assert _post(early, b'resumable', **one)[0] == 200
  assert _post(late, b'resumable', **one)[0] == 412
  for data, kind, headers in ((b'media', 'media', {}), (parts, 'multipart', multipart)):
    assert _post(f'{url}{kind}{absent}', data, **headers)[0] == 412
    assert bucket.objects == {'k': b'resumable'}
  assert _post(f'{url}resumable{absent}', b'')[0] == 412
  assert _post(f'{url}multipart', parts, **multipart)[0] == 200
  assert bucket.objects == {'k': b'multipart'}


def test_of_many_that_write_at_once_one_does(bucket):
  kv = _kv(bucket)
  with concurrent.futures.ThreadPoolExecutor(16) as pool:
    write = lambda n: kv.write('k', b'%d' % n, if_equal=ABSENT).result().generation
    found = list(pool.map(write, range(64)))
  (winner,) = [n for n, generation in enumerate(found) if generation != NOT_EQUAL]
  assert bucket.objects == {'kv/k': b'%d' % winner}


def test_lists_have_pages(bucket):
  kv, names = _kv(bucket), [b'%03d' % n for n in range(2 * fake_gcs.PAGE + 1)]
  for done in [kv.write(name, b'') for name in names]:
    done.result()
  assert kv.list().result() == names
  some = kv.list(kv.KeyRange('050', '170')).result()
  assert some == names[50:170]
  path = epath.Path(f'{bucket.url}/kv')
  assert sorted(one.name.encode() for one in path.iterdir()) == names
  (path / 'a' / 'b').write_text('')
  assert 'a' in {one.name for one in path.iterdir()}


# --- Failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', fake_gcs.KINDS)
def test_tensorstore_lives_through_a_failure(bucket, kind, monkeypatch):
  """Each request fails once in this way, and is sent again."""
  monkeypatch.setattr(fake_gcs, 'SLOW_S', 0.01)
  kv = _kv(bucket)
  for act in (lambda: kv.write('a', NOISE).result(), lambda: kv.read('a').result().value):
    bucket.door.faults = fake_gcs.Faults(0, rate=1, kinds=(kind,), most=1)
    found = act()
    assert bucket.door.faults.injected == {kind: 1}
  assert found == NOISE and bucket.objects == {'kv/a': NOISE}


def test_gcsfs_lives_through_failures(bucket, monkeypatch):
  """It waits more than a second before it sends a request again: many at once."""
  monkeypatch.setattr(fake_gcs, 'SLOW_S', 0.01)
  paths = [epath.Path(f'{bucket.url}/{n}') for n in range(20)]
  with concurrent.futures.ThreadPoolExecutor(20) as pool:
    for act in (lambda path: path.write_bytes(NOISE), lambda path: path.read_bytes()):
      bucket.door.faults = fake_gcs.Faults(0, rate=1, most=20)
      found = list(pool.map(act, paths))
      assert bucket.door.faults.injected.keys() == set(fake_gcs.KINDS)
  assert found == [NOISE] * 20
  assert bucket.objects == {str(n): NOISE for n in range(20)}


def test_a_lost_answer_looks_as_if_another_had_written(bucket):
  """TensorStore sends the request again, and the object that it wrote itself is there."""
  bucket.door.faults = fake_gcs.Faults(0, rate=1, kinds=('lost answer',), most=1)
  assert _kv(bucket).write('k', b'1', if_equal=ABSENT).result().generation == NOT_EQUAL
  assert bucket.objects == {'kv/k': b'1'}


def test_of_a_resumable_upload_that_was_cut_the_rest_is_sent(bucket):
  url = f'{bucket.door.url}/upload/storage/v1/b/{bucket.name}/o?name=k&uploadType=resumable'
  location = _post(url, b'')[1]['Location']
  bucket.door.faults = fake_gcs.Faults(0, rate=1, kinds=('truncated upload',), most=1)
  whole, rest = {'Content-Range': 'bytes 0-9/10'}, {'Content-Range': 'bytes 5-9/10'}
  assert _post(location, b'0123456789', **whole)[0] == 308
  assert bucket.objects == {}
  for _ in range(2):  # also sent again
    assert _post(location, b'56789', **rest)[0] == 200
  assert bucket.objects == {'k': b'0123456789'}


def test_a_door_that_is_shut_shuts_out_its_own_client_alone(bucket):
  kv, other = _kv(bucket, retries=1), bucket.fake.door()
  kv.write('k', b'1').result()
  bucket.door.shut = True
  with pytest.raises(Exception, match='retry attempts failed'):
    kv.write('k', b'2').result()
  url = f'{other.url}/storage/v1/b/{bucket.name}/o/kv%2Fk'
  with urllib.request.urlopen(url) as answer:
    assert json.load(answer)['size'] == '1'
  bucket.door.shut = False
  kv.write('k', b'2').result()
  other.close()


def test_a_request_to_a_silent_door_is_not_carried_out(bucket):
  kv = _kv(bucket)
  bucket.door.silent = True
  write = kv.write('k', b'1')
  with pytest.raises(TimeoutError):
    write.result(timeout=0.2)
  assert not bucket.objects
  bucket.door.silent = False
  write.result()  # TensorStore sends it again
  assert bucket.objects == {'kv/k': b'1'}


def test_failures_are_those_of_the_seed():
  asked = fake_gcs.Request('GET', '/', {}, b'')
  drawn = [[faults.draw(asked) for _ in range(200)] for faults in map(fake_gcs.Faults, (7, 7, 8))]
  assert drawn[0] == drawn[1] != drawn[2]
  assert set(drawn[0]) == {'', *fake_gcs.KINDS} and 40 < drawn[0].count('') < 160
  assert fake_gcs.Faults(7, most=3).draw(asked) == drawn[0][0]
