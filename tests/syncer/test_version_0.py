"""The first version of the global model has the bits of the initial values, without subnormals."""

import jax.numpy as jnp
import numpy as np

from diloco_jax.configs import own_loop
from diloco_jax.numerics import codecs
from diloco_jax.process import own_model
from diloco_jax.syncer import global_model
from tests.numerics import vectors


def test_version_0_is_the_canonical_gathered_tree():
  rng = np.random.default_rng(0)
  w = rng.standard_normal((40, 33)) * 2.0 ** rng.integers(-148, 5, (40, 33))
  w[0, 0] = -0.0
  half = jnp.asarray(rng.standard_normal((16, 5)), jnp.bfloat16)
  params = {'w': w.astype(np.float32), 'b': np.ones(7, np.float32), 'half': half}
  config = own_loop.get_config()
  config.sync.fragments, config.sync.period, config.sync.overlap = 2, 2, 0
  assembled = own_model.complete(own_model.describe(params, lambda name: 'body'), config)
  theta = global_model.Theta(assembled)
  for p in range(2):
    expected = codecs.canonical(vectors.gather(assembled.layout, p, assembled.init()))
    published = theta._tiles.join(p, theta._whole()[p]).published_n
    np.testing.assert_array_equal(published.view(np.uint32), np.asarray(expected).view(np.uint32))
    assert (published == 0).sum() > 100
