"""Shows what there is of a syncer's log, and cuts it where an operator says so.

    python -m experiments.wal_repair runs/cpu-20260101-120000           # looks, changes nothing
    python -m experiments.wal_repair runs/cpu-20260101-120000 --to=41   # goes on behind record 41

For a log that the syncer refuses (DD402): damaged before its end, or of another history than its
checkpoint. Every record is one outer step. Nothing is deleted: what is cut off is kept beside as
`*.aside` (syncer/log_repair.py). Give the folder of the run, or its syncer/wal.

Exit codes: 0 the syncer can start from it (now), 42 it cannot, or the wrong command, or a syncer is
running on it, 74 the disk failed: run it again.
"""

import pathlib

from absl import flags

from diloco_jax.launch import program
from diloco_jax.storage import files
from diloco_jax.syncer import log_repair

_TO = flags.DEFINE_integer('to', None, 'the last record (outer step) that is kept', 0)


def main(argv: list[str]) -> int:
  if len(argv) != 2:
    raise program.NeverRetry(
      'give one folder; for example: python -m experiments.wal_repair runs/X'
    )
  try:
    with program.never_retry(ValueError, files.DirectoryError), program.log_failures():
      with log_repair.opened(pathlib.Path(argv[1]).absolute()) as repair:
        return _repair(repair)
  except OSError as error:
    raise program.DiskFailed(
      f'{program.one_line(error)}. Nothing is deleted: check the disk, then run this again'
    ) from error


def _repair(repair: log_repair.Repair) -> int:
  findings = repair.look()
  if _TO.value is not None:
    print(repair.cut(findings, _TO.value))
    findings = repair.look()
  print(log_repair.text(repair.place, findings))
  return 0 if log_repair.sound(findings) else program.NEVER_RETRY


if __name__ == '__main__':
  program.run_main(main, positional=True)
