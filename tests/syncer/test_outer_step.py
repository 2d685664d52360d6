"""The outer step in tiles: the equations of the paper, and bits that depend on nothing else than
payloads, weights and the values before."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco_jax.numerics import codecs, exchange, fragments, merge, outer
from diloco_jax.numerics import digest as digest_lib
from diloco_jax.syncer import outer_step
from tests.numerics import vectors
from tests.syncer import one_fragment

_RULES = {'avg': merge.avg(), 'rda': merge.rda()}
_OUTERS = (*outer.OUTERS, 'sgd(learning_rate=1.0)', 'rmsprop(learning_rate=0.05)')


def _tree(seed=0):
  rng = np.random.default_rng(seed)
  normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
  layer = lambda: {'w': normal(16, 24), 'scale': normal(24)}
  return {'embed': normal(48, 16), 'layers': [layer(), layer(), layer()], 'gain': normal()}


@functools.cache
def _layout():
  label = lambda path: 'avg' if 'embed' in path else 'rda'
  return fragments.make_layout(_tree(), 2, label)


def _fragment(p=0, codec='int8', tx=None, rules=_RULES, **more):
  first_N = np.asarray(codecs.canonical(vectors.gather(_layout(), p, _tree())))
  tx = tx or outer.nesterov(0.7, 0.9)
  return one_fragment.Fragment(_layout(), p, first_N, rules, tx, codec, codec, **more)


def _deltas(p, learners, scale=0.01, seed=100):
  rows = [vectors.gather(_layout(), p, _tree(seed + m)) for m in range(learners)]
  return scale * np.asarray(jnp.stack(rows))


def _bits(whole):
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(whole)]


_apply_delta = jax.jit(exchange.apply_delta, static_argnums=0)
codec_names = pytest.mark.parametrize('name', list(codecs.CODECS))


@codec_names
def test_learner_and_syncer_hold_the_same_bits_version_after_version(name):
  fragment = _fragment(1, name)
  anchor_N = fragment.whole.published_n
  for version in range(3):
    stepped = fragment.merge(_deltas(1, 3, seed=10 * version), [3, 1, 2])
    assert stepped.delta.shape == (fragment.codec.encoded_size(anchor_N.size),)
    learner_N, learner_digest = _apply_delta(fragment.codec, anchor_N, stepped.delta)
    assert _bits(learner_N) == _bits(fragment.whole.published_n)
    assert digest_lib.as_int(learner_digest) == stepped.digest == fragment.digest()
    anchor_N = learner_N


@pytest.mark.parametrize('name', ['int8', 'int4', 'int2'])
def test_error_feedback_keeps_the_codecs_error_in_the_master(name):
  """Error feedback: with no further outer gradients, published converges to the master."""
  fragment, gaps, factor = _fragment(0, name, optax.sgd(0.7)), [], 2 if name == 'int2' else 4
  fragment.merge(_deltas(0, 2), [1, 1])
  for _ in range(4):
    gaps.append(float(np.max(np.abs(fragment.whole.master_n - fragment.whole.published_n))))
    fragment.merge(np.zeros_like(_deltas(0, 2)), [1, 1])  # present, but did not move
  assert gaps[0] > 0 and all(b <= a / factor or b < 1e-6 for a, b in zip(gaps, gaps[1:]))


# --- The equations --------------------------------------------------------------------------------


def _expected(deltas_MxN, weights, p, tx, rules):
  """The master after each outer step, by whole tensors in float64."""
  params = fragments.split(_layout(), p, _fragment(p).whole.master_n)
  labels = {piece.key: piece.label for piece in _layout().fragments[p]}
  state = tx.init(params)
  for rows_MxN in deltas_MxN:
    merged = {}
    for key, rows in fragments.split(_layout(), p, np.float64(rows_MxN)).items():
      lengths_Mx1 = np.linalg.norm(rows.reshape(len(rows), -1), axis=1)[:, None]
      rule, seen = rules[labels[key]], merge.Rows(merge.shares(weights), lengths_Mx1)
      total = np.tensordot(rule.factors(seen)[:, 0], rows, 1)
      length = np.array([np.linalg.norm(total)])
      merged[key] = jnp.float32(total * rule.stretch(seen, length)[0])
    updates, state = tx.update(merged, state, params)
    params = optax.apply_updates(params, updates)
  return np.asarray(fragments.join(_layout(), p, params))


@pytest.mark.parametrize(
  'text',
  [
    'nesterov',
    'lars(learning_rate=0.1)',
    *(pytest.param(text, marks=pytest.mark.full) for text in _OUTERS if text != 'nesterov'),
  ],
)
@jax.numpy_dtype_promotion('standard')  # optax's lamb multiplies a float with an int
def test_it_is_the_rule_of_each_tensor_then_the_transform(text):
  """Also with a transform that looks at whole tensors."""
  tx, weights = outer.make(text), [3, 1, 2]
  fragment = _fragment(1, 'float32', tx, tile=96)
  steps = [_deltas(1, 3, seed=10 * k) for k in range(3)]
  for deltas_MxN in steps:
    fragment.merge(deltas_MxN, weights)
  want_N = _expected(steps, weights, 1, tx, _RULES)
  np.testing.assert_allclose(fragment.whole.master_n, want_N, rtol=1e-4, atol=1e-5)


def test_nesterov_is_the_equation_of_section_4():
  """b <- mu b + D; Theta <- Theta - lr (D + mu b), with DiLoCo's 0.7 and 0.9."""
  fragment = _fragment(0, 'float32', outer.nesterov())
  theta_N, b_N = fragment.whole.master_n, 0.0
  for seed in range(3):
    delta_N = _deltas(0, 1, seed=seed)[0]
    fragment.merge(delta_N[None], [1])
    b_N = 0.9 * b_N + delta_N
    theta_N = theta_N - 0.7 * (delta_N + 0.9 * b_N)
    np.testing.assert_allclose(fragment.whole.master_n, theta_N, rtol=1e-4, atol=1e-5)


