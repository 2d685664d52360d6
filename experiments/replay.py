"""Replays tapes: makes each machine again, feeds it its events, compares what it asks for.

    python -m experiments.replay runs/cpu-20260101-120000          # every node, every life
    python -m experiments.replay runs/cpu-20260101-120000/tapes/l1.2.0.jsonl

A folder of a run (or its `tapes`) means all lives in it; any segment means its whole life. Each
life is one line, `identical: N events, hash H`, or its first divergence with what came before. A
machine that crashed as recorded shows its traceback. Exit codes: 0 all identical, 1 a divergence or
a damaged tape, 42 no such tape.
"""

import pathlib
import traceback

from diloco_jax.protocol import tape
from diloco_jax.runtime import launch
from diloco_jax.runtime import tapes


def main(argv: list[str]) -> int:
  if len(argv) < 2:
    raise launch.NeverRetry('no tape given; for example: python -m experiments.replay runs/NAME')
  with launch.never_retry(ValueError):
    lives = [life for path in argv[1:] for life in tapes.find(pathlib.Path(path))]
  return int(not all([_replay(life) for life in lives]))


def _replay(life: tapes.Life) -> bool:
  """Prints what came of one life; whether it is identical."""
  try:
    replay = tapes.replay(life)
  except (tape.TapeError, OSError) as error:
    print(f'{life.name}: damaged: {launch.one_line(error)}')
    return False
  print(f'{life.name}: {replay.text()}')
  if replay.crash is not None:
    print(''.join(traceback.format_exception(replay.crash)).rstrip())
  if not replay.identical:
    header = replay.header
    print(f'The tape is of commit {header.commit} {header.versions}, this is {tapes.commit()} '
          f'{tapes.versions()}.')
  return replay.identical


if __name__ == '__main__':
  launch.run_main(main, positional=True)
