"""Loops of the user's own as learners: two plain loops learn together over a real syncer."""

import contextlib
import dataclasses
import pathlib
import pickle
import re
import subprocess
import sys
import threading
import time
import weakref
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import diloco_jax
from diloco_jax.api import admission as admission_lib
from diloco_jax.api import own_arrays
from diloco_jax.config import load
from diloco_jax.configs import stdlib_lm
from diloco_jax.learner import on_device, stuck
from diloco_jax.process import bring, own_model, run_folder
from diloco_jax.protocol import messages
from diloco_jax.report import records as records_lib
from diloco_jax.report import run_facts
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import states
from diloco_jax.transport import addresses
from diloco_jax.transport import payloads as payloads_lib
from tests.certs import mint
from tests.launch.lib import command_line

_WIDTH, _WORDS = 16, 32
_RULE = np.random.default_rng(7).permutation(_WORDS)
_TX = optax.adamw(1e-2)
_DEADLINE_S = 240.0
_ROOT = pathlib.Path(__file__).parents[2]
_ONE = diloco_jax.SyncConfig(learners=1, fragments=1, period=2, overlap=1)


def _sync(learners: int = 2, **settings) -> diloco_jax.SyncConfig:
  shape = {'fragments': 3, 'period': 3, 'overlap': 1}
  return diloco_jax.SyncConfig(learners=learners, quorum=1, **shape, **settings)


def _params(seed: int = 0):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32) * 0.1)
  return {
    'embed': draw(_WORDS, _WIDTH),
    'hidden': draw(_WIDTH, _WIDTH),
    'out': draw(_WIDTH, _WORDS),
  }


def _batch(shard: int, index: int) -> jax.Array:
  return jnp.asarray(np.random.default_rng([shard, index]).integers(0, _WORDS, 32))


def _loss(params, words):
  logits = jax.nn.relu(params['embed'][words] @ params['hidden']) @ params['out']
  targets = jnp.asarray(_RULE)[words]
  return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


@jax.jit
def _step(params, opt_state, words):
  loss, grads = jax.value_and_grad(_loss)(params, words)
  with jax.numpy_dtype_promotion('standard'):
    updates, opt_state = _TX.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, loss


_PAIRED = dataclasses.replace(_ONE, fragments=2)


@contextlib.contextmanager
def _joined(params, total_steps, sync=_ONE, init=None, **kwargs):
  """A syncer, and a loop that has joined it."""
  with diloco_jax.run_syncer(init, total_steps=total_steps, sync=sync) as server:
    with diloco_jax.join(params, learner='l0', syncer=server.address, **kwargs) as peer:
      yield server, peer


@pytest.fixture(scope='module', name='server')
def _server():
  """A syncer for many loops, one after the other."""
  with diloco_jax.run_syncer(_params(), total_steps=1_000_000, sync=_ONE) as server:
    yield server


def _loop(server, name, losses, seed=0, metrics=lambda loss: {'loss': loss}, **kwargs):
  params = _params(seed)
  opt_state = _TX.init(params)
  with diloco_jax.join(params, learner=name, syncer=server.address, **kwargs) as peer:
    params = peer.params
    for _clock, words in peer.steps(_batch):
      params, opt_state, loss = _step(params, opt_state, words)
      tokens = np.prod(words.shape)  # an integer of NumPy
      params = peer.sync(params, tokens=tokens, metrics=metrics(loss))
      losses.append(float(loss))
  return params


def _threads(*calls):
  """Runs calls side by side; returns their results or raises the first error."""
  results = {}

  def run(number, call):
    try:
      results[number] = call()
    except BaseException as error:
      results[number] = error

  threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(calls)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(_DEADLINE_S)
    assert not thread.is_alive(), 'a loop has not ended'
  for result in results.values():
    if isinstance(result, BaseException):
      raise result
  return [results[number] for number in range(len(calls))]


def test_two_loops_learn_together_and_the_first_brings_the_model(tmp_path, capfd):
  """What they measure is in their folders; the syncer's own tells of both, too. Each has its own
  data, and the settings of the syncer."""
  losses, place = {'l0': [], 'l1': []}, tmp_path / 'l0'
  metrics = lambda loss: {'loss': loss, 'two': 2}
  with diloco_jax.run_syncer(
    total_steps=120, sync=_sync(), workdir=tmp_path / 'run', shards=None
  ) as server:
    ends = _threads(
      lambda: _loop(server, 'l0', losses['l0'], metrics=metrics, workdir=place, shards=None),
      lambda: _loop(server, 'l1', losses['l1'], seed=1),  # takes version 0 from the syncer
    )
    merged = server.wait(_DEADLINE_S)
  rows = list(diloco_jax.records(place))
  assert [row['loss'] for row in rows if row['name'] == 'step'] == losses['l0']
  others = [row['values'] for row in rows if row['name'] == 'metrics']
  assert others == [{'two': 2.0}] * len(losses['l0'])
  said = capfd.readouterr().out
  assert re.search(r'\[l0\] .*completed step: \d+, .* loss: \d.*, two: 2\n', said)
  seen = run_facts.RunFacts((), 120).take(records_lib.TailAll(tmp_path / 'run').read())
  for name, learner in seen.learners.items():
    steps = len(losses[name])
    assert learner.step >= 120, 'a closing sync may move the clock beyond T'
    assert (learner.counted, learner.state) == ((steps, 32 * steps), 'done')
    assert learner.steps[-1].loss in losses[name][-2:] and learner.tokens_per_step == 32
  assert seen.learners.keys() == losses.keys() and seen.progress == 1
  assert sorted(merged) == ['embed', 'hidden', 'out']
  words = jnp.arange(_WORDS)
  assert float(_loss(merged, words)) < 2.0 < np.log(_WORDS)
  for params in ends:
    assert jax.tree.structure(params) == jax.tree.structure(_params())
    assert float(_loss(params, words)) < 2.0


