"""Tokenizers: text to ids and back. Imports no jax, and for bytes no library.

`data.tokenizer` names one: '' are the bytes of the text; FILE.json is one of the library
`tokenizers`, FILE.model one of SentencePiece (most of which lose newlines); 'bpe(size=2048)' is
trained on the corpus itself, byte-level BPE. All but bytes need the extra [data].
"""

import contextlib
import functools
import importlib
import importlib.metadata
import pathlib
import types
from collections.abc import Callable, Iterator, Sequence

from diloco_jax.numerics import spec
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import json_files
from diloco_jax.train import corpus_files, fingerprint

_ENDS = ('<|endoftext|>', '</s>', '<eos>', '<|end_of_text|>', '[SEP]', '[EOS]', '<|eos|>')
_ENDS += ('<\uff5cend\u2581of\u2581sentence\uff5c>', '<|im_end|>')
CONFIG = 'tokenizer_config.json'  # beside a tokenizer.json
_BESIDE = (CONFIG, 'special_tokens_map.json')
_SIZES = range(257, 1 << 20)  # the bytes and the end, at least
_TRAINED_ON_BYTES = 8 << 20


class Tokenizer:
  """Bytes as UTF-8. `size` is the number of ids, `end` follows each document."""

  size, end, dtype = 256, [0], 'uint8'

  def encode(self, texts: Sequence[str]) -> list[list[int]]:
    return [list(text.encode('utf-8', 'surrogateescape')) for text in texts]

  def decode(self, ids: Sequence[int]) -> str:
    return bytes(ids).decode('utf-8', 'replace')

  def num_bytes(self, ids: Sequence[int]) -> int:
    """How many bytes of text these ids are."""
    return len(ids)


class _Subwords(Tokenizer):
  def __init__(self, encode: Callable, decode: Callable, size: int, end: list[int]):
    self.encode = lambda texts: encode(list(texts))
    self.decode = lambda ids: decode([int(token_id) for token_id in ids])
    self.size, self.end, self.dtype = size, end, 'uint16' if size <= 1 << 16 else 'uint32'

  def num_bytes(self, ids: Sequence[int]) -> int:
    # A character that a window cuts is a U+FFFD, of three bytes: counted as one.
    text = self.decode(ids)
    return len(text.encode()) - 2 * text.count('\ufffd')


def load(name: str, corpus: str, field: str = 'text') -> Tokenizer:
  """The tokenizer of `data.tokenizer`, `data.corpus` and `data.field`. Warns once if it has no end.
  Raises ValueError."""
  if not name:
    return Tokenizer()
  path = file(name, corpus, field)
  tokenizer = _load(name, path)
  if not tokenizer.end:
    corpus_files.say_once(
      f'tokenizer {name!r} has no end of a document that is known, so documents follow each other '
      f'without one: name it in {CONFIG} beside tokenizer.json, {{"eos_token": "..."}}'
    )
  return tokenizer


def _load(name: str, path: pathlib.Path) -> Tokenizer:
  try:
    if path.suffix == '.model':
      tokenizer = _import('sentencepiece').SentencePieceProcessor(model_file=str(path))
      end = [tokenizer.eos_id()] if tokenizer.eos_id() >= 0 else []
      return _Subwords(tokenizer.encode, tokenizer.decode, tokenizer.vocab_size(), end)
    tokenizer = _import('tokenizers').Tokenizer.from_file(str(path))
    tokenizer.no_truncation()  # a file may ask for both
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # the letters of one in a text are letters
    named = [end for end in (find_end(path), *_ENDS) if tokenizer.token_to_id(end) is not None]
    tokenizer.add_special_tokens(named)  # a file may have its end as a plain added token
    encode = functools.partial(tokenizer.encode_batch_fast, add_special_tokens=False)
    ends = [tokenizer.token_to_id(end) for end in named]
    ids = lambda texts: [encoding.ids for encoding in encode(texts)]
    size = 1 + max(tokenizer.get_vocab().values())  # there may be gaps
    return _Subwords(ids, tokenizer.decode, size, ends[:1])
  except Exception as error:  # the libraries raise plain ones
    raise ValueError(f'tokenizer {name!r}: {error}') from error


def _import(name: str) -> types.ModuleType:
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise ValueError(f"this needs the package {name}: pip install 'diloco-jax[data]'") from error


def file(name: str, corpus: str, field: str = 'text') -> pathlib.Path:
  """The file of a tokenizer, trained if need be, once on this machine. Raises ValueError."""
  if name.endswith(('.json', '.model')):
    if what := files_lib.kind(name):
      raise ValueError(f'tokenizer {name!r} is {what} (seen from {pathlib.Path.cwd()})')
    return pathlib.Path(name)
  try:
    size = spec.make(name, {'bpe': lambda size=2048: size}, _SIZES.index)
  except ValueError as error:
    raise ValueError(
      f'data.tokenizer: {error}; or name a file of tokenizers (*.json) or SentencePiece (*.model)'
    ) from None
  build = lambda new: _train_bpe(size, _some(corpus, field), new / 'tokenizer.json')
  what = f'bpe {size} of {field} by {library(name)}'
  return corpus_files.build_once(what, corpus, build) / 'tokenizer.json'


def find_end(path: pathlib.Path) -> str:
  """The end of a document that a file beside a tokenizer.json names; ''. Raises ValueError."""
  for beside in map(path.with_name, _BESIDE if path.name == 'tokenizer.json' else ()):
    if beside.is_file():
      end = json_files.require_keys(beside, beside.read_bytes(), {}).get('eos_token')
      end = end.get('content') if isinstance(end, dict) else end
      if isinstance(end, str):
        return end
  return ''


def digest(name: str, corpus: str, field: str = 'text') -> str:
  """The fingerprint of a tokenizer: its file, and the end that one beside it names. Raises
  ValueError, as `file`."""
  if not name:
    return ''
  path = file(name, corpus, field)
  return fingerprint.of([(find_end(path), str(path))])


def files_of(name: str, corpus: str, field: str = 'text') -> fingerprint.Files:
  """The file of a tokenizer, and the files beside it that may name its end."""
  path = file(name, corpus, field)
  return [('', str(file_path)) for file_path in (path, *map(path.with_name, _BESIDE))]


def library(name: str) -> str:
  """The library that applies a tokenizer, and its version: another one may give other ids."""
  package = 'sentencepiece' if name.endswith('.model') else 'tokenizers'
  with contextlib.suppress(ImportError):
    return f'{package} {importlib.metadata.version(package)}'
  return package


def _train_bpe(size: int, texts: Iterator[str], path: pathlib.Path) -> None:
  tokenizers = _import('tokenizers')
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=size,
    special_tokens=[_ENDS[0]],
    initial_alphabet=tokenizer.pre_tokenizer.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer)
  tokenizer.save(str(path))


def _some(corpus: str, field: str) -> Iterator[str]:
  """Documents to train on, from evenly spread files."""
  listed = corpus_files.list_files(corpus)
  total = sum(pathlib.Path(path).stat().st_size for _, path in listed)
  left = _TRAINED_ON_BYTES
  for held_out, text in corpus_files.documents(listed[:: 1 + total // _TRAINED_ON_BYTES], field):
    if not held_out and left > 0:
      yield text[:left].decode('utf-8', 'replace')
      left -= len(text)
