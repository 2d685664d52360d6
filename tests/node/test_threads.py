"""A thread is waited for again after an interrupt."""

import os
import signal
import sys
import threading
import traceback

import pytest

from diloco_jax.node import threads


def test_a_join_that_was_interrupted_waits_when_it_is_called_again():
  """`threading.Thread.join` returns at once then, on Python 3.11 and 3.12."""
  go, main = threading.Event(), threading.get_ident()
  thread = threads.Thread(target=go.wait, name='node')
  thread.start()

  def waits() -> bool:
    stack = traceback.walk_stack(sys._current_frames()[main])
    return 'join' in [frame.f_code.co_name for frame, _ in stack]

  def interrupt() -> None:
    while not waits():
      pass
    os.kill(os.getpid(), signal.SIGINT)

  other = threading.Thread(target=interrupt)
  other.start()
  with pytest.raises(KeyboardInterrupt):
    thread.join()
  other.join()
  thread.join(timeout=0.01)
  assert thread.is_alive()
  go.set()
  thread.join()
  assert not thread.is_alive()
