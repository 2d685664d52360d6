"""A thread that a program can stop waiting for, and wait for again."""

import threading

_LOOK_S = 1.0  # a signal that another thread of the process has received wakes no wait


class Thread(threading.Thread):
  """A daemon thread whose `join` may be interrupted and called again.

  On Python 3.11 and 3.12 a `threading.Thread.join` that a signal interrupts marks the thread as
  stopped: from then on `join` returns at once and `is_alive` is False while the thread runs. Use
  this class for every thread that the main thread of a user's program waits for.
  """

  def __init__(self, **kwargs):
    super().__init__(daemon=True, **kwargs)
    # A signal may interrupt `join` anywhere, and an Event would then keep its own lock for ever.
    self._over = False
    self._runs = threading.Lock()
    self._runs.acquire()

  def start(self) -> None:
    try:
      super().start()
    except RuntimeError:  # the system has no thread left: `join` has nothing to wait for
      self._over = True
      raise

  def run(self) -> None:
    try:
      super().run()
    finally:
      self._over = True
      self._runs.release()

  def join(self, timeout: float | None = None) -> None:
    while not self._over:
      if self._runs.acquire(timeout=_LOOK_S if timeout is None else timeout):
        self._runs.release()
      elif timeout is not None:
        break
    if self._over and self.ident is not None:
      super().join()
