"""The settings of an island as typed data.

The dataclasses are mutable and slotted so that `ml_collections.config_flags` can override any
field (`--config.model.num_layers=8`). Overrides do not run `__post_init__` again; a program
therefore calls `validate()` once before the first compile. Each error names both values and the
remedy.
"""

import dataclasses
import math

from diloco_jax.numerics import spec

_DTYPES = ('float32', 'bfloat16')
STYLES = ('gemma', 'llama')
REMATS = ('none', 'dots', 'full')
_OPTIMIZERS = ('adamw', 'muon')
MAX_LAYERS = 10**4
MAX_PARAMETERS = 10**12


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
  """A Gemma-like decoder (decoder.py). The letters are the axes in the names of arrays.

  Attributes:
    vocab_size: V, the number of ids; 256 = bytes.
    num_layers: how many blocks of attention and feed-forward.
    embed_dim: D, the width of the residual stream.
    num_heads: N, query heads.
    num_kv_heads: K, key and value heads; divides num_heads.
    head_dim: H, even, because RoPE rotates pairs.
    hidden_dim: F, of the gated feed-forward block, or of each expert.
    num_experts: E, of the Mixture of Experts in every layer (experts.py); 0 = none, a dense model.
    experts_per_token: C, how many of them a token is given to.
    tied_head: whether the output head is the embedding, transposed.
    style: 'gemma': GELU, embeddings times sqrt(D), norms times 1 + s; 'llama': SiLU, and neither.
    norm_eps: what a norm adds to the mean square.
    qk_norm: whether queries and keys are normed per head.
    post_norms: whether what a block adds is normed, too.
    rope_theta: wavelengths run from 2 pi to 2 pi rope_theta positions.
    rope_local_theta: the same of layers with a window; 0 = rope_theta.
    rope_factor: how much longer the longest wavelengths are (Llama 3.1); 1 = they are not.
    logit_softcap: c of logits <- c tanh(logits / c); 0 = off.
    dtype: of activations, 'float32' or 'bfloat16'.
    param_dtype: of parameters, the same; moments and what is exchanged are always float32.
    window: how many positions, itself included, a position attends to; 0 = all before it.
    global_every: layers k, 2k, 3k ... attend to all positions all the same; 0 = none does.
    scan: one program for all layers, their tensors stacked along a first axis; not with experts.
    remat: what is computed twice, to save memory: 'none', 'dots' (all of a layer but products with
      its tensors) or 'full' (each layer). Each learner chooses.
    loss_chunk: positions whose logits exist at the same time, a divisor of data.seq_len; 0 = all.
      Each learner chooses.
  """

  vocab_size: int = 256
  num_layers: int = 4
  embed_dim: int = 128
  num_heads: int = 4
  num_kv_heads: int = 2
  head_dim: int = 32
  hidden_dim: int = 512
  num_experts: int = 0
  experts_per_token: int = 2
  tied_head: bool = True
  style: str = 'gemma'
  norm_eps: float = 1e-6
  qk_norm: bool = True
  post_norms: bool = False
  rope_theta: float = 10_000.0
  rope_local_theta: float = 0.0
  rope_factor: float = 1.0
  logit_softcap: float = 30.0
  dtype: str = 'float32'
  param_dtype: str = 'float32'
  window: int = 0
  global_every: int = 0
  scan: bool = False
  remat: str = 'none'
  loss_chunk: int = 0

  @property
  def sees_all(self) -> list[bool]:
    """Whether the attention of each layer has no window."""
    numbers, every = range(1, self.num_layers + 1), self.global_every
    return [not self.window or bool(every and number % every == 0) for number in numbers]

  def _least_parameters(self) -> int:
    """The size of the embedding, the projections of attention and the feed-forward blocks."""
    heads = 2 * self.head_dim * (self.num_heads + self.num_kv_heads)
    blocks = 3 * self.hidden_dim * max(self.num_experts, 1)
    return self.embed_dim * (self.vocab_size + self.num_layers * (heads + blocks))

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
      'experts_per_token',
      'norm_eps',
      'rope_theta',
      'rope_factor',
    )
    if self.num_layers > MAX_LAYERS:
      raise ValueError(f'num_layers is {self.num_layers}: at most {MAX_LAYERS}')
    if (least := self._least_parameters()) > MAX_PARAMETERS:
      raise ValueError(
        f'the model has {least} parameters or more: at most {MAX_PARAMETERS}; lower its sizes'
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
    if self.num_experts < 0:
      raise ValueError(f'num_experts is {self.num_experts}: use 0 for a dense model')
    if self.num_experts and self.experts_per_token > self.num_experts:
      raise ValueError(
        f'experts_per_token {self.experts_per_token} is more than num_experts '
        f'{self.num_experts}: use at most that'
      )
    if not 0 <= self.logit_softcap < math.inf:
      raise ValueError(f'logit_softcap is {self.logit_softcap}: use 0 to switch it off')
    choices = {'dtype': _DTYPES, 'param_dtype': _DTYPES, 'remat': REMATS, 'style': STYLES}
    for name, known in choices.items():
      if getattr(self, name) not in known:
        raise ValueError(f'{name} {getattr(self, name)!r} is unknown: choose one of {known}')
    for name in ('window', 'global_every', 'loss_chunk', 'rope_local_theta'):
      if not getattr(self, name) >= 0:  # NaN fails, too
        raise ValueError(f'{name} is {getattr(self, name)}: use 0 to switch it off')
    if self.scan and self.num_experts:
      raise ValueError(
        f'scan with num_experts {self.num_experts}: experts are stacked already; use scan=False'
      )


@dataclasses.dataclass(kw_only=True, slots=True)
class OptimizerConfig:
  """The inner optimizer (optimizer.py). Rates follow the protocol's clock, in inner steps.

  Attributes:
    name: 'adamw', or 'muon': Muon for the matrices of the body and AdamW for the rest. Or a
      transform of optax in place of Adam's, without a rate: 'optax:scale_by_lion(b1=0.95)', or
      'package.module:make(...)' or 'FILE.py:make' of your own.
    learning_rate: the peak, for all tensors; an update of Muon is as large as one of AdamW.
    warmup_steps: linear, from peak / warmup_steps at clock 0.
    end_lr_ratio: the rate at train.steps and after (cosine), as a share of the peak.
    b2: of AdamW, decay of the mean of their squares.
    momentum: of Muon, decay of the mean of the gradients.
    momentum_weight: of that mean in an update, beside the newest gradient (quasi-hyperbolic
      momentum, arXiv 1810.06801); 0: Nesterov's with Muon, 1 with AdamW.
    weight_decay: of tensors of two axes and more.
    clip_norm: the largest global norm of the gradient; 0 = no clipping.
  """

  name: str = 'adamw'
  learning_rate: float = 6e-3
  warmup_steps: int = 50
  end_lr_ratio: float = 0.1
  b2: float = 0.95
  momentum: float = 0.95
  momentum_weight: float = 0.0
  weight_decay: float = 0.1
  clip_norm: float = 1.0

  def validate(self) -> None:
    if self.name not in _OPTIMIZERS and not spec.OWN.fullmatch(self.name):
      raise ValueError(
        f'optimizer {self.name!r} is unknown: choose one of {_OPTIMIZERS}, or MODULE:FUNCTION(...)'
      )
    _require_positive(self, 'learning_rate')
    _require_fraction(self, 'b2', 'momentum')
    if not 0 <= self.momentum_weight <= 1:
      raise ValueError(f'optimizer.momentum_weight is {self.momentum_weight}: choose one in [0, 1]')
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
  """Ids of text, cut into windows, read by shards (data.py).

  Attributes:
    corpus: 'stdlib' = Python's own sources; else a directory or a glob of files of text, *.jsonl
      or *.parquet (rows) or *.array_record (records of text). `{node}` in it stands for the id of
      the learner, or 'syncer'.
    field: the key of *.jsonl and the column of *.parquet that has the text.
    local: each learner has files of its own, which no other node reads: no shards, and no learner
      waits for one. The syncer needs no files; with some, it evaluates on their held-out part.
    tokenizer: '' = bytes; FILE.json of Hugging Face's tokenizers, FILE.model of SentencePiece, or
      'bpe(size=2048)', which is trained on the corpus. model.vocab_size must hold its ids.
    seq_len: L, tokens predicted per sequence.
    batch_size: B, sequences per batch of a shard; the same on every learner of a run.
    batch_rows: how many of them this learner trains on; 0 = all. Each learner chooses, so that
      slow devices take as long for a step as fast ones.
    shards: V, the number of shards; at least the largest number of learners. Not with `local`.
    seed: of the shuffle; the same on every learner of a run.
    eval_batches: how many batches of the held-out files an evaluation reads.
    eval_batch_size: sequences per batch of an evaluation.
  """

  corpus: str = 'stdlib'
  field: str = 'text'
  local: bool = False
  tokenizer: str = ''
  seq_len: int = 128
  batch_size: int = 8
  batch_rows: int = 0
  shards: int = 16
  seed: int = 0
  eval_batches: int = 8
  eval_batch_size: int = 32

  @property
  def rows(self) -> int:
    """Sequences per inner step of this learner."""
    return self.batch_rows or self.batch_size

  def validate(self) -> None:
    _require_positive(self, 'seq_len', 'batch_size', 'shards', 'eval_batches', 'eval_batch_size')
    if not 0 <= self.batch_rows <= self.batch_size:
      raise ValueError(
        f'batch_rows is {self.batch_rows}, of a batch_size of {self.batch_size}: use 0 for all'
      )
    if not self.corpus:
      raise ValueError("corpus is empty: use 'stdlib', a directory, or a glob of text files")
    if not self.field:
      raise ValueError("data.field is empty: name the field of the text, such as 'text'")
    if self.local and self.tokenizer.startswith('bpe'):
      raise ValueError(
        f'data.tokenizer is {self.tokenizer!r}, with data.local each learner would train its own: '
        'give all nodes the same file'
      )
    if not 0 <= self.seed < 2**32:
      raise ValueError(f'seed {self.seed} is outside [0, {2**32}): choose 32 bits')


@dataclasses.dataclass(kw_only=True, slots=True)
class MeshConfig:
  """Devices per axis of one island's mesh (mesh.py). The product is the island's devices.

  Attributes:
    data: batch split, parameters replicated.
    fsdp: batch split, parameters split.
    tensor: heads and hidden units split.
    hosts: the processes that `diloco train` starts for each learner; they share the devices evenly.
  """

  data: int = 1
  fsdp: int = 1
  tensor: int = 1
  hosts: int = 1

  @property
  def num_devices(self) -> int:
    return self.data * self.fsdp * self.tensor

  def validate(self) -> None:
    _require_positive(self, 'data', 'fsdp', 'tensor', 'hosts')
    if self.num_devices % self.hosts:
      raise ValueError(
        f'mesh.hosts is {self.hosts}: {self.num_devices} devices do not split evenly over them'
      )


def validate_decoder(model: ModelConfig, data: DataConfig, mesh: MeshConfig) -> None:
  """Validates the parts of the decoder, and that they fit together and on a mesh."""
  model.validate()
  data.validate()
  if model.vocab_size < 256 and not data.tokenizer:
    raise ValueError(f'vocab_size {model.vocab_size} cannot hold bytes: use at least 256')
  if model.loss_chunk and data.seq_len % model.loss_chunk:
    raise ValueError(f'loss_chunk {model.loss_chunk} does not divide seq_len {data.seq_len}')
  ways = mesh.data * mesh.fsdp
  for name in ('batch_rows' if data.batch_rows else 'batch_size', 'eval_batch_size'):
    if getattr(data, name) % ways:
      raise ValueError(
        f'{name} {getattr(data, name)} does not split {ways} ways (data '
        f'{mesh.data} x fsdp {mesh.fsdp}): use a multiple of {ways}'
      )
