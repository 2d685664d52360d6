"""The call that brings a model to a syncer, before peers that are not what they should be."""

import contextlib
import dataclasses
import itertools
import json
import queue
import resource
import threading
from concurrent import futures

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from diloco_jax.api import admission as admission_lib
from diloco_jax.config import run_config
from diloco_jax.process import accelerators, bring, exits, own_model
from diloco_jax.process import syncer as syncer_process
from diloco_jax.protocol import agreement as agreement_lib
from diloco_jax.report import records as records_lib
from diloco_jax.storage import arrays, folders, states
from diloco_jax.storage import lineage as lineage_lib
from diloco_jax.transport import addresses, grpc_server, grpc_session, listen

_DEADLINE_S = 60
_CONFIG = own_model.config(
  20, run_config.SyncConfig(learners=1, fragments=1, period=2, overlap=0), shards=1
)
_MODEL = own_model.describe({'w': jnp.ones((8, 8))}, lambda name: 'body')


class Waiting:
  """A syncer that waits for a model on a Unix socket."""

  def __init__(self, folder, keep=lambda model: own_model.complete(model, _CONFIG), **limits):
    self.model, self._keep = futures.Future(), keep
    self.brought = bring.Brought(self._arrived, own_model.Terms.of(_CONFIG).encode(), **limits)
    door = grpc_server.Door(addresses.in_folder(folder), 8, print, self.brought)
    self.address, self.close = door.address, door.close

  def _arrived(self, model):
    self._keep(model)
    self.model.set_result(model)

  def bring(self, parts):
    """The call; the parts are those of an iterator."""
    channel = listen.dial(self.address, addresses.LOCAL, ())
    return channel.stream_unary(f'/{grpc_session.SERVICE}/{grpc_session.BRING}').future(
      parts, timeout=_DEADLINE_S
    )

  def refuses(self, parts):
    """The status and the text of the refusal."""
    error = self.bring(parts).exception()
    return error.code(), error.details()

  def receives(self, model=None, wait_s=_DEADLINE_S):
    """What has arrived of a model that a learner brings."""
    bring.bring(model or _MODEL, lambda: self.address, addresses.LOCAL, wait_s)
    return self.model.result(_DEADLINE_S)

  @contextlib.contextmanager
  def receiving(self):
    """The time in which another learner brings a model slowly; its call."""
    began, ends = threading.Event(), threading.Event()

    def parts():
      yield header()
      began.set()
      ends.wait()

    call = self.bring(parts())
    assert began.wait(_DEADLINE_S)
    yield call
    call.cancel()
    ends.set()


@pytest.fixture
def waiting(tmp_path):
  started = []

  def start(**limits):
    started.append(Waiting(tmp_path, **limits))
    return started[-1]

  yield start
  for syncer in started:
    syncer.close()


def header(shape=(8, 8), **changes):
  fields = {'format': 1, 'shapes': {'w': [shape, 'float32']}, 'labels': {'w': 'body'}}
  return json.dumps(fields | changes).encode()


@pytest.mark.parametrize(
  'parts, said',
  [
    ([b'[' * 100_000], 'not the header of a model'),
    ([b'{"format": 1, "shapes": 1}'], 'not the header of a model'),
    ([header(shape=(1 << 40, 8))], 'this syncer has memory for'),
    ([header(shape=(-1, 8))], 'not the header of a model'),
    ([header(shape=('8',))], 'not the header of a model'),
    ([header(shape=(8.0,))], 'not the header of a model'),
    ([header(shapes={'w': [(8,), 'int32']}), bytes(32)], 'parameters must be floats'),
    ([header(labels={'w': 'kernel'}), bytes(256)], "the labels ['kernel'] have no merge rule"),
    (
      [header(shapes={"'w'": [(8,), 'float32']}, labels={"'w'": 'body'}), bytes(32)],
      'rename it',
    ),
    ([header(), b'x' * 255], 'w has 255 bytes'),
    ([header(), b'x' * 257], 'w has 257 bytes'),
    ([header(), np.full(64, np.nan, np.float32).tobytes()], 'not finite'),
  ],
  ids=str,
)
def test_what_is_no_model_is_refused_and_the_syncer_waits_on(waiting, parts, said):
  syncer = waiting()
  code, text = syncer.refuses(iter(parts))
  assert code is grpc.StatusCode.INVALID_ARGUMENT and said in text and len(text) < 300
  np.testing.assert_array_equal(syncer.receives().values()['w'], np.ones((8, 8)))


