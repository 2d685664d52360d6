"""Learners that lie in updates of ordinary length: RDA and the majority rule (faults.md)."""

from typing import Any

from diloco_jax.verification.virtual import conditions
from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

STEPS = 300
RULES = ('rda', 'majority')
LIARS: dict[str, tuple[int, dict[str, tuple[str, ...]]]] = {  # how many learners, and which lie
  '0 of 3': (3, {}),
  '1 of 3 flipped': (3, {'flipped': ('l0',)}),
  '0 of 4': (4, {}),
  '2 of 4 flipped': (4, {'flipped': ('l0', 'l1')}),
  '1 of 3 noise': (3, {'noisy': ('l0',)}),
}


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """K=3, so that no liar is merged alone or with one honest learner; the arms of a number of
  learners have one schedule."""
  del book
  return [
    arms.decoupled(
      'liars',
      f'{rule}, {name}',
      quick,
      steps=STEPS,
      learners=learners,
      where=arms.USUAL | {'faults': conditions.Faults(**lies)},
      against=f'rda, 0 of {learners}',
      quorum=3,
      **_settings(rule, learners),
    )
    for name, (learners, lies) in list(LIARS.items())[: 2 if quick else None]
    for rule in RULES
  ]


def _settings(rule: str, learners: int) -> dict[str, Any]:
  """The defaults, or the majority rule for all tensors."""
  if rule == 'rda':
    return {}
  return dict.fromkeys(('merge', 'embedding_merge'), f'majority(learners={learners})')


STUDY = study_lib.Study(name='liars', title='Updates of ordinary length that are wrong', plan=plan)
