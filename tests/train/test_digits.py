"""The digits: a fixed split, captions that fit, and errors in one line."""

import sys

import numpy as np
import pytest

from diloco_jax.train import config as config_lib
from diloco_jax.train import data as data_lib
from diloco_jax.train import digits


def test_no_image_is_in_both_parts():
  loaded = digits.load('digits')
  train, held_out = loaded.train(26), loaded.held_out(26)
  assert (len(train), len(held_out)) == (1437, 360)
  images = lambda part: {part[i]['image'].tobytes() for i in range(len(part))}
  assert not images(train) & images(held_out)
  assert loaded.digest == digits.load('digits').digest


def test_an_example_is_an_image_and_its_caption():
  example = digits.load('digits').train(30)[5]
  text = example['text'].tobytes()
  dark = np.count_nonzero(example['image'] >= 8)
  assert text == b'\0a seven of %d dark pixels' % dark + bytes(31 - 26)
  assert example['image'].shape == (8, 8) and example['image'].dtype == np.uint8


def test_shards_share_no_image():
  config = config_lib.DataConfig(seq_len=26, batch_size=8, shards=4, eval_batches=2)
  loaded = digits.load('digits')
  batches = 1437 // 4 // 8
  shards = [data_lib.make_shard(loaded, config, v) for v in range(4)]
  rows = [{row.tobytes() for i in range(batches) for row in one[i]['image']} for one in shards]
  assert len(set.union(*rows)) == sum(map(len, rows))
  first, again = (data_lib.eval_batches(loaded, config) for _ in range(2))
  assert [one['text'].shape for one in first] == [(32, 27)] * 2
  np.testing.assert_array_equal(first[1]['image'], again[1]['image'])


def test_errors_are_one_clear_line(monkeypatch):
  with pytest.raises(ValueError, match="corpus 'stdlib' has no images: set data.corpus to"):
    digits.load('stdlib')
  with pytest.raises(ValueError, match='seq_len 20 cuts captions off: use at least 25'):
    digits.load('digits').train(20)
  monkeypatch.setitem(sys.modules, 'sklearn', None)
  with pytest.raises(ValueError, match='needs scikit-learn .*: pip install scikit-learn'):
    digits.load('digits')