def test_a_model_that_is_not_finite_is_not_stored(tmp_path):
  """Else the folder would keep it as version 0 of the run."""
  values = {'w': np.ones((8, 8), np.float32), 'b': np.float32([0, -np.inf])}
  model = own_model.describe(values, lambda name: 'body')
  with pytest.raises(ValueError, match=r'^\[1\] has initial values that are not finite'):
    own_model.require_finite('1', np.float32(np.inf))  # of a tuple
  with pytest.raises(ValueError, match='^b has initial values that are not finite'):
    own_model.write(tmp_path, model, _CONFIG)
  assert own_model.read(tmp_path) is None and not (tmp_path / folders.OWN_MODEL).exists()


def test_a_model_has_arrived_once_the_syncer_has_stored_it(tmp_path):
  """A syncer whose disk is full ends, and the learner brings the model to the next one."""
  noise = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
  model = own_model.describe({'w': jnp.asarray(noise)}, lambda name: 'body')
  keep = lambda model: own_model.write(tmp_path, model, _CONFIG)
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # the same kind of error
  with futures.ThreadPoolExecutor(1) as pool:
    try:
      with contextlib.closing(Waiting(tmp_path, keep)) as syncer:
        brought = pool.submit(
          bring.bring, model, lambda: syncer.address, addresses.LOCAL, _DEADLINE_S
        )
        with pytest.raises((OSError, states.StateError)) as failed:
          syncer.brought.wait(threading.Event())
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not brought.done() and own_model.read(tmp_path) is None
    assert exits.refusal(failed.value) is exits.DiskFailed
    with contextlib.closing(Waiting(tmp_path, keep)) as syncer:
      brought.result(_DEADLINE_S)
      np.testing.assert_array_equal(own_model.read(tmp_path).values()['w'], noise)
      syncer.brought.wait(threading.Event())


def test_a_learner_that_calls_for_a_session_before_there_is_a_model_is_told_to_dial_again(waiting):
  syncer = waiting()
  with listen.dial(syncer.address, addresses.LOCAL, ()) as channel:
    for method in ('Control', 'Bulk'):
      call = channel.stream_stream(f'/{grpc_session.SERVICE}/{method}')
      with pytest.raises(grpc.RpcError, match='the syncer has no model yet: dial again') as refused:
        list(call(iter(()), timeout=_DEADLINE_S))
      assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize('processes', [0, 1])
def test_the_address_stays_the_same_once_the_model_is_there(tmp_path, processes):
  """Also where transport processes serve the loops from then on."""
  access, listening = addresses.Access(plaintext_loopback=True), queue.Queue()
  recorder = records_lib.Recorder(tmp_path, 'syncer')
  syncer = syncer_process.Syncer(
    config=_CONFIG,
    folder=tmp_path,
    records=recorder,
    address='127.0.0.1:0',
    access=access,
    processes=processes,
    listening=listening.put,
  )
  with contextlib.closing(recorder), futures.ThreadPoolExecutor(1) as pool:
    ended = pool.submit(syncer.run_loops)
    try:
      address = listening.get(timeout=_DEADLINE_S)
      call = lambda model: bring.bring(model, lambda: address, access, _DEADLINE_S)
      assert call(_MODEL) == own_model.Terms.of(_CONFIG).encode()
      assert listening.get(timeout=_DEADLINE_S) == address
      terms = own_model.Terms.decode(call(own_model.NO_MODEL))
      assert terms._replace(run='') == own_model.Terms.of(_CONFIG, _MODEL)
      assert terms.run == lineage_lib.read(tmp_path).run
    finally:
      syncer.stop('the test ends')
    assert ended.result(_DEADLINE_S).code == 0


def test_names_and_shapes_may_be_larger_than_a_frame(waiting):
  model = own_model.describe({'w' * (15 << 17): jnp.ones(2)}, lambda name: 'body')
  assert waiting().receives(model).shapes == model.shapes


def test_one_learner_at_a_time_brings_the_model(waiting):
  syncer = waiting()
  with syncer.receiving():
    busy = grpc.StatusCode.RESOURCE_EXHAUSTED, 'another learner brings the model'
    assert syncer.refuses(iter([b'no header'])) == busy
  assert syncer.receives().shapes == _MODEL.shapes


