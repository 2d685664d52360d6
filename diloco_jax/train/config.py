"""The settings of an island as typed data.

The dataclasses are mutable and slotted so that `ml_collections.config_flags` can override any
field (`--config.model.num_layers=8`). Overrides do not run `__post_init__` again; a program
therefore calls `validate()` once before the first compile. Each error names both values and the
remedy.
"""

import dataclasses
import math

_ACTIVATION_DTYPES = ('float32', 'bfloat16')


def _require_positive(config: object, *names: str) -> None:
  for name in names:
    value = getattr(config, name)
    if not 0 < value < math.inf:  # written so that NaN fails
      raise ValueError(f'{type(config).__name__}.{name} is {value}: set it to more than 0')


def _require_fraction(config: object, *names: str) -> None:
  for name in names:
    value = getattr(config, name)
    if not 0 <= value < 1:
      raise ValueError(f'{type(config).__name__}.{name} is {value}: choose a value in [0, 1)')


@dataclasses.dataclass(kw_only=True, slots=True)
class ModelConfig:
  """A Gemma-like decoder (model.py). The letters are the axes in the names of arrays."""

  vocab_size: int = 256  # V; 256 = bytes
  num_layers: int = 4
  embed_dim: int = 128  # D
  num_heads: int = 4  # N, query heads
  num_kv_heads: int = 2  # K, key and value heads; divides num_heads
  head_dim: int = 32  # H, even (RoPE rotates pairs)
  hidden_dim: int = 512  # F, of the gated feed-forward block
  tied_head: bool = True  # the output head is the embedding, transposed
  rope_theta: float = 10_000.0  # wavelengths run from 2 pi to 2 pi rope_theta positions
  logit_softcap: float = 30.0  # logits <- c tanh(logits / c); 0 = off
  dtype: str = 'float32'  # of activations; parameters are always float32

  def validate(self) -> None:
    _require_positive(
      self,
      'vocab_size',
      'num_layers',
      'embed_dim',
      'num_heads',
      'num_kv_heads',
      'head_dim',
      'hidden_dim',
      'rope_theta',
    )
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_heads {self.num_heads} is not a multiple of num_kv_heads '
        f'{self.num_kv_heads}: every key head serves equally many query heads'
      )
    if self.head_dim % 2:
      raise ValueError(
        f'head_dim {self.head_dim} is odd: RoPE rotates pairs, use {self.head_dim + 1}'
      )
    if not self.logit_softcap >= 0:
      raise ValueError(f'logit_softcap is {self.logit_softcap}: use 0 to switch it off')
    if self.dtype not in _ACTIVATION_DTYPES:
      raise ValueError(f'dtype {self.dtype!r} is unknown: choose one of {_ACTIVATION_DTYPES}')


@dataclasses.dataclass(kw_only=True, slots=True)
class OptimizerConfig:
  """The inner optimizer, AdamW (optimizer.py). Rates follow the protocol's clock, in inner
  steps."""

  learning_rate: float = 3e-3  # the peak
  warmup_steps: int = 50  # linear, from peak / warmup_steps at clock 0
  end_lr_ratio: float = 0.1  # of the peak, at total_steps and after (cosine)
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.1  # on tensors of two axes and more
  clip_norm: float = 1.0  # global norm of the gradient; 0 = no clipping

  def validate(self) -> None:
    _require_positive(self, 'learning_rate', 'eps')
    _require_fraction(self, 'b1', 'b2')
    for name in ('warmup_steps', 'weight_decay', 'clip_norm'):
      if not getattr(self, name) >= 0:
        raise ValueError(f'OptimizerConfig.{name} is {getattr(self, name)}: use 0 for none')
    if not 0 <= self.end_lr_ratio <= 1:
      raise ValueError(
        f'end_lr_ratio {self.end_lr_ratio} is outside [0, 1]: it is a share of '
        f'learning_rate {self.learning_rate}'
      )


@dataclasses.dataclass(kw_only=True, slots=True)
class DataConfig:
  """Bytes of text, cut into windows, divided into disjoint shards (data.py)."""

  corpus: str = 'stdlib'  # 'stdlib' = Python's own sources; else a directory or a glob of files
  seq_len: int = 128  # L, tokens predicted per sequence
  batch_size: int = 8  # B, sequences per inner step of one learner
  shards: int = 16  # V, disjoint shards; at least the largest number of learners
  seed: int = 0  # of the shuffle; the same on every learner of a run
  eval_batches: int = 8  # of the held-out files
  eval_batch_size: int = 32  # sequences

  def validate(self) -> None:
    _require_positive(self, 'seq_len', 'batch_size', 'shards', 'eval_batches', 'eval_batch_size')
    if not self.corpus:
      raise ValueError("corpus is empty: use 'stdlib', a directory, or a glob of text files")
    if not 0 <= self.seed < 2**32:
      raise ValueError(f'seed {self.seed} is outside [0, {2**32}): choose 32 bits')


@dataclasses.dataclass(kw_only=True, slots=True)
class MeshConfig:
  """Devices per axis of one island's mesh (mesh.py). The product is the island's devices."""

  data: int = 1  # batch split, parameters replicated
  fsdp: int = 1  # batch split, parameters split
  tensor: int = 1  # heads and hidden units split

  @property
  def num_devices(self) -> int:
    return self.data * self.fsdp * self.tensor

  def validate(self) -> None:
    _require_positive(self, 'data', 'fsdp', 'tensor')


def validate(
  model: ModelConfig, optimizer: OptimizerConfig, data: DataConfig, mesh: MeshConfig
) -> None:
  """Validates each part, and that the parts fit together."""
  for part in (model, optimizer, data, mesh):
    part.validate()
  if model.vocab_size < 256:
    raise ValueError(f'vocab_size {model.vocab_size} cannot hold bytes: use at least 256')
  ways = mesh.data * mesh.fsdp
  for name in ('batch_size', 'eval_batch_size'):
    if getattr(data, name) % ways:
      raise ValueError(
        f'{name} {getattr(data, name)} does not split {ways} ways (data '
        f'{mesh.data} x fsdp {mesh.fsdp}): use a multiple of {ways}'
      )
