"""The syncer is away for many periods, or a learner, or all learners stand still (faults.md)."""

import pathlib

from diloco_jax.verification import plans
from diloco_jax.verification.virtual import conditions
from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

# Periods away, and the steps of the run. The outage begins after a third of them.
AWAY = {3: 600, 10: 600, 40: 1500, 150: 3600, 500: 12_000}
APART = 500  # after so many the run goes on from one learner: of the syncer alone
QUICK = {10: 300}
PERIOD = 12
CASES = {  # which nodes, and what happens to them
  'syncer killed': ((plans.SYNCER,), 'kill'),
  'l3 cut off': (('l3',), 'partition'),
  'all learners frozen': (('l0', 'l1', 'l2', 'l3'), 'freeze'),
}
EVERY = 24  # steps between two evaluations


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """Settings of the exchange and optimizer as in the demo; equal tokens."""
  del book
  planned = []
  for seed in study_lib.seeds(quick):
    away = QUICK if quick else AWAY
    for steps in sorted(set(away.values())):
      planned.append(arm(f'in step, {steps} steps', steps, seed))
      if not quick:
        config = arm('', steps, seed).config
        config.sync.learners = config.sync.quorum = config.data.shards = 1
        planned.append(
          arms.Arm(study='outage', name=f'alone, {steps} steps', config=config, kind='alone')
        )
    for periods, steps in away.items():
      for case in list(CASES)[: 1 if quick or periods == APART else None]:
        planned.append(_away(case, periods, steps, seed))
  return planned


def arm(name: str, steps: int, seed: int, **more: object) -> arms.Arm:
  arm = arms.decoupled(
    'outage',
    name,
    False,
    seed=seed,
    steps=steps,
    optimizer='adamw',
    rate=6e-3,
    codec_up='int8',
    codec_down='int8',
    outer='nesterov(learning_rate=0.7, momentum=0.5)',
    **more,
  )
  arm.config.train.eval_every = EVERY
  return arm


def _away(case: str, periods: int, steps: int, seed: int) -> arms.Arm:
  nodes, kind = CASES[case]
  planned = arm(f'{case}, {periods} periods', steps, seed, against=f'in step, {steps} steps')
  ns = planned.where['hardware'].ns
  plan = (
    plans.Fault(at_ns=ns(steps / 3), kind=kind, node=node, for_ns=ns(periods * PERIOD))
    for node in nodes
  )
  planned.where['faults'] = conditions.Faults(plan=tuple(plan))
  return planned


def conclude(quick: bool, book: study_lib.Book, folder: pathlib.Path) -> str:
  """The held-out losses around each outage."""
  lines = [
    '| arm | seed | last loss before | highest after the return | refused |',
    '|---|---|---|---|---|',
  ]
  for arm in plan(quick, book):
    row, faults = book.row(arm), arm.where.get('faults')
    if row is None or not faults:
      continue
    step_ns = arm.where['hardware'].ns(1)
    began = faults.plan[0].at_ns / step_ns
    back = began + faults.plan[0].for_ns / step_ns
    losses = [(point['time'], point['loss']) for point in row['curve']]
    before = [loss for time, loss in losses if time <= began][-1]
    after = max(loss for time, loss in losses if time > back)
    bad = row['discarded'].get('bad_value', 0.0)
    lines.append(
      f'| {arm.name} | {arm.seed} | {before:.4f} | {after:.4f} ({after / before - 1:+.1%}) '
      f'| {bad:.1%} |'
    )
  return '\n'.join(['', *lines, ''])


STUDY = study_lib.Study(
  name='outage', title='The syncer, a learner or all learners away', plan=plan, conclude=conclude
)