def test_a_learner_has_limited_time_to_bring_the_model(waiting):
  syncer = waiting(upload_s=1.0)
  with syncer.receiving() as call:  # the syncer cancels it: its own end is later
    assert call.exception().code() is grpc.StatusCode.CANCELLED
  assert syncer.receives().shapes == _MODEL.shapes


def test_an_upload_may_take_longer_than_the_wait_for_a_syncer(waiting):
  shape, wait_s = (1 << 10, 5 << 10), 0.2  # 20 MiB, for which both ends grant 20 s

  def values():
    threading.Event().wait(2 * wait_s)
    return {'w': np.ones(shape, np.float32)}

  model = own_model.describe({'w': jnp.ones(shape)}, lambda name: 'body')
  model = dataclasses.replace(model, values=values)
  assert waiting().receives(model, wait_s).shapes == model.shapes


def test_a_learner_waits_for_as_long_as_another_one_brings_the_model(waiting):
  """Its patience ends without an answer only, and here every call is answered."""
  syncer, wait_s, patient = waiting(), 60.0, threading.Event()
  clock, calls = [0.0], itertools.count()

  def address():
    if next(calls) == 5:  # the first call was answered four times the patience ago
      patient.set()
    clock[0] += 0.8 * wait_s
    return syncer.address

  with futures.ThreadPoolExecutor(1) as pool:
    patience = wait_s, lambda: clock[0]
    with syncer.receiving():
      brought = pool.submit(bring.bring, _MODEL, address, addresses.LOCAL, *patience)
      assert patient.wait(_DEADLINE_S)
    brought.result(_DEADLINE_S)
  assert syncer.model.result(_DEADLINE_S).shapes == _MODEL.shapes


def test_a_header_that_no_syncer_takes_is_not_sent():
  model = own_model.describe({'w' * (5 << 20): jnp.ones(1)}, lambda name: 'body')
  with pytest.raises(ValueError, match='nothing was sent: use fewer or shorter names'):
    bring.bring(model, lambda: 'unix:/nowhere', addresses.LOCAL, wait_s=0.0)


def test_a_parameter_called_value_keeps_its_name():
  leaf = jnp.zeros((2, 2))
  assert list(arrays.by_name({'attention': {'key': leaf, 'value': leaf}})) == [
    'attention/key',
    'attention/value',
  ]
  layer = nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Param)
  assert sorted(arrays.by_name(layer)) == ['bias', 'kernel']
  read = {'kernel': {'value': leaf}, 'bias': {'value': leaf}}  # as Orbax reads it
  assert sorted(arrays.by_name(read)) == ['bias', 'kernel']
  twice = arrays.by_name({'a': {'value': {'value': leaf}}})
  assert list(twice) == list(arrays.by_name(twice)), 'names stay'


def _answer(**changes):
  shared = _CONFIG.agreement() | {
    name.replace('_', '.', 1): value for name, value in changes.items()
  }
  return json.dumps({name: value for name, value in shared.items() if value is not ...})


@pytest.mark.parametrize(
  'answer, error',
  [
    ('[' * 100_000, 'deep'),
    ('{"sync.period": 3', 'not JSON'),
    ('[]', 'not an object'),
    (_answer(sync_period='3'), 'period is .3., it must be of type int'),
    (_answer(sync_fragments=10**5), 'sync.fragments is 100000, it must be between'),
    (_answer(sync_lease_s=1e9), 'sync.lease_s is 1000000000.0, it must be between'),
    (_answer(sync_outer='open(name="x")'), "sync.outer: 'open' is unknown"),
    (_answer(sync_period=...), "sync.period is 12 here, 'absent' there"),
    (_answer(sync_news=1), "sync.news is 'absent' here, 1 there"),
    (_answer(train_store='/tmp/theirs'), "train.store is 'absent' here, '/tmp/theirs' there"),
    (_answer(sync_checkpoint_every_syncs=9), "every_syncs is 'absent' here, 9 there"),
    (_answer(name_x=1), "name.x is 'absent' here, 1 there"),
    (_answer() + '\n' + header(shape=(-1, 8)).decode(), 'not the header of a model'),
  ],
  ids=str,
)
def test_settings_that_no_syncer_of_this_version_has_are_refused(monkeypatch, answer, error):
  """And nothing is brought."""
  brought, given = [], own_model.config(0, run_config.SyncConfig(), 0)

  def answered(model, *args):
    brought.extend(model.shapes)
    return answer.encode()

  monkeypatch.setattr(bring, 'bring', answered)
  with pytest.raises(ValueError, match=error):
    admission_lib.meet(_MODEL, given, lambda: 'unix:/nowhere', addresses.LOCAL, _DEADLINE_S)
  assert not brought


