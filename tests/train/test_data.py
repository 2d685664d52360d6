"""Every window belongs to one shard, every batch is a function of its index."""

import collections
import dataclasses
import pathlib
import re
import types

import numpy as np
import pytest

from diloco_jax.train import config as train_config
from diloco_jax.train import data as data_lib


@pytest.fixture(name='numbered')
def _numbered() -> data_lib.Corpus:
  """A corpus whose windows are all different: big-endian 16-bit counters."""
  values = np.arange(4096, dtype='>u2').view(np.uint8)
  return data_lib.Corpus(values, values[:2048], 0)


def _pass(numbered, config, shard: int, number: int) -> list[bytes]:
  each = len(data_lib.Windows(numbered.train_ids, 16)) // config.shards // config.batch_size
  batches = data_lib.make_shard(numbered, config, shard)
  return [row.tobytes() for i in range(number * each, (number + 1) * each) for row in batches[i]]


def _epoch(numbered, shards: int, learners: int) -> tuple[list[bytes], set[bytes]]:
  """The windows that are read in the passes of one epoch, and all windows."""
  config = train_config.DataConfig(seq_len=16, batch_size=1, shards=shards)
  rows = [
    row
    for number in range(shards // learners)
    for v in range(learners)
    for row in _pass(numbered, config, v, number)
  ]
  return rows, {window.tobytes() for window in data_lib.Windows(numbered.train_ids, 16)}


@pytest.mark.parametrize(
  'shards, learners', [(4, 4), (16, 1), (16, 4), (16, 16), (6, 2), (20, 4), (24, 8)]
)
def test_learners_read_every_window_once_before_any_twice(numbered, shards, learners):
  """Issue 4: learners train on each example about once, for any number of unleased shards."""
  rows, windows = _epoch(numbered, shards, learners)
  assert len(set(rows)) == len(rows) >= len(windows) - shards  # slices are not all equally long
  assert set(rows) <= windows


@pytest.mark.parametrize('shards, learners', [(16, 3), (16, 7), (33, 2)])
def test_any_number_of_learners_reads_about_evenly(numbered, shards, learners):
  """After the passes of one epoch every window was read at most twice, and most of them once."""
  rows, windows = _epoch(numbered, shards, learners)
  assert max(collections.Counter(rows).values()) <= 2
  assert len(set(rows)) >= 0.6 * len(windows)


def test_every_byte_but_the_first_is_a_target_once(numbered):
  windows = data_lib.Windows(numbered.train_ids, 16)
  targets = np.concatenate([window[1:] for window in windows])
  np.testing.assert_array_equal(targets, numbered.train_ids[1 : len(targets) + 1])
  assert len(numbered.train_ids) - len(targets) <= 16


def test_a_batch_is_a_function_of_its_index(numbered):
  config = train_config.DataConfig(seq_len=16, batch_size=4, shards=4, seed=5)
  shard = data_lib.make_shard(numbered, config, 2)
  forward = [shard[i] for i in range(6)]
  again = data_lib.make_shard(numbered, config, 2)
  for i in reversed(range(6)):
    np.testing.assert_array_equal(again[i], forward[i])
  config.seed = 6
  assert not np.array_equal(data_lib.make_shard(numbered, config, 2)[0], forward[0])
  assert forward[0].shape == (4, 17) and forward[0].dtype == np.uint8


def test_a_slice_is_read_in_another_order_each_time(numbered):
  config = train_config.DataConfig(seq_len=16, batch_size=4, shards=4)
  first, again = (_pass(numbered, config, 0, number) for number in (0, 4))
  assert first != again
  assert len(set(first) & set(again)) >= len(first) - 4


def test_one_shard_read_to_its_second_pass_goes_on_to_the_next_slice(numbered):
  config = train_config.DataConfig(seq_len=16, batch_size=4, shards=4)
  shard = data_lib.make_shard(numbered, config, 0)
  of_a_pass = len(numbered.train(16)) // 4 // 4
  first, second = (
    {row.tobytes() for i in range(of_a_pass) for row in shard[number * of_a_pass + i]}
    for number in (0, 1)
  )
  assert len(first) == len(second) == 4 * of_a_pass and not first & second


def test_two_learners_with_files_of_their_own_read_all_of_them_in_orders_of_their_own(numbered):
  config = train_config.DataConfig(seq_len=16, batch_size=4, local=True)
  of_a_pass = len(numbered.train(16)) // 4
  passes = []
  for number in (0, 1):
    shard = data_lib.make_shard(numbered, config, number)
    for first in (0, of_a_pass):
      indices = range(first, first + of_a_pass)
      passes.append([row.tobytes() for index in indices for row in shard[index]])
  assert len(set(map(tuple, passes))) == 4
  assert all(len(set(rows)) == 4 * of_a_pass for rows in passes)


@pytest.mark.parametrize('part', [0, -1])
def test_another_text_to_train_on_or_to_hold_out_is_another_digest(part, tmp_path):
  path = tmp_path / 'input.txt'
  digests = set()
  for letter in b'xy':
    text = bytearray(b'some letters ' * 300)
    text[part] = letter
    path.write_bytes(text)
    digests.add(data_lib.load_corpus(str(path)).digest)
  assert len(digests) == 2


def test_the_end_of_a_single_file_is_held_out(tmp_path):
  text = bytes(range(1, 201)) * 50
  (tmp_path / 'input.txt').write_bytes(text)
  corpus = data_lib.load_corpus(str(tmp_path / 'input.txt'))
  both = corpus.train_ids.tobytes() + corpus.eval_ids.tobytes()
  assert both == text + b'\0' and 0.02 < len(corpus.eval_ids) / len(both) < 0.04


def test_a_glob_reads_what_a_directory_reads(tmp_path):
  folder = tmp_path / 'deep'
  folder.mkdir()
  for i in range(50):
    (folder / f'{i}.txt').write_text(str(i))
  as_directory = data_lib.load_corpus(str(folder))
  as_glob = data_lib.load_corpus(str(folder / '*.txt'))
  assert as_directory.digest == as_glob.digest
  (folder / '7.txt').write_text('another')
  assert data_lib.load_corpus(str(folder)).digest != as_glob.digest


def test_the_standard_library_is_enough_text():
  corpus = data_lib.load_corpus('stdlib')
  assert len(corpus.train_ids) > 10_000_000
  assert 0.01 < len(corpus.eval_ids) / len(corpus.train_ids) < 0.1
  config = train_config.DataConfig()
  assert len(data_lib.eval_batches(corpus, config)) == config.eval_batches


def test_evaluation_batches_are_always_the_same(numbered):
  config = train_config.DataConfig(seq_len=16, eval_batches=3, eval_batch_size=4)
  first, second = (data_lib.eval_batches(numbered, config) for _ in range(2))
  np.testing.assert_array_equal(first, second)
  assert np.shape(first) == (3, 4, 17)
  rows = [row.tobytes() for batch in first for row in batch]
  windows = numbered.held_out(16)
  assert len(set(rows)) == 12
  assert (rows[0], rows[-1]) == (windows[0].tobytes(), windows[len(windows) - 1].tobytes())


def test_too_little_text_says_how_much_is_needed(numbered):
  config = train_config.DataConfig(seq_len=128, batch_size=32, shards=16)
  with pytest.raises(ValueError, match=r'has 63 training windows .* \(512\)'):
    data_lib.make_shard(numbered, config, 0)
  with pytest.raises(ValueError, match='has 15 held-out examples .* 8 x 32 = 256'):
    data_lib.eval_batches(numbered, config)
  with pytest.raises(ValueError, match=r'shard 16 is outside \[0, 16\)'):
    data_lib.make_shard(numbered, config, 16)


def test_a_share_of_a_batch_is_its_first_rows(data, corpus):
  """So batch i of a shard is the same for learners of any speed, and is read once."""
  whole = data_lib.make_shard(corpus, data, 1)
  share = data_lib.make_shard(corpus, dataclasses.replace(data, batch_rows=3), 1)
  for index in (0, 1, 30):
    np.testing.assert_array_equal(share[index], whole[index][:3])


def test_the_batches_of_the_page_lead_two_learners_through_all_records():
  """docs/howto/tokenizer.md; as many records as a data set may have, which 16 divides."""
  page = pathlib.Path(__file__).parents[2] / 'docs' / 'howto' / 'tokenizer.md'
  (code,) = re.findall(r'```python\n(.*?)\n```', page.read_text(), re.S)
  exec(compile(code, str(page), 'exec'), page_names := {})
  config = types.SimpleNamespace(data=train_config.DataConfig(batch_size=4))
  make = page_names['batches'](config, np.arange(1600))
  read = np.concatenate([make(shard)[index] for shard in (0, 1) for index in range(200)])
  assert sorted(read) == list(range(1600))
  with pytest.raises(ValueError, match=r'^63 examples .* one batch of 4 for each of 16 shards'):
    page_names['batches'](config, np.arange(63))(0)
