"""Wrong configurations are refused with both values and the remedy."""

import dataclasses
import math

import pytest

from diloco_jax.train import config as config_lib


@pytest.mark.parametrize(
  'config, words',
  [
    (config_lib.ModelConfig(num_heads=4, num_kv_heads=3), ['4', '3', 'multiple']),
    (config_lib.ModelConfig(head_dim=31), ['31', 'use 32']),
    (config_lib.ModelConfig(style='bert'), ['style', 'bert', 'gemma', 'llama']),
    (config_lib.ModelConfig(dtype='float16'), ['float16', 'float32', 'bfloat16']),
    (config_lib.ModelConfig(num_layers=0), ['num_layers', '0', 'more than 0']),
    (config_lib.ModelConfig(logit_softcap=-1.0), ['-1.0', 'use 0']),
    (config_lib.ModelConfig(num_experts=-1), ['-1', 'use 0']),
    (config_lib.ModelConfig(num_experts=2, experts_per_token=3), ['3', '2', 'at most']),
    (config_lib.OptimizerConfig(name='sgd'), ['sgd', 'adamw', 'muon']),
    (config_lib.OptimizerConfig(b2=1.0), ['b2', '1.0', '[0, 1)']),
    (config_lib.OptimizerConfig(end_lr_ratio=2.0), ['2.0', '[0, 1]', '0.006']),
    (config_lib.OptimizerConfig(clip_norm=-1.0), ['clip_norm', '-1.0', 'use 0']),
    (config_lib.DataConfig(corpus=''), ['stdlib', 'directory']),
    (config_lib.DataConfig(shards=0), ['shards', '0']),
    (config_lib.DataConfig(seed=-1), ['-1', '4294967296']),
    (config_lib.MeshConfig(fsdp=0), ['fsdp', '0']),
  ],
)
def test_each_part_refuses_bad_values(config, words):
  with pytest.raises(ValueError) as error:
    config.validate()
  assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize('kind', [config_lib.ModelConfig, config_lib.OptimizerConfig])
def test_nan_is_refused_in_every_field_of_floats(kind):
  names = [field.name for field in dataclasses.fields(kind) if field.type is float]
  assert names
  for name in names:
    with pytest.raises(ValueError, match=f'{name}.* nan'):
      kind(**{name: math.nan}).validate()


def test_parts_must_fit_together():
  parts = {
    'model': config_lib.ModelConfig(),
    'data': config_lib.DataConfig(),
    'mesh': config_lib.MeshConfig(data=2),
  }
  config_lib.validate_decoder(**parts)
  with pytest.raises(ValueError, match='batch_size 7 does not split 2 ways'):
    config_lib.validate_decoder(**parts | {'data': config_lib.DataConfig(batch_size=7)})
  with pytest.raises(ValueError, match='vocab_size 100 .* at least 256'):
    config_lib.validate_decoder(**parts | {'model': config_lib.ModelConfig(vocab_size=100)})
