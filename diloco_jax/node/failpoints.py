"""Named places where a test has a process killed: DILOCO_FAILPOINT=NAME:kill, and the flag
--allow_failpoints of `diloco syncer`, without which the variable means nothing.

A process that reaches the place kills itself with SIGKILL, as a power button would: nothing is
flushed, no peer is told. Else passing a place costs one comparison.

| name | where in the syncer |
|---|---|
| wal.before_append | the outer step has been carried out, nothing of it is written |
| wal.after_append | the operating system has the record, the disk may not |
| wal.after_commit | the record is durable, no peer knows of it |
| store.after_put | the record is in the store, the log has not committed it |
| save.before | a checkpoint is due, nothing of it is written |
| save.after | it is written, the log still holds all that it makes superfluous |
| compact.after | that part of the log is dropped, the machine does not know of the checkpoint |
| store.in_copy | the store has a part of a copy |
| store.after_copy | the store has a copy, and all that it makes superfluous |
"""

import os
import signal

VARIABLE = 'DILOCO_FAILPOINT'
NAMES = (
  'wal.before_append',
  'wal.after_append',
  'wal.after_commit',
  'save.before',
  'save.after',
  'compact.after',
  'store.after_put',
  'store.in_copy',
  'store.after_copy',
)


def wanted(text: str) -> str:
  """The place that the variable names; '' for none. Raises ValueError.

  >>> wanted('save.after:kill')
  'save.after'
  """
  name, _, what = text.partition(':')
  if text and (name not in NAMES or what != 'kill'):
    raise ValueError(f'{VARIABLE}={text}: it must be NAME:kill, NAME one of {", ".join(NAMES)}')
  return name


_wanted = ''


def allow() -> None:
  """Lets the variable name a place from now on. Raises ValueError if it names none."""
  global _wanted
  _wanted = wanted(os.environ.get(VARIABLE, ''))


def reached(name: str) -> None:
  """This place was reached."""
  if name == _wanted:
    os.kill(os.getpid(), signal.SIGKILL)