def test_the_model_that_another_learner_brought_meanwhile_is_compared(waiting, monkeypatch):
  syncer, really, asked = waiting(), bring.bring, []
  other = own_model.describe({'v': jnp.ones((8, 8))}, lambda name: 'body')

  def slowly(model, *args):
    answer = really(model, *args)
    if not model.shapes:
      asked.append(answer)
      really(other, *args)
      syncer.model.result(_DEADLINE_S)
      complete = own_model.Terms.of(_CONFIG, other).encode()
      monkeypatch.setattr(bring, 'bring', lambda *args: complete)
    return answer

  monkeypatch.setattr(bring, 'bring', slowly)
  with pytest.raises(ValueError, match=r"array v is 'absent' here, 'float32\[8, 8\], body' there"):
    admission_lib.meet(_MODEL, _CONFIG, lambda: syncer.address, addresses.LOCAL, _DEADLINE_S)
  assert asked == [own_model.Terms.of(_CONFIG).encode()]


def test_steps_may_be_a_numpy_integer_and_nothing_but_a_whole_number():
  assert own_model.config(np.int64(10), None, 4) == own_model.config(10, None, 4)
  shared, own = (
    own_model.complete(_MODEL, own_model.config(9, _CONFIG.sync, n)) for n in (1, None)
  )
  assert len(agreement_lib.differences(shared.agreement, own.agreement)) == 2, (
    'local, and no shards'
  )
  with pytest.raises(ValueError, match='train.steps is 10.0, a float; it must be int'):
    own_model.config(10.0, None, 4).validate()


def test_numbers_are_arrays_and_what_cannot_travel_is_named():
  with pytest.warns(UserWarning, match=r'params: 1 leaves of NumPy have 64 bits.*\(wide\)') as seen:
    tree = own_model.as_arrays(
      {'rate': 0.5, 'count': 3, 'wide': np.ones(2), 'w': jnp.ones(2, jnp.bfloat16)}, 'params'
    )
    own_model.describe(tree, None)
  assert len(seen) == 1
  assert {name: str(leaf.dtype) for name, leaf in tree.items()} == {
    'rate': 'float32',
    'count': 'int32',
    'wide': 'float32',
    'w': 'bfloat16',
  }
  with pytest.raises(ValueError, match='opt_state: rng is a typed PRNG key.*jax.random.key_data'):
    own_model.as_arrays({'rng': jax.random.key(0)}, 'opt_state')
  with pytest.raises(ValueError, match='params: name is a str, not an array of numbers'):
    own_model.as_arrays({'name': 'l0'}, 'params')


def test_running_statistics_are_labelled_by_default():
  class Model(nnx.Module):
    def __init__(self):
      self.bn = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
      self.seen = nnx.BatchStat(jnp.zeros(4))

  leaf = jnp.ones(4)
  linen = {'params': {'bn': {'scale': leaf}}, 'batch_stats': {'bn': {'mean': leaf, 'var': leaf}}}
  for params, counted in (
    (nnx.state(Model()), {'bn/mean', 'bn/var', 'seen'}),
    (linen, {'batch_stats/bn/mean', 'batch_stats/bn/var'}),
    ({'running_mean': leaf, 'mean': {'kernel': leaf}}, {'running_mean'}),
  ):
    model = own_model.describe(params, None)
    assert {name for name, label in model.labels.items() if label == 'statistic'} == counted
    assert counted < model.labels.keys()
    assert own_model.statistics(params) == counted
    assert set(own_model.describe(params, lambda name: 'body').labels.values()) == {'body'}


def test_the_limit_of_a_model_is_half_of_the_memory_of_the_container(tmp_path, monkeypatch):
  """A host may have far more; the syncer would be killed with the model half read."""
  parts = list(bring._parts(_MODEL.header().encode(), _MODEL))
  monkeypatch.setattr(accelerators, 'available_memory', lambda: 2 * 255)
  with contextlib.closing(Waiting(tmp_path)) as waiting:
    code, text = waiting.refuses(iter(parts))
  assert code == grpc.StatusCode.INVALID_ARGUMENT and '255' in text