@pytest.mark.long
def test_a_loop_takes_its_own_moments_else_anothers_else_those_given(tmp_path, capfd):
  """Each process takes a few steps and is left, as by an exception."""
  kwargs = {'total_steps': 1_000_000, 'sync': _sync(learners=1), 'opt_state': _TX.init(_params())}
  sync = _sync(learners=1)
  with diloco_jax.run_syncer(_params(), total_steps=1_000_000, sync=sync) as server:

    def count(learner: str, workdir: str, store: str = '') -> int:
      """The updates in the moments with which it begins."""
      with diloco_jax.join(
        _params(),
        learner=learner,
        syncer=server.address,
        workdir=tmp_path / workdir,
        checkpoint_every_steps=4,
        store=store,
        **kwargs,
      ) as peer:
        params, opt_state = peer.params, peer.opt_state
        begun = int(opt_state[0].count)
        assert not opt_state[0].count.committed  # as given
        for _, (_clock, words) in zip(range(10), peer.steps(_batch)):
          params, opt_state, _ = _step(params, opt_state, words)
          params = peer.sync(params, tokens=words.size, opt_state=opt_state)
      return begun

    assert [count('l0', 'run'), count('l0', 'run')] == [0, 10]
    assert 'l0 continues with the moments of its checkpoint at step' in capfd.readouterr().out
    assert count('l1', 'run') == 20
    begun = 'the inner optimizer begins with the moments of l0 at step'
    assert re.search(rf'\[l1\] .*{begun}', capfd.readouterr().out)
    newest = max((tmp_path / 'run/islands/l1/ckpt').glob('[0-9]*'), key=lambda path: int(path.name))
    (newest / states.MANIFEST).write_text('{}')
    assert 20 < count('l1', 'run') < 30  # of the one before
    assert 'fresh' not in capfd.readouterr().out
    assert count('l1', 'other') == 0
    out = capfd.readouterr().out
    assert out.count('begins with the opt_state that join was given') == 1, out
    assert count('l1', 'other') == 10
    store = str(tmp_path / 'run')
    assert count('l0', 'new', store) == 20, 'its own, from the store'
    assert count('l0', 'newer', store) == 30
    assert [path.name for path in (tmp_path / 'new/islands/l0/ckpt').iterdir()] == ['lock']


@pytest.mark.parametrize(
  'devices, kind, sets',
  [
    pytest.param(2, 'Auto', 0, marks=pytest.mark.long),
    pytest.param(1, 'Explicit', 0, marks=pytest.mark.long),
    (2, 'Explicit', 4),
  ],
)
def test_the_same_tree_dtypes_and_shardings_come_back(devices, kind, sets):
  """Bfloat16 leaves, nested trees and leaves split over a mesh, next to replicated ones; also if
  the program has set another mesh (jax.set_mesh)."""
  mesh = jax.make_mesh((devices,), ('x',), devices=jax.devices()[:devices],
                       axis_types=(jax.sharding.AxisType[kind],))  # fmt: skip
  others = jax.make_mesh((sets,), ('y',), devices=jax.devices()[:sets]) if sets else None
  place = lambda value, *spec: jax.device_put(
    value, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
  )
  params = {
    'layers': [(place(jnp.ones((8, 4), jnp.bfloat16), 'x'), place(jnp.zeros(4)))],
    'embed': place(jnp.ones((16, 8)), None, 'x'),
    'small': [place(jnp.ones((8, 2)), 'x'), place(jnp.ones((2, 8)), None, 'x')],  # neighbours
  }
  with jax.set_mesh(others), _joined(params, 8, _PAIRED, init=params) as (server, peer):
    held = peer.params
    for _ in peer.steps():
      with jax.set_mesh(mesh):
        held = jax.tree.map(lambda leaf: (leaf - 0.25).astype(leaf.dtype), held)
      back = peer.sync(held, tokens=1)
      assert jax.tree.structure(back) == jax.tree.structure(params)
      for new, leaf in zip(jax.tree.leaves(back), jax.tree.leaves(params)):
        assert (new.dtype, new.sharding) == (leaf.dtype, leaf.sharding)
      held = back
    server.wait(_DEADLINE_S)
  assert np.asarray(held['embed']).max() < 0.5


def test_the_merged_model_is_evaluated_by_a_function_of_the_program(tmp_path, capfd):
  seen = []

  def evaluate(params):
    seen.append(float(params['w'].sum()))
    return {'loss': params['b'].sum(), 'accuracy': seen[-1]}

  params = {'w': jnp.zeros(8), 'b': jnp.ones(2)}
  lossless = dataclasses.replace(_ONE, codec_up='float32', codec_down='float32')
  with diloco_jax.run_syncer(
    total_steps=4, sync=lossless, workdir=tmp_path, evaluate=evaluate
  ) as server:
    with diloco_jax.join(params, syncer=server.address) as peer:
      held = peer.params
      for _ in peer.steps():
        held = peer.sync({**held, 'w': held['w'] + 1}, tokens=1)
    merged = server.wait(_DEADLINE_S)
  assert 0 < seen[-1] == float(merged['w'].sum())
  rows = list(diloco_jax.records(tmp_path))
  assert [row['loss'] for row in rows if row['name'] == 'eval'][-1] == 2.0
  accuracies = [row['values'] for row in rows if row['name'] == 'metrics']
  assert accuracies == [{'accuracy': value} for value in seen]
  line = rf'held-out at clock \d+: accuracy: {re.escape(f"{seen[-1]:.4g}")}'
  assert re.search(line, capfd.readouterr().out)


