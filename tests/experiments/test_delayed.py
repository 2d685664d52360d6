"""Delayed Nesterov momentum against the algorithm of its paper."""

import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.numerics import outer
from experiments.studies.lib import arms, delayed


def _run(tx, gradients):
  params = jnp.zeros(2)
  state = tx.init(params)
  for gradient in gradients:
    updates, state = tx.update(gradient, state, params)
    params = params + updates
  return params


_GRADIENTS = np.random.default_rng(1).standard_normal((11, 2)).astype(np.float32)


@pytest.mark.parametrize('every, spread', [(2, 0.0), (3, 0.0), (3, 1.0), (4, 0.4)])
def test_delayed_nesterov_is_the_algorithm_of_the_paper(every, spread):
  """arXiv 2401.09135 with epsilon = N lr and c = spread / N."""
  lr, beta = 0.7, 0.9
  epsilon, c = every * lr, spread / every
  theta, m, delta = np.zeros(2), np.zeros(2), np.zeros(2)
  for t, g in enumerate(_GRADIENTS):
    delta = delta + g
    if (t + 1) % every == 0:
      m = beta * m + delta / every
      theta = theta - epsilon * ((1 - c * every + c) * beta * m + g / every)
      delta = np.zeros(2)
    else:
      theta = theta - epsilon * (c * beta * m + g / every)
  tx = delayed.delayed_nesterov(lr, beta, every, spread)
  np.testing.assert_allclose(_run(tx, _GRADIENTS), theta, rtol=1e-5)


@pytest.mark.parametrize('spread', [0.0, 0.7])
def test_without_a_delay_it_is_nesterov(spread):
  tx = delayed.delayed_nesterov(0.7, 0.9, every=1, spread=spread)
  np.testing.assert_allclose(
    _run(tx, _GRADIENTS), _run(outer.nesterov(0.7, 0.9), _GRADIENTS), rtol=1e-5
  )


@pytest.mark.parametrize(
  'text', ['every=0', 'every=2.5', 'spread=1.5', 'momentum=1.0', 'learning_rate=0.0']
)
def test_arguments_outside_their_range_are_refused(text):
  assert arms.outer is outer  # which registers it
  with pytest.raises(ValueError, match='every at least 1'):
    outer.make(f'delayed_nesterov({text})')
