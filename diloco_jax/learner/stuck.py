"""What the thread of the steps does, and the end of a process in which it is stuck."""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

from diloco_jax.protocol import actions, events, messages

GRACE_S = 2.0
_CALLS = 8  # that are shown, the innermost ones
_COMPILES = tuple(
  f'jax/_src/{file}.py' for file in ('compiler', 'interpreters/partial_eval', 'interpreters/mlir')
)
_READS = 'train/island.py', '_read'


def examine(thread: int, doing: str) -> events.Examined:
  """What a thread does. `doing`: what it reported last (messages.DOING)."""
  frame = sys._current_frames().get(thread)
  calls = traceback.extract_stack(frame) if frame else []
  names = [(call.filename.replace(os.sep, '/'), call.name) for call in calls]
  if any(file.endswith(_COMPILES) for file, _ in names):
    doing = messages.COMPILING
  elif any(file.endswith(_READS[0]) and name == _READS[1] for file, name in names):
    doing = messages.READING
  shown = [f'{call.name} in {os.path.basename(call.filename)}:{call.lineno}' for call in calls]
  return events.Examined(doing=doing, where=' < '.join(reversed(shown[-_CALLS:])))


def abandon(end: actions.Exit, thread: int, doing: Callable[[], str]) -> bool:
  """The node has ended while its step is missing. A loop that reads its next batch is interrupted
  and ends in order (api/peer.py); returns whether the process must end at once, as nothing else
  helps. A thread that is not the main one belongs to a larger program, which goes on."""
  if thread != threading.main_thread().ident or 'ipykernel' in sys.modules or hasattr(sys, 'ps1'):
    return False
  deadline_s = time.monotonic() + GRACE_S  # what is queued for the syncer leaves meanwhile
  if doing() == messages.READING and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.pthread_kill(thread, signal.SIGINT)
  while time.monotonic() < deadline_s:
    if not doing():
      return False
    time.sleep(0.05)
  print(f'error: {end.text}', file=sys.stderr, flush=True)
  return True