def test_every_array_keeps_its_place_in_the_tree():
  """Of twelve layers, '10' comes before '2' among names, and after it in the tree."""
  params = [jnp.full((8, 8), float(layer)) for layer in range(12)]
  with _joined(params, 12, _PAIRED, init=params) as (_, peer):
    held = peer.params
    for _ in peer.steps():
      held = peer.sync(held, tokens=1)
      np.testing.assert_allclose([leaf[0, 0] for leaf in held], np.arange(12), atol=1e-3)


def test_a_jitted_step_is_compiled_once():
  """Also if its other arguments are committed to no device, as those of an optimizer are."""
  params = {'w': jnp.ones((8, 8))}
  step = jax.jit(lambda params, count: ({'w': params['w'] * 0.9}, count + params['w'].sum()))
  with _joined(params, 8) as (_, peer):
    held, count = peer.params, jnp.zeros(())
    for _ in peer.steps():
      held, count = step(held, count)
      held = peer.sync(held, tokens=1)
  assert step._cache_size() == 1


def test_the_arrays_that_join_was_given_do_not_live_on():
  """Else the memory of a device would hold the model and the optimizer's state twice."""
  params = _params()
  opt_state = _TX.init(params)
  given = [weakref.ref(leaf) for leaf in jax.tree.leaves((params, opt_state))]
  with diloco_jax.run_syncer(total_steps=120, sync=_sync(learners=1)) as server:
    with diloco_jax.join(params, syncer=server.address, opt_state=opt_state) as peer:
      params, opt_state = peer.params, peer.opt_state
      _, words = next(peer.steps(_batch))
      params, opt_state, _ = _step(params, opt_state, words)
      params = peer.sync(params, tokens=words.size, opt_state=opt_state)
      assert not any(leaf() is not None for leaf in given)


def test_a_loop_that_is_left_after_a_step_raises_its_own_error(capfd):
  """The step has consumed the arrays that `sync` gave: nothing of them can be sent."""
  params = lambda: {'w': jnp.ones((8, 8))}
  moments = lambda: {'m': jnp.ones((8, 8), jnp.bfloat16), 'n': jnp.int32(0)}
  step = jax.jit(lambda *held: jax.tree.map(lambda leaf: leaf + 1, held), donate_argnums=(0, 1))
  kwargs = {'total_steps': 100, 'sync': _ONE}
  with diloco_jax.run_syncer(params(), **kwargs) as server:
    before = threading.active_count()
    kwargs |= {'learner': 'l0', 'syncer': server.address}
    with pytest.raises(ZeroDivisionError):
      with diloco_jax.join(params(), opt_state=moments(), **kwargs) as peer:
        held = peer.params, peer.opt_state
        for clock in peer.steps():
          held = step(*held)
          if clock == 20:
            raise ZeroDivisionError
          held = peer.sync(held[0], tokens=1, opt_state=held[1]), held[1]
    assert threading.active_count() <= before + 8  # those of the syncer for the session
    with diloco_jax.join(params(), opt_state=moments(), **kwargs) as peer:
      assert peer.clock is not None  # the syncer takes its next process
  assert 'NaN' not in ''.join(capfd.readouterr())


def test_arrays_that_have_moved_are_refused_or_put_back():
  params, moments = {'w': jnp.ones((8, 8))}, {'m': jnp.ones((8, 8)), 'count': jnp.int32(0)}
  mesh = jax.make_mesh((2,), ('d',))
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('d'))
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  kwargs = {'total_steps': 9, 'sync': _ONE}
  with diloco_jax.run_syncer(params, **kwargs) as server:
    kwargs |= {'learner': 'l0', 'syncer': server.address}
    with diloco_jax.join(params, opt_state=moments, **kwargs) as peer:
      held = {'opt_state': peer.opt_state, 'tokens': 1}
      with pytest.raises(ValueError, match='w has moved to other devices .* jax.device_put'):
        peer.sync(jax.device_put(peer.params, rows), **held)
      with pytest.raises(ValueError, match=r'opt_state: count is absent, join was given int32\[\]'):
        peer.sync(peer.params, opt_state={'m': moments['m']}, tokens=1)
    placed = jax.device_put((params, moments), whole)
    with diloco_jax.join(placed[0], opt_state=placed[1], **kwargs) as peer:
      peer.sync(peer.params, opt_state={**peer.opt_state, 'm': jax.device_put(moments['m'], rows)},
                tokens=1)  # fmt: skip
      assert peer.opt_state['m'].sharding == whole


