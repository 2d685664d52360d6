"""Random streams that follow from a seed: each use has its own."""

import random


def random_stream(seed: int, *names: str) -> random.Random:
  """The random stream of one use: a policy that draws more or less does not change the faults that
  another use draws (common random numbers)."""
  return random.Random('/'.join((str(seed), *names)))


def chance(draw: random.Random, permille: int) -> bool:
  """True in `permille` of 1000 cases; if `permille` is 0 it does not draw."""
  return permille > 0 and draw.randrange(1000) < permille
