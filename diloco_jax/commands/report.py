"""Prints and writes the report of a run, or sets several runs beside each other.

    diloco report                      # of the newest run in ./runs
    diloco report runs/x               # or --workdir=runs/x
    diloco report runs/x runs/alone    # their losses after equal tokens, and one page of all

The run may have ended, been killed, or be under way, and any program may have started it: `diloco
train`, a notebook, or a syncer whose learners are on other machines. All of it comes from the
records in the folder, which may be a copy. Of one run the files are in DIR/report: report.txt,
summary.json, index.html, timeline.png; of several in that of the first DIR: beside.txt,
beside.html. Exit codes: 0 done, 42 there is no such run, 74 a file is missing.
"""

import pathlib
import shutil

from absl import flags

from diloco_jax.process import exits
from diloco_jax.report import beside
from diloco_jax.report import folder as folder_lib
from diloco_jax.report import summary as summary_lib

POSITIONAL = True

_WORKDIR = flags.DEFINE_string('workdir', None, 'The folder of the run, as the first DIR.')
_OUT = flags.DEFINE_string('out', '', 'Write here, not into report/ of the first DIR.')
_PLOT = flags.DEFINE_bool('plot', True, 'Whether to draw the picture, too.')


def main(argv: list[str]) -> int:
  workdirs = [pathlib.Path(word) for word in filter(None, [_WORKDIR.value, *argv[1:]])]
  with exits.never_retry(ValueError):
    workdirs = workdirs or [pathlib.Path(folder_lib.choose(None))]
  out = pathlib.Path(_OUT.value) if _OUT.value else workdirs[0] / summary_lib.REPORT
  width = shutil.get_terminal_size().columns
  with exits.never_retry(ValueError):
    if len(workdirs) == 1:
      summary = summary_lib.write(workdirs[0], plot=_PLOT.value, out=out)
      text, failed = summary_lib.text(summary, workdirs[0], width, out), summary.get('missing')
    else:
      runs = beside.read(workdirs)
      text, failed = beside.text(runs), beside.write(runs, out)
      text += f'\nin {out}: beside.txt, beside.html\n'
  print(text, end='')
  return exits.DISK_FAILED if failed else 0
