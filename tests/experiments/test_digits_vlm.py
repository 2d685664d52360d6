"""The example that reads an image in front of its caption: its digits, its model, its config."""

import dataclasses
import doctest
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.config import build, load, run_config
from diloco_jax.train import config as train_config
from diloco_jax.train import data as data_lib
from diloco_jax.train import decoder, evaluate
from diloco_jax.train import island as island_lib
from experiments.examples import digits_vlm

L = 26


@pytest.fixture(name='model')
def _model() -> train_config.ModelConfig:
  return train_config.ModelConfig(
    num_layers=1, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, hidden_dim=32
  )


@pytest.fixture(name='optimizer')
def _optimizer() -> train_config.OptimizerConfig:
  return train_config.OptimizerConfig(learning_rate=1e-2, warmup_steps=2)


def _task(model, data):
  return digits_vlm.task(run_config.Config(name='digits', model=model, data=data))


@pytest.fixture(name='data')
def _data() -> train_config.DataConfig:
  return train_config.DataConfig(
    seq_len=L, batch_size=16, shards=2, eval_batches=2, eval_batch_size=64
  )


@pytest.fixture(name='batch')
def _batch(model, data):
  return _task(model, data).batches(0)[0]


def _logits(model, params, batch):
  module = decoder.bind(model, params, digits_vlm.VisionDecoder)
  return module.caption(batch['image'], batch['text'][:, :-1].astype(jnp.int32))[0]


def test_a_caption_depends_on_the_whole_image_and_on_no_later_byte(model, batch):
  drawn = decoder.initial_params(model, 0, digits_vlm.VisionDecoder)
  params = jax.tree.map(jnp.asarray, drawn)
  logits = jax.jit(lambda batch: _logits(model, params, batch))
  before = logits(batch)
  assert before.shape == (16, L, 256)
  later = logits(batch | {'text': batch['text'] + (np.arange(L + 1) == 9).astype(np.uint8)})
  np.testing.assert_array_equal(before[:, :9], later[:, :9])
  assert not np.array_equal(before[:, 9], later[:, 9])
  for pixel in ((0, 0), (3, 5), (7, 7)):
    image = batch['image'].copy()
    image[:, *pixel] ^= 15
    other = logits(batch | {'image': image})
    assert np.all(np.any(before != other, axis=2))  # every byte, from the first on


def test_the_loss_is_that_of_the_caption_alone(model, batch):
  drawn = decoder.initial_params(model, 0, digits_vlm.VisionDecoder)
  params = jax.tree.map(jnp.asarray, drawn)
  log_p = jax.nn.log_softmax(jax.jit(lambda batch_in: _logits(model, params, batch_in))(batch))
  chosen = np.take_along_axis(np.asarray(log_p), batch['text'][:, 1:, None].astype(int), axis=2)
  value, grads = jax.jit(jax.value_and_grad(lambda p: digits_vlm.loss(model, p, batch)))(params)
  assert float(value) == pytest.approx(-chosen.mean(), rel=1e-5)
  for path, grad in jax.tree_util.tree_leaves_with_path(grads):
    assert grad.dtype == jnp.float32 and float(jnp.max(jnp.abs(grad))) > 0, path


@pytest.mark.full
def test_a_small_one_learns_to_read_images(model, data, optimizer):
  model.embed_dim, model.hidden_dim = 32, 64
  island = island_lib.Island(
    task=_task(model, data),
    optimizer=optimizer,
    mesh=train_config.MeshConfig(data=2),
    total_steps=200,
    devices=jax.devices()[:2],
  )
  for clock in range(200):
    island.step(clock)
  held_out = _task(model, data).eval_batches()
  loss = jax.jit(lambda batch: digits_vlm.loss(model, island.params, batch))
  seen = np.mean([loss(batch) for batch in held_out])
  swapped = np.mean([loss(batch | {'image': batch['image'][::-1]}) for batch in held_out])
  assert seen < 0.16 and swapped > seen + 0.1


def test_no_image_is_in_both_parts():
  loaded = digits_vlm.load()
  train, held_out = loaded.train(26), loaded.held_out(26)
  assert (len(train), len(held_out)) == (1437, 360)
  images = lambda part: {part[i]['image'].tobytes() for i in range(len(part))}
  assert not images(train) & images(held_out)
  assert loaded.digest == digits_vlm.load().digest


def test_an_example_is_an_image_and_its_caption():
  example = digits_vlm.load().train(30)[5]
  text = example['text'].tobytes()
  dark = np.count_nonzero(example['image'] >= 8)
  assert text == b'\0a seven of %d dark pixels' % dark + bytes(31 - 26)
  assert example['image'].shape == (8, 8) and example['image'].dtype == np.uint8


def test_shards_share_no_image():
  config = train_config.DataConfig(seq_len=26, batch_size=8, shards=4, eval_batches=2)
  loaded = digits_vlm.load()
  batches = 1437 // 4 // 8
  shards = [data_lib.make_shard(loaded, config, v) for v in range(4)]
  rows = [{row.tobytes() for i in range(batches) for row in shard[i]['image']} for shard in shards]
  assert len(set.union(*rows)) == sum(map(len, rows))
  first, again = (data_lib.eval_batches(loaded, config) for _ in range(2))
  assert [window['text'].shape for window in first] == [(32, 27)] * 2
  np.testing.assert_array_equal(first[1]['image'], again[1]['image'])


def test_the_suite_asks_which_digit_a_held_out_image_shows(model, data):
  held_out = digits_vlm.load().held_out(L)
  images_NxSxS = np.stack([held_out[index]['image'] for index in range(360)])
  texts = [held_out[index]['text'].tobytes()[1:] for index in range(360)]

  def knows(texts_NxL, inputs):  # the caption of each held-out image
    same_BxN = (inputs['image'][:, None] == images_NxSxS[None]).all(axis=(2, 3))
    return 30 * jax.nn.one_hot(texts_NxL[same_BxN.argmax(axis=1)], 256)

  task = dataclasses.replace(_task(model, data), logits=knows)
  texts_NxL = np.array([list(text) for text in texts])
  score = evaluate.scores(task, texts_NxL, task.suite(400))['digits']
  assert (score.percent, score.error, len(score.right_N)) == (100, 0, 360)
  others = evaluate.scores(task, np.roll(texts_NxL, 1, axis=0), task.suite(400))['digits']
  digits = [text.split()[1] for text in texts]
  alike = np.mean([digit == other for digit, other in zip(digits, np.roll(digits, 1))])
  assert others.percent == pytest.approx(100 * alike)
  assert len(task.suite(5)['digits'].right_N) == 5


def test_errors_are_one_clear_line(monkeypatch):
  with pytest.raises(ValueError, match='seq_len 20 cuts captions off: use at least 25'):
    digits_vlm.load().train(20)
  digits_vlm.load.cache_clear()
  monkeypatch.setitem(sys.modules, 'sklearn', None)
  with pytest.raises(ValueError, match='need scikit-learn .*: pip install scikit-learn'):
    digits_vlm.load()


def test_it_is_a_task_of_its_own():
  config = load.load(digits_vlm.__file__)
  config.validate()
  assembled = build.assemble(config)
  loss = jax.jit(assembled.task.loss)(
    jax.tree.map(jnp.asarray, assembled.init()), assembled.task.batches(0)[0], None
  )
  assert 5 < float(loss) < 6


def test_examples_in_docstrings():
  assert doctest.testmod(digits_vlm) == (0, 3)
