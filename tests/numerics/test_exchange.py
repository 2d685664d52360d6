"""The exchange of one fragment on a learner: nothing is lost. The syncer's half:
tests/syncer/test_outer_step.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.numerics import codecs, exchange, fragments
from tests.numerics import vectors

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
  return fragments.make_layout(_tree(), _P, _label)


_jit_pseudo_gradient = jax.jit(exchange.pseudo_gradient, static_argnums=(0, 1), donate_argnums=2)
_jit_adopt = jax.jit(exchange.adopt, static_argnums=(0, 1, 2))
_apply_delta = jax.jit(exchange.apply_delta, static_argnums=0)


def _pseudo_gradient(p, codec, params, anchor_N):
  data = jnp.full(codec.encoded_size(anchor_N.shape[0]), 0xAB, jnp.uint8)  # of another payload
  return _jit_pseudo_gradient(
    _layout().fragments[p], codec, data, fragments.by_path(params), anchor_N
  )


def _adopt(p, codec, params, anchor_N, published_N, capture, merged=True, keep=True):
  """The parameters with a value adopted that came whole."""
  value = exchange.Adoption(
    published_N, jnp.zeros_like(capture), capture, jnp.bool_(merged), jnp.bool_(keep)
  )
  leaves = fragments.by_path(params)
  adopted = _jit_adopt(_layout().fragments[p], codec, codec, leaves, anchor_N, value)
  return jax.tree.unflatten(jax.tree.structure(params), [adopted[path] for path in leaves])


def _broken(params):
  return params | {'embed': params['embed'].at[3].set(jnp.nan)}


def test_a_learner_that_diverged_does_not_get_an_ok_payload():
  params = _tree()
  anchor_N = vectors.gather(_layout(), 0, params)
  for name in codecs.CODECS:
    assert not _pseudo_gradient(0, codecs.get(name), _broken(params), anchor_N)[1]


@pytest.mark.parametrize('name', codecs.CODECS)
def test_the_loop_of_a_tpu_makes_the_bytes_of_the_whole(name, monkeypatch):
  codec, params = codecs.get(name), jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), _tree())
  anchor_N = vectors.gather(_layout(), 0, _tree(1))
  whole, ok = _pseudo_gradient(0, codec, params, anchor_N)
  turns = []

  def on_tpu(*operands, tpu, default):
    turns.append(operands[0].shape)
    return tpu(*operands)

  monkeypatch.setattr(jax.lax, 'platform_dependent', on_tpu)
  monkeypatch.setattr(exchange, '_AT_ONCE', 160)
  encode = lambda data, *held: exchange.pseudo_gradient(_layout().fragments[0], codec, data, *held)
  data, still_ok = jax.jit(encode)(jnp.zeros_like(whole), fragments.by_path(params), anchor_N)
  np.testing.assert_array_equal(data, whole)
  assert ok and still_ok and turns
  assert not jax.jit(encode)(data, fragments.by_path(_broken(params)), anchor_N)[1]


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize('merged', [True, False])
def test_the_rounding_of_an_adopted_value_is_no_training(dtype, merged):
  codec, params = codecs.get('float32'), jax.tree.map(lambda leaf: leaf.astype(dtype), _tree())
  value_N = vectors.gather(_layout(), 0, _tree(1))
  value_N *= jnp.exp2(jnp.arange(len(value_N), dtype=jnp.float32) % 30 - 28)  # some are subnormal
  zeros, _ = codec.encode(jnp.zeros_like(value_N))
  adopted = _adopt(0, codec, params, value_N, value_N, zeros, keep=False)
  data, ok = _pseudo_gradient(0, codec, adopted, value_N)
  assert ok and not np.any(codec.decode(data, len(value_N)))
  again = _adopt(0, codec, adopted, value_N, 2 * value_N, data, merged=merged)
  np.testing.assert_array_equal(
    vectors.gather(_layout(), 0, again), (2 * value_N).astype(dtype).astype(jnp.float32)
  )


def test_adopt_refuses_a_bad_anchor():
  codec, params = codecs.get('int8'), _tree()
  flat_N = vectors.gather(_layout(), 0, params)
  capture, _ = codec.encode(flat_N)
  with pytest.raises(ValueError, match='different layouts'):
    _adopt(0, codec, params, flat_N[:32], flat_N, capture)


def test_a_delta_is_adopted_as_the_value_that_it_makes():
  """theta and the new anchor come from two functions: they contain the same published value."""
  codec, params = codecs.get('int8'), _tree()
  for p in range(_P):
    anchor_N = vectors.gather(_layout(), p, params)
    data, _ = codec.encode(0.1 * vectors.gather(_layout(), p, _tree(1)))
    published_N, _ = _apply_delta(codec, anchor_N, data)
    value = exchange.Adoption(anchor_N, data, data, jnp.bool_(False), jnp.bool_(False))
    leaves = fragments.by_path(params)
    new = _jit_adopt(_layout().fragments[p], codec, codec, leaves, anchor_N, value)
    for piece, start, stop in fragments.spans(_layout().fragments[p]):
      row_n = fragments.flat(piece, fragments.rows(new, piece))
      np.testing.assert_array_equal(row_n[: piece.size], published_N[start:stop][: piece.size])


def test_cancellation_into_subnormals_publishes_zero():
  """Where A + D(bytes) is subnormal some backends keep it and some do not; published is +0."""
  codec = codecs.get('float32')
  anchor_N = jnp.full(32, 1.5 * 2.0**-126, jnp.float32)
  data, ok = codec.encode(jnp.full(32, -1.25 * 2.0**-126, jnp.float32))
  published_N, _ = _apply_delta(codec, anchor_N, data)
  assert ok and not np.asarray(published_N).view(np.uint32).any()


# --- Rebase ---------------------------------------------------------------------------------------


def _local(p, params):
  return vectors.gather(_layout(), p, params)


@pytest.mark.parametrize('name', ['float32', 'int8', 'int4', 'int2'])
def test_no_step_is_lost_or_counted_twice_in_many_rounds(name):
  """theta' - A' = theta - A + c, with c the decoded capture if it was merged, else 0: so the merged
  captures and what is left are the inner steps, whatever the published values and the codec's
  errors are (error feedback upward); every third capture is late."""
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
        capture, ok = _pseudo_gradient(p, codec, params, anchor_N)
        assert ok
    merged = turn % 3 != 2
    published_N = anchor_N + 0.05 * _local(p, _tree(1000 + turn))
    other_N = _local(1 - p, params)
    params = _adopt(p, codec, params, anchor_N, published_N, capture, merged)
    np.testing.assert_array_equal(_local(1 - p, params), other_N)
    anchor_N = published_N
    if merged:
      merged_N += codec.decode(capture, size)
    left.append(float(jnp.abs(_local(p, params) - anchor_N).max()))
    np.testing.assert_allclose(_local(p, params) - anchor_N, steps_N + merged_N, atol=2e-5)
  assert max(left[-3:]) < 2 * max(left[:3]), 'the codec errors do not pile up'


def test_a_statistic_is_adopted_as_it_is():
  """The steps since the capture, carried onto a lower value, would make a variance negative."""
  pieces, codec = (fragments.Piece('0', 0, 4, (4,), fragments.STATISTIC),), codecs.get('float32')
  flat_N = lambda value: jnp.full(32, value, jnp.float32)
  capture, _ = codec.encode(flat_N(0.1))
  value = exchange.Adoption(
    flat_N(0.2), jnp.zeros_like(capture), capture, jnp.bool_(True), jnp.bool_(True)
  )
  local = {'0': jnp.full(4, 0.01)}  # 0.9 at the capture
  adopted = exchange.adopt(pieces, codec, codec, local, flat_N(1.0), value)
  np.testing.assert_array_equal(adopted['0'], np.full(4, 0.2, np.float32))
