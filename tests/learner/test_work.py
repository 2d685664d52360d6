"""The work of a learner on a real island: where it reads, and what it undoes when it moves."""

import contextlib
import threading
import types

import jax
import numpy as np

from diloco_jax.config import build
from diloco_jax.configs import stdlib_lm
from diloco_jax.learner import node as learner_node
from diloco_jax.learner import on_device
from diloco_jax.learner import work as learner_work
from diloco_jax.protocol import actions, events
from diloco_jax.report import records as records_lib
from diloco_jax.transport import payloads as payloads_lib
from tests.numerics import vectors
from tests.train import small_task


def _host(tree):
  return jax.tree.map(lambda leaf: np.array(leaf, copy=True), tree)


def _make(tmp_path, **sync):
  """A config with these settings of `sync`, what is assembled of it, and its island."""
  config = small_task.use(stdlib_lm.get_config('tiny'))
  for name, value in sync.items():
    setattr(config.sync, name, value)
  config.train.log_every = 2
  assembled = build.assemble(config)
  island = learner_node.make_island(assembled, tmp_path, 'l0', jax.devices()[:1])
  return config, assembled, island


@contextlib.contextmanager
def _work(tmp_path, functions=None, **sync):
  """The work of a learner, and beside it what `_make` returns, its store and `posted` events."""
  config, assembled, island = _make(tmp_path, **sync)
  rig = types.SimpleNamespace(config=config, assembled=assembled, island=island, posted=[])
  rig.store = payloads_lib.PayloadStore()
  exchange = on_device.Exchange(assembled, island, functions).begin()
  with contextlib.closing(records_lib.Recorder(tmp_path, 'l0')) as recorder:
    rig.work = learner_work.LearnerWork(
      assembled, island, rig.posted.append, None, rig.store, recorder, exchange
    )
    yield rig
  island.close()


def _same(tree, expected) -> bool:
  return all(map(np.array_equal, jax.tree.leaves(tree), jax.tree.leaves(expected)))


def test_a_cache_of_compiled_functions_that_cannot_be_written_is_no_error():
  before = jax.config.jax_compilation_cache_dir
  jax.config.update('jax_compilation_cache_dir', '/proc/nowhere')
  try:
    with learner_node._compile_in_turn():
      pass
  finally:
    jax.config.update('jax_compilation_cache_dir', before)


def test_use_shard_moves_the_island_and_rewinds_it_if_asked(tmp_path):
  with _work(tmp_path) as rig:
    work, island = rig.work, rig.island
    initial = _host(island.params)
    work.submit(actions.UseShard(shard=3, cursor=7, rewind=False))
    work.submit(actions.Step(clock=0))
    work.submit(actions.Step(clock=1))
    work.stop()
    work.run()
    assert (island.shard, island.data_state) == (3, 9)
    moments = _host(island.state.opt_state)
    assert not _same(island.params, initial)

    work.submit(actions.UseShard(shard=2, cursor=5, rewind=True))
    work.stop()
    work.run()
    assert [type(event) for event in rig.posted] == [events.StepDone] * 2
    assert (island.shard, island.data_state) == (2, 5)
    assert _same(island.params, initial)  # the anchors
    assert _same(island.state.opt_state, moments)


def test_in_lock_step_the_first_step_of_a_process_reports_no_wait(tmp_path, capsys):
  """The time before it is booked already, as that of joining. A step is recorded once it is done,
  also while the learner has no other one to make."""
  with _work(tmp_path, overlap=0) as rig:
    work, assembled = rig.work, rig.assembled
    assert assembled.protocol.lag == 0

    def ask() -> None:
      work.submit(actions.Step(clock=0))
      if work._stepped.wait(60):
        work.submit(actions.Step(clock=1))
      work.stop()

    work.submit(actions.UseShard(shard=0, cursor=0, rewind=False))
    asking = threading.Thread(target=ask)
    asking.start()
    work.run()
    asking.join()
  assert [type(event) for event in rig.posted] == [events.StepDone] * 2
  facts = [fact for _, fact in records_lib.TailAll(tmp_path).read()]
  waited_s = [fact['waited_s'] for fact in facts if 'waited_s' in fact]
  assert len(waited_s) == 2 and waited_s[0] == 0 < waited_s[1]

  (cost,) = [fact for fact in facts if fact['name'] == 'cost']  # as every log line
  assert cost['parameters'] == assembled.parameters
  assert (cost['tokens'], cost['devices']) == (rig.island.tokens_per_step, 1)
  assert cost['flops'] == assembled.task.flops_per_token * cost['tokens']
  (line,) = [line for line in capsys.readouterr().out.splitlines() if 'TFLOP/s ' in line]
  assert ' completed step: 2, ' in line and 'MFU' not in line and 'HBM' not in line
  curves = b''.join(path.read_bytes() for path in (tmp_path / 'tensorboard' / 'l0').iterdir())
  assert all(b'perf/' + name in curves for name in (b'tflops', b'parameters', b'tokens_per_step'))