def test_an_outer_optimizer_with_a_schedule_counts_its_steps():
  fragment = _fragment(0, tx=optax.sgd(optax.linear_schedule(1.0, 0.5, 10)), tile=96)
  fragment.merge(_deltas(0, 2), [1, 1])
  assert [int(x) for x in jax.tree.leaves(fragment.whole.tx_state)] == [1]


def test_an_outer_optimizer_may_hold_its_state_in_another_type():
  small = lambda updates, state, params: (updates, state + updates.astype(jnp.bfloat16))
  tx = optax.GradientTransformation(lambda params: params.astype(jnp.bfloat16), small)
  fragment = _fragment(0, tx=tx)
  fragment.merge(_deltas(0, 2), [1, 1])
  assert fragment.whole.tx_state.dtype == jnp.bfloat16


@codec_names
def test_cosines_are_those_of_the_tensors(name):
  fragment, deltas_MxN = _fragment(1, name, tile=96), _deltas(1, 3)
  deltas_MxN[1] += deltas_MxN[0]
  deltas_MxN[2, : deltas_MxN.shape[1] // 2] = 0
  payloads = [np.asarray(fragment.codec.encode(row_N)[0]) for row_N in deltas_MxN]
  held = [np.asarray(fragment.codec.decode(each, deltas_MxN.shape[1])) for each in payloads]
  cosines = fragment.cosines(payloads)
  for t, (_, start, stop) in enumerate(fragments.spans(_layout().fragments[1])):
    rows = np.float64(held)[:, start:stop]
    lengths_M = np.linalg.norm(rows, axis=1)
    want = rows @ rows.T / np.where(lengths_M > 0, lengths_M, np.inf)[:, None]
    want /= np.where(lengths_M > 0, lengths_M, np.inf)
    np.testing.assert_allclose(cosines[..., t], want, atol=1e-6)
  assert (cosines[2, 2] == 0).any() and cosines[0, 1].max() > 0.5


# --- The bits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'name, text, rules',
  [
    ('int8', 'nesterov', _RULES),
    pytest.param(
      'float32', 'rmsprop(learning_rate=0.05, momentum=0.9)', _RULES, marks=pytest.mark.full
    ),
    ('int8', 'nesterov', {'avg': merge.avg(), 'rda': merge.majority(agree=1.0)}),
  ],
  ids=['int8', 'float32', 'majority'],
)
def test_the_size_of_the_tiles_changes_no_bit(name, text, rules):
  """Nor do the threads: a single tile is computed by the caller; nor other devices, with payloads
  that never reach the host."""
  results = set()
  devices = jax.devices()
  for where in ({'tile': 32}, {'tile': 640}, {}, {'devices': devices[5:7]}):
    fragment = _fragment(1, name, outer.make(text), rules=rules, **where)
    steps = [fragment.merge(_deltas(1, 3, seed=10 * k), [3, 1, 2]) for k in range(2)]
    ends = [(np.asarray(stepped.delta).tobytes(), stepped.digest) for stepped in steps]
    results.add(str((ends, _bits(fragment.whole))))
  assert len(results) == 1


def test_rows_of_one_call_are_added_as_those_of_many(monkeypatch):
  results = set()
  for at_once in (outer_step.AT_ONCE, (1,)):
    monkeypatch.setattr(outer_step, 'AT_ONCE', at_once)
    fragment = _fragment(1, 'int4', tile=640)
    stepped = fragment.merge(_deltas(1, 7), np.arange(1, 8))
    results.add(str((stepped.digest, fragment.gradient.tobytes(), _bits(fragment.whole))))
  assert len(results) == 1


@codec_names
def test_the_encoded_gradient_repeats_the_outer_step_bit_for_bit(name):
  """What the log holds: one payload, whatever the number of learners."""
  fragment, again, live = _fragment(1, name), _fragment(1, name, tile=96), 0
  for seed in range(3):
    stepped = fragment.merge(_deltas(1, 3, seed=10 * seed), [3, 1, 2])
    assert fragment.gradient.nbytes == stepped.delta.nbytes
    repeated = again.redo(fragment.gradient)
    live = live or len(jax.live_arrays())
    assert len(jax.live_arrays()) <= live, 'new values are in the buffers of old ones'
    assert (repeated.digest, repeated.delta.tobytes()) == (stepped.digest, stepped.delta.tobytes())
  assert _bits(fragment.whole) == _bits(again.whole)


