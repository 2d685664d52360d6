"""Beyond the paper: age-aware weights, delayed Nesterov momentum (beyond.md)."""

from typing import Any

from diloco_jax.verification.virtual import conditions
from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

STEPS = 500
PLAIN = "the paper's rules"
ARMS: dict[str, dict[str, Any]] = {
  PLAIN: {},
  'age decay 0.5': {'age_decay': 0.5},
  'delayed Nesterov': {'outer': 'delayed_nesterov(learning_rate=0.5, momentum=0.3)'},
  'both': {
    'age_decay': 0.5,
    'outer': 'delayed_nesterov(learning_rate=0.5, momentum=0.3)',
  },
}


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """A latency of a step each way: many payloads are a period old."""
  del book
  where = arms.USUAL | {'network': conditions.Network(latency=1.0, up=0.3, down=0.3)}
  return [
    arms.decoupled(
      'beyond', name, quick, steps=STEPS, where=where, overlap=4, ahead=2, against=PLAIN, **sync
    )
    for name, sync in list(ARMS.items())[: 3 if quick else None]
  ]


STUDY = study_lib.Study(name='beyond', title='Beyond the paper, with old payloads', plan=plan)
