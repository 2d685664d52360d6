"""Images of handwritten digits with captions: scikit-learn's 1,797 of 8 x 8 pixels.

They are a part of the scikit-learn package (`load_digits`; Alpaydin and Kaynak, 1998), so nothing
is downloaded. Every fifth image is held out. A caption names the digit and counts its dark pixels:
'a seven of 23 dark pixels'. With the name alone the held-out loss of a small model falls to 0.1
nats per caption, and is then the loss of a few ambiguous images; the count keeps it near 2.
"""

import dataclasses
import zlib

import numpy as np

SIDE = 8  # pixels
BLACK = 16  # the largest value of a pixel
NAME = 'digits'
_HELD_OUT_EVERY = 5
_WORDS = ('zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine')


@dataclasses.dataclass(frozen=True, eq=False)
class Digits:
  """The images and what they show."""

  images_NxSxS: np.ndarray  # uint8, S = SIDE
  digits_N: np.ndarray

  @property
  def digest(self) -> int:
    """A crc32: learners of one run must agree on it."""
    return zlib.crc32(self.digits_N.astype(np.uint8).tobytes(), zlib.crc32(self.images_NxSxS))

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


def load(source: str) -> Digits:
  """Reads the images of scikit-learn; `source` must be 'digits'.

  Raises:
    ValueError: scikit-learn is not installed, or another source is asked for.
  """
  if source != NAME:
    raise ValueError(f'corpus {source!r} has no images: set data.corpus to {NAME!r}')
  try:
    from sklearn import datasets  # here: only this task needs it, and it takes a second
  except ImportError as error:
    raise ValueError(
      f'corpus {NAME!r} needs scikit-learn ({error}): pip install scikit-learn'
    ) from error
  loaded = datasets.load_digits()
  return Digits(loaded.images.astype(np.uint8), loaded.target)
