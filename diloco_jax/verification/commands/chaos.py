"""Carries out a chaos plan on real processes and checks their tapes against the invariants.

    diloco chaos --plan=kill            # one fault, three learners of `tiny`
    diloco chaos --plan=freeze,cut_up   # several, in turn against all but the first
    diloco chaos --plan=storm           # one of each kind

One syncer and M learners run, each in a process behind a separate faulty proxy
(verification/faults/chaos_run.py). Exit codes: 0 all invariants held and the untouched learners
never paused, 1 otherwise, 42 a wrong command or a process that refused to start, 130 interrupted.
"""

import functools
import pathlib
import sys

from absl import flags

from diloco_jax.config import run_config
from diloco_jax.launch import cli
from diloco_jax.process import exits, run_folder
from diloco_jax.report import live
from diloco_jax.verification import plans
from diloco_jax.verification.faults import chaos_run
from diloco_jax.verification.faults import conductor as conductor_lib

# Enough steps for any plan (the learners leave at its end), leases that expire during a fault, and
# syncs with time to wait for more than one learner (tau = 3).
DEFAULT_FLAGS = """
  --config.train.steps=1000000 --config.train.log_every=200 --config.train.eval_every=0
  --config.train.checkpoint_every_steps=100 --config.sync.lease_s=1.5
  --config.sync.checkpoint_every_syncs=100 --config.sync.overlap=3
""".split()

DEFAULT_CONFIG = 'stdlib_lm:tiny'

cli.define_config(f'; without it that of --workdir, or {DEFAULT_CONFIG}')
_WORKDIR = flags.DEFINE_string('workdir', '', 'The folder of the run; else runs/NAME-DATE-TIME.')
_PLAN = flags.DEFINE_string(
  'plan', plans.STORM, f'The faults, joined by commas: {", ".join((*plans.KINDS, plans.STORM))}.'
)
_FAULT_S = flags.DEFINE_float('fault_s', 4.0, 'Each fault lasts so many seconds.', 0.1)


def main(argv: list[str]) -> int:
  del argv
  config = cli.config()
  names = run_config.learner_ids(config.sync.learners)
  with exits.never_retry(ValueError):
    if len(names) < 2:
      raise ValueError(
        f'sync.learners is {len(names)}, chaos needs at least 2: one to fail, one to train on'
      )
    plan = plans.named(_PLAN.value, names, round(_FAULT_S.value * plans.SECOND_NS))
    config.name = f'chaos-{_PLAN.value}'
    workdir = run_folder.open_workdir(
      config, pathlib.Path(_WORKDIR.value) if _WORKDIR.value else None, resume=False
    )
  print(f'chaos in {workdir}: {len(plan)} faults', flush=True)
  config_flags = cli.config_flags_of_this_process()
  display = live.Display()
  make = functools.partial(
    chaos_run.ChaosRun, config=config, config_flags=config_flags, plan=plan, display=display
  )
  try:
    chaos, run = conductor_lib.play(workdir, make)
  except conductor_lib.EndedEarly as error:
    print(f'the run ended before its plan did: {error.outcome.text}', file=sys.stderr)
    return error.outcome.code or 1
  text, as_promised = chaos.verdict()
  print(text)
  return run.outcome.code or int(not as_promised)
