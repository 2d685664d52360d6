"""Properties of the decoder at any size."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.train import config as train_config
from diloco_jax.train import decoder


def _draw(model: train_config.ModelConfig, batch: int = 2, length: int = 12):
  params = jax.tree.map(jnp.asarray, decoder.initial_params(model, seed=0))
  tokens = np.random.default_rng(0).integers(0, 256, (batch, length)).astype(np.int32)
  return params, jnp.asarray(tokens)


def _apply(model: train_config.ModelConfig, params, tokens):
  return jax.jit(lambda p, t: decoder.apply(model, p, t))(params, tokens)


def test_it_starts_at_the_loss_of_a_uniform_guess_and_every_parameter_learns(model):
  model.tied_head = False
  params, tokens = _draw(model, batch=16, length=33)
  loss, grads = jax.jit(jax.value_and_grad(lambda p: decoder.loss(model, p, tokens)))(params)
  assert abs(float(loss) - math.log(256)) < 0.1
  for path, grad in jax.tree_util.tree_leaves_with_path(grads):
    assert grad.dtype == jnp.float32, path
    assert float(jnp.max(jnp.abs(grad))) > 0, path


def test_bfloat16_activations_stay_close(model):
  params, tokens = _draw(model)
  exact = _apply(model, params, tokens)
  model.dtype = 'bfloat16'
  rough = _apply(model, params, tokens)
  assert rough.dtype == jnp.float32
  np.testing.assert_allclose(rough, exact, atol=0.05)


def test_logits_stay_below_the_softcap(model):
  model.logit_softcap = 2.0
  params, tokens = _draw(model)
  params['final_norm'] = params['final_norm'] + 1e4
  logits = _apply(model, params, tokens)
  assert 1.9 < float(jnp.max(jnp.abs(logits))) <= 2.0


def test_rope_scores_depend_on_distance_only(model):
  rng = np.random.default_rng(0)
  query_H, key_H = (jnp.asarray(rng.normal(size=8), jnp.float32) for _ in range(2))
  sin_LxH, cos_LxH = decoder._rope_table(model, 10, model.rope_theta)
  turn = lambda v_H: decoder._rope(
    jnp.broadcast_to(v_H[None, None, None, :], (1, 10, 1, 8)), sin_LxH, cos_LxH
  )[0, :, 0]
  score_LxL = np.asarray(turn(query_H) @ turn(key_H).T)
  for offset in range(-9, 10):
    diagonal = np.diagonal(score_LxL, offset)
    np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
  assert np.std(score_LxL[0]) > 0.1
