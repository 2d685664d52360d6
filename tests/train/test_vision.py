"""The decoder reads an image in front of its caption."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.train import config as config_lib
from diloco_jax.train import decoder, digits, vision
from diloco_jax.train import island as island_lib

L = 26


@pytest.fixture(name='data')
def _data() -> config_lib.DataConfig:
  return config_lib.DataConfig(
    corpus='digits', seq_len=L, batch_size=16, shards=2, eval_batches=2, eval_batch_size=64
  )


@pytest.fixture(name='batch')
def _batch(model, data):
  return vision.task(model, data).batches(0)[0]


def _logits(model, params, batch):
  module = decoder.bind(model, params, vision.VisionDecoder)
  return module.caption(batch['image'], batch['text'][:, :-1].astype(jnp.int32))[0]


def test_a_caption_depends_on_the_whole_image_and_on_no_later_byte(model, batch):
  params = jax.device_put(vision.task(model, config_lib.DataConfig()).init(0))
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
  params = jax.device_put(vision.task(model, config_lib.DataConfig()).init(0))
  log_p = jax.nn.log_softmax(_logits(model, params, batch))
  chosen = np.take_along_axis(np.asarray(log_p), batch['text'][:, 1:, None].astype(int), axis=2)
  value, grads = jax.jit(jax.value_and_grad(lambda p: vision.loss(model, p, batch)))(params)
  assert float(value) == pytest.approx(-chosen.mean(), rel=1e-5)
  for path, grad in jax.tree_util.tree_leaves_with_path(grads):
    assert grad.dtype == jnp.float32 and float(jnp.max(jnp.abs(grad))) > 0, path


def test_a_small_one_learns_to_read_images(model, data, optimizer):
  model.num_layers, model.embed_dim, model.hidden_dim = 1, 32, 64
  island = island_lib.Island(
    task=vision.task(model, data),
    optimizer=optimizer,
    mesh=config_lib.MeshConfig(data=2),
    total_steps=200,
    devices=jax.devices()[:2],
  )
  for clock in range(200):
    island.step(clock)
  held_out = vision.task(model, data).eval_batches()
  loss = jax.jit(lambda batch: vision.loss(model, island.params, batch))
  seen = np.mean([loss(batch) for batch in held_out])
  swapped = np.mean([loss(batch | {'image': batch['image'][::-1]}) for batch in held_out])
  assert seen < 0.16 and swapped > seen + 0.1


def test_examples_in_docstrings():
  assert doctest.testmod(vision) == (0, 2)
  assert doctest.testmod(digits) == (0, 1)