def test_on_devices_each_fragment_is_on_one_and_only_numbers_reach_the_host(monkeypatch):
  devices, copied = jax.devices()[4:7], []
  fragment = _fragment(1, devices=devices)
  deltas_MxN = _deltas(1, 3)
  payloads = [jax.device_put(fragment.codec.encode(row_N)[0], devices[0]) for row_N in deltas_MxN]
  fragment.step(payloads, [3, 1, 2])  # compiles
  asarray = np.asarray
  monkeypatch.setattr(np, 'asarray', lambda *args: copied.append(asarray(*args)) or copied[-1])
  stepped = fragment.step(payloads, [3, 1, 2])
  tensors = len(_layout().fragments[1])
  assert copied and max(array.size for array in copied) <= tensors < payloads[0].size / 10
  arrays = stepped.delta, fragment.gradient, *jax.tree.leaves(stepped.tiles)
  assert {device for array in arrays for device in array.devices()} == {devices[1]}


def test_padding_stays_zero():
  ones = jax.tree.map(jnp.ones_like, _tree())
  padding = np.asarray(vectors.gather(_layout(), 1, ones)) == 0
  assert padding.any()
  fragment = _fragment(1)
  fragment.merge(_deltas(1, 2) + 0.5, [1, 1])  # a learner that sends something in it
  for leaf in jax.tree.leaves(fragment.whole):
    assert not leaf[padding].any()


@pytest.mark.parametrize('values', [[0.1, np.nan], [np.inf, 0.1], [3e38, 3e38]], ids=str)
@pytest.mark.parametrize('where', [{'tile': 96}, {'devices': jax.devices()[3:4]}], ids=str)
def test_a_bad_outer_step_leaves_everything_as_it_was(values, where):
  """One NaN of one learner must not poison the model: refused, and the old state, bit for bit."""
  fragment = _fragment(0, 'float32', outer.nesterov(3.0), **where)
  fragment.merge(_deltas(0, 2), [1, 1])
  before, digest = _bits(fragment.whole), fragment.digest()
  deltas_MxN = _deltas(0, 2)
  deltas_MxN[:, -40] = values  # in one of the tiles
  payloads = [row_N.astype('<f4').view(np.uint8) for row_N in deltas_MxN]
  assert fragment.step(payloads, [1, 1]) is None
  assert (_bits(fragment.whole), fragment.digest()) == (before, digest)
  assert fragment.merge(_deltas(0, 2), [1, 1]) is not None, 'and the next one works'


def test_a_payload_of_another_size_is_refused():
  fragment = _fragment(0)
  with pytest.raises(ValueError, match='a payload has 33 bytes, fragment 0 needs'):
    fragment.lengths(np.zeros(33, np.uint8))


def test_the_syncer_leaves_xla_the_cores_that_the_tiles_do_not_use():
  code = """
import pathlib
from diloco_jax.process import syncer as syncer_process
syncer_process.prepare()
import jax.numpy as jnp
jnp.ones(8).block_until_ready()
names = [path.read_text() for path in pathlib.Path('/proc/self/task').glob('*/comm')]
print(sum('XLA' in name for name in names))
"""
  environment = {'JAX_PLATFORMS': 'cpu', 'PATH': os.environ['PATH']}
  done = subprocess.run(
    [sys.executable, '-c', code], env=environment, check=True, capture_output=True, text=True
  )
  assert int(done.stdout) == max(1, outer_step.cores() - outer_step.MOST_THREADS)


@pytest.mark.parametrize(
  'outer_spec', ['nesterov', pytest.param('lars(learning_rate=0.1)', marks=pytest.mark.full)]
)
def test_a_statistic_becomes_the_mean_of_the_learners_with_any_outer_optimizer(outer_spec):
  """A variance that falls from 1 to 0.01 does not fall below 0, as by momentum."""
  layout = fragments.make_layout(
    {'var': jnp.ones(70), 'w': jnp.ones(70)},
    1,
    lambda path: 'statistic' if 'var' in path else 'body',
  )
  rules = {'statistic': merge.avg(), 'body': merge.avg()}
  value_N = np.ones(layout.size(0), np.float32)
  fragment = one_fragment.Fragment(layout, 0, value_N, rules, outer.make(outer_spec), tile=64)
  for _ in range(3):
    var_N, w_N = np.split(np.asarray(fragment.whole.published_n), 2)
    held_N = np.concatenate([0.2 * var_N, w_N - 1.0])
    lower_N = np.concatenate([0.4 * var_N, w_N - 1.0])
    published_N = np.concatenate([var_N, w_N])
    assert fragment.merge(published_N - np.stack([held_N, lower_N]), np.ones(2))
    after_N = np.asarray(fragment.whole.published_n)
    np.testing.assert_allclose(after_N[:70], (0.3 * var_N)[:70], rtol=1e-5)
    assert not np.allclose(after_N[96:166], w_N[:70] - 1.0)
