"""The program of a syncer (`diloco syncer`) that kills itself with SIGKILL at a place that
DILOCO_FAILPOINT names: as by a power button nothing is flushed, and no peer is told.

| name | where in the syncer |
|---|---|
| wal.before_append | the outer step has been carried out, nothing of it is written |
| wal.after_append | the operating system has the record, the disk may not |
| wal.after_commit | the record is durable, no peer knows of it |
| save.before | a checkpoint is due, nothing of it is written |
| save.after | it is written, the log still holds all that it makes superfluous |
| compact.after | that part of the log is dropped, the machine does not know of the checkpoint |
| store.after_put | the record is in the store, the log has not committed it |
| store.in_copy | the store has a part of a copy |
| store.after_copy | the store has a copy, and all that it makes superfluous |
"""

import dataclasses
import functools
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from diloco_jax import __main__
from diloco_jax.launch import cli
from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.storage import checkpoint, outer_log, wal
from diloco_jax.storage import store as store_lib
from diloco_jax.syncer import commit, stored

VARIABLE = 'DILOCO_FAILPOINT'
BEFORE, AFTER = False, True
PLACES: dict[str, tuple[Any, str, bool]] = {
  'wal.before_append': (outer_log, 'encode', BEFORE),
  'wal.after_append': (wal.Wal, 'append', AFTER),
  'wal.after_commit': (commit.CommitLog, 'write', AFTER),
  'save.before': (checkpoint.Checkpoints, 'save', BEFORE),
  'save.after': (commit.CommitLog, 'compact_behind', BEFORE),
  'compact.after': (commit.CommitLog, 'compact_behind', AFTER),
  'store.after_put': (stored.Stored, 'before_commit', AFTER),
  'store.in_copy': (store_lib.Store, 'put_file', AFTER),
  'store.after_copy': (stored.Stored, '_remove_old', BEFORE),
}
NAMES = tuple(PLACES)


def instead(
  program: supervisor_lib.LocalProgram, environment: Mapping[str, str]
) -> supervisor_lib.LocalProgram:
  """Replaces a syncer's program by this one."""
  words = list(program.command)
  start = list(cli.PROGRAM)
  assert words[: len(start)] == start, words
  command = [sys.executable, '-X', 'utf8', '-m', __spec__.name, *words[len(start) :]]
  return dataclasses.replace(program, command=command, environment=environment)


def _die() -> None:
  os.kill(os.getpid(), signal.SIGKILL)


def arm(
  place: str, die: Callable[[], object] = _die, replace: Callable[[Any, str, Any], None] = setattr
) -> None:
  """Calls `die` as soon as this process is at the place; `replace` sets an attribute."""
  owner, name, after = PLACES[place]
  original = getattr(owner, name)

  @functools.wraps(original)
  def reached(*args: Any, **more: Any) -> Any:
    elsewhere = place == 'store.in_copy' and '/ckpt/' not in args[1]
    result = original(*args, **more) if after or elsewhere else None
    if not elsewhere:
      die()
    return result

  replace(owner, name, reached)


if __name__ == '__main__':
  if os.environ.get(VARIABLE):
    arm(os.environ[VARIABLE])
  __main__.main()
