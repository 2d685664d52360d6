"""A thread that a program can stop waiting for, and wait for again."""

import threading


class Thread(threading.Thread):
  """A daemon thread whose `join` may be interrupted and called again.

  On Python 3.11 and 3.12 a `threading.Thread.join` that a signal interrupts marks the thread as
  stopped: from then on `join` returns at once and `is_alive` is False while the thread runs. Use
  this class for every thread that the main thread of a user's program waits for.
  """

  def __init__(self, **kwargs):
    super().__init__(daemon=True, **kwargs)
    self._over = threading.Event()

  def start(self) -> None:
    try:
      super().start()
    except RuntimeError:  # the system has no thread left: `join` has nothing to wait for
      self._over.set()
      raise

  def run(self) -> None:
    try:
      super().run()
    finally:
      self._over.set()

  def join(self, timeout: float | None = None) -> None:
    if self._over.wait(timeout) and self.ident is not None:
      super().join()
