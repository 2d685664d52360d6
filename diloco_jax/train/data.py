"""Ids of text: a corpus, its held-out documents, and shards of its windows.

A corpus is a list of files in sorted order of their relative names. One pass reads them into one
array of ids with an end after each document; without a tokenizer the ids are the bytes, and a zero
ends a document. The ids of a tokenizer are kept in a cache that all processes of a machine map into
memory. A hash of its text decides whether a document is held out: the split needs no list, and no
document moves another. Of a few documents that are all on one side, the end of the text is held
out, without copies. Windows overlap by one id, so that every id but the first is a target once.

A seeded shuffle divides the windows once into V slices. A learner trains on a leased shard v of V:
one slice after the other, each in an order drawn for that pass. Batch i is a pure function of
(corpus, seed, v, i), so the state of a shard is one integer, the next index. A pass leaves out the
windows that do not fill a batch, different ones each time. The shards start at evenly spread
slices, so that M learners, which lease the first M shards, read all slices once before any slice
twice (if M is a power of two, else about evenly): an epoch is V / M passes. Shards need no more of
a window than random access, so images with captions have them too. With `data.local` a learner
reads all of its own files in every pass.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import jax
import numpy as np

from diloco_jax.train import config as train_config
from diloco_jax.train import corpus_files, fingerprint
from diloco_jax.train import task as task_lib
from diloco_jax.train import tokenizer as tokenizer_lib

if TYPE_CHECKING:
  import grain

_PARTS = 'train.ids', 'held_out.ids'
_PART_BYTES = 1 << 20


class Examples(Protocol):
  """Examples by index: host arrays, or trees of them, all of one shape."""

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> task_lib.Batch: ...


class Source(Protocol):
  """What is read: examples to train on and held-out ones, with `length` ids to predict each;
  `digest` differs if they do."""

  digest: str

  def train(self, length: int) -> Examples: ...

  def held_out(self, length: int) -> Examples: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
  """The ids of a corpus, an end after each document, files in order of their relative names."""

  train_ids: np.ndarray  # uint8, uint16 or uint32
  eval_ids: np.ndarray
  digest: str  # the fingerprint of both parts: learners of one run must agree on it

  def train(self, length: int) -> 'Windows':
    """The windows to train on, of `length` + 1 ids."""
    return Windows(self.train_ids, length)

  def held_out(self, length: int) -> 'Windows':
    return Windows(self.eval_ids, length)


def load_corpus(source: str, tokenizer: str = '', field: str = 'text') -> Corpus:
  """Reads 'stdlib' (Python's own sources), a directory, or a glob of files (corpus_files.py), in
  those of rows the text in `field`. Raises ValueError: there is no text, or a file or the tokenizer
  is not usable."""
  if source == 'stdlib' and not tokenizer:
    return _stdlib()
  return _read(source, tokenizer, field)


@functools.cache  # it does not change, and the nodes of a process share its 30 MB
def _stdlib() -> Corpus:
  return _read('stdlib', '', '')


def _read(source: str, tokenizer: str, field: str) -> Corpus:
  def texts(files: fingerprint.Files) -> Iterator[tuple[bool, bytes]]:
    return corpus_files.documents(files, field, once=not corpus_files.has_both(files, field))

  files = corpus_files.list_files(source)
  try:
    if tokenizer:
      digest = tokenizer_lib.digest(tokenizer, source, field)
      loaded = tokenizer_lib.load(tokenizer, source, field)
      if digest != tokenizer_lib.digest(tokenizer, source, field):
        raise ValueError(f'tokenizer {tokenizer!r} has changed while it was read: start again')
      what = f'ids of {field} by {digest} and {tokenizer_lib.library(tokenizer)}'
      build = lambda new: _write_ids(texts(corpus_files.list_files(source)), loaded, new)
      folder = corpus_files.build_once(what, source, build)
      return _split(*_map_parts(folder, loaded.dtype), fingerprint.of(folder))
    parts: tuple[list[bytes], list[bytes]] = [], []
    for held_out, text in texts(files):
      parts[held_out].extend((text, b'\0'))
    ids = [np.frombuffer(b''.join(part), np.uint8) for part in parts]
    hashes = (hashlib.sha256(part).hexdigest() for part in ids)
    return _split(*ids, fingerprint.combine(zip(_PARTS, hashes)))
  except ValueError as error:
    raise ValueError(f'corpus {source!r}: {error}') from error


def _split(train_ids: np.ndarray, eval_ids: np.ndarray, digest: str) -> Corpus:
  if not train_ids.size:
    raise ValueError('no document in its files has a text: use files that have some')
  if not eval_ids.size:
    cut = len(train_ids) * (1000 - corpus_files.HELD_OUT_OF_1000) // 1000
    train_ids, eval_ids = train_ids[:cut], train_ids[cut:]
  return Corpus(train_ids, eval_ids, digest)


def _map_parts(folder: pathlib.Path, dtype: str) -> tuple[np.ndarray, np.ndarray]:
  paths = [folder / name for name in _PARTS]
  train, held_out = (
    np.memmap(p, dtype, 'r') if p.stat().st_size else np.empty(0, dtype) for p in paths
  )
  return train, held_out


def _write_ids(
  texts: Iterator[tuple[bool, bytes]], tokenizer: tokenizer_lib.Tokenizer, folder: pathlib.Path
) -> None:
  """Writes the ids of both parts. The library encodes some MiB at a time, on all cores."""
  with open(folder / _PARTS[0], 'wb') as train, open(folder / _PARTS[1], 'wb') as held_out:
    for batch in _batch_parts(texts):
      for (part, ends, _), ids in zip(batch, tokenizer.encode([text for *_, text in batch])):
        (held_out if part else train).write(
          np.asarray([*ids, *(tokenizer.end if ends else ())], tokenizer.dtype)
        )


def _batch_parts(texts: Iterator[tuple[bool, bytes]]) -> Iterator[list[tuple[bool, bool, str]]]:
  """Parts of documents: whether one is held out, whether its end is in it, its text. A long one is
  cut behind a line."""
  batch, size = [], 0
  for held_out, text in texts:
    lines = io.BytesIO(text)
    while part := b''.join(lines.readlines(_PART_BYTES)):
      batch.append((held_out, lines.tell() == len(text), part.decode('utf-8', 'replace')))
      size += len(part)
      if size >= 4 * _PART_BYTES:
        yield batch
        batch, size = [], 0
  yield batch


class Windows:
  """Random access to the windows of `length` + 1 ids that start every `length` ids."""

  def __init__(self, values: np.ndarray, length: int):
    self._values, self._length = values, length

  def __len__(self) -> int:
    return max(0, (len(self._values) - 1) // self._length)

  def __getitem__(self, index: int) -> np.ndarray:
    if not 0 <= index < len(self):
      raise IndexError(f'window {index} of {len(self)}')
    start = int(index) * self._length
    return self._values[start : start + self._length + 1]

  def __repr__(self) -> str:
    return f'Windows(length={self._length}, count={len(self)})'


class Shard:
  """The endless batches of a shard, by index from 0: the first `config.rows` examples of each, with
  a leading axis; for a corpus ids[rows, seq_len + 1]. Raises ValueError: too few examples."""

  def __init__(self, examples: Examples, config: train_config.DataConfig, shard: int):
    import grain  # here: the syncer reads no shard, and it takes half a second

    self._shuffled = grain.MapDataset.source(examples).seed(config.seed).shuffle()
    self._config, self._first = config, first_slice(shard, config.shards)
    self._batches = len(examples) // config.shards // config.batch_size  # of each pass
    if not self._batches:
      raise ValueError(
        f'{len(examples)} examples are fewer than one batch of {config.batch_size} for each of '
        f'{config.shards} shards: use more data, fewer shards or a smaller batch'
      )
    self._pass: tuple[int, grain.MapDataset] | None = None

  def __getitem__(self, index: int) -> task_lib.Batch:
    number, rest = divmod(index, self._batches)
    if self._pass is None or self._pass[0] != number:
      self._pass = number, self._order(number)
    return jax.tree.map(lambda leaf: leaf[: self._config.rows], self._pass[1][rest])

  def _order(self, number: int) -> 'grain.MapDataset':
    """The batches of pass `number`."""
    config = self._config
    which = (self._first + number) % config.shards
    seed = np.random.SeedSequence([config.seed, which, number]).generate_state(1)
    examples = self._shuffled.slice(slice(which, None, config.shards))
    return examples.shuffle(seed=int(seed[0])).batch(config.batch_size, drop_remainder=True)


def first_slice(shard: int, shards: int) -> int:
  """The first slice of a shard: its rank when shards are sorted by their bit-reversed numbers, so
  that the first M shards are about evenly spread for every M (van der Corput).

  >>> [first_slice(shard, 8) for shard in range(8)]
  [0, 4, 2, 6, 1, 5, 3, 7]
  >>> [first_slice(shard, 5) for shard in range(5)]
  [0, 3, 2, 4, 1]
  """
  bits = max(1, (shards - 1).bit_length())
  backwards = [int(f'{number:0{bits}b}'[::-1], 2) for number in range(shards)]
  return sorted(backwards).index(backwards[shard])


def make_shard(source: Source, config: train_config.DataConfig, shard: int) -> Shard:
  """Returns a shard of a source; with `local` all of it, in an order drawn for this number. Raises
  ValueError: no such shard, or too little data."""
  if config.local:
    seed = int(np.random.SeedSequence([config.seed, shard]).generate_state(1)[0])
    config, shard = dataclasses.replace(config, shards=1, seed=seed), 0
  if not 0 <= shard < config.shards:
    raise ValueError(
      f'shard {shard} is outside [0, {config.shards}): read an existing one or '
      'raise DataConfig.shards'
    )
  examples = source.train(config.seq_len)
  need = config.shards * config.batch_size
  if len(examples) < need:
    raise ValueError(
      f'corpus {config.corpus!r} has {len(examples)} training windows of {config.seq_len} ids, '
      f'fewer than one batch of {config.batch_size} for each of {config.shards} shards '
      f'({need}): use more text, fewer shards or a smaller batch'
    )
  return Shard(examples, config, shard)


def has_files(config: train_config.DataConfig) -> bool:
  """False on a node without files where learners have theirs: the syncer, which evaluates then
  nothing."""
  with contextlib.suppress(ValueError):
    return not config.local or bool(corpus_files.list_files(config.corpus))
  return False


def digest(source: Source, config: train_config.DataConfig) -> str:
  """For `Task.data_digest`. Raises ValueError if there is too little to evaluate: at the start of a
  run, not after its training."""
  _held_out_examples(source, config)
  return source.digest


def _held_out_examples(source: Source, config: train_config.DataConfig) -> Examples:
  examples = source.held_out(config.seq_len)
  need = config.eval_batches * config.eval_batch_size
  if len(examples) < need:
    raise ValueError(
      f'corpus {config.corpus!r} has {len(examples)} held-out examples of {config.seq_len} ids, '
      f'fewer than {config.eval_batches} x {config.eval_batch_size} = {need}: use more text, or '
      'fewer or smaller evaluation batches (data.eval_batches, data.eval_batch_size; of diloco '
      'evaluate --batches, --batch_size)'
    )
  return examples


def eval_batches(source: Source, config: train_config.DataConfig) -> list[task_lib.Batch]:
  """Returns the same evenly spread batches of eval_batch_size examples at every call."""
  examples, need = _held_out_examples(source, config), config.eval_batches * config.eval_batch_size
  picked = np.linspace(0, len(examples) - 1, need).astype(np.int64)
  stack = lambda *rows: np.stack(rows)
  return [
    jax.tree.map(stack, *(examples[i] for i in batch))
    for batch in picked.reshape(config.eval_batches, config.eval_batch_size)
  ]
