"""What coarse payloads cost (codecs.md): those of all learners, both ways, and of one upward."""

import dataclasses

from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

CODECS = ('float32', 'bfloat16', 'int8', 'int4')
MIXED_SEEDS = 5


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """The same codec both ways; the schedule does not depend on the codec. Mixed: int8 but for the
  payloads of l3, which is asked for narrow ones."""
  del book
  planned = []
  for seed in range(1 if quick else MIXED_SEEDS):
    names = CODECS if seed in study_lib.seeds(quick) else ('int8',)
    for codec in names:
      settings = {'seed': seed, 'codec_up': codec, 'codec_down': codec}
      against = 'float32' if len(names) > 1 else ''
      planned.append(arms.decoupled('codecs', codec, quick, against=against, **settings))
      if codec == 'int8':
        mixed = dataclasses.replace(planned[-1], name='mixed', narrow=('l3',), against='int8')
        planned.append(mixed)
  return planned


STUDY = study_lib.Study(name='codecs', title='Codecs, both ways and of one learner', plan=plan)
