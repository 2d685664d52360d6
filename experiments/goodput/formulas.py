"""Goodput and scavenging as formulas: pure functions of numbers, in seconds and shares.

The paper prints results of these studies, not their assumptions. What is assumed here stands in the
docstrings; constants without a source were fitted to the paper's figures (paper.py).
"""

import math

from diloco_jax.verification.sim import hardware

# --- Failures (paper section 7) -------------------------------------------------------------------


def elastic(slices: hardware.Slices) -> float:
  """Goodput of an island that goes on without its failed slices (verification/sim/hardware.py).

  With failures at rate `n / MTBI` while the island runs, 1 / (share of time it runs) is 1 plus the
  pauses per second of running: a downscale per failure, and an upscale per group of healthy slices
  that no other pause takes in before their hold-off ends. It assumes independent failures, an
  exponential recovery, and few missing slices.
  """
  rate = slices.chips / slices.mtbi_s
  down, mean = slices.downscale_s, slices.recovery_s
  early = 1 - math.exp(-down / mean)  # healthy before its own downscale ends
  alone = math.exp(-rate * slices.hold_off_s)
  runs = 1.0
  for _ in range(200):
    share = (1 - early) * runs
    pauses = rate * down + rate * slices.upscale_s * share * alone / (1 + share * (1 - alone))
    runs = (runs + 1 / (1 + pauses)) / 2
  missing = slices.chips / slices.count / slices.mtbi_s * (mean - early * down)
  return runs * (1 - missing)


def rigid(slices: hardware.Slices) -> float:
  """Goodput of a job that any failure stops for a recovery and a restart."""
  trains = slices.mtbi_s / slices.chips + slices.spared_s
  return trains / (trains + slices.recovery_s + slices.upscale_s)


# --- Scavenging -----------------------------------------------------------------------------------


def scavenged_decoupled(extra: float) -> float:
  """Time to the same tokens, as a share of that without extra compute.

  Assumes that half of the work runs with (1 + extra) times the compute, as further learners that
  cost nothing to add.
  """
  return 0.5 + 0.5 / (1 + extra)


def scavenged_elastic(extra: float) -> float:
  """The same for elastic data-parallel training.

  Assumes that the half of the work with extra compute pays an overhead for changes of membership,
  `1.41 * (1 - exp(-extra / 0.665))`, fitted to the paper's five figures.
  """
  overhead = 1.41 * (1 - math.exp(-extra / 0.665))
  return 0.5 + (1 + overhead) / (2 * (1 + extra))
