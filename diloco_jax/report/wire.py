"""The bytes of a run on the wire, as its syncer counts them."""

import dataclasses

from diloco_jax.report import facts


@dataclasses.dataclass(slots=True)
class Wire:
  """Bytes through all processes of the syncer, each of which counts from 0."""

  bytes_up: int = 0
  bytes_down: int = 0
  bytes_data_parallel: int = 0
  _last: tuple[int, int] = (0, 0)

  def take(self, traffic: facts.Traffic) -> None:
    now = traffic.bytes_up, traffic.bytes_down
    before = self._last if all(a >= b for a, b in zip(now, self._last)) else (0, 0)
    self.bytes_up += now[0] - before[0]
    self.bytes_down += now[1] - before[1]
    self.bytes_data_parallel = traffic.bytes_data_parallel
    self._last = now
