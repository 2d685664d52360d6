"""A learner that joins when half of the clock is over (joining.md)."""

from diloco_jax.verification import plans
from diloco_jax.verification.virtual import conditions
from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

SOON = 0.01  # of a step after the start


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """Equal tokens. The learner that joins has no checkpoint: it takes a donor's moments."""
  del book
  joins = arms.decoupled('joining', 'three, the fourth joins half-way', quick, against='four')
  ns = joins.where['hardware'].ns
  # As many tokens as four learners train in T steps take 8/7 T if one comes half-way.
  half_way = joins.config.train.steps * 4 / 7
  late = plans.Fault(at_ns=ns(SOON), kind='kill', node='l3', for_ns=ns(half_way))
  joins.where['faults'] = conditions.Faults(plan=(late,), host_lost=1.0)
  four = arms.decoupled('joining', 'four', quick)
  three = arms.decoupled('joining', 'three', quick, learners=3, against='four')
  tokens = arms.tokens_per_step(four.config) * four.config.train.steps
  return [four, joins, arms.with_tokens(three, tokens)]


STUDY = study_lib.Study(name='joining', title='A learner that joins half-way', plan=plan)
