"""A vision-language model that describes handwritten digits: 'a seven of 23 dark pixels'.

    diloco train --config=experiments/examples/digits_vlm.py

  sequence = [patches W + positions, E[caption] sqrt(D)]

An image is cut into patches of 2 x 2 pixels; each is projected to the width of the model, gets a
learned vector of its place, and precedes the bytes of the caption (LLaVA, arXiv 2304.08485).
Attention is causal over the whole sequence. The loss is that of the caption alone.

The images are scikit-learn's 1,797 of 8 x 8 pixels (`load_digits`; Alpaydin and Kaynak, 1998), a
part of that package, so nothing is downloaded. Every fifth one is held out. A caption names the
digit and counts its dark pixels: with the name alone the held-out loss of a small model falls to
0.1 nats per caption, and is then the loss of a few ambiguous images; the count keeps it near 2.

Axes as in decoder.py, and: S side of an image, I patches, C values of a patch.
"""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from diloco_jax.config import run_config
from diloco_jax.configs import stdlib_lm
from diloco_jax.train import config as train_config
from diloco_jax.train import data as data_lib
from diloco_jax.train import decoder, evaluate
from diloco_jax.train import task as task_lib

PARTITION = (
  (r'patches', P(None, 'fsdp')),  # C D
  (r'positions', P(None, 'fsdp')),  # I D
  *decoder.PARTITION,
)
PATCH = 2  # side of a patch, in pixels
SIDE = 8  # pixels
BLACK = 16  # the largest value of a pixel
_HELD_OUT_EVERY = 5
_WORDS = ('zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine')


@dataclasses.dataclass(frozen=True, eq=False)
class Digits:
  """The images and what they show."""

  images_NxSxS: np.ndarray  # uint8, S = SIDE
  digits_N: np.ndarray

  @property
  def digest(self) -> str:
    """A crc32: learners of one run must agree on it."""
    images = zlib.crc32(self.images_NxSxS)
    return f'{zlib.crc32(self.digits_N.astype(np.uint8).tobytes(), images):08x}'

  def train(self, length: int) -> 'Captioned':
    """The images to train on, with captions of `length` bytes."""
    return self._captioned(length, held_out=False)

  def held_out(self, length: int) -> 'Captioned':
    return self._captioned(length, held_out=True)

  def _captioned(self, length: int, held_out: bool) -> 'Captioned':
    picked_N = (np.arange(len(self.digits_N)) % _HELD_OUT_EVERY == 0) == held_out
    return Captioned(self.images_NxSxS[picked_N], self.digits_N[picked_N], length)


class Captioned:
  """Random access to {'image': uint8[SIDE, SIDE], 'text': uint8[length + 1]}: a zero byte, then the
  caption, then zeros."""

  def __init__(self, images_NxSxS: np.ndarray, digits_N: np.ndarray, length: int):
    self._images = images_NxSxS
    self._texts = [b'\0' + caption(*pair) for pair in zip(digits_N.tolist(), images_NxSxS)]
    self._length = length
    longest = max(map(len, self._texts)) - 1
    if length < longest:
      raise ValueError(f'seq_len {length} cuts captions off: use at least {longest}')

  def __len__(self) -> int:
    return len(self._texts)

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    text = self._texts[index].ljust(self._length + 1, b'\0')
    return {'image': self._images[index], 'text': np.frombuffer(text, np.uint8)}

  def __repr__(self) -> str:
    return f'Captioned(length={self._length}, count={len(self)})'


def caption(digit: int, image_SxS: np.ndarray) -> bytes:
  """The bytes of a caption. A pixel is dark if its value is half of BLACK or more.

  >>> caption(7, np.full((8, 8), 9))
  b'a seven of 64 dark pixels'
  """
  dark = np.count_nonzero(2 * image_SxS >= BLACK)
  return f'a {_WORDS[digit]} of {dark} dark pixels'.encode()


@functools.cache
def load() -> Digits:
  """The images of scikit-learn. Raises ValueError if it is not installed."""
  try:
    from sklearn import datasets  # here: it takes a second
  except ImportError as error:
    raise ValueError(f'the digits need scikit-learn ({error}): pip install scikit-learn') from error
  loaded = datasets.load_digits()
  return Digits(loaded.images.astype(np.uint8), loaded.target)


