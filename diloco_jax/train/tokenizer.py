"""Tokenizers: text to ids and back. Imports no jax, and for bytes no library.

`data.tokenizer` names one: '' are the bytes of the text; FILE.json is one of the library
`tokenizers`, FILE.model one of SentencePiece; 'bpe(size=2048)' is trained on the corpus itself,
byte-level BPE. All but bytes need the extra [data].
"""

import functools
import importlib
import itertools
import pathlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from diloco_jax.numerics import spec
from diloco_jax.train import corpus_files

_END = '<|endoftext|>'
_ENDS = (_END, '</s>', '<eos>', '<|end_of_text|>', '[SEP]')  # the first that a vocabulary has
_TRAINED_ON_BYTES = 8 << 20


class Tokenizer(Protocol):
  """`size` is the number of ids, `end` stands after each document."""

  size: int
  end: list[int]

  def encode(self, texts: Sequence[str]) -> list[list[int]]: ...

  def decode(self, ids: Sequence[int]) -> str: ...

  def num_bytes(self, ids: Sequence[int]) -> int:
    """How many bytes of text they stand for."""
    ...


class Bytes:
  """The bytes of a text as UTF-8; a zero ends a document."""

  size, end = 256, [0]

  def encode(self, texts: Sequence[str]) -> list[list[int]]:
    return [list(text.encode('utf-8', 'surrogateescape')) for text in texts]

  def decode(self, ids: Sequence[int]) -> str:
    return bytes(ids).decode('utf-8', 'replace')

  def num_bytes(self, ids: Sequence[int]) -> int:
    return len(ids)


class _Subwords:
  def num_bytes(self, ids: Sequence[int]) -> int:
    # A character that a window cuts is a U+FFFD, of three bytes: counted as one.
    text = self.decode(ids)
    return len(text.encode()) - 2 * text.count('\ufffd')


class _HuggingFace(_Subwords):
  def __init__(self, path: str):
    self._library = _import('tokenizers').Tokenizer.from_file(path)
    self._library.no_truncation()  # a file may ask for both
    self._library.no_padding()
    self.size = self._library.get_vocab_size()
    known = filter(None, (self._library.token_to_id(name) is not None and name for name in _ENDS))
    self.end = [self._library.token_to_id(name) for name in itertools.islice(known, 1)]

  def encode(self, texts: Sequence[str]) -> list[list[int]]:
    made = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
    return [one.ids for one in made]

  def decode(self, ids: Sequence[int]) -> str:
    return self._library.decode([int(one) for one in ids])


class _SentencePiece(_Subwords):
  """Most such models turn newlines and runs of spaces into one space."""

  def __init__(self, path: str):
    self._library = _import('sentencepiece').SentencePieceProcessor(model_file=path)
    self.size = self._library.vocab_size()
    self.end = [self._library.eos_id()] if self._library.eos_id() >= 0 else []

  def encode(self, texts: Sequence[str]) -> list[list[int]]:
    return self._library.encode(list(texts))

  def decode(self, ids: Sequence[int]) -> str:
    return self._library.decode([int(one) for one in ids])


def _import(name: str) -> types.ModuleType:
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise ValueError(f"this needs the package {name}: pip install 'diloco-jax[data]'") from error


def load(name: str, corpus: str) -> Tokenizer:
  """The tokenizer of `data.tokenizer` and `data.corpus`. Raises ValueError."""
  if not name:
    return Bytes()
  path = file(name, corpus)
  try:
    return (_SentencePiece if path.suffix == '.model' else _HuggingFace)(str(path))
  except Exception as error:  # the libraries raise plain ones
    raise ValueError(f'tokenizer {name!r}: {error}') from error


def file(name: str, corpus: str) -> pathlib.Path:
  """Its file; one that is to be trained is, once on this machine. Raises ValueError."""
  if name.endswith(('.json', '.model')):
    if not pathlib.Path(name).is_file():
      raise ValueError(f'tokenizer {name!r} is not there (seen from {pathlib.Path.cwd()})')
    return pathlib.Path(name)
  try:
    train = spec.make(name, {'bpe': _bpe}, callable)
  except ValueError as error:
    raise ValueError(
      f'data.tokenizer: {error}; or name a file of tokenizers (*.json) or SentencePiece (*.model)'
    ) from None
  made_of = f'{name} of {corpus_files.stamp(corpus)}'
  folder = corpus_files.cached(made_of, lambda new: train(corpus, new / 'tokenizer.json'))
  return folder / 'tokenizer.json'


def _bpe(size: int = 2048) -> Callable[[str, pathlib.Path], None]:
  if not 256 < size <= 1 << 20:
    raise ValueError('size must be more than the 256 bytes, and at most 2^20')
  return functools.partial(_train_bpe, size)


def _train_bpe(size: int, corpus: str, path: pathlib.Path) -> None:
  tokenizers = _import('tokenizers')
  made = tokenizers.Tokenizer(tokenizers.models.BPE())
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=size,
    special_tokens=[_END],
    initial_alphabet=made.pre_tokenizer.alphabet(),
    show_progress=False,
  )
  made.train_from_iterator(_some(corpus), trainer)
  made.save(str(path))


def _some(corpus: str) -> Iterator[str]:
  """Documents to train on, from evenly spread files."""
  files = corpus_files.list_files(corpus)
  total = sum(pathlib.Path(path).stat().st_size for _, path in files)
  left = _TRAINED_ON_BYTES
  for held_out, text in corpus_files.documents(files[:: 1 + total // _TRAINED_ON_BYTES]):
    if not held_out and left > 0:
      yield text[:left].decode('utf-8', 'replace')
      left -= len(text)
