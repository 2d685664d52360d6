"""Brings a run back to an earlier state that is whole; nothing is deleted.

    diloco restore --workdir=runs/x                # prints the clocks that can be gone back to
    diloco restore --workdir=runs/x --to=latest    # the syncer's newest checkpoint that is whole
    diloco restore --workdir=runs/x --to=300       # its newest at or before clock 300
    diloco restore --workdir=runs/x --to=latest --config.sync.learners=3 --config.mesh.data=1

`diloco train --resume --workdir=runs/x` then continues the run; one on several machines continues
once its syncer and its learners are started again with their own commands. Older checkpoints than
the newest two are there if the run keeps them (`sync.keep_every`). A damaged log is set aside, so
this repairs it, too. The number of learners, the quorum and the mesh may change. All processes of
the run must have ended. Exit codes: 0 restored, 42 impossible and nothing was changed, 74 the disk
failed: restore again.
"""

import os
import pathlib

from absl import flags, logging

from diloco_jax.config import run_config
from diloco_jax.launch import cli
from diloco_jax.process import exits
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import folders, wal

cli.define_config()
_WORKDIR = flags.DEFINE_string('workdir', None, 'The folder of the run.', required=True)
_TO = flags.DEFINE_string(
  'to', '', "Which checkpoint of the syncer to take: 'latest', or the newest at or before a clock."
)


def main(argv: list[str]) -> int:
  del argv
  workdir = pathlib.Path(_WORKDIR.value).absolute()
  if not workdir.is_dir():
    raise exits.NeverRetry(f'there is no run in {workdir}: there is no such folder')
  if flags.FLAGS['config'].value is None and not folders.syncer_folder(workdir).exists():
    raise exits.NeverRetry(f'there is no run in {workdir}: its syncer has written nothing there')
  config = cli.config()
  os.environ['JAX_PLATFORMS'] = 'cpu'
  logging.set_verbosity(logging.ERROR)  # Orbax writes many lines for what is one line here
  with cli.importing_jax():  # after the config is validated
    from diloco_jax.process import restore

  try:
    with exits.never_retry(ValueError, files_lib.DirectoryError):
      restore.restore(config, workdir, _TO.value, lambda text: print(text, flush=True))
  except (OSError, wal.WalFull, wal.WalBroken) as error:
    raise exits.DiskFailed(
      f'the disk failed: {exits.one_line(error)}. Nothing is lost: restore again, with this --to'
    ) from error
  if config.task == run_config.OWN_LOOP or not (workdir / folders.ISLANDS).is_dir():
    print('continue the run: start its syncer and its learners again, with their own commands')
  else:
    again = cli.command('train', '--resume', f'--workdir={workdir}')
    print(f'continue the run with: {again}')
  return 0
