"""The splash kernel, interpreted, computes what JAX's own attention does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.train import attention


@pytest.mark.parametrize('window', [0, 100])
def test_splash_is_the_plain_form(window):
  rng = np.random.default_rng(0)
  query, key, value = (
    jnp.asarray(rng.standard_normal((1, 256, heads, 128), np.float32)) for heads in (4, 2, 2)
  )
  weights = jnp.asarray(rng.standard_normal(query.shape, np.float32))

  def value_and_gradient(function, **kwargs):
    mixed = lambda *arrays: function(*arrays, window=window, **kwargs)
    gradient = jax.grad(lambda *arrays: jnp.sum(mixed(*arrays) * weights), argnums=(0, 1, 2))
    return jax.jit(lambda *arrays: (mixed(*arrays), gradient(*arrays)))(query, key, value)

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5),
    value_and_gradient(attention.splash, interpret=True),
    value_and_gradient(attention.attention),
  )
