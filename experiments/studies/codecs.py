"""What coarse payloads cost (codecs.md): those of all learners, both ways, and of one upward."""

import dataclasses

from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

CODECS = ('float32', 'bfloat16', 'int8', 'int4')
MIXED_SEEDS, MIXED_STEPS = 5, 500


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """The same codec both ways; the schedule does not depend on the codec. Mixed: int8 in fewer
  steps, but for the payloads of l3, which is asked for narrow ones (int4)."""
  del book
  arm = lambda name, codec, seed, **more: arms.decoupled(
    'codecs', name, quick, seed=seed, codec_up=codec, codec_down=codec, **more
  )
  planned = [
    arm(codec, codec, seed, against='float32')
    for seed in study_lib.seeds(quick)
    for codec in (('float32', 'int4') if quick else CODECS)
  ]
  for seed in range(1 if quick else MIXED_SEEDS):
    planned.append(arm('int8, short', 'int8', seed, steps=MIXED_STEPS))
    planned.append(
      dataclasses.replace(planned[-1], name='mixed', narrow=('l3',), against='int8, short')
    )
  return planned


STUDY = study_lib.Study(name='codecs', title='Codecs, both ways and of one learner', plan=plan)