class VisionDecoder(decoder.Decoder):
  """The decoder, and a projection of patches."""

  def __init__(self, config: train_config.ModelConfig):
    super().__init__(config)
    values, count = PATCH**2, (SIDE // PATCH) ** 2
    self.patches = decoder.normal((values, config.embed_dim), values**-0.5)
    self.positions = decoder.normal((count, config.embed_dim), 1.0)

  def caption(
    self,
    image_BxSxS: jax.Array,
    tokens_BxL: jax.Array,
    sharding: jax.sharding.NamedSharding | None = None,
  ) -> tuple[jax.Array, jax.Array]:
    """As Decoder.__call__, for captions of images with values in [0, BLACK]."""
    patches_BxIxC = cut(image_BxSxS, PATCH).astype(self.patches[...].dtype)
    patches_BxIxC = patches_BxIxC * (2 / BLACK) - 1  # in [-1, 1]
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


def logits(
  config: train_config.ModelConfig, params: decoder.Params, inputs: dict[str, jax.Array]
) -> jax.Array:
  """Of the byte that follows each one of a caption: BxLxV. `inputs`: 'image', 'text' of L bytes."""
  module = decoder.bind(config, params, VisionDecoder)
  return module.caption(inputs['image'], inputs['text'])[0]


def suite(length: int, most: int) -> dict[str, task_lib.Questions]:
  """'digits': which of the ten words names the digit of a held-out image."""
  part = load().held_out(length)
  examples = [part[index] for index in range(min(most, len(part)))]
  texts = [example['text'].tobytes() for example in examples]
  rows = [list(b'\0a %s of' % word.encode()) for word in _WORDS]
  right = [_WORDS.index(text.split()[1].decode()) for text in texts]
  asked = evaluate.multiple_choice([rows] * len(examples), right, length)
  images_RxSxS = np.repeat(np.stack([example['image'] for example in examples]), len(rows), axis=0)
  return {
    'digits': dataclasses.replace(asked, inputs={'image': images_RxSxS, 'text': asked.inputs})
  }


def loss(
  config: train_config.ModelConfig,
  params: decoder.Params,
  batch: dict[str, jax.Array],
  sharding: jax.sharding.NamedSharding | None = None,
) -> jax.Array | task_lib.Measured:
  """Mean cross-entropy of the caption's bytes, in nats; with experts as `decoder.text_loss`.

  Args:
    config: of the model.
    params: of a VisionDecoder.
    batch: 'image' and 'text' of Captioned, with a leading axis B.
    sharding: of the batch axis.
  """
  tokens_BxL1 = batch['text'].astype(jnp.int32)
  module = decoder.bind(config, params, VisionDecoder)
  logits_BxLxV, routing_3 = module.caption(batch['image'], tokens_BxL1[:, :-1], sharding)
  return decoder.text_loss(config, logits_BxLxV, tokens_BxL1[:, 1:], routing_3)


def label(path: str) -> str:
  """As decoder.label; the places of patches are an embedding.

  >>> label('positions'), label('patches'), label('head')
  ('embedding', 'body', 'head')
  """
  return 'embedding' if path == 'positions' else decoder.label(path)


def task(config: run_config.Config) -> task_lib.Task:
  """The captions of the digits; one caption has `config.data.seq_len` bytes. Raises ValueError."""
  model, data = config.model, config.data
  return task_lib.Task(
    init=functools.partial(decoder.initial_params, model, kind=VisionDecoder),
    loss=functools.partial(loss, model),
    batches=lambda shard: data_lib.make_shard(load(), data, shard),
    tokens_per_batch=data.rows * data.seq_len,
    eval_batches=lambda: data_lib.eval_batches(load(), data),
    label=label,
    partition=PARTITION,
    matrices=decoder.MATRICES,
    data_digest=lambda: data_lib.digest(load(), data),
    logits=functools.partial(logits, model),
    suite=functools.partial(suite, data.seq_len),
  )


def get_config() -> run_config.Config:
  """Four learners with the small model of stdlib_lm."""
  config = stdlib_lm.small()
  config.name, config.task = 'digits_vlm', f'{__file__}:task'
  config.data.seq_len = 26
  config.data.eval_batches, config.data.eval_batch_size = 11, 32
  config.train.steps = 400
  return config
