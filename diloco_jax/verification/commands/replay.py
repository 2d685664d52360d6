"""Replays tapes: builds each machine again, feeds it its events and compares its actions.

    diloco replay runs/cpu-20260101-120000          # every process of every node
    diloco replay runs/cpu-20260101-120000/tapes/l1.2.0.jsonl

The folder of a run (or its `tapes`) names all its tapes; a segment names the whole tape of its
process. The program prints one line per tape, `identical: N events, hash H`, or the first
divergence with the turns before it. For a machine that crashed as recorded it prints the traceback.
Exit codes: 0 all identical, 1 a divergence or a damaged tape, 42 no such tape.
"""

import pathlib
import traceback

from diloco_jax.process import exits
from diloco_jax.protocol.tape import tape as tape_lib
from diloco_jax.storage import tapes
from diloco_jax.verification.replay import tape_files

POSITIONAL = True


def main(argv: list[str]) -> int:
  if len(argv) < 2:
    raise exits.NeverRetry('no tape given; for example: diloco replay runs/NAME')
  with exits.never_retry(ValueError):
    process_tapes = [tape for path in argv[1:] for tape in tape_files.find(pathlib.Path(path))]
    identical = [_replay(process_tape) for process_tape in process_tapes]
  return int(not all(identical))


def _replay(process_tape: tapes.ProcessTape) -> bool:
  """Prints the result of one process's tape; returns whether it is identical."""
  try:
    replay = tape_files.replay(process_tape)
  except tape_lib.OtherTape:
    raise
  except (tape_lib.TapeError, OSError) as error:
    print(f'{process_tape.name}: damaged: {exits.one_line(error)}')
    return False
  print(f'{process_tape.name}: {replay.text()}')
  if replay.crash is not None:
    print(''.join(traceback.format_exception(replay.crash)).rstrip())
  if not replay.identical:
    header = replay.header
    print(
      f'The tape is of commit {header.commit} {header.versions}, this program of {tapes.commit()} '
      f'{tapes.versions()}.'
    )
  return replay.identical
