"""The FLOPs of a step by formula are those that the compiler counts where it counts right."""

import jax
import numpy as np
import pytest

from diloco_jax.train import config as train_config
from diloco_jax.train import decoder, flops


def test_the_formula_counts_what_the_compiler_counts_without_scan_and_kernels():
  model = train_config.ModelConfig(
    num_layers=1, embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=32, tied_head=False
  )
  batch, length = 2, 128
  like = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
  params = jax.tree.map(like, decoder.initial_params(model, seed=0))
  tokens = jax.ShapeDtypeStruct((batch, length + 1), np.int32)
  grads = jax.jit(jax.value_and_grad(lambda p, t: decoder.loss(model, p, t)))
  counted = grads.lower(params, tokens).compile().cost_analysis()['flops']
  assert flops.decoder(model, length) * batch * length == pytest.approx(counted, rel=0.05)


def test_of_experts_those_count_that_a_token_is_given_to():
  dense, mixed = train_config.ModelConfig(), train_config.ModelConfig(num_experts=8)
  each = 6 * 3 * dense.embed_dim * dense.hidden_dim * dense.num_layers
  router = 6 * dense.embed_dim * 8 * dense.num_layers
  assert flops.decoder(mixed, 128) - flops.decoder(dense, 128) == each + router


def test_a_window_limits_the_keys_that_count():
  model = train_config.ModelConfig(num_layers=3)
  local = train_config.ModelConfig(num_layers=3, window=8, global_every=2)
  keys = 12 * model.head_dim * model.num_heads
  assert flops.decoder(model, 128) - flops.decoder(local, 128) == 2 * keys * (128 - 8)
  assert flops.decoder(model, 4) == flops.decoder(local, 4)


@pytest.mark.parametrize(
  'kind, tflops',
  [
    ('TPU v4', 275),
    ('TPU v5 lite', 197),
    ('TPU v5', 459),
    ('TPU v5p', 459),
    ('TPU v6 lite', 918),
    ('NVIDIA H100 80GB HBM3', 989),
    ('NVIDIA A100-SXM4-40GB', 312),
    ('NVIDIA H100 PCIe', 0),
    ('TPU v4 lite', 0),
    ('cpu', 0),
  ],
)
def test_the_peak_of_a_device_or_none(kind, tflops):
  assert flops.peak(kind) == tflops * 1e12


def test_memory_is_that_of_the_fullest_device_and_of_cpus_unknown():
  class Device:
    def __init__(self, peak):
      self.peak = peak

    def memory_stats(self):
      return {'peak_bytes_in_use': self.peak, 'bytes_limit': 100}

  assert flops.memory([Device(3), Device(7), Device(5)]) == (7, 100)
  assert flops.memory(jax.devices()[:2]) == (0, 0)
