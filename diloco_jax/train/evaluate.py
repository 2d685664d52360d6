"""What parameters are worth, an island's own or the global model: held-out loss, and text drawn."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.train import config as config_lib
from diloco_jax.train import mesh as mesh_lib
from diloco_jax.train import task as task_lib


def make_eval_step(task: task_lib.Task, mesh: jax.sharding.Mesh, params_shardings: Any) -> Callable:
  """Returns jitted (params, batch) -> mean loss, a float32 scalar."""
  batch_sharding = mesh_lib.batch_sharding(mesh)
  return jax.jit(
    lambda params, batch: task.measured(params, batch, batch_sharding)[0],
    in_shardings=(params_shardings, batch_sharding),
    out_shardings=mesh_lib.replicated(mesh),
  )


def evaluate(
  eval_step: Callable,
  params: Any,
  batches: Sequence[task_lib.Batch],
  stopped: Callable[[], bool] = lambda: False,
) -> float | None:
  """Mean loss over equally large batches; blocks per batch (see island.py). None: there are no
  batches, or `stopped`, which is asked before every batch, said so."""
  if not batches:
    return None
  total = 0.0
  for batch in batches:
    if stopped():
      return None
    total += float(eval_step(params, batch))
  return total / len(batches)


class HeldOut:
  """The held-out batches of a task, on one device; by default the first of this process."""

  def __init__(
    self, task: task_lib.Task, shapes: task_lib.Params, device: jax.Device | None = None
  ):
    mesh = mesh_lib.make_mesh(config_lib.MeshConfig(), [device or jax.local_devices()[0]])
    self._shardings = mesh_lib.tree_shardings(mesh, shapes, task.partition)
    self._step = make_eval_step(task, mesh, self._shardings)
    batches = task.eval_batches()
    self._bits_per_byte = bits_per_byte(task, batches)
    self.batches = [mesh_lib.put_batch(mesh, batch) for batch in batches]

  def evaluate(
    self, params: task_lib.Params, stopped: Callable[[], bool] = lambda: False
  ) -> tuple[float, float] | None:
    """The loss, and the bits per byte; None: as `evaluate`."""
    if not self.batches:
      return None
    loss = evaluate(self._step, jax.device_put(params, self._shardings), self.batches, stopped)
    return None if loss is None else (loss, self._bits_per_byte(loss))


def bits_per_byte(
  task: task_lib.Task, batches: Sequence[task_lib.Batch]
) -> Callable[[float], float]:
  """From loss to bits per byte of the text that these batches of the host predict, so that losses
  of two tokenizers can be compared; 0.0 if the task has no tokenizer."""
  if task.tokenizer is None or not batches:
    return lambda loss: 0.0
  targets = [row[1:] for batch in batches for row in np.asarray(batch).tolist()]
  size = sum(map(task.tokenizer().num_bytes, targets))
  return lambda loss: loss / math.log(2) * sum(map(len, targets)) / max(size, 1)


def sample(
  task: task_lib.Task,
  params: Any,
  prompt: Sequence[int],
  length: int,
  temperature: float = 0.8,
  seed: int = 0,
) -> Iterator[int]:
  """Draws one id after the other, without end, each from the `length` ids before it (L of the
  training), the first from at least one of `prompt`. `temperature` divides the logits; 0 takes the
  likeliest id. The task has `logits` and a tokenizer."""
  size = task.tokenizer().size  # the model may have room for more

  @jax.jit
  def draw(params: Any, window_L: jax.Array, end: jax.Array, key: jax.Array) -> jax.Array:
    logits_V = task.logits(params, window_L[None])[0, end - 1, :size]
    likeliest = jnp.argmax(logits_V)
    drawn = jax.random.categorical(key, logits_V / (temperature or 1.0))
    return drawn if temperature else likeliest

  params, key = jax.device_put(params), jax.random.key(seed)
  ids = list(prompt)
  for index in itertools.count():
    window = ids[-length:]
    window_L = np.zeros(length, np.int32)  # what comes after `end` changes nothing before it
    window_L[: len(window)] = window
    ids.append(int(draw(params, window_L, np.int32(len(window)), jax.random.fold_in(key, index))))
    yield ids[-1]
