"""Payloads that come many versions late: merge them, or drop their steps (late.md)."""

from diloco_jax.verification.virtual import conditions
from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

STEPS = 600
LIMITS = ((1, 2), (2, 4), (4, 8))  # max_staleness, max_misses; the first are the defaults
LATENCIES = (1.0, 8.0, 15.0)  # one way, in inner steps; H = 12


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """At a latency of a step no payload comes more than a version late, so only the defaults run."""
  del book
  return [
    arms.decoupled(
      'late',
      f'latency {latency:g}, max_staleness={staleness}, max_misses={misses}',
      quick,
      steps=STEPS,
      against=f'latency {latency:g}, max_staleness=1, max_misses=2',
      where={
        'hardware': conditions.Hardware(lognormal=0.3, merge=0.05),
        'network': conditions.Network(latency=latency, up=0.3, down=0.3),
      },
      max_staleness=staleness,
      max_misses=misses,
    )
    for latency in (LATENCIES[1:2] if quick else LATENCIES)
    for staleness, misses in (LIMITS[:1] if latency <= 1 else LIMITS[: 2 if quick else None])
  ]


STUDY = study_lib.Study(name='late', title='Payloads that come many versions late', plan=plan)
