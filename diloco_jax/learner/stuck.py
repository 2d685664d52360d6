"""What the thread of the steps does, and the end of a process in which it is stuck."""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

import jax

from diloco_jax.protocol import actions, events, messages

GRACE_S = 2.0
_CALLS = 8  # that are shown, the innermost ones
_PAUSE_S = 10.0  # at most between two programs that a thread compiles one after the other
_COMPILES = tuple(
  f'jax/_src/{file}.py' for file in ('compiler', 'interpreters/partial_eval', 'interpreters/mlir')
)
_READS = 'train/island.py', '_read'
_compiled_s: dict[int, float] = {}  # of each thread: when it last traced, lowered or compiled


def _note_compilation(event: str, *_: float, **__: object) -> None:
  if event.startswith('/jax/core/compile/'):
    _compiled_s[threading.get_ident()] = time.monotonic()


jax.monitoring.register_event_duration_secs_listener(_note_compilation)


def examine(thread: int, doing: str) -> events.Examined:
  """What a thread does; between two programs of a first step, too, it compiles. `doing`: what it
  reported last (messages.DOING)."""
  frame = sys._current_frames().get(thread)
  calls = traceback.extract_stack(frame) if frame else []
  names = [(call.filename.replace(os.sep, '/'), call.name) for call in calls]
  is_in = lambda where: any(file.endswith(where[0]) and name == where[1] for file, name in names)
  trains = doing in (messages.LOOPING, messages.STEPPING)
  has_compiled = time.monotonic() < _compiled_s.get(thread, -_PAUSE_S) + _PAUSE_S
  if any(file.endswith(_COMPILES) for file, _ in names) or (trains and has_compiled):
    doing = messages.COMPILING
  elif is_in(_READS):
    doing = messages.READING
  elif doing == messages.LOOPING and is_in(('api/peer.py', '_sync')):
    doing = messages.SYNCING
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
