"""Token weights, paper section 4."""

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.numerics import weights


def test_quantity_times_quality():
  """Section 4: w = c_tokens * (c_tokens / c_steps)."""
  got = jax.jit(weights.token_weights)(jnp.array([1000, 1000, 500]), jnp.array([10, 20, 10]))
  assert got.dtype == jnp.float32 and got.tolist() == [100000.0, 50000.0, 25000.0]


def test_absent_learners_weigh_nothing():
  got = weights.token_weights(np.array([0, 5, 0, 7]), np.array([0, 0, 3, 7]))
  assert got.tolist() == [0.0, 0.0, 0.0, 7.0]


def test_many_tokens_do_not_overflow():
  assert np.isfinite(weights.token_weights(np.array([2**60]), np.array([1]))).all()
