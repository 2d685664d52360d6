"""Replays tapes: makes each machine again, feeds it its events, compares what it asks for.

    python -m experiments.replay runs/cpu-20260101-120000          # every node, every life
    python -m experiments.replay runs/cpu-20260101-120000/tapes/l1.2.0.jsonl
    python -m experiments.replay runs/cpu-20260101-120000 --arrays # and Theta, from the log

A folder of a run (or its `tapes`) means all lives in it; any segment means its whole life. Each
life is one line, `identical: N events, hash H`, or its first divergence with what came before. A
machine that crashed as recorded shows its traceback. With --arrays every outer step of the run is
carried out again from its payloads in the log (runs with --config.sync.keep_log=true), and Theta
compared at every version. Exit codes: 0 all identical, 1 a divergence or
a damaged tape, 42 no such tape.
"""

import pathlib
import traceback

from absl import flags

from diloco_jax.launch import program
from diloco_jax.protocol.tape import tape
from diloco_jax.storage import tapes

_ARRAYS = flags.DEFINE_bool(
  'arrays', False, 'make Theta again from the log of each run (folders only) and compare it too'
)


def main(argv: list[str]) -> int:
  if len(argv) < 2:
    raise program.NeverRetry('no tape given; for example: python -m experiments.replay runs/NAME')
  with program.never_retry(ValueError):
    lives = [life for path in argv[1:] for life in tapes.find(pathlib.Path(path))]
    identical = [_replay(life) for life in lives]
    if _ARRAYS.value:
      identical += [_rebuild(pathlib.Path(path)) for path in argv[1:]]
  return int(not all(identical))


def _replay(life: tapes.Life) -> bool:
  """Prints what came of one life; whether it is identical."""
  try:
    replay = tapes.replay(life)
  except (tape.TapeError, OSError) as error:
    print(f'{life.name}: damaged: {program.one_line(error)}')
    return False
  print(f'{life.name}: {replay.text()}')
  if replay.crash is not None:
    print(''.join(traceback.format_exception(replay.crash)).rstrip())
  if not replay.identical:
    header = replay.header
    print(
      f'The tape is of commit {header.commit} {header.versions}, this is {tapes.commit()} '
      f'{tapes.versions()}.'
    )
  return replay.identical


def _rebuild(workdir: pathlib.Path) -> bool:
  """Prints what came of the arrays of a run; whether they are identical."""
  from diloco_jax.storage import wal_format  # tapes alone are replayed without jax
  from diloco_jax.syncer import rebuild

  try:
    print(f'arrays of {workdir}: {rebuild.rebuild(workdir).text()}')
    return True
  except rebuild.Differs as error:
    print(f'arrays of {workdir}: different: {error}')
  except (tape.TapeError, wal_format.WalError, OSError) as error:
    print(f'arrays of {workdir}: {program.one_line(error)}')
  return False


if __name__ == '__main__':
  program.run_main(main, positional=True)
