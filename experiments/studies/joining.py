"""A learner that joins when half of the clock is over (joining.md)."""

from diloco_jax.verification import plans
from diloco_jax.verification.virtual import conditions
from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

SOON = 0.01  # of a step after the start


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """Equal tokens. The learner that joins has no checkpoint of its own."""
  del book
  four = arms.decoupled('joining', 'four', quick)
  ns, steps = four.where['hardware'].ns, four.config.train.steps
  # As many tokens as four learners train in T steps take 8/7 T if one comes half-way.
  late = plans.Fault(at_ns=ns(SOON), kind='kill', node='l3', for_ns=ns(steps * 4 / 7))
  planned = [four]
  for shared, moments in ((True, "another's"), (False, 'fresh')):
    name = f'three, the fourth joins half-way, {moments} moments'
    planned.append(arms.decoupled('joining', name, quick, against='four'))
    planned[-1].config.train.checkpoint_every_steps = 25
    faults = conditions.Faults(plan=(late,), host_lost=1.0, shared=shared)
    planned[-1].where['faults'] = faults
  three = arms.decoupled('joining', 'three', quick, learners=3, against='four')
  tokens = arms.tokens_per_step(four.config) * steps
  return [*planned, arms.with_tokens(three, tokens)]


STUDY = study_lib.Study(name='joining', title='A learner that joins half-way', plan=plan)