def test_wrong_calls_are_refused_with_a_remedy():
  params = {'w': jnp.zeros((8, 8))}
  sync = diloco_jax.SyncConfig(learners=1, fragments=1, period=1, overlap=0)
  with diloco_jax.run_syncer(params, total_steps=4, sync=sync) as server:
    kwargs = {'learner': 'l0', 'syncer': server.address, 'total_steps': 4}
    with diloco_jax.join(params, sync=sync, **kwargs) as peer:
      held = peer.params
      with pytest.raises(ValueError, match='tokens is 0'):
        peer.sync(held, tokens=0)
      with pytest.raises(ValueError, match=r'loss has the shape \(8,\), give one number'):
        peer.sync(held, tokens=1, metrics={'loss': jnp.zeros(8)})
      with pytest.raises(ValueError, match="phase is 'warm', give one number"):
        peer.sync(held, tokens=1, metrics={'loss': jnp.zeros(()), 'phase': 'warm'})
      with pytest.raises(TypeError, match='float'):
        peer.sync(held, tokens=1.0)
      with pytest.raises(ValueError, match='join was given no opt_state'):
        peer.sync(held, tokens=1, opt_state={})
      with pytest.raises(ValueError, match=r'w is float32\[4, 8\], join was given float32\[8, 8\]'):
        peer.sync({'w': held['w'][:4]}, tokens=1)
      steps = peer.steps()
      next(steps)
      with pytest.raises(RuntimeError, match='once per step'):
        next(steps)
  with pytest.raises(ValueError, match="learner is 'L 0'"):
    with diloco_jax.join(params, sync=sync, **kwargs | {'learner': 'L 0'}):
      pass
  with pytest.raises(ValueError, match='needs certificates'):
    with diloco_jax.join(params, sync=sync, **kwargs | {'syncer': '10.0.0.1:7070'}):
      pass
  with pytest.raises(TimeoutError, match='no syncer answered within 0.5 s'):
    with diloco_jax.join(params, sync=sync, wait_s=0.5, **kwargs):
      pass


def test_what_only_one_call_may_do_is_refused_at_the_other(tmp_path):
  """Twice in a step, beside another thread, in another process; and the loop goes on."""
  with _joined(_params(), 20) as (_, peer):
    params, seen = peer.params, []
    for _, batch in peer.steps(lambda shard, index: index):
      seen.append(batch)
      params = peer.sync(params, tokens=1)
      if peer.clock is not None:
        with pytest.raises(RuntimeError, match='called twice in one step.*Nothing of this call'):
          peer.sync(params, tokens=1)
    assert seen == list(range(20)), 'no batch is left out'
    with pytest.raises(TypeError, match='l0 cannot go to another process: call join there'):
      pickle.dumps(peer)
  entered, goes_on = threading.Event(), threading.Event()

  class Waits(float):  # a metric, which the first thread is kept at
    def __float__(self):
      entered.set()
      goes_on.wait(_DEADLINE_S)
      return 1.0

  with _joined(_params(), 20) as (_, peer):
    params, steps = peer.params, peer.steps()
    next(steps)
    with futures.ThreadPoolExecutor(1) as pool:
      first = pool.submit(peer.sync, params, tokens=1, metrics={'loss': Waits()})
      assert entered.wait(_DEADLINE_S)
      with pytest.raises(RuntimeError, match='another thread is in peer.sync'):
        peer.sync(params, tokens=1)
      goes_on.set()
      params = first.result(_DEADLINE_S)
    for _ in steps:
      params = peer.sync(params, tokens=1)


_FORKS = """
import os, sys
import jax.numpy as jnp
import diloco_jax

def read(shard, index):
  if index != 4 or os.getpid() != me:
    return index
  child = os.fork()
  if child:
    ended.append(os.waitpid(child, 0)[1])
  elif sys.argv[1] == 'raises':
    raise RuntimeError('the error of the child')
  return index

me, ended, params = os.getpid(), [], {'w': jnp.ones(64)}
sync = diloco_jax.SyncConfig(learners=1, fragments=1, period=2, overlap=1)
with diloco_jax.run_syncer(total_steps=20, sync=sync) as server:
  with diloco_jax.join(params, learner='l0', syncer=server.address) as peer:
    for clock, index in peer.steps(read):
      if os.getpid() != me and sys.argv[1] == 'leaves':
        break
      params = peer.sync(params, tokens=1)
assert os.getpid() == me or sys.argv[1] == 'leaves'
print('whole', clock, ended != [], os.getpid() == me, flush=True)
"""


@pytest.mark.parametrize(
  'how', ['raises', pytest.param('leaves', marks=pytest.mark.long), 'trains']
)
def test_a_process_that_a_loop_forks_ends_and_takes_nothing_of_the_learner(how):
  command = [sys.executable, '-c', _FORKS, how]
  run = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, cwd=_ROOT)
  assert not run.returncode and 'whole 19 True True' in run.stdout, run.stdout + run.stderr
  error = {'raises': 'the error of the child', 'trains': 'was forked from the learner l0'}
  assert error.get(how, '') in run.stderr
  assert ('whole 4 False False' in run.stdout) == (how == 'leaves')


def test_a_loop_takes_the_settings_of_the_syncer_and_keeps_its_own(tmp_path, capfd):
  """Those of a syncer that has been started again, too; it compares them at the Join."""
  sync = diloco_jax.SyncConfig(learners=1, fragments=2, period=5, overlap=1, codec_up='bfloat16')
  own = {'checkpoint_every_steps': 3}
  params, kwargs = {'v': jnp.ones((8, 8)), 'w': jnp.ones((8, 8))}, {'sync': sync, 'shards': 4}
  for steps in (8, 12):  # the run continues
    with diloco_jax.run_syncer(total_steps=steps, workdir=tmp_path / 'run', **kwargs) as server:
      with diloco_jax.join(params, learner='l0', syncer=server.address, **own) as peer:
        assert peer.total_steps == steps
        held = peer.params
        for _ in peer.steps():
          held = peer.sync(held, tokens=1)
      server.wait(_DEADLINE_S)
    said = capfd.readouterr().out
    assert re.search(r'\[l0\] .* done at clock', said)


