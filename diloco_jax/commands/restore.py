"""Brings a run back to an earlier state that is whole; nothing is deleted.

    diloco restore --workdir=runs/x --to=latest        # the newest run snapshot that is whole
    diloco restore --workdir=runs/x --to=3             # run snapshot 3: runs/x/snapshots/3.json
    diloco restore --workdir=runs/x --to=checkpoint    # the syncer's newest checkpoint
    diloco restore --workdir=runs/x --to=latest --config.sync.learners=3 --config.mesh.data=1
    diloco restore --workdir=runs/x --to=latest --without=l3   # its part is damaged or elsewhere

`diloco train --resume --workdir=runs/x` then continues the run, `diloco syncer --workdir=runs/x`
one of loops of your own. `--to=checkpoint` repairs a damaged log: it sets the log aside. The number
of learners, the quorum and the mesh may change. All processes of the run must have ended. Exit
codes: 0 restored, 42 impossible and nothing was changed, 74 the disk failed: restore again.
"""

import os
import pathlib

from absl import flags, logging

from diloco_jax.config import run_config
from diloco_jax.launch import cli
from diloco_jax.storage import files, wal_format

_WITHOUT = flags.DEFINE_list(
  'without', [], 'Learners whose parts of the snapshot are not restored, for example l2,l3.'
)
cli.define_config()
cli.define_files()
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.', required=True)
_TO = flags.DEFINE_string(
  'to',
  None,
  "'latest' or the number of a run snapshot, or 'checkpoint': the syncer's newest.",
  required=True,
)


def main(argv: list[str]) -> int:
  del argv
  workdir = pathlib.Path(_WORKDIR.value).absolute()
  if not workdir.is_dir():
    raise cli.NeverRetry(f'there is no run in {workdir}: there is no such folder')
  config = cli.config()
  os.environ['JAX_PLATFORMS'] = 'cpu'
  logging.set_verbosity(logging.ERROR)  # Orbax writes many lines for what is one line here
  with cli.importing_jax():  # after the config is validated
    from diloco_jax.launch import restore

  try:
    with cli.never_retry(ValueError, files.DirectoryError):
      restore.restore(
        config,
        workdir,
        restore.Asked(_TO.value, tuple(_WITHOUT.value)),
        lambda text: print(text, flush=True),
      )
  except (OSError, wal_format.WalFull, wal_format.WalBroken) as error:
    raise cli.DiskFailed(
      f'the disk failed: {cli.one_line(error)}. Nothing is lost; restore again, with the same --to'
    ) from error
  words = ('syncer',) if config.task == run_config.OWN_LOOP else ('train', '--resume')
  again = cli.command(*words, f'--workdir={workdir}', *cli.file_flags())
  print(f'continue the run with: {again}')
  return 0
