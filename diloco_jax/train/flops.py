"""What an inner step costs and what its devices could do: FLOPs by formula, peaks, memory.

The compiler's own count is no measure: it counts the body of a scan once and no Pallas kernel.
"""

import dataclasses
import math
import re
from typing import TYPE_CHECKING

from diloco_jax.train import config as train_config

if TYPE_CHECKING:
  import jax

# Dense bfloat16 FLOPs a second of one device, by its `device_kind`; from the makers' data sheets.
_PEAKS = (
  (r'TPU v6 lite|TPU v6e', 918e12),
  (r'TPU v5 lite|TPU v5e', 197e12),
  (r'TPU v5', 459e12),
  (r'TPU v4$', 275e12),
  (r'H[12]00(?!.*(PCIe|NVL))', 989e12),
  (r'A100', 312e12),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
  """What a learner trains, and on what (train/flops.py), at each log line. `tokens` of an inner
  step; `flops` of an inner step on one of its `devices`, `peak_flops` of one in a second;
  `memory_bytes`: the most that one has held. 0: not known."""

  parameters: int
  tokens: int
  devices: int
  kind: str
  flops: float
  peak_flops: float
  memory_bytes: int
  memory_limit_bytes: int

  def __str__(self) -> str:
    count = self.parameters
    millions = f'{count / 1e6:.4g} million' if count >= 10**6 else f'{count:,}'
    return f'{millions} parameters, {self.tokens:,} tokens a step, {self.devices} x {self.kind}'

  def speed(self, seconds: float) -> dict[str, float]:
    """The figures of a step of `seconds` that are known: TFLOP/s of one device, as a share of the
    peak, and the share of its memory that was held at most."""
    rate = self.flops / seconds if seconds > 0 else 0.0
    figures = {
      'tflops': rate / 1e12,
      'mfu': rate / (self.peak_flops or math.inf),
      'memory': self.memory_bytes / (self.memory_limit_bytes or math.inf),
    }
    return {name: value for name, value in figures.items() if value}


def decoder(model: train_config.ModelConfig, seq_len: int) -> float:
  """FLOPs of training on one token, forward and backward: 6 for each weight that it is multiplied
  with, and 12 H N L for the attention of a layer with L keys (PaLM, arXiv 2204.02311, appendix B).

  The look-up of the embedding counts nothing, the output head counts, tied or not; of experts those
  count that a token is given to. Attention counts all keys of its window: a causal mask does not
  halve it, as it does for MaxText. Repeated work of remat does not count.
  """
  D, N, K = model.embed_dim, model.num_heads, model.num_kv_heads
  mixed = 3 * D * model.hidden_dim
  if model.num_experts:
    mixed = mixed * model.experts_per_token + D * model.num_experts
  layer = 6 * (2 * D * model.head_dim * (N + K) + mixed)
  keys = sum(seq_len if sees_all else min(model.window, seq_len) for sees_all in model.sees_all)
  return model.num_layers * layer + 12 * model.head_dim * N * keys + 6.0 * D * model.vocab_size


def peak(kind: str) -> float:
  """Dense bfloat16 FLOPs a second of a device; 0: not known."""
  return next((flops for pattern, flops in _PEAKS if re.search(pattern, kind)), 0.0)


def memory(devices: 'list[jax.Device]') -> tuple[int, int]:
  """The most bytes that any of these devices of this host has held, and its limit; 0 each: a
  backend that does not count, as on CPUs, or does not answer, as Pathways."""
  import jax  # who reads records needs none

  try:
    stats = [device.memory_stats() or {} for device in devices]
  except jax.errors.JaxRuntimeError:
    return 0, 0
  return max((stat.get('peak_bytes_in_use', 0), stat.get('bytes_limit', 0)) for stat in stats)
