"""Runs an experiment on this machine: one syncer and its learners, each in its own process.

    diloco train                                  # the demo, stdlib_lm.py:cpu
    diloco train --config=stdlib_lm:tiny --chaos=off
    diloco train --resume --workdir=runs/cpu-20260101-120000
    diloco train --controller=single              # all in one process

Every process gets the same --config and overrides. At the end WORKDIR/report holds summary.json and
timeline.png, WORKDIR/logs the output of each process, WORKDIR/tensorboard the curves.
"""

import pathlib

from absl import flags

from diloco_jax.launch import local, program, run_folder
from diloco_jax.storage import files

DEFAULT_CONFIG = 'stdlib_lm:cpu'

program.define_config()
program.define_files()
_WORKDIR = flags.DEFINE_string('workdir', '', 'folder of the run; default runs/NAME-DATE-TIME')
_RESUME = flags.DEFINE_bool('resume', False, 'continue the run in --workdir, with its own config')
_CONTROLLER = flags.DEFINE_enum(
  'controller',
  'processes',
  ['processes', 'single'],
  'processes: one process per node; single: one process for all nodes',
)
_SYNCER = flags.DEFINE_enum(
  'syncer', 'local', ['local', 'none'], 'none: one learner trains alone, the baseline'
)
_STANDBY = flags.DEFINE_bool(
  'standby',
  False,
  'keep a standby syncer process ready to take over; it costs memory: its own and, while it '
  'compiles, that of a second global model',
)
_CHAOS = flags.DEFINE_enum(
  'chaos', 'config', ['config', 'on', 'off'], 'carry out the chaos plan of the config'
)


def main(argv: list[str]) -> int:
  del argv
  config = program.config()
  if _CHAOS.value != 'config':
    config.chaos.enabled = _CHAOS.value == 'on'
  workdir = pathlib.Path(_WORKDIR.value) if _WORKDIR.value else None
  alone, single = _SYNCER.value == 'none', _CONTROLLER.value == 'single'
  with program.never_retry(ValueError, files.DirectoryError):
    if sum((alone, single, _STANDBY.value)) > 1:
      raise ValueError(
        '--syncer=none, --controller=single and --standby exclude each other: give one of them'
      )
    workdir = run_folder.open_workdir(config, workdir, resume=_RESUME.value, alone=alone)
  return local.run(
    config,
    workdir,
    config_flags=program.config_flags_of_this_process(),
    alone=alone,
    single=single,
    standby=_STANDBY.value,
  )
