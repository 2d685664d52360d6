"""Following a run: a real syncer, a loop that trains, and followers in the same program."""

import contextlib
import functools
import itertools
import json
import math
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diloco_jax
from diloco_jax.api import follow
from diloco_jax.config import load
from diloco_jax.configs import stdlib_lm
from diloco_jax.process import follower as follower_process
from diloco_jax.process import own_model
from diloco_jax.protocol import agreement as agreement_lib
from diloco_jax.storage import claim as claim_lib
from diloco_jax.storage import json_files
from diloco_jax.storage import store as store_lib
from diloco_jax.transport import addresses, grpc_server, grpc_session, link
from diloco_jax.transport import payloads as payloads_lib
from tests.certs import mint
from tests.launch.lib import command_line
from tests.syncer import test_followers
from tests.transport import ends

DEADLINE_S = 240.0
STEPS = 24


def _sync(**settings) -> diloco_jax.SyncConfig:
  return diloco_jax.SyncConfig(learners=1, fragments=2, period=4, overlap=0, **settings)


def _init() -> dict[str, jax.Array]:
  return {'a': jnp.ones((32, 16)), 'b': jnp.ones((30, 16), jnp.bfloat16), 'c': jnp.ones(())}


def _train(address: str, steps: int = STEPS) -> None:
  with diloco_jax.join(_init(), syncer=address) as peer:
    params = peer.params
    for clock in itertools.islice(peer.steps(), steps):
      params = jax.tree.map(lambda leaf: leaf * 0.9 + jnp.sin(clock + leaf) * 0.1, params)
      params = peer.sync(params, tokens=8)


def _equal(ours: dict[str, np.ndarray], theirs: dict[str, jax.Array]) -> None:
  assert ours.keys() == theirs.keys()
  for name, leaf in theirs.items():
    assert ours[name].dtype == leaf.dtype and ours[name].tobytes() == np.asarray(leaf).tobytes()


_syncer = functools.partial(diloco_jax.run_syncer, _init, total_steps=STEPS)


