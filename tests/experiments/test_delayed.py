"""Delayed Nesterov momentum against its paper; the aligned one against its module's formulas."""

import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.numerics import outer
from experiments.studies.lib import aligned, arms, delayed


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


def test_aligned_nesterov_turns_what_does_not_point_with_the_momentum():
  """Against the three cases, in numpy: keep, turn, shrink."""
  b = np.array([3.0, 4.0], np.float32)
  tx = aligned.aligned_nesterov(0.5, 0.3, keep=0.5, shrink=1.0, turn=0.5)
  state = tx.init(jnp.zeros(2))
  _, state = tx.update(jnp.asarray(b), state)  # the first one stays, and is the momentum
  for degrees in (10, 80, 150):
    angle = np.arctan2(4, 3) + np.deg2rad(degrees)
    d = 2 * np.array([np.cos(angle), np.sin(angle)])
    cosine, conf, v = np.cos(np.deg2rad(degrees)), 2 / (2 + 5), b / 5
    if cosine < 0:
      expected = d - min(-cosine * conf, 1) * cosine * 2 * v
    elif cosine < 0.5:
      part = 0.5 * (1 - cosine) * conf
      mixed = (1 - part) * d / 2 + part * v
      expected = 2 * mixed / np.linalg.norm(mixed)
    else:
      expected = d
    updates, _ = tx.update(jnp.asarray(d, jnp.float32), state)
    np.testing.assert_allclose(updates, -0.5 * (expected + 0.3 * (0.3 * b + expected)), rtol=1e-5)
