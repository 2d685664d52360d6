"""What is merged, and when: the protocol alone, without arrays (schedule.md)."""

import dataclasses
from typing import Any

from diloco_jax.verification.virtual import conditions
from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

PAPER = {'adopt': 'overwrite', 'overlap': 2, 'ahead': 0}
NOISE = (0.1, 0.3)


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """In seconds each: the studies with arrays have these schedules."""
  del book
  made = [arm('M=4, usual conditions', {}), arm("M=4, usual conditions, the paper's rule", PAPER)]
  far = conditions.Network(latency=1.0, up=0.3, down=0.3)
  for sigma in NOISE:
    where = {'hardware': conditions.Hardware(lognormal=sigma, merge=0.05), 'network': far}
    for text, sync in (
      ("the paper's rule", PAPER),
      ('tau=3, ahead=1', {}),
      ('tau=4, ahead=2', {'overlap': 4, 'ahead': 2}),
      ('tau=4, ahead=3', {'overlap': 4, 'ahead': 3}),
    ):
      made.append(arm(f'M=4, latency of a step, noise {sigma}, {text}', sync, where=where))
  for sigma in (0.02, *NOISE):
    where = conditions.delays('wan', step_s=1.0, lognormal=sigma)
    for text, sync in (
      ("the paper's rule", PAPER),
      ('tau=2', {'overlap': 2}),
      ('tau=3', {}),
    ):
      made.append(arm(f'M=8, wan, noise {sigma}, {text}', sync, 8, 24, where))
  mixed: dict[str, Any] = {'slowness': (1.0, 1.18), 'gaussian': 0.1, 'step_s': 1.0}
  for delays in ('lan', 'wan'):
    where = conditions.delays(delays, **mixed)
    for text, sync in (
      ('K=8, tau=0', {'quorum': 8, 'overlap': 0}),
      ('K=1', {'gamma': 0.0}),
      ('K=1 with grace', {}),
    ):
      made.append(arm(f'4 + 4 at 1.18, {delays}, {text}', sync, 8, 24, where))
  return [short(one) for one in made[::4]] if quick else made


def arm(
  name: str,
  sync: dict[str, Any],
  learners: int = 4,
  period: int = 12,
  where: dict[str, Any] | None = None,
) -> arms.Arm:
  """P=H."""
  sync = {'fragments': period, 'period': period} | sync
  made = arms.decoupled('schedule', name, False, learners=learners, where=where, **sync)
  return dataclasses.replace(made, kind='schedule')


def short(made: arms.Arm) -> arms.Arm:
  made.config.train.steps = 100
  return made


STUDY = study_lib.Study(name='schedule', title='What is merged, and when', plan=plan)
