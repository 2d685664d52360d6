"""The hardware of an island: the duration of its steps, and their tokens.

An island is *up*, *slowed* (its steps take longer), *shrunk* (it lost devices: longer steps, fewer
tokens) or *down* (no process, world.py). Step times vary: a part of every step is random.
"""

import dataclasses
import random

from diloco_jax.proof.sim import engine as engine_lib

MS = engine_lib.MS


@dataclasses.dataclass
class Island:
  """One learner's accelerators.

  Attributes:
    step_ns: an inner step without noise.
    encode_ns, adopt_ns: time to encode a fragment, to adopt one.
    donate_ns: time to copy the moments to the host.
    garble: per mille of the donations that get wrong bits.
    noise: largest random addition to a step, per mille.
    lognormal: sigma of a factor of every step whose mean is 1.
    gaussian: standard deviation of such a factor, which is at least a tenth.
    tokens: of an inner step on all devices.
    slow, shrink: factors of the faults, 1: no fault.
  """

  draw: random.Random
  step_ns: int = 100 * MS
  encode_ns: int = 2 * MS
  adopt_ns: int = MS
  donate_ns: int = 20 * MS
  garble: int = 0
  noise: int = 0
  lognormal: float = 0.0
  gaussian: float = 0.0
  tokens: int = 10
  slow: int = 1
  shrink: int = 1

  def next_step(self) -> tuple[int, int]:
    """Time in ns and tokens of the step that begins now."""
    time_ns = self.step_ns
    if self.noise:
      time_ns += time_ns * self.draw.randrange(self.noise) // 1000
    if self.lognormal:
      time_ns *= self.draw.lognormvariate(-(self.lognormal**2) / 2, self.lognormal)
    if self.gaussian:
      time_ns *= max(0.1, self.draw.gauss(1, self.gaussian))
    time_ns = round(time_ns)
    return time_ns * self.slow * self.shrink, max(1, self.tokens // self.shrink)
