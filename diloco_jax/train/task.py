"""The seam between training and what is trained: parameters, loss and data of a model.

Islands, the syncer's global model and its evaluation are built from a Task and know no model. The
reference is the decoder (decoder.py); an own model is one file with a function that returns a Task
(config/build.py says how a config names it).
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

from diloco_jax.numerics import fragments
from diloco_jax.train import tokenizer as tokenizer_lib

NEVER_SENT = fragments.NEVER_SENT  # labels
Params = Any  # a tree of float arrays whose paths do not change during a run
Batch = Any  # a tree of host arrays; each has the batch as its first axis, none is a scalar
Partition = Sequence[tuple[str, PartitionSpec]]
Axes = tuple[int, ...]
Matrices = Sequence[tuple[str, tuple[Axes, Axes] | None]]
Measured = tuple[jax.Array, dict[str, jax.Array]]  # the loss, and other scalars by name
_Rule = TypeVar('_Rule')
_STATISTIC = re.compile('batch_stats|(running|moving)_(mean|var|variance)|(mean|var)_ema')


def first_match(rules: Sequence[tuple[str, _Rule]], path: str, otherwise: _Rule) -> _Rule:
  """The rule of the first regular expression that fits the end of a path such as 'layers/3/query'.

  >>> first_match([('layers/./out', 'split'), ('out', 'whole')], 'mu/layers/3/out', '')
  'split'
  """
  return next((rule for pattern, rule in rules if re.search(f'(^|/){pattern}$', path)), otherwise)


class Batches(Protocol):
  """The endless batches of a shard, by index from 0. A batch is a pure function of its index, so a
  learner continues from an integer."""

  def __getitem__(self, index: int, /) -> Batch: ...


def embeddings(path: str) -> str:
  """The default label of a parameter: 'embedding' if its path says so, 'head' for a last layer that
  is called `head`, `lm_head` or so, 'statistic' for a running mean or variance (linen's
  `batch_stats`; `mean` and `var` of nnx), else 'body'. The syncer merges the first two by
  `sync.embedding_merge` (paper section 4). A Mixture of Experts has labels of its own (Task).

  Args:
    path: of the parameter, such as 'layers/3/kernel'.

  >>> embeddings('params/Embed_0/embedding'), embeddings('layers/0/query')
  ('embedding', 'body')
  >>> embeddings('lm_head/kernel'), embeddings('MultiHeadDotProductAttention_0/query')
  ('head', 'body')
  >>> embeddings('batch_stats/BatchNorm_0/var'), embeddings('mean/kernel')
  ('statistic', 'body')
  """
  lowered = path.lower()
  names = [name for name in re.split(r'[^a-z0-9_]+', lowered) if name]
  while names[-1:] == ['value']:  # of flax.nnx
    names.pop()
  if names[-1:] in (['mean'], ['var']) or any(map(_STATISTIC.fullmatch, names)):
    return 'statistic'
  if 'embed' in lowered:
    return 'embedding'
  return 'head' if any(re.fullmatch(r'(.*_|lm)?head(_\d+)?', name) for name in names) else 'body'


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Questions:
  """Held-out questions whose right answers are known (evaluate.scores).

  A row is what a model reads with one of the C `choices` filled in: question n has the rows
  n C ... n C + C - 1. A model chooses the row whose counted ids have the largest product of
  probabilities. With one choice a row counts as right by the share of its counted ids that are the
  likeliest ones of all.

  Attributes:
    inputs: what `Task.logits` reads: a tree of host arrays, each with R = N C rows.
    targets_RxL: the id that follows each position, int32.
    counted_RxL: which of them count, bool.
    right_N: the right choice of each question.
    choices: C.
  """

  inputs: Batch
  targets_RxL: np.ndarray
  counted_RxL: np.ndarray
  right_N: np.ndarray
  choices: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """What a run trains.

  Attributes:
    init: seed -> the initial parameters. Every learner and the syncer call it and must get the same
      bits, so draw on the host (numpy) or on one device. If jax cannot trace it, it is called for
      the shapes, too. A leaf may be drawn when it is read (initial.py), so that no host of a large
      model draws all of it.
    start: (`train.init_from`, seed) -> the same, of weights that are there; None: the names in that
      file are those of the tree.
    export: params -> the tensors of a Hugging Face folder by name (storage/hugging_face.py).
    loss: (params, batch, sharding) -> the mean loss per token or example, a float32 scalar; traced
      by jit. Or that and a dict of other scalars, such as an accuracy: curves and records have them
      by their names (`measured`). `sharding` is that of the batch axis on the learner's mesh, for
      `jax.lax.with_sharding_constraint`; a model may ignore it.
    batches: shard in [0, config.data.shards) -> its batches. Each learner leases another
      shard, so two shards should not have the same batches at the same time. With `data.local`
      the number of this learner, any from 0 -> batches of all data of its own.
    tokens_per_batch: tokens (or examples) of a batch: the learner's weight in a merge.
    eval_batches: the held-out batches, the same at every call; () for no evaluation.
    label: path of a parameter ('layers/3/query') -> 'embedding', 'head', 'router' or 'body', which
      selects its merge rule; or 'expert' or 'layer' for tensors of the body with one row per expert
      or layer, each merged by itself; or 'statistic' for running statistics, which become the mean
      of the learners': no outer optimizer moves them. Two labels are never sent: 'local' for what
      each learner trains for itself, such as a head of its own, and 'frozen' for what no
      learner trains, which may have any dtype; the syncer reads neither, not even from `init`.
    partition: (regular expression on the end of a path such as 'layers/3/query', partition) pairs,
      the first match counts; the rest is replicated. Mesh axes: train/mesh.py.
    matrices: (the same, (input axes, output axes)) pairs: how Muon reads a tensor of the body as a
      matrix, or as several of them, one for each index of the other axes (experts, or layers that
      are stacked for a scan). Without a match a tensor of two axes maps the first to the second.
      AdamW has the rest, and what maps to None. Weight decay is for tensors of several axes. What
      maps to None, and what is called `scale` or `bias`, is taken for vectors, however many axes it
      has: without Muon and without decay.
    data_digest: a text that differs if the data does; compared when a learner joins, and when the
      run goes on or is evaluated (config/brought.py), but not asked for with `data.local`. The
      syncer then makes the task, too, without the learners' data.
    tokenizer: of a task of text, whose batches are windows of L + 1 ids: gives losses in bits per
      byte as well, and, with `logits`, the text of `diloco sample`.
    logits: (params, ids_BxL) -> logits_BxLxV of the id that follows each position. A task whose
      suite has other inputs than ids reads those.
    suite: how many held-out examples to use, at most -> the questions of each kind, the same at
      every call, for `diloco evaluate --suite`. Of text: `evaluate.text_suite`.
    flops_per_token: of training, forward and backward (train/flops.py); 0: TFLOP/s are not shown.
  """

  init: Callable[[int], Params]
  loss: Callable[[Params, Batch, jax.sharding.Sharding], jax.Array | Measured]
  batches: Callable[[int], Batches]
  tokens_per_batch: int
  start: Callable[[str, int], Params] | None = None
  export: Callable[[Params], dict[str, np.ndarray]] | None = None
  eval_batches: Callable[[], Sequence[Batch]] = tuple
  label: Callable[[str], str] = embeddings
  partition: Partition = ()
  matrices: Matrices = ()
  data_digest: Callable[[], str] = str
  tokenizer: Callable[[], tokenizer_lib.Tokenizer] | None = None
  logits: Callable[[Params, Any], jax.Array] | None = None
  suite: Callable[[int], Mapping[str, Questions]] | None = None
  flops_per_token: float = 0.0

  def trained(self, params: Params) -> Params:
    """The parameters with None instead of those that are frozen."""
    return fragments.keep(params, lambda path: self.label(path) != fragments.FROZEN)

  def measured(self, params: Params, batch: Batch, sharding: jax.sharding.Sharding) -> Measured:
    """The loss, and the other scalars that `loss` returns. Raises ValueError for other shapes."""
    result = self.loss(params, batch, sharding)
    loss, others = result if isinstance(result, tuple) else (result, {})
    for name, value in {**others, 'loss': loss}.items():
      if np.ndim(value):
        raise ValueError(f'{name} of the task has the shape {np.shape(value)}, return one number')
    return loss, others