def test_what_a_loop_names_must_be_what_the_syncer_has():
  """Before anything is sent, also by the learner that would bring the model."""
  sync = diloco_jax.SyncConfig(learners=1, fragments=2, period=2, overlap=1, lease_s=9.0)
  layers = {f'layers/{number}/a_long_name_of_a_kernel': jnp.ones((8, 8)) for number in range(99)}
  last = 'layers/98/a_long_name_of_a_kernel'
  with diloco_jax.run_syncer(total_steps=4, sync=sync, shards=8) as server:

    def refuse(text: str, params=layers, **kwargs) -> None:
      with pytest.raises(ValueError, match=text):
        with diloco_jax.join(params, learner='l0', syncer=server.address, **kwargs):
          pass

    def refuse_settings() -> None:
      refuse('train.steps is 300 here, 4 there.*Nothing was sent', total_steps=300)
      refuse('1 difference: data.shards is 16 here, 8 there', shards=16)
      refuse('data.local is True here, False there', shards=None)
      refuse('1 difference: sync.lease_s is 8.0 here, 9.0 there',
             sync=diloco_jax.SyncConfig(fragments=2, lease_s=8.0))  # fmt: skip
      refuse('train.steps is 4.0, a float; it must be int', total_steps=4.0)

    refuse_settings()
    with diloco_jax.join(layers, learner='l0', syncer=server.address, total_steps=4, sync=sync):
      refuse_settings()
      same = lambda leaf: layers | {last: leaf}
      refuse(r"1 difference: .*/98/a_long_name_of_a_kernel is 'float32\[4, 8\], body' here, "
             r"'float32\[8, 8\], body' there", same(jnp.ones((4, 8))))  # fmt: skip
      refuse("'bfloat16.*here, 'float32.* there", same(jnp.ones((8, 8), jnp.bfloat16)))
      refuse(r"1 difference: array new is 'float32\[1\], body' here, 'absent' there",
             layers | {'new': jnp.ones(1)})  # fmt: skip
      refuse("1 difference: .* 'float32.*, head' here, .* body' there",
             label=lambda name: 'head' if name == last else 'body')  # fmt: skip


def test_a_loop_that_is_started_after_the_end_makes_no_step(tmp_path, capfd):
  """It has one setting of the run then, and needs no other."""
  (tmp_path / 'address').write_text(addresses.ended(3))
  params = {'w': jnp.ones((8, 8))}
  with diloco_jax.join(params, learner='l0', syncer=f'file:{tmp_path}/address') as peer:
    assert list(peer.steps(_batch)) == [] and peer.params['w'].shape == (8, 8)
    assert peer.total_steps == 3, 'a schedule may need it'
  line = (
    '[l0] the run has ended: there are no steps left. peer.params are those that join was given'
  )
  assert capfd.readouterr().out.count(line) == 1


@pytest.mark.parametrize('brought', [True, False])
def test_a_run_begins_with_the_moments_of_no_other_run(brought, tmp_path):
  """Also where another learner had the same folder: its schedule would be at its end."""
  for learner in ('l0', 'l1'):
    params, moments = {'w': jnp.ones((8, 8))}, {'m': jnp.zeros(3)}
    with diloco_jax.run_syncer(None if brought else params, total_steps=4, sync=_ONE) as server:
      kwargs = {'learner': learner, 'syncer': server.address, 'workdir': tmp_path}
      with diloco_jax.join(params, opt_state=moments, **kwargs) as peer:
        params, moments = peer.params, peer.opt_state
        assert not moments['m'].any()
        for _ in peer.steps():
          moments = {'m': moments['m'] + 1}
          params = peer.sync(params, tokens=1, opt_state=moments)
    assert (tmp_path / 'islands' / learner / 'ckpt' / '4').is_dir()


def test_a_loop_that_does_not_use_the_moments_of_its_checkpoint_is_told(server, tmp_path, capfd):
  kwargs = {'learner': 'l0', 'syncer': server.address, 'workdir': tmp_path}
  line = r'\[l0\] .*opt_state: the moments of the checkpoint at step \d+ are not used'
  for reads, times in ((False, 0), (True, 0), (False, 1)):
    params, moments = _params(), {'m': jnp.zeros(3)}
    with diloco_jax.join(params, opt_state=moments, **kwargs) as peer:
      params, moments = peer.params, peer.opt_state if reads else moments
      for _ in zip(range(2), peer.steps()):
        params = peer.sync(params, tokens=1, opt_state=moments)
    assert len(re.findall(line, capfd.readouterr().out)) == times


@pytest.mark.parametrize('ignores', [True, False], ids=['the line is missing', 'a step consumes'])
def test_a_loop_that_goes_on_with_what_was_replaced_fails_and_is_told_the_line(ignores):
  """With small arrays, too, which are replaced in one vector. A loop that goes on with what a step
  of its own has consumed is told nothing."""
  run = lambda params: jax.tree.map(lambda leaf: 0.9 * leaf, params)
  step, consuming = jax.jit(run), jax.jit(run, donate_argnums=0)
  sync = diloco_jax.SyncConfig(learners=1, quorum=1, fragments=1, period=2, overlap=0)
  with pytest.raises((RuntimeError, ValueError), match='has been deleted') as raised:
    with _joined(_params(), 20, sync) as (_, peer):  # in lock step
      params = peer.params
      for _clock in peer.steps():
        params = step(params)
        merged = peer.sync(params, tokens=1)
        if not ignores:
          params = merged
          if peer._replaced:
            consuming(params)
  notes = getattr(raised.value, '__notes__', [])
  assert any('`state = peer.sync(state, ...)`' in note for note in notes) == ignores


