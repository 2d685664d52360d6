"""What the thread of the steps does: what the learner prints of it must be so."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import pytest

from diloco_jax.learner import stuck
from diloco_jax.protocol import messages


@contextlib.contextmanager
def _waiting(before: Callable[[], object]) -> Iterator[int]:
  """A thread that has done this and now waits."""
  begun, end = threading.Event(), threading.Event()

  def run() -> None:
    before()
    begun.set()
    end.wait()

  thread = threading.Thread(target=run)
  thread.start()
  assert begun.wait(60) and thread.ident
  try:
    yield thread.ident
  finally:
    end.set()
    thread.join()


def _compile() -> None:
  shift = len(threading.enumerate())  # a program of its own
  jax.jit(lambda x: jnp.sin(x) + shift)(jnp.ones(3)).block_until_ready()


@pytest.mark.parametrize('doing', [messages.LOOPING, messages.STEPPING])
def test_between_two_programs_that_it_compiles_a_thread_compiles_but_no_longer(doing, monkeypatch):
  """A first step and its boundary are many programs; the moment of the look may be between two."""
  with _waiting(_compile) as thread, _waiting(lambda: None) as other:
    assert stuck.examine(thread, doing).doing == messages.COMPILING
    assert stuck.examine(other, doing).doing == doing
    assert stuck.examine(thread, messages.READING).doing == messages.READING
    later_s = stuck.time.monotonic() + stuck._PAUSE_S
    monkeypatch.setattr(stuck.time, 'monotonic', lambda: later_s)
    assert stuck.examine(thread, doing).doing == doing
