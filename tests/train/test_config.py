"""Wrong configurations are refused with both values and the remedy."""

import dataclasses
import math

import pytest

from diloco_jax.train import config as train_config


@pytest.mark.parametrize(
  'config, words',
  [
    (train_config.ModelConfig(num_heads=4, num_kv_heads=3), ['4', '3', 'multiple']),
    (train_config.ModelConfig(head_dim=31), ['31', 'use 32']),
    (train_config.ModelConfig(style='bert'), ['style', 'bert', 'gemma', 'llama']),
    (train_config.ModelConfig(dtype='float16'), ['float16', 'float32', 'bfloat16']),
    (train_config.ModelConfig(num_layers=0), ['num_layers', '0', 'more than 0']),
    (train_config.ModelConfig(logit_softcap=-1.0), ['-1.0', 'use 0']),
    (train_config.ModelConfig(num_experts=-1), ['-1', 'use 0']),
    (train_config.ModelConfig(num_experts=2, experts_per_token=3), ['3', '2', 'at most']),
    (train_config.ModelConfig(scan=True, num_experts=4), ['num_experts 4', 'use scan=False']),
    (train_config.OptimizerConfig(name='sgd'), ['sgd', 'adamw', 'muon']),
    (train_config.OptimizerConfig(b2=1.0), ['b2', '1.0', '[0, 1)']),
    (train_config.OptimizerConfig(end_lr_ratio=2.0), ['2.0', '[0, 1]', '0.006']),
    (train_config.OptimizerConfig(clip_norm=-1.0), ['clip_norm', '-1.0', 'use 0']),
    (train_config.DataConfig(corpus=''), ['stdlib', 'directory']),
    (train_config.DataConfig(shards=0), ['shards', '0']),
    (train_config.DataConfig(seed=-1), ['-1', '4294967296']),
    (train_config.MeshConfig(fsdp=0), ['fsdp', '0']),
  ],
)
def test_each_part_refuses_bad_values(config, words):
  with pytest.raises(ValueError) as error:
    config.validate()
  assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize('kind', [train_config.ModelConfig, train_config.OptimizerConfig])
def test_nan_is_refused_in_every_field_of_floats(kind):
  names = [field.name for field in dataclasses.fields(kind) if field.type is float]
  assert names
  for name in names:
    with pytest.raises(ValueError, match=f'{name}.* nan'):
      kind(**{name: math.nan}).validate()


def test_parts_must_fit_together():
  parts = {
    'model': train_config.ModelConfig(),
    'data': train_config.DataConfig(),
    'mesh': train_config.MeshConfig(data=2),
  }
  train_config.validate_decoder(**parts)
  with pytest.raises(ValueError, match='batch_size 7 does not split 2 ways'):
    train_config.validate_decoder(**parts | {'data': train_config.DataConfig(batch_size=7)})
  with pytest.raises(ValueError, match='vocab_size 100 .* at least 256'):
    train_config.validate_decoder(**parts | {'model': train_config.ModelConfig(vocab_size=100)})