def test_a_follower_has_the_bits_of_the_syncer_through_its_restart(tmp_path, monkeypatch):
  """The caller is slow: it misses versions, and has the newest one. Where it is does not matter."""
  with _syncer(sync=_sync(codec_down='int4'), workdir=tmp_path) as server:
    monkeypatch.chdir(tmp_path.parent)
    models = diloco_jax.follow(workdir=tmp_path.name, into=_init())
    monkeypatch.chdir('/')
    version, params = next(models)
    assert version == 0
    _equal(params, _init())
    _train(server.address, STEPS // 2)
    middle, _ = next(models)
    assert middle >= 1
  with _syncer(sync=_sync(codec_down='int4'), workdir=tmp_path) as server:
    _train(server.address)
    trained = server.wait(DEADLINE_S)
  *_, (version, params) = models  # until the run has ended
  assert version > middle and isinstance(params['a'], jax.Array)
  _equal(params, trained)
  _equal(params, diloco_jax.load_params(tmp_path))
  rows = [row for row in diloco_jax.records(tmp_path) if row['name'] == 'followers']
  assert max(row['count'] for row in rows) == 1 and rows[-1]['count'] == 0


def test_followers_change_nothing_and_leave_at_any_time(tmp_path):
  """In lock step the model of a run is known: with followers it has the same bits."""
  trained = []
  for count in (0, 3):
    with _syncer(sync=_sync(), workdir=tmp_path / str(count)) as server:
      models = [diloco_jax.follow(server.address) for _ in range(count)]
      for model in models:
        next(model)
      for model in models[:1]:
        model.close()
      _train(server.address)
      trained.append(server.wait(DEADLINE_S))
      for model in models[1:]:
        *_, (_, params) = model
        _equal(params, trained[0])
  _equal(trained[1], trained[0])


def test_a_follower_comes_before_the_model():
  with diloco_jax.run_syncer(total_steps=STEPS, sync=_sync()) as server:
    models, arrived = [], threading.Event()

    def receive():
      for model in diloco_jax.follow(server.address):
        models.append(model)
        arrived.set()

    follows = threading.Thread(target=receive)
    follows.start()
    _train(server.address, STEPS // 2)
    assert arrived.wait(DEADLINE_S)  # it asks once a second: a run may be over by then
    _train(server.address)
    trained = server.wait(DEADLINE_S)
    follows.join(DEADLINE_S)
  _equal(models[-1][1], trained)


def test_a_follower_proves_its_name_and_is_kept_out_once_that_is_revoked(tmp_path):
  owner = mint.owner(tmp_path / 'certs')
  tls = {name: owner.folder / name for name in ('syncer', 'l1')}
  with _syncer(sync=_sync(), listen='127.0.0.1:0', tls=tls['syncer']) as server:
    with pytest.raises(ValueError, match='needs certificates'):
      diloco_jax.follow(server.address)
    models = diloco_jax.follow(server.address, tls=tls['l1'])
    assert next(models)[0] == 0
    owner.revoke('l1')
    with pytest.raises(ValueError, match='learner l1 is not on the allowlist'):
      next(models)


def test_a_run_that_nobody_may_follow_says_so():
  with _syncer(sync=_sync(follow_bytes_per_s=0)) as server:
    with pytest.raises(
      ValueError, match='Nobody may follow this run: sync.follow_bytes_per_s is 0'
    ):
      next(diloco_jax.follow(server.address))


def test_a_run_with_a_task_needs_its_folder_and_its_own_config(tmp_path):
  about = agreement_lib.encode({'layout': 'abc', 'model.window': 7}).encode()
  limits = test_followers.LIMITS
  door = grpc_server.Door('127.0.0.1:0', limits.seats, access=ends.PLAIN)
  make = lambda *ports: grpc_server.GrpcSyncerTransport(door, *ports, limits, about=about)
  transport = make(print, payloads_lib.PayloadStore())
  try:
    with pytest.raises(ValueError, match='this run has a task: give `workdir`'):
      diloco_jax.follow(transport.address, plaintext_loopback=True)
    load.write(tmp_path, stdlib_lm.get_config('tiny'))
    with pytest.raises(ValueError, match='config.json is not the config of the run: model.window'):
      diloco_jax.follow(transport.address, workdir=tmp_path, plaintext_loopback=True)
  finally:
    transport.shutdown(0.0)


def test_a_follower_gives_up_where_something_listens_that_never_answers(monkeypatch):
  monkeypatch.setattr(link.Limits, 'handshake_s', 0.1)
  model = own_model.describe(_init(), None)
  assembled = own_model.complete(model, own_model.config(STEPS, _sync(), 1))
  door, over = grpc_server.Door('127.0.0.1:0', 4, access=ends.PLAIN), threading.Event()
  door.open({grpc_session.FOLLOW: lambda *call: iter(over.wait, True)}, b'', list)
  grpc_session.start_timer(ends.DEADLINE_S, over.set)
  follower = follower_process.Follower(assembled, lambda: door.address, ends.PLAIN, 0.5)
  try:
    with pytest.raises(TimeoutError, match='no syncer has answered for 0.5 s'):
      follower.newest()
  finally:
    over.set()
    follower.close()
    door.close()


def test_a_follower_gives_up_where_no_syncer_answers_and_ends_with_an_ended_run(tmp_path):
  with pytest.raises(TimeoutError, match='no syncer answered within 0.01 s'):
    diloco_jax.follow(f'unix:{tmp_path}/socket', wait_s=0.01)
  (tmp_path / 'address').write_text(addresses.ended(3))
  with contextlib.closing(diloco_jax.follow(f'file:{tmp_path}/address')) as models:
    assert not list(models)


@pytest.mark.long
@pytest.mark.parametrize('kind', ['folder', pytest.param('bucket', marks=pytest.mark.full)])
def test_a_store_alone_is_followed_to_the_end(kind, tmp_path, request, monkeypatch):
  """Without the syncer, which may have ended, and have begun again; past a damaged copy."""
  url = f'{tmp_path}/store' if kind == 'folder' else f'{request.getfixturevalue("bucket").url}/run'
  config = stdlib_lm.get_config('tiny')
  config.sync.learners = config.sync.quorum = config.mesh.data = 1
  config.sync.fragments, config.sync.period = 2, 4
  config.train.steps, config.train.store = 12, url
  store, waits = store_lib.Store(url), iter([20])

  def train(steps):
    config.train.steps = steps
    exits = diloco_jax.run(config, tmp_path / 'run').exits
    assert {name: end.code for name, end in exits.items()} == {'syncer': 0, 'l0': 0}
    return diloco_jax.load_params(tmp_path / 'run')

  def damage():
    name = max(name for name in store.names('syncer/ckpt/') if '/d/' in name)
    store.put(name, b'damaged')

  def newest(models):
    version, params = next(models)
    trained = diloco_jax.load_params(tmp_path / 'run')
    jax.tree.map(np.testing.assert_array_equal, params, trained)
    return version

  clock = types.SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: train(next(waits)))
  monkeypatch.setattr(follow, 'time', clock)
  with pytest.raises(ValueError, match='there is no (run|model) in'):
    diloco_jax.follow(workdir=url if kind == 'bucket' else tmp_path)
  train(12)
  models = diloco_jax.follow(workdir=url, into=diloco_jax.load_params(tmp_path / 'run'))
  first = newest(models)
  damage()
  others = diloco_jax.follow(workdir=url)  # waits for the second run
  assert newest(others) == newest(models) > first > 0
  for ended in (models, others):
    assert not list(ended)
  models = diloco_jax.follow(workdir=url)
  assert newest(models)
  was = store.read(claim_lib.NAME).data
  claim = json_files.unseal(json.loads(was))
  claim['content']['lineage']['run'] = '0' * 16
  store.put(claim_lib.NAME, json.dumps(json_files.seal(claim)).encode())
  with pytest.raises(ValueError, match='has the run 0000000000000000 now, the run .* was followed'):
    next(models)
  store.put(claim_lib.NAME, was)
  if kind == 'bucket':
    done = command_line.diloco('evaluate', '--follow', f'--workdir={url}')
    assert done.stdout.startswith('version ') and done.stdout.count('held-out loss') == 1, done
  damage()
  clock.sleep = lambda _: setattr(clock, 'monotonic', lambda: math.inf)
  with pytest.raises(TimeoutError, match='renewed its claim in .* is not what was put there'):
    next(diloco_jax.follow(workdir=url))
