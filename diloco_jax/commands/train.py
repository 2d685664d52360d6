"""Runs an experiment on this machine: one syncer and its learners, each in its own process.

    diloco train                                  # the demo, stdlib_lm:cpu
    diloco train --config=stdlib_lm:tiny --kill=l1@0.45+8    # once 45 % is done; again 8 s later
    diloco train --resume --workdir=runs/cpu-20260101-120000
    diloco train --controller=single              # all in one process
    diloco train --controller=single --pathways   # the same on the slices of Pathways

Every process gets the same --config and overrides. At the end WORKDIR/report holds what `diloco
report` writes, WORKDIR/logs the output of each process, WORKDIR/tensorboard the curves.
"""

import functools
import os
import pathlib
import sys

from absl import flags

from diloco_jax.config import run_config
from diloco_jax.launch import cli, local_run, pathways
from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.process import exits, run_folder
from diloco_jax.protocol import actions, ids
from diloco_jax.storage import files as files_lib

DEFAULT_CONFIG = 'stdlib_lm:cpu'

cli.define_config(f'; without it that of --workdir, or {DEFAULT_CONFIG}')
_WORKDIR = flags.DEFINE_string('workdir', '', 'The folder of the run; else runs/NAME-DATE-TIME.')
_RESUME = flags.DEFINE_bool('resume', False, 'Continue the run in --workdir, with its own config.')
_CONTROLLER = flags.DEFINE_enum(
  'controller',
  'processes',
  ['processes', 'single'],
  'Whether each node has a process of its own, or a single one has them all.',
)
_PATHWAYS = flags.DEFINE_bool(
  'pathways', False, 'With --controller=single: the islands are slices behind a Pathways proxy.'
)
_SYNCER = flags.DEFINE_enum(
  'syncer', 'local', ['local', 'none'], 'With none one learner trains alone: the baseline.'
)
_KILLS = flags.DEFINE_multi_string(
  'kill', [], 'Kill a program at a share of the run and start it again later: NAME@SHARE+SECONDS.'
)
_PROMPT = flags.DEFINE_string(
  'prompt', '', 'A text that the trained model continues at the end, as `diloco sample` does.'
)


def main(argv: list[str]) -> int:
  del argv
  config = cli.config()
  workdir = pathlib.Path(_WORKDIR.value) if _WORKDIR.value else None
  alone, single = _SYNCER.value == 'none', _CONTROLLER.value == 'single'
  with exits.never_retry(ValueError, files_lib.DirectoryError):
    if alone and single:
      raise ValueError('--syncer=none and --controller=single exclude each other: give one of them')
    if (alone or single) and _KILLS.value:
      raise ValueError('--kill needs a syncer, and learners that are processes: leave it out')
    learners = run_config.learner_ids(config.sync.learners)
    kills = supervisor_lib.parse_kills(_KILLS.value, [ids.SYNCER, *learners])
    if _PATHWAYS.value:
      pathways.require(single)
      pathways.start(config.mesh.num_devices * config.sync.learners)
    try:
      workdir = run_folder.open_workdir(
        config, workdir, resume=_RESUME.value, alone=alone, changed=cli.overrides()
      )
    except run_folder.NothingLeft as ended:
      print(ended)
      return 0
  unusual = '--controller=single' if single else '--syncer=none' if alone else ''
  if single:
    carry_out = functools.partial(_run_single, config, workdir)
  else:
    described = local_run.describe(config, workdir, cli.config_flags_of_this_process(), alone)
    carry_out = functools.partial(local_run.run_processes, config, workdir, described, kills=kills)
  again = ['train', *filter(None, [unusual]), *['--pathways'] * _PATHWAYS.value]
  code = local_run.run(config, workdir, carry_out, again)
  if _PROMPT.value and code == 0:
    print(f'\nThe model continues {_PROMPT.value!r}:', flush=True)
    words = ['sample', f'--workdir={workdir}', f'--prompt={_PROMPT.value}', '--tokens=300']
    os.execv(sys.executable, [*cli.PROGRAM, *words])
  return code


def _run_single(config: run_config.Config, workdir: pathlib.Path) -> supervisor_lib.Outcome:
  """Runs all nodes in this process."""
  if not _PATHWAYS.value:
    local_run.emulate(config)
  from diloco_jax.api import single_controller
  from diloco_jax.process import learner as learner_process
  from diloco_jax.process import lifecycle

  with exits.never_retry():
    controller = single_controller.SingleController(config, workdir)
  asked = []

  def stop(reason: str) -> None:
    asked.append(reason)
    controller.stop('interrupted')

  controller.start()
  with (
    lifecycle.ending_on_signals(
      stop, config.train.drain_s, learner_process.LEARNER_SAFE, exits.INTERRUPTED
    ),
    exits.log_failures(),
    lifecycle.errors_as_exits(),
  ):
    ended = controller.outcome()
  if asked:
    ended = actions.Exit(code=exits.INTERRUPTED, text='interrupted')
  return supervisor_lib.Outcome(
    code=ended.code, text=ended.text, statuses={}, interrupted=bool(asked)
  )
