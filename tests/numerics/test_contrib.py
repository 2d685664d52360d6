"""The battery of diloco_jax.testing for every outer optimizer, and the equations of
numerics/contrib."""

import numpy as np
import pytest

from diloco_jax import testing
from diloco_jax.numerics import merge, outer
from diloco_jax.numerics.contrib import aged


@pytest.mark.parametrize('name', outer.OUTERS)
def test_every_outer_optimizer_passes_the_battery(name):
  testing.check_outer(name)


def test_a_learner_counts_less_the_older_its_anchor_is():
  weights = lambda steps, slow: merge.token_weights(
    [100, 100, 0], steps, aged.factors(steps, 12, [slow] * 3)
  )
  np.testing.assert_array_equal(weights([12, 24, 0], False), np.float32([1, 0.5, 0]))  # the paper's
  np.testing.assert_array_equal(weights([12, 24, 0], True), np.float32([1, 0.25, 0]))
  np.testing.assert_array_equal(weights([6, 12, 0], True), np.float32([1, 0.5, 0]))  # none is old


def test_one_without_company_counts_in_full_at_any_age():
  for steps in ([0, 10**9, 0], [0, 0]):
    assert aged.factors(steps, 12, [True] * len(steps)).tolist() == [1] * len(steps)
