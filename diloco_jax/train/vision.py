"""A vision-language task: the decoder reads an image, then predicts its caption.

  sequence = [patches W + positions, E[caption] sqrt(D)]

An image is cut into square patches; each is projected to the width of the model, gets a learned
vector of its place, and stands in the sequence in front of the bytes of the caption (LLaVA, arXiv
2304.08485). Attention is causal over the whole sequence. The loss is that of the caption alone.

Axes as in decoder.py, and: S side of an image, I patches, C values of a patch.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from diloco_jax.train import config as config_lib
from diloco_jax.train import data as data_lib
from diloco_jax.train import decoder, digits
from diloco_jax.train import task as task_lib

PARTITION = (
  (r'patches', P(None, 'fsdp')),  # C D
  (r'positions', P(None, 'fsdp')),  # I D
  *decoder.PARTITION,
)


def task(model: config_lib.ModelConfig, data: config_lib.DataConfig) -> task_lib.Task:
  """The captions of the digits; one caption has `data.seq_len` bytes. Raises ValueError."""
  if digits.SIDE % model.patch_size:
    raise ValueError(
      f'patch_size {model.patch_size} does not divide the side of an image, {digits.SIDE} pixels: '
      'use 1, 2, 4 or 8'
    )
  corpus = functools.cache(lambda: digits.load(data.corpus))
  return task_lib.Task(
    init=functools.partial(decoder.init_params, model, kind=VisionDecoder),
    loss=functools.partial(loss, model),
    batches=lambda shard: data_lib.make_shard(corpus(), data, shard),
    tokens_per_batch=data.batch_size * data.seq_len,
    eval_batches=lambda: data_lib.eval_batches(corpus(), data),
    label=label,
    partition=PARTITION,
    matrices=decoder.MATRICES,
    data_digest=lambda: data_lib.digest(corpus(), data),
  )


class VisionDecoder(decoder.Decoder):
  """The decoder, and a projection of patches."""

  def __init__(self, config: config_lib.ModelConfig, rng: np.random.Generator):
    super().__init__(config, rng)
    values, count = config.patch_size**2, (digits.SIDE // config.patch_size) ** 2
    self.patches = decoder.normal(rng, (values, config.embed_dim), values**-0.5)
    self.positions = decoder.normal(rng, (count, config.embed_dim), 1.0)

  def caption(
    self,
    image_BxSxS: jax.Array,
    tokens_BxL: jax.Array,
    sharding: jax.sharding.NamedSharding | None = None,
  ) -> tuple[jax.Array, jax.Array]:
    """As Decoder.__call__, for captions of images with values in [0, digits.BLACK]."""
    patches_BxIxC = cut(image_BxSxS, self.config.patch_size).astype(self.patches[...].dtype)
    patches_BxIxC = patches_BxIxC * (2 / digits.BLACK) - 1  # in [-1, 1]
    prefix_BxIxD = patches_BxIxC @ self.patches[...] + self.positions[...][None]
    return self(tokens_BxL, sharding, prefix_BxIxD)


def cut(image_BxSxS: jax.Array, side: int) -> jax.Array:
  """The patches of images, row by row: BxIxC with C = side^2.

  >>> cut(jnp.arange(16).reshape(1, 4, 4), 2)[0, 1].tolist()  # the top right one
  [2, 3, 6, 7]
  """
  across = image_BxSxS.shape[1] // side
  split = image_BxSxS.reshape(-1, across, side, across, side).transpose(0, 1, 3, 2, 4)
  return split.reshape(-1, across**2, side**2)


def loss(
  config: config_lib.ModelConfig,
  params: decoder.Params,
  batch: dict[str, jax.Array],
  sharding: jax.sharding.NamedSharding | None = None,
) -> jax.Array:
  """Mean cross-entropy of the caption's bytes, in nats.

  Args:
    config: of the model.
    params: of a VisionDecoder.
    batch: 'image' and 'text' of digits.Captioned, with a leading axis B.
    sharding: of the batch axis.
  """
  tokens_BxL1 = batch['text'].astype(jnp.int32)
  module = decoder.bind(config, params, VisionDecoder)
  logits_BxLxV, balance = module.caption(batch['image'], tokens_BxL1[:, :-1], sharding)
  return decoder.text_loss(config, logits_BxLxV, tokens_BxL1[:, 1:], balance)


def label(path: str) -> str:
  """As decoder.label; the places of patches are an embedding.

  >>> label("['positions']"), label("['patches']"), label("['head']")
  ('embedding', 'body', 'head')
  """
  return 'embedding' if path == "['positions']" else decoder.label(path)
