"""What the work of a learner is worth whose link is thin, or that is offline for long (links.md)."""

from typing import Any

from diloco_jax.config import build
from diloco_jax.configs import stdlib_lm
from diloco_jax.verification import plans
from diloco_jax.verification.sim import network as network_lib
from diloco_jax.verification.virtual import conditions
from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

STEPS = 480
SLOW = (1.5, 2.0, 4.0, 8.0)  # inner steps that a payload of `codec_up` takes on the link of l3
OFFLINE = (0.25, 0.5)  # shares of the run
WITHOUT = 'three learners, without l3'
HARDWARE = conditions.Hardware(lognormal=0.2, merge=0.02, encode=0.005, adopt=0.005)
RULES: dict[str, dict[str, Any]] = {
  'the default': {},
}


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """Runs of one clock: the learners without l3 train three quarters of the tokens."""
  del book
  steps = 160 if quick else STEPS
  planned = []
  for seed in (0,) if quick else range(5):

    def arm(
      name: str, learners: int = 4, line=conditions.Line(), off: float = 0.0, seed=seed, **sync
    ):
      one = arms.decoupled(
        'links',
        name,
        False,
        seed=seed,
        steps=steps,
        learners=learners,
        batch=4,
        against=WITHOUT,
        where={
          'hardware': HARDWARE,
          'network': conditions.Network(
            latency=0.001, lines=(*[conditions.Line()] * 3, line)[:learners]
          ),
        },
        codec_up='int8',
        codec_down='int8',
        **sync,
      )
      one.config.model = stdlib_lm.tiny().model
      return one

    planned += [arm(WITHOUT, 3), arm('four good links')]
  return planned


STUDY = study_lib.Study(name='links', title='A learner with a thin link, or offline', plan=plan)
