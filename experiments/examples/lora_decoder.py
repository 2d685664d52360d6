"""LoRA as a Task: any Task with a frozen base; learners exchange the small matrices only.

    diloco train --config=experiments/examples/lora_decoder.py

`lora` makes the Task. Every matrix W of a layer becomes W + A B of rank r; W has the label
'frozen', so it is not trained, not sent and not read by the syncer. The weights are those of
`train.init_from`, a Hugging Face folder (pretrained.py) or a *.safetensors file, as `diloco export`
writes it; without one the random ones of the task's own `init`, to try it out. Such a folder
is mapped, not read: a process reads the rows of its own devices, the syncer none. `diloco export
--out=NEW_FOLDER` adds A B to W. The sum is float32, and is rounded once: by the decoder to its
`model.dtype`, which is float32 unless you say otherwise, and by the export to the type of W.
"""

import dataclasses
import functools
import math
import zlib
from typing import Any

import jax
import numpy as np

from diloco_jax.config import run_config
from diloco_jax.configs import stdlib_lm
from diloco_jax.train import decoder
from diloco_jax.train import task as task_lib


def task(config: run_config.Config, rank: int = 8) -> task_lib.Task:
  return lora(decoder.task(config.model, config.data), rank)


def lora(whole: task_lib.Task, rank: int) -> task_lib.Task:
  """The Task that trains A and B of the matrices that `whole` says how to read (its `matrices`)."""

  def adapted(frozen: task_lib.Params, seed: int) -> task_lib.Params:
    make = functools.partial(matrices, seed, whole, rank)
    return {'base': frozen, 'lora': jax.tree_util.tree_map_with_path(make, frozen)}

  def merged(params: task_lib.Params, rounds: bool = False) -> task_lib.Params:
    """Float32, or rounded once to the type of W: an A B below half a step of bfloat16 would change
    nothing in it."""

    def add(w: Any, ab: dict[str, Any] | None) -> Any:
      if ab is None:
        return w
      total = w.astype(np.float32) + (ab['a'] @ ab['b']).reshape(w.shape)
      return total.astype(w.dtype) if rounds else total

    return jax.tree.map(add, params['base'], params['lora'])

  def label(path: str) -> str:
    if path.startswith('base/'):
      return 'frozen'
    return whole.label(path.removeprefix('lora/').removesuffix('/a').removesuffix('/b'))

  of_merged = lambda function: lambda params, *rest: function(merged(params), *rest)
  rounded = lambda params: whole.export(merged(params, rounds=True))
  return dataclasses.replace(
    whole,
    init=lambda seed: adapted(whole.init(seed), seed),
    start=(lambda path, seed: adapted(whole.start(path, seed), seed)) if whole.start else None,
    export=rounded if whole.export else None,
    loss=of_merged(whole.loss),
    logits=of_merged(whole.logits) if whole.logits else None,
    label=label,
    matrices=(('[ab]', None),),  # AdamW for all, no decay
  )


def matrices(
  seed: int, whole: task_lib.Task, rank: int, path: Any, leaf: Any
) -> dict[str, np.ndarray] | None:
  """A and B of a matrix, or of a stack of them; None: the leaf is no matrix of the body."""
  inside = whole.label(text(path)) in ('body', 'layer', 'expert')
  plain = ((0,), (1,)) if leaf.ndim == 2 else None
  axes = task_lib.first_match(whole.matrices, text(path), plain)
  if axes is None or not inside:
    return None
  rows, columns = (math.prod(leaf.shape[axis] for axis in side) for side in axes)
  stack = leaf.shape[: leaf.ndim - sum(map(len, axes))]
  draw = np.random.default_rng((seed, zlib.crc32(text(path).encode()))).standard_normal
  a = draw((*stack, rows, rank), np.float32) / math.sqrt(rows)
  return {'a': a, 'b': np.zeros((*stack, rank, columns), np.float32)}


def text(path: Any) -> str:
  return jax.tree_util.keystr(path, simple=True, separator='/')


def get_config() -> run_config.Config:
  config = stdlib_lm.get_config('small')
  config.name, config.task = 'lora', f'{__file__}:task(rank=8)'
  return config
