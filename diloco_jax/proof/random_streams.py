"""Random numbers that repeat from a seed: a stream of its own for every use."""

import random


def random_stream(seed: int, *names: str) -> random.Random:
  """A random stream of its own for every use: what one policy draws more or less of does not move
  the faults that another meets (common random numbers)."""
  return random.Random('/'.join((str(seed), *names)))


def chance(draw: random.Random, permille: int) -> bool:
  """True in `permille` of 1000 cases; draws nothing if it cannot be."""
  return permille > 0 and draw.randrange(1000) < permille
