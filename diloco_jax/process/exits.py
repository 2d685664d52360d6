"""How every program of the project ends: its exit code, and one line for an error.

Exit codes are the contract with the process manager (the supervisor, Kubernetes):

  0   done
  42  never retry: the command or the config is wrong, or the log on disk is damaged or belongs to
      another run. A retry would fail in the same way; a person has to decide.
  74  the disk has failed or is full, no checkpoint can be read, or the syncer did not end in time;
      a retry recovers all committed outer steps
  75  a learner did not end in time, made no step for `sync.end_stuck_s`, or waited for a syncer for
      too long, or a syncer was stopped before its model was in the store; a retry helps, as after
      every other code

A program that ends with 42, 74 or 75 prints one line that starts with `error:` and shows the values
and the remedy. Only unexpected errors print a traceback.
"""

import contextlib
import errno
import math
import signal
import sys
import time
from collections.abc import Iterator

from diloco_jax.protocol import actions
from diloco_jax.storage import files_port, wal

NEVER_RETRY = 42
DISK_FAILED = 74
NOT_IN_TIME = actions.NOT_IN_TIME
INTERRUPTED = 130
DONE, RETRY, NEVER = 'done', 'retry', 'never'
ENDS = {0: DONE, NEVER_RETRY: NEVER}  # all other codes: RETRY
_PASSING = {  # of a disk or a host that may be well again at the next start
  errno.EIO,
  errno.EMFILE,
  errno.ENFILE,
  errno.ENOMEM,
  errno.ESTALE,
  errno.ETIMEDOUT,
}


def outcome(code: int | None) -> str:
  """What an exit code means for every engine: DONE, RETRY or NEVER. None: it could not be started.

  >>> outcome(0), outcome(42), outcome(75), outcome(-9)
  ('done', 'never', 'retry', 'retry')
  """
  return ENDS.get(code, RETRY)


def end_signals() -> list[signal.Signals]:
  """The signals that ask a program to end; SIGHUP (its terminal closes) only without nohup."""
  without_nohup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
  return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if without_nohup else [])]


class EndRequests:
  """Counts the signals that ask a program to end. Signals within WITHIN_S are one request, as a
  service manager signals every process and the supervisor passes its own signal on, and a terminal
  that closes sends two."""

  WITHIN_S = 0.5

  def __init__(self):
    self.count = 0
    self._last_s = -math.inf

  def add(self) -> bool:
    """Counts a signal. Returns whether it is another request."""
    now_s = time.monotonic()
    if now_s < self._last_s + self.WITHIN_S:
      return False
    self._last_s = now_s
    self.count += 1
    return True


class NeverRetry(Exception):
  """The command, the config, the machine's set-up or the data on its disk is wrong: one line, exit
  42."""

  code = NEVER_RETRY


class DiskFailed(Exception):
  """The disk failed; committed outer steps are safe: one line, exit 74."""

  code = DISK_FAILED


class NotInTime(Exception):
  """A learner has waited for too long: one line, exit 75."""

  code = NOT_IN_TIME


@contextlib.contextmanager
def never_retry(*kinds: type[Exception]) -> Iterator[None]:
  """Turns exceptions of these kinds (default: ValueError) into NeverRetry, or into DiskFailed if
  `refusal` says so: one line, exit 42 or 74."""
  caught = kinds or (ValueError,)
  try:
    yield
  except caught as error:
    raise refusal(error)(one_line(error)) from error


def refusal(error: BaseException | None) -> type[NeverRetry | DiskFailed]:
  """The end of a program because of an error: DiskFailed if a disk that is full or fails has caused
  it, or a host without memory or file descriptors: a later start may succeed."""
  while error is not None:
    if isinstance(error, OSError) and error.errno in files_port.FULL | _PASSING:
      return DiskFailed
    error = error.__cause__
  return NeverRetry


@contextlib.contextmanager
def log_failures() -> Iterator[None]:
  """Turns a fatal error of the write-ahead log into one line and exit code 74 or 42, and a full
  disk into 74."""
  try:
    yield
  except (wal.WalBroken, wal.WalFull) as error:
    raise DiskFailed(one_line(error)) from error
  except wal.WalError as error:
    raise NeverRetry(one_line(error)) from error
  except OSError as error:
    if refusal(error) is NeverRetry:
      raise
    raise DiskFailed(one_line(error)) from error


def one_line(error: BaseException | str) -> str:
  """The text of an error without line breaks.

  >>> one_line(ValueError('quorum is 5,\\n  it must be at most 4'))
  'quorum is 5, it must be at most 4'
  """
  return ' '.join(str(error).split()) or type(error).__name__


def refuse(text: str, code: int = NEVER_RETRY) -> int:
  """Prints the one line of an error and returns its exit code."""
  sys.stdout.flush()
  print(f'error: {text}', file=sys.stderr, flush=True)
  return code