def test_sync_waits_for_the_metrics_of_the_step_before_at_most(tmp_path):
  """But for those of the first step, which compiles, and of the last one."""

  class Late:
    ndim = 0

    def __init__(self, clock: int):
      self.clock = clock

    def is_ready(self) -> bool:
      return self.clock == 1  # as of a loop that waits for its step

    def block_until_ready(self) -> None:
      waited.append(self.clock)

    def __float__(self) -> float:
      return float(self.clock)

  waited, seen = [], []
  with _joined({'w': jnp.ones((8, 8))}, 4, workdir=tmp_path) as (_, peer):
    params = peer.params
    for clock in peer.steps():
      params = peer.sync(params, tokens=8, metrics={'loss': Late(clock)})
      seen.append((list(waited), sum(r['name'] == 'step' for r in diloco_jax.records(tmp_path))))
  assert seen == [([0], 1), ([0], 2), ([0], 2), ([0, 2, 3], 4)]


def test_a_loop_that_is_in_sync_is_not_one_that_has_not_called_it(server, monkeypatch):
  """The line about a missing step, and the page, have what the thread of the loop does."""
  seen = []

  class Asks:
    """A metric that looks at the thread that reads it."""

    def __float__(self) -> float:
      return 0.0

    @property
    def ndim(self) -> int:
      seen.append(examine())
      return 0

  monkeypatch.setattr(stuck, '_compiled_s', {})
  with diloco_jax.join(_params(), learner='l0', syncer=server.address) as peer:
    work = peer._node.work
    examine = lambda: stuck.examine(work._thread, work.doing).doing
    for _ in zip(peer.steps(), range(2)):
      stuck._compiled_s.clear()
      seen.append(examine())
      peer.sync(peer.params, tokens=1, metrics={'loss': Asks()})
  assert seen == 2 * [messages.LOOPING, messages.SYNCING]


def test_steps_without_an_update_after_a_restart_are_not_merged(tmp_path, capfd):
  """Gradients are accumulated over steps: the first payload of a process may have no update yet.
  Here none comes at all, and the run ends nevertheless."""
  rows = lambda name: [row for row in diloco_jax.records(tmp_path) if row['name'] == name]
  sync = dataclasses.replace(_ONE, overlap=0)  # in lock step
  with diloco_jax.run_syncer(_params(), total_steps=60, sync=sync, workdir=tmp_path) as server:
    for updates in (True, False):
      with diloco_jax.join(_params(), learner='l0', syncer=server.address) as peer:
        params, before = peer.params, len(rows('synced'))
        for _ in peer.steps():
          if updates:
            params = jax.tree.map(lambda leaf: 0.99 * leaf, params)
          params = peer.sync(params, tokens=1)
          if updates and len(rows('synced')) > 4:
            break
    server.wait(_DEADLINE_S)
    assert [row['why'] for row in rows('refused')][:1] == ['norm 0']
    assert len(rows('synced')) == before and peer.clock is None, 'it merged zeros'
  said = capfd.readouterr().out
  assert 'l0 trained nothing in these steps' in said
  assert 'merged only zeros' not in said and 'Outer step' not in said


_NO_METRICS = """
import jax, jax.numpy as jnp
import diloco_jax

@jax.jit
def step(params):
  long = jax.lax.fori_loop(0, 40, lambda k, x: x @ x / 512, jnp.ones((512, 512)))
  return {**params, 'w': params['w'] + long[:8, :8]}

sync = diloco_jax.SyncConfig(learners=1, fragments=1, period=2, overlap=1)
run = {'total_steps': 12, 'sync': sync}
params, made, behind, still = {'w': jnp.ones((8, 8)), 'b': jnp.ones(2)}, [], [], 0
with diloco_jax.run_syncer(**run) as server:
  with diloco_jax.join(params, learner='l0', syncer=server.address, **run) as peer:
    params = peer.params
    for clock in peer.steps():
      params = step(params)
      made.append(jnp.copy(params['w']))
      params = peer.sync(params, tokens=8)
      behind += [k for k, one in enumerate(made[:-1]) if not one.is_ready()]
      still += not made[-1].is_ready()
assert not behind, f'{behind} ran while a later step was dispatched already'
assert still, 'sync has waited for its own step each time'
"""


@pytest.mark.full
def test_a_loop_without_metrics_is_one_step_ahead_of_its_devices():
  """On a device that computes after the dispatch, and with an array that no step changes."""
  ended = command_line.python('-c', _NO_METRICS, JAX_NUM_CPU_DEVICES='1')
  assert ended.returncode == 0, ended.stderr


def test_tied_and_frozen_arrays_are_adopted_and_those_of_the_program_stay():
  table = jnp.ones((8, 8))
  inner = jax.jit(lambda trained: 0.9 * trained)
  params = {'w': jnp.ones((8, 8)), 'embed': table, 'head': table, 'scale': 1.0}
  with _joined(params, 8) as (_, peer):
    held = peer.params
    for _ in peer.steps():
      held = peer.sync({**held, 'w': inner(held['w'])}, tokens=1)
  assert np.all(held['w'] < params['w'])
  assert not table.is_deleted() and not params['w'].is_deleted()


def test_a_run_that_continues_keeps_its_version_0(tmp_path):
  """Whatever `init` the second call gives."""
  sync = diloco_jax.SyncConfig(learners=1, fragments=1, period=2, overlap=0, codec_down='float32')
  kwargs, init = {'total_steps': 20, 'sync': sync}, {'w': jnp.ones((8, 8))}
  with diloco_jax.run_syncer(init, workdir=tmp_path, **kwargs) as server:
    with pytest.raises(TimeoutError, match='has not ended within 0.1 s'):
      server.wait(0.1)
  with (
    diloco_jax.run_syncer({'w': init['w'] * 5}, workdir=tmp_path, **kwargs) as server,
    diloco_jax.join({'w': init['w'] * 7}, learner='l0', syncer=server.address, **kwargs) as peer,
  ):
    np.testing.assert_array_equal(peer.params['w'], init['w'])


