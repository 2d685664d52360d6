"""The cost of delays in loss, from the runs of a study (docs/studies/scale/delays.md).

A delay of a kind costs a share of the loss that falls with the length and the size of a run:

  cost = c strength^a (T / 1000)^b (N / 100,000)^d

strength: of a latency the inner steps that a message takes one way, of thin links the time of a
payload over the time until the next one is due; an outage is of a tenth of the run. T: inner steps;
N: parameters.
"""

import math
from typing import NamedTuple

LEAST_PERIODS = 6  # in a run; with fewer of them no law holds


class Law(NamedTuple):
  """A line through the logarithms of the runs.

  Attributes:
    line: ln c, a, b, d.
    uncertain: the inverse of the normal matrix of its fit, 4 x 4.
    spread: of a run from the line, times the quantile of a 95 % interval.
  """

  line: tuple[float, ...]
  uncertain: tuple[tuple[float, ...], ...]
  spread: float


# python -m experiments.studies.run --study=scale.delays; a test compares them with its rows.
LAWS = {
  'latency': Law(
    (-4.8507, 0.803, -0.3783, -0.2942),
    (
      (0.3282, -0.1443, 0.1227, 0.0402),
      (-0.1443, 0.1041, 0.0, 0.0),
      (0.1227, 0.0, 0.2135, 0.0032),
      (0.0402, 0.0, 0.0032, 0.1903),
    ),
    0.6477,
  ),
  'thin': Law(
    (-4.2132, 1.0445, -0.6188, -0.1436),
    (
      (0.8169, -0.403, 0.3218, 0.1327),
      (-0.403, 0.2449, -0.1224, -0.0101),
      (0.3218, -0.1224, 0.2738, 0.0105),
      (0.1327, -0.0101, 0.0105, 0.337),
    ),
    0.2694,
  ),
  'outage': Law(
    (-4.6235, 0.0, -0.1261, -0.0995),
    (
      (0.2565, 0.0, 0.2454, 0.0803),
      (0.0, 0.0, 0.0, 0.0),
      (0.2454, 0.0, 0.4269, 0.0064),
      (0.0803, 0.0, 0.0064, 0.3806),
    ),
    0.3949,
  ),
}


class Cost(NamedTuple):
  """By what share the loss is higher: the mean, and the ends of its 95 % interval for a run."""

  mean: float
  low: float
  high: float


def terms(strength: float, steps: int, parameters: float) -> tuple[float, ...]:
  """The regressors of a law."""
  return 1.0, math.log(strength), math.log(steps / 1_000), math.log(parameters / 100_000)


def expected(law: Law, strength: float, steps: int, parameters: float) -> Cost:
  """The expected cost of a delay in a run. Far from the runs of the study the interval is wide.

  >>> law = Law((math.log(0.05), 1, 0, 0), ((0,) * 4,) * 4, math.log(2))
  >>> [round(one, 3) for one in expected(law, 2, 1_000, 1e5)]
  [0.1, 0.05, 0.2]
  """
  x = terms(strength, steps, parameters)
  middle = sum(weight * of for weight, of in zip(law.line, x, strict=True))
  apart = sum(value * row[n] * x[n] for value, row in zip(x, law.uncertain) for n in range(len(x)))
  wide = law.spread * math.sqrt(1 + apart)
  return Cost(*(math.exp(end) for end in (middle, middle - wide, middle + wide)))
