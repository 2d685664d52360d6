"""A loop makes the same bits through `join` as without it, whatever it brings (drawn_loops.py)."""

import pytest

from tests.api import drawn_loops


@pytest.mark.parametrize(
  'seed',
  [
    *range(4),
    *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 30)),
  ],
)
def test_a_drawn_loop_makes_the_bits_of_the_plain_one(seed):
  assert not drawn_loops.difference(drawn_loops.draw(seed))