def test_a_syncer_that_is_refused_leaves_the_folder_as_it_is(tmp_path):
  """Another one has it, or the run in it is not one of own loops."""
  init, folder = {'w': jnp.ones((8, 8))}, tmp_path / 'loops'
  with diloco_jax.run_syncer(init, total_steps=20, sync=_ONE, workdir=folder):
    with pytest.raises(files_lib.DirectoryError, match='already used by syncer'):
      with diloco_jax.run_syncer(init, total_steps=30, sync=_ONE, workdir=folder):
        pass
  assert load.read(folder).train.steps == 20
  config = stdlib_lm.get_config('tiny')
  folder = run_folder.open_workdir(config, tmp_path / 'task', resume=False)
  (folder / 'syncer' / 'wal').mkdir(parents=True)
  (folder / 'syncer' / 'wal' / '0.rec').touch()
  for given in (init, None):
    with pytest.raises(ValueError, match='none of own loops. Nothing was changed'):
      with diloco_jax.run_syncer(given, total_steps=20, sync=_ONE, workdir=folder):
        pass
  assert load.read(folder) == config and own_model.read(folder) is None


def test_the_error_of_a_syncer_reaches_its_program(tmp_path, capfd):
  sync = diloco_jax.SyncConfig(learners=1, fragments=64, period=64)
  kwargs = {'total_steps': 100, 'sync': sync, 'workdir': tmp_path}
  with pytest.raises(ValueError, match='64 balanced fragments'):
    with diloco_jax.run_syncer({'w': jnp.ones((8, 8))}, **kwargs):
      pass
  assert own_model.read(tmp_path) is None
  with diloco_jax.run_syncer({'w': jnp.ones((64, 64))}, **kwargs):  # the mistake is mended
    pass
  for file in (tmp_path / 'syncer' / 'ckpt').glob('*/state/**/d/*'):
    file.write_bytes(b'')
  with pytest.raises(LookupError) as error:  # as of a learner that has waited for the syncer
    with diloco_jax.run_syncer({'w': jnp.ones((64, 64))}, **kwargs) as server:
      server._thread.join()
      assert 'the syncer has ended: StateError: none' in capfd.readouterr().out
      raise LookupError
  assert 'StateError: none of the checkpoints' in error.value.__notes__[0]


def test_a_model_that_does_not_fit_the_syncer_is_refused_and_not_kept(tmp_path):
  """It has too few arrays for the syncer's fragments; the next learner brings another one."""
  sync = diloco_jax.SyncConfig(learners=1, fragments=64, period=64)
  with diloco_jax.run_syncer(total_steps=100, sync=sync, workdir=tmp_path) as server:
    give = lambda rows: bring.bring(
      own_model.describe({'w': jnp.ones((rows, 8))}, lambda name: 'body'),
      lambda: server.address,
      addresses.LOCAL,
      wait_s=_DEADLINE_S,
    )
    with pytest.raises(ValueError, match='the syncer refused the model: .*64 balanced fragments'):
      give(8)
    assert own_model.read(tmp_path) is None
    give(64)
  assert own_model.read(tmp_path).shapes['w'].shape == (64, 8)


def test_an_interrupt_while_join_waits_leaves_no_learner(monkeypatch):
  """Its node would keep the id and a seat, and never make a step."""

  def interrupted(peer):
    raise KeyboardInterrupt

  nodes = lambda: [thread for thread in threading.enumerate() if thread.name == 'node']
  kwargs = {'total_steps': 100, 'sync': _ONE}
  before = nodes()
  with diloco_jax.run_syncer(**kwargs) as server:
    kwargs |= {'learner': 'l0', 'syncer': server.address}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
      patch.setattr(diloco_jax.Peer, '_next', interrupted)
      with diloco_jax.join(_params(), **kwargs):
        raise AssertionError('it has joined')
    assert nodes() == before
    with diloco_jax.join(_params(), **kwargs) as peer:  # the same cell again
      assert peer.clock is not None


def test_a_loop_that_joins_as_the_run_ends_waits_no_longer_than_it_was_told(monkeypatch):
  """The syncer had a model, so the learner joins; but then the syncer is gone, or admits none."""
  kwargs = {'total_steps': 4, 'sync': _ONE, 'wait_s': _DEADLINE_S}

  def late():
    with diloco_jax.join(_params(), learner='l1', **kwargs | {'wait_s': 0.5}):
      raise AssertionError('it has joined a run that is over')

  with diloco_jax.run_syncer(total_steps=4, sync=_ONE) as server:
    kwargs['syncer'] = server.address
    with diloco_jax.join(_params(), learner='l0', **kwargs) as peer:
      for _ in peer.steps():
        peer.sync(peer.params, tokens=1)
    server.wait(_DEADLINE_S)
    terms = own_model.Terms.of(own_model.config(4, _ONE, 16))
    monkeypatch.setattr(admission_lib, 'meet', lambda *args: terms)
    with pytest.raises(
      TimeoutError, match='has admitted learner l1 within 0.5 s: .*the run has ended, it'
    ):
      _threads(late)


