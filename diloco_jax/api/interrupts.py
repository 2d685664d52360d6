"""An interrupt of a notebook's cell, put off: an import of jax that ends in the middle cannot be
made up for in the same process."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def put_off() -> Iterator[None]:
  """An interrupt of the body is raised at its end, a second one at once."""
  before = signal.getsignal(signal.SIGINT)
  if threading.current_thread() is not threading.main_thread() or not callable(before):
    yield
    return
  came = []

  def remember(*about: object) -> None:
    came.append(about)
    signal.signal(signal.SIGINT, before)

  signal.signal(signal.SIGINT, remember)
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, before)
    if came:
      before(*came[0])
