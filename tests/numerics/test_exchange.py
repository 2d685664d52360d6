"""The exchange of one fragment: learner and syncer hold the same bits, and nothing is lost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco_jax.numerics import codecs, digest, exchange, fragments, merge, outer
from tests.numerics import codecs_numpy

_P = 2


def _tree(seed=0):
  rng = np.random.default_rng(seed)
  normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
  layer = lambda: {'w': normal(16, 24), 'scale': normal(24)}
  return {'embed': normal(48, 16), 'layers': [layer(), layer(), layer()], 'gain': normal()}


def _label(path):
  return 'avg' if 'embed' in path else 'rda'


@functools.cache
def _layout():
  return fragments.make_layout('balanced', _tree(), _P, _label)


@functools.cache
def _outer(lr=0.7, momentum=0.9, rule='by_label'):
  rules = {'avg': merge.avg(), 'rda': merge.rda()}
  chosen = merge.by_label(rules, fragments.labels(_layout())) if rule == 'by_label' else rules[rule]
  tx = outer.nesterov(lr, momentum) if momentum else optax.sgd(lr)
  return outer.outer_optimizer(chosen, tx)


_pseudo_gradient = jax.jit(exchange.pseudo_gradient, static_argnums=(0, 1, 2))
_adopt = jax.jit(exchange.adopt, static_argnums=(0, 1, 5))
_apply_delta = jax.jit(exchange.apply_delta, static_argnums=0)
_outer_step = jax.jit(exchange.outer_step, static_argnums=(0, 1, 2, 3, 4))


def _start(p, codec='int8', **settings):
  """(codec, outer optimizer, master, published, optimizer state) at version 0."""
  outer_opt = _outer(**settings)
  master_N = codecs.canonical(fragments.gather(_layout(), p, _tree()))
  state = exchange.init_outer(_layout(), p, outer_opt, master_N)
  return codecs.get(codec), outer_opt, master_N, master_N, state


def _payloads(codec, p, anchor_N, learners, scale=0.01):
  """Learners that moved away from the anchor by random steps."""
  rows = []
  for m in range(learners):
    moved = jax.tree.map(lambda x: scale * x, _tree(100 + m))
    local = fragments.gather(_layout(), p, moved) + anchor_N
    data, ok = _pseudo_gradient(
      _layout(), p, codec, fragments.scatter(_layout(), p, _tree(), local), anchor_N
    )
    assert ok
    rows.append(data)
  return jnp.stack(rows)


@pytest.mark.parametrize(
  'name, p', [('float32', 0), ('bfloat16', 1), ('int8', 0), ('int8', 1), ('int4', 1)]
)
def test_learner_and_syncer_hold_the_same_bits_version_after_version(name, p):
  codec, outer_opt, master_N, published_N, state = _start(p, name)
  params, anchor_N = _tree(), published_N
  for _version in range(3):
    payloads = _payloads(codec, p, anchor_N, 3)
    weights = jnp.float32([3, 1, 2])
    result = _outer_step(
      _layout(), p, outer_opt, codec, codec, master_N, published_N, state, payloads, weights
    )
    assert result.ok and result.norm > 0
    assert result.delta_bytes.shape == (codec.encoded_size(_layout().size(p)),)
    learner_N, learner_digest = _apply_delta(codec, anchor_N, result.delta_bytes)
    np.testing.assert_array_equal(
      np.asarray(learner_N).view(np.uint32), np.asarray(result.published_N).view(np.uint32)
    )
    assert learner_digest.tolist() == result.digest.tolist()
    assert learner_digest.tolist() == codecs_numpy.digest(np.asarray(learner_N)).tolist()
    params, anchor_N = _adopt(_layout(), p, params, anchor_N, learner_N)
    np.testing.assert_array_equal(fragments.gather(_layout(), p, params), result.published_N)
    master_N, published_N, state = result.master_N, result.published_N, result.opt_state


def test_the_numpy_twins_follow_the_published_value():
  """A host without a device can apply deltas: the arithmetic is one exact product and one sum."""
  codec, outer_opt, master_N, published_N, state = _start(0)
  payloads = _payloads(codec, 0, published_N, 2)
  result = _outer_step(
    _layout(), 0, outer_opt, codec, codec, master_N, published_N, state, payloads, jnp.ones(2)
  )
  decoded = codecs_numpy.TWINS['int8'].decode(np.asarray(result.delta_bytes), published_N.size)
  np.testing.assert_array_equal(result.published_N, np.asarray(published_N) + decoded)


@pytest.mark.parametrize('name', ['int8', 'int4'])
def test_error_feedback_keeps_the_codecs_error_in_the_master(name):
  """Error feedback: with no further outer gradients, published converges to the master."""
  codec, outer_opt, master_N, published_N, state = _start(0, name, momentum=0)
  n = _layout().size(0)
  payloads = _payloads(codec, 0, published_N, 2)
  gaps = []
  for _ in range(4):
    result = _outer_step(
      _layout(), 0, outer_opt, codec, codec, master_N, published_N, state, payloads, jnp.ones(2)
    )
    master_N, published_N, state = result.master_N, result.published_N, result.opt_state
    gaps.append(float(jnp.max(jnp.abs(master_N - published_N))))
    payloads = jnp.zeros((2, codec.encoded_size(n)), jnp.uint8)  # present, but did not move
  assert gaps[0] > 0 and all(b <= a / 4 or b < 1e-6 for a, b in zip(gaps, gaps[1:]))


def test_averaging_losslessly_with_rate_one_is_the_mean_of_the_learners():
  codec, outer_opt, master_N, published_N, state = _start(
    0, 'float32', lr=1.0, momentum=0, rule='avg'
  )
  moved = [0.01 * fragments.gather(_layout(), 0, _tree(m)) for m in (7, 8)]
  locals_MxN = jnp.stack([published_N + step_N for step_N in moved])
  payloads = jnp.stack([codec.encode(published_N - local_N)[0] for local_N in locals_MxN])
  result = _outer_step(
    _layout(), 0, outer_opt, codec, codec, master_N, published_N, state, payloads, jnp.ones(2)
  )
  np.testing.assert_allclose(result.published_N, jnp.mean(locals_MxN, 0), atol=1e-6)


@pytest.mark.parametrize('present, learners', [([0, 1, 2], 4), ([1, 2, 4], 5)])
def test_absent_learners_change_no_bit_of_the_outer_step(present, learners):
  codec, outer_opt, master_N, published_N, state = _start(1)
  payloads, weights = _payloads(codec, 1, published_N, 3), jnp.float32([3, 1, 2])
  padded = jnp.zeros((learners, payloads.shape[1]), jnp.uint8).at[jnp.array(present)].set(payloads)
  padded_weights = jnp.zeros(learners).at[jnp.array(present)].set(weights)
  step = functools.partial(_outer_step, _layout(), 1, outer_opt, codec, codec)
  jax.tree.map(
    np.testing.assert_array_equal,
    step(master_N, published_N, state, payloads, weights),
    step(master_N, published_N, state, padded, padded_weights),
  )


def test_padding_stays_zero():
  codec, outer_opt, master_N, published_N, state = _start(1)
  ones = jax.tree.map(jnp.ones_like, _tree())
  padding = np.asarray(fragments.gather(_layout(), 1, ones)) == 0
  assert padding.any()
  payloads = _payloads(codec, 1, published_N, 2)
  result = _outer_step(
    _layout(), 1, outer_opt, codec, codec, master_N, published_N, state, payloads, jnp.ones(2)
  )
  for values in (codec.decode(payloads[0], published_N.size), result.master_N, result.published_N):
    assert not np.asarray(values)[padding].any()


@pytest.mark.parametrize('case', ['nan payload', 'no weight', 'too large'])
def test_a_bad_outer_step_leaves_everything_as_it_was(case):
  """One NaN of one learner must not poison the model: not ok, and the old state, bit for bit."""
  codec, outer_opt, master_N, published_N, state = _start(0, 'float32', lr=3.0)
  n, weights = published_N.size, jnp.ones(2)
  values = {'nan payload': [0.1, np.nan], 'no weight': [0.1, 0.1], 'too large': [3e38, 3e38]}[case]
  payloads = np.stack([np.full(n, v, '<f4').view(np.uint8) for v in values])
  if case == 'no weight':
    weights = jnp.zeros(2)
  result = _outer_step(
    _layout(), 0, outer_opt, codec, codec, master_N, published_N, state, payloads, weights
  )
  assert not result.ok
  jax.tree.map(np.testing.assert_array_equal, result[:3], (master_N, published_N, state))
  assert result.digest.tolist() == codecs_numpy.digest(np.asarray(published_N)).tolist()


def test_an_outer_optimizer_with_a_schedule_counts_its_steps():
  codec, _, master_N, published_N, _ = _start(0)
  outer_opt = outer.outer_optimizer(merge.avg(), optax.sgd(optax.linear_schedule(1.0, 0.5, 10)))
  state = exchange.init_outer(_layout(), 0, outer_opt, master_N)
  payloads = _payloads(codec, 0, published_N, 2)
  result = _outer_step(
    _layout(), 0, outer_opt, codec, codec, master_N, published_N, state, payloads, jnp.ones(2)
  )
  assert result.ok and [int(x) for x in jax.tree.leaves(result.opt_state)] == [1]


def test_a_learner_that_diverged_does_not_get_an_ok_payload():
  params = _tree()
  anchor_N = fragments.gather(_layout(), 0, params)
  broken = fragments.scatter(_layout(), 0, params, anchor_N.at[3].set(jnp.nan))
  for name in codecs.CODECS:
    assert not _pseudo_gradient(_layout(), 0, codecs.get(name), broken, anchor_N)[1]


def test_the_pseudo_gradient_is_anchor_minus_local():
  params = _tree()
  anchor_N = fragments.gather(_layout(), 0, params) + 0.5
  data, ok = _pseudo_gradient(_layout(), 0, codecs.get('float32'), params, anchor_N)
  delta_N = codecs.get('float32').decode(data, anchor_N.size)
  np.testing.assert_allclose(delta_N, 0.5, atol=1e-6)


def test_adopt_overwrites_or_mixes_its_fragment_only():
  params = _tree()
  local_N = fragments.gather(_layout(), 1, params)
  published_N = local_N + 1.0
  for alpha in (0.0, 0.25):
    new, anchor_N = _adopt(_layout(), 1, params, local_N, published_N, alpha)
    want = (1 - alpha) * published_N + alpha * local_N
    real = np.asarray(fragments.gather(_layout(), 1, jax.tree.map(jnp.ones_like, params))) == 1
    np.testing.assert_allclose(fragments.gather(_layout(), 1, new)[real], want[real], rtol=1e-6)
    np.testing.assert_array_equal(anchor_N, published_N)
    np.testing.assert_array_equal(
      fragments.gather(_layout(), 0, new), fragments.gather(_layout(), 0, params)
    )


def test_adopt_refuses_a_bad_alpha_or_anchor():
  params = _tree()
  flat_N = fragments.gather(_layout(), 0, params)
  with pytest.raises(ValueError, match='alpha is 1.0'):
    exchange.adopt(_layout(), 0, params, flat_N, flat_N, 1.0)
  with pytest.raises(ValueError, match='different layouts'):
    exchange.adopt(_layout(), 0, params, flat_N[:32], flat_N)


def test_a_published_value_can_be_sent_whole_without_loss():
  """A learner of another version gets the value whole: float32 keeps canonical values exactly."""
  values = codecs.canonical(jnp.float32([1e-40, -0.0, 1e-30, -3.5] * 8))
  codec = codecs.get('float32')
  data, _ = codec.encode(values)
  assert digest.digest(codec.decode(data, 32)).tolist() == digest.digest(values).tolist()


def test_cancellation_into_subnormals_publishes_zero():
  """Where A + D(bytes) is subnormal some backends keep it and some do not; published is +0."""
  codec = codecs.get('float32')
  anchor_N = jnp.full(32, 1.5 * 2.0**-126, jnp.float32)
  data, ok = codec.encode(jnp.full(32, -1.25 * 2.0**-126, jnp.float32))
  published_N, _ = _apply_delta(codec, anchor_N, data)
  assert ok and not np.asarray(published_N).view(np.uint32).any()


# --- Rebase ---------------------------------------------------------------------------------------

_rebase = jax.jit(exchange.rebase, static_argnums=(0, 1, 2))


def _local(p, params):
  return fragments.gather(_layout(), p, params)


def _capture(codec, p, params, anchor_N):
  data, ok = _pseudo_gradient(_layout(), p, codec, params, anchor_N)
  assert ok
  return data


@pytest.mark.parametrize('name', ['float32', 'int8', 'int4'])
@pytest.mark.parametrize('merged', [True, False])
def test_rebase_carries_on_exactly_what_the_published_value_does_not_contain(name, merged):
  """theta' - A' = theta - A + c, with c the decoded capture if it was merged, else 0."""
  p, codec = 1, codecs.get(name)
  anchor_N = _local(p, _tree())
  params = jax.tree.map(lambda x, y: x + 0.01 * y, _tree(), _tree(1))
  capture = _capture(codec, p, params, anchor_N)
  trained_on = jax.tree.map(lambda x, y: x + 0.003 * y, params, _tree(2))
  published_N = anchor_N + 0.02 * _local(p, _tree(3))
  after, new_anchor_N = _rebase(
    _layout(), p, codec, trained_on, anchor_N, published_N, capture, jnp.bool_(True), merged
  )
  contained_N = codec.decode(capture, anchor_N.shape[0]) if merged else 0.0
  carried_N = _local(p, trained_on) - anchor_N + contained_N
  np.testing.assert_array_equal(new_anchor_N, published_N)
  np.testing.assert_allclose(_local(p, after) - published_N, carried_N, atol=1e-6)
  other = 1 - p
  np.testing.assert_array_equal(_local(other, after), _local(other, trained_on))


def test_rebase_that_keeps_nothing_is_the_published_value():
  p, codec = 0, codecs.get('int8')
  anchor_N = _local(p, _tree())
  capture = _capture(codec, p, _tree(1), anchor_N)
  published_N = _local(p, _tree(3))
  for merged in (True, False):
    after, _ = _rebase(
      _layout(), p, codec, _tree(1), anchor_N, published_N, capture, jnp.bool_(False), merged
    )
    np.testing.assert_array_equal(_local(p, after), published_N)


@pytest.mark.parametrize('name', ['float32', 'int8', 'int4'])
def test_no_step_is_lost_or_counted_twice_in_many_rounds(name):
  """The merged captures and what is left are the inner steps, whatever the published values and
  the codec's errors are (error feedback upward); every third capture is late."""
  p, codec = 1, codecs.get(name)
  params, anchor_N = _tree(), _local(p, _tree())
  size = anchor_N.shape[0]
  steps_N, merged_N, left = jnp.zeros(size), jnp.zeros(size), []
  for turn in range(12):
    for part in (0, 1):  # before the capture, and until the adoption
      update = jax.tree.map(lambda x: 0.01 * x, _tree(10 * turn + part))
      params = jax.tree.map(jnp.add, params, update)
      steps_N += _local(p, update)
      if part == 0:
        capture = _capture(codec, p, params, anchor_N)
    merged = turn % 3 != 2
    published_N = anchor_N + 0.05 * _local(p, _tree(1000 + turn))
    params, anchor_N = _rebase(
      _layout(), p, codec, params, anchor_N, published_N, capture, jnp.bool_(True), merged
    )
    if merged:
      merged_N += codec.decode(capture, size)
    left.append(float(jnp.abs(_local(p, params) - anchor_N).max()))
    np.testing.assert_allclose(_local(p, params) - anchor_N, steps_N + merged_N, atol=2e-5)
  assert max(left[-3:]) < 2 * max(left[:3]), 'the codec errors do not pile up'
