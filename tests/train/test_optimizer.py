"""AdamW equals optax's, with the learning rate of the clock."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco_jax.train import config as config_lib
from diloco_jax.train import optimizer as optimizer_lib

_CONFIG = config_lib.OptimizerConfig(learning_rate=0.5, warmup_steps=10, end_lr_ratio=0.1)


@pytest.mark.parametrize(
  'clock, rate',
  [
    (0, 0.05),
    (4, 0.25),
    (9, 0.5),
    (10, 0.5),
    (60, 0.275),
    (110, 0.05),
    (500, 0.05),
  ],
)
def test_rate_warms_up_and_decays(clock, rate):
  np.testing.assert_allclose(optimizer_lib.learning_rate(_CONFIG, 110, clock), rate, rtol=1e-5)


def test_without_warm_up_it_starts_at_the_peak():
  config = config_lib.OptimizerConfig(learning_rate=0.5, warmup_steps=0)
  np.testing.assert_allclose(optimizer_lib.learning_rate(config, 100, 0), 0.5)


def test_equals_optax_adamw_when_the_clock_is_the_count():
  params = {'w': jnp.linspace(-1, 1, 12).reshape(3, 4), 'b': jnp.ones(4)}
  grads = jax.tree.map(lambda leaf: 3 * leaf + 1, params)
  ours = optimizer_lib.make_optimizer(_CONFIG, 110)
  mask = {'w': True, 'b': False}
  theirs = optax.chain(
    optax.clip_by_global_norm(_CONFIG.clip_norm),
    optax.adamw(
      lambda count: optimizer_lib.learning_rate(_CONFIG, 110, count),
      b1=_CONFIG.b1,
      b2=_CONFIG.b2,
      eps=_CONFIG.eps,
      weight_decay=_CONFIG.weight_decay,
      mask=mask,
    ),
  )
  our_params = their_params = params
  our_state, their_state = ours.init(params), theirs.init(params)
  for clock in range(3):
    updates, our_state = ours.update(grads, our_state, our_params, step=jnp.int32(clock))
    our_params = optax.apply_updates(our_params, updates)
    with jax.numpy_dtype_promotion('standard'):
      updates, their_state = theirs.update(grads, their_state, their_params)
    their_params = optax.apply_updates(their_params, updates)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), our_params, their_params)


def test_the_rate_follows_the_clock_and_not_the_count():
  params = {'w': jnp.ones((2, 2))}
  tx = optimizer_lib.make_optimizer(_CONFIG, 110)
  update = lambda clock: tx.update(params, tx.init(params), params, step=jnp.int32(clock))[0]['w']
  np.testing.assert_allclose(update(60) / update(0), jnp.full((2, 2), 0.275 / 0.05), rtol=1e-5)


def test_a_run_shorter_than_its_warm_up_is_refused():
  with pytest.raises(ValueError, match='total_steps 10 .* warmup_steps 10'):
    optimizer_lib.make_optimizer(_CONFIG, 10)