def test_a_save_compiles_nothing_after_the_warm_up(tmp_path):
  """Or all learners, which save at the same clock, would stop training for the first time."""
  _, _, island = _make(tmp_path)
  island.warm_up()
  island.step(0)
  compiled = []

  def listen(name: str, seconds: float, **more) -> None:
    if name.endswith('backend_compile_duration'):
      compiled.append((name, seconds))

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    island.save(1)()
    assert not compiled
    jax.jit(lambda x: 3 * x)(1.0)
    assert compiled, 'else the name of the event has changed'
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  island.close()


class _Functions(dict):
  """Compiled functions by name; `on_another` is called when the compilation of one begins."""

  on_another = None

  def __setitem__(self, name, function):
    super().__setitem__(name, function)
    if self.on_another is not None:
      self.on_another()


def test_a_learner_that_comes_back_compiles_no_exchange_before_its_first_step(tmp_path):
  """It takes every fragment whole, with the bits and the digests of the syncer; what the exchange
  needs later is compiled from its first step on."""
  functions = _Functions()
  with _work(tmp_path, functions, fragments=5, period=5) as rig:  # the embedding is cut
    work, island, begun = rig.work, rig.island, len(functions)
    draw = np.random.default_rng(0)
    published = jax.tree.map(
      lambda leaf: draw.standard_normal(leaf.shape, np.float32), island.params
    )
    for p in range(rig.config.sync.fragments):
      value = np.asarray(vectors.gather(rig.assembled.layout, p, published))
      whole = {'whole': True, 'keep': False, 'merged': False}
      payload_id = rig.store.put(memoryview(value))
      work.submit(actions.Adopt(fragment=p, version=3, payload_id=payload_id, **whole))
    work.stop()
    work.run()
    assert _same(island.params, published) and len(functions) == begun
    digests = [event.digest for event in rig.posted]
    assert digests == list(work.exchange.digests())

    begun = len(functions)
    functions.on_another = work.stop
    work.submit(actions.Step(clock=0))
    work.run()
  assert len(functions) > begun


def test_an_adoption_keeps_steps_only_where_it_is_told_to(tmp_path):
  """So a NaN, or a step that was refused, does not survive the adoption after it."""
  _, assembled, island = _make(tmp_path, fragments=1)
  exchange = on_device.Exchange(assembled, island).begin()
  like = jax.tree.map(np.zeros_like, _host(island.params))
  value = np.asarray(vectors.gather(assembled.layout, 0, like))

  def local(number: float) -> None:
    filled = jax.tree.map(lambda leaf: np.full_like(leaf, number), like)
    island.params = jax.device_put(filled, island.shardings.params)

  def holds(number: float) -> bool:
    return all(np.all(leaf == number) for leaf in jax.tree.leaves(_host(island.params)))

  no_delta = bytes(assembled.codec_down.encoded_size(value.size))
  local(np.nan)
  exchange.adopt(0, memoryview(value), whole=True, keep=False, merged=False)
  assert holds(0)
  for bad in (np.nan, 1e30):
    local(bad)
    exchange.adopt(0, no_delta, whole=False, keep=False, merged=False)
    assert holds(0)
  local(4.0)
  exchange.adopt(0, no_delta, whole=False, keep=True, merged=False)
  assert holds(4)
  island.close()


def test_a_payload_has_the_same_bytes_in_new_memory_and_in_that_of_another(tmp_path):
  """Only a learner that carries steps on has a payload to use again."""
  payloads = set()
  for adopt, ahead, overlap in (('rebase', 1, 3), ('overwrite', 0, 2)):
    how = {'adopt': adopt, 'ahead': ahead, 'overlap': overlap}
    _, assembled, island = _make(tmp_path / adopt, **how)
    exchange = on_device.Exchange(assembled, island).begin()
    island.params = jax.tree.map(lambda leaf: 0.5 * leaf + 0.01, island.params)
    data, ok = exchange.encode(0)
    assert ok
    payloads.add((assembled.protocol.rebases, np.asarray(data).tobytes()))
    island.close()
  (_, first), (_, second) = sorted(payloads)
  assert len(payloads) == 2 and first == second


def test_a_merged_payload_gives_its_memory_to_the_next_one_unless_the_transport_reads_it(tmp_path):
  _, assembled, island = _make(tmp_path, fragments=1)
  assert assembled.protocol.rebases
  exchange = on_device.Exchange(assembled, island).begin()
  draw = np.random.default_rng(0)

  def encode() -> np.ndarray:
    moved = jax.tree.map(
      lambda leaf: leaf + draw.standard_normal(leaf.shape, np.float32), _host(island.params)
    )
    island.params = jax.device_put(moved, island.shardings.params)
    data, ok = exchange.encode(0)
    assert ok
    return np.asarray(data)

  def merge() -> None:
    no_delta = bytes(assembled.codec_down.encoded_size(exchange.anchors[0].size))
    exchange.adopt(0, no_delta, whole=False, keep=True, merged=True)

  reading = encode()
  sent = reading.copy()
  merge()
  newer = encode()
  assert np.array_equal(reading, sent) and not np.array_equal(newer, sent)
  place = newer.ctypes.data
  del newer
  merge()
  assert encode().ctypes.data == place != reading.ctypes.data
  assert np.array_equal(reading, sent)
  island.close()
