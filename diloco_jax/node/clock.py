"""The real clock behind the Clock port."""

import time


class Monotonic:
  """Monotonic time of this machine; wall-clock jumps do not touch it."""

  def now_ns(self) -> int:
    return time.monotonic_ns()
