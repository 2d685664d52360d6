"""What coarse payloads cost (codecs.md), both ways."""

from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

CODECS = ('float32', 'bfloat16', 'int8', 'int4')


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """The same codec both ways; the schedule does not depend on the codec."""
  del book
  arm = lambda name, codec, seed, **more: arms.decoupled(
    'codecs', name, quick, seed=seed, codec_up=codec, codec_down=codec, **more
  )
  return [
    arm(codec, codec, seed, against='float32')
    for seed in study_lib.seeds(quick)
    for codec in (('float32', 'int4') if quick else CODECS)
  ]


STUDY = study_lib.Study(name='codecs', title='Codecs, both ways', plan=plan)