def test_a_loop_ends_with_its_egress_thread(monkeypatch):
  """Or it would train on, and none of its work would reach the model."""
  keep = payloads_lib.keep

  def keep_unless_it_leaves_a_learner(store, data):
    if threading.current_thread().name == 'egress':
      raise MemoryError('no room for the contribution')
    return keep(store, data)

  monkeypatch.setattr(payloads_lib, 'keep', keep_unless_it_leaves_a_learner)
  with pytest.raises(MemoryError, match='no room for the contribution'):
    with _joined(_params(), 1_000_000) as (_, peer):
      deadline_s = time.monotonic() + _DEADLINE_S
      for _ in peer.steps():
        assert time.monotonic() < deadline_s, 'the loop trains on'
        peer.sync(peer.params, tokens=1)


@pytest.mark.parametrize('error', [MemoryError('on the device'), KeyboardInterrupt()], ids=str)
@pytest.mark.parametrize(
  'where, name',
  [
    (own_arrays.OwnArrays, 'save'),
    (on_device.Exchange, 'encode'),
    (on_device.Exchange, 'adopt'),
    (diloco_jax.Peer, '_measure'),
  ],
)
def test_an_error_in_a_boundary_ends_the_loop_at_once(where, name, error, server, tmp_path):
  """And reaches the program: without that work its machine would wait for ever."""

  def broken(*args, **kwargs):
    raise error

  def loop():
    given = {'opt_state': {'m': jnp.ones(3)}, 'workdir': tmp_path, 'checkpoint_every_steps': 2}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(type(error)) as raised:
      with diloco_jax.join(_params(), syncer=server.address, **given) as peer:
        held = peer.params
        patch.setattr(where, name, broken)
        for _ in peer.steps():
          held = peer.sync(held, tokens=1, opt_state=peer.opt_state)
    assert raised.value is error and peer.clock is None
    with pytest.raises(diloco_jax.Ended, match='ended with an error'):
      peer.sync(held, tokens=1, opt_state=peer.opt_state)

  _threads(loop)


def _aligned(value: float) -> np.ndarray:
  """An array whose memory jax would share."""
  raw = np.full(64 + 32, value, np.float32)
  return raw[-raw.ctypes.data // 4 % 16 :][:64]


def test_what_a_loop_gives_may_be_written_again(tmp_path):
  """Arrays of NumPy that join and sync are given, and metrics of NumPy, or donated ones."""

  class Late(float):  # with it a step is recorded in the next sync
    def is_ready(self) -> bool:
      return False

  params, loss, donated = {'w': _aligned(1.0)}, np.zeros(()), jnp.ones(())
  spend = jax.jit(lambda value: value + 1, donate_argnums=0)
  with diloco_jax.run_syncer(total_steps=8, sync=_ONE) as server:
    moments = {'m': _aligned(1.0)}
    where = {'syncer': server.address, 'workdir': tmp_path, 'learner': 'l0'}
    with diloco_jax.join(params, opt_state=moments, **where) as peer:
      held, expected, params['w'][:] = peer.params, 1.0, 77.0
      for clock in peer.steps():
        np.testing.assert_allclose(held['w'], expected, atol=1.0)
        assert float(peer.opt_state['m'][0]) == 1.0
        expected -= 0.125
        params['w'][:], moments['m'][:], loss[...] = np.asarray(held['w']) - 0.125, 1.0, clock
        metrics = {'loss': loss, 'other': donated, 'late': Late()}
        held = peer.sync(params, tokens=1, opt_state=moments, metrics=metrics)
        params['w'][:], moments['m'][:], loss[...] = 77.0, 77.0, 77.0
        donated = spend(donated)
    np.testing.assert_allclose(server.wait(_DEADLINE_S)['w'], expected, atol=1.0)
  rows = list(diloco_jax.records(tmp_path))
  assert [row['loss'] for row in rows if row['name'] == 'step'] == list(range(8))


def test_what_no_checkpoint_can_have_is_refused_at_join(server, tmp_path):
  given = {'syncer': server.address, 'workdir': tmp_path}
  with pytest.raises(ValueError, match='opt_state/m is int4, which no checkpoint can have'):
    with diloco_jax.join(_params(), opt_state={'m': jnp.ones(3, jnp.int4)}, **given):
      pass
  complex_ones = {'m': jnp.ones(3, jnp.complex64)}
  with diloco_jax.join(_params(), opt_state=complex_ones, **given) as peer:
    next(peer.steps())
    peer.sync(peer.params, tokens=1, opt_state={'m': complex_ones['m'] * 2j})
  with diloco_jax.join(_params(), opt_state=complex_ones, **given) as peer:
    assert complex(peer.opt_state['m'][0]) == 2j


@pytest.mark.long
def test_loops_over_mutual_tls(tmp_path):
  """The first learner brings the model under its own name; a loop of another run gets nothing."""
  owner = mint.owner(tmp_path / 'certs')
  kwargs = {'total_steps': 6, 'sync': _ONE}
  params = {'w': jnp.ones((8, 8))}
  where = {'listen': '127.0.0.1:0', 'tls': owner.folder / 'syncer'}
  with diloco_jax.run_syncer(**where, **kwargs) as server:
    own = {'learner': 'l0', 'syncer': server.address, **kwargs}
    other = mint.owner(tmp_path / 'other', run='run-y').folder / 'l0'
    with pytest.raises(TimeoutError, match='no certificate of the syncer of this run'):
      with diloco_jax.join(params, tls=other, wait_s=10.0, **own):
        pass
    with pytest.raises(ValueError, match='is that of l0, and this learner is l1'):
      with diloco_jax.join(params, tls=owner.folder / 'l0', **own | {'learner': 'l1'}):
        pass
    with diloco_jax.join(params, tls=owner.folder / 'l0', **own) as peer:
      for _ in peer.steps():
        peer.sync({'w': peer.params['w'] * 0.9}, tokens=1)
    assert float(server.wait()['w'].max()) < 1
