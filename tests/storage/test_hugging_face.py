"""Hugging Face folders: the same logits as the reference, and there and back.

The folders in tests/storage/hugging_face are tiny models that the reference has written, with what
it computes (reference.py there).
"""

import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy

from diloco_jax.storage import arrays, hugging_face
from diloco_jax.train import config as config_lib
from diloco_jax.train import decoder
from diloco_jax.train import tokenizer as tokenizer_lib
from experiments.examples import lora_decoder, pretrained

MODELS = pathlib.Path(__file__).with_name('hugging_face')
NAMES = sorted(path.parent.name for path in MODELS.glob('*/config.json'))
# What the hub has of these, as transformers 4 wrote it.
LLAMA_3_2_1B = {
  'model_type': 'llama',
  'attention_bias': False,
  'head_dim': 64,
  'hidden_act': 'silu',
  'hidden_size': 2048,
  'intermediate_size': 8192,
  'mlp_bias': False,
  'num_attention_heads': 32,
  'num_hidden_layers': 16,
  'num_key_value_heads': 8,
  'rms_norm_eps': 1e-05,
  'rope_scaling': {
    'factor': 32.0,
    'high_freq_factor': 4.0,
    'low_freq_factor': 1.0,
    'original_max_position_embeddings': 8192,
    'rope_type': 'llama3',
  },
  'rope_theta': 500000.0,
  'tie_word_embeddings': True,
  'torch_dtype': 'bfloat16',
  'vocab_size': 128256,
}
GEMMA_3_1B = {
  'model_type': 'gemma3_text',
  'attention_bias': False,
  'attn_logit_softcapping': None,
  'final_logit_softcapping': None,
  'head_dim': 256,
  'hidden_activation': 'gelu_pytorch_tanh',
  'hidden_size': 1152,
  'intermediate_size': 6912,
  'num_attention_heads': 4,
  'num_hidden_layers': 26,
  'num_key_value_heads': 1,
  'query_pre_attn_scalar': 256,
  'rms_norm_eps': 1e-06,
  'rope_local_base_freq': 10000,
  'rope_scaling': None,
  'rope_theta': 1000000,
  'sliding_window': 512,
  'sliding_window_pattern': 6,
  'torch_dtype': 'bfloat16',
  'vocab_size': 262144,
}


def _golden(name: str) -> dict:
  return json.loads((MODELS / name / 'golden' / 'ids.json').read_text('utf-8'))


def _logits(model: config_lib.ModelConfig, params, ids) -> np.ndarray:
  found = jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float32), params)
  ids_BxL = np.asarray(ids[:32], np.int32).reshape(2, 16)
  return np.asarray(jax.jit(functools.partial(decoder.apply, model))(found, ids_BxL))


def _model(told: dict, folder: pathlib.Path) -> config_lib.ModelConfig:
  (folder / 'config.json').write_text(json.dumps(told), 'utf-8')
  return pretrained.model_config(folder)


@pytest.mark.parametrize('scan', [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize('name', NAMES)
def test_logits_are_those_of_the_reference(name, scan):
  model = dataclasses.replace(pretrained.model_config(MODELS / name), scan=scan)
  model.validate()
  params = decoder.start(model, str(MODELS / name), 0)
  golden = np.load(MODELS / name / 'golden' / 'logits.npy')
  np.testing.assert_allclose(_logits(model, params, _golden(name)['ids']), golden, atol=1e-4)


@pytest.mark.parametrize('name', NAMES)
def test_ids_are_those_of_the_reference(name):
  golden, path = _golden(name), MODELS / name / 'tokenizer.json'
  tokenizer = tokenizer_lib.load(str(path), '')
  assert tokenizer.encode([golden['text']]) == [golden['ids']]
  assert tokenizer.end == [json.loads((MODELS / name / 'config.json').read_text())['eos_token_id']]


def _tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
  files = sorted(folder.glob('*.safetensors'))
  return {name: one for file in files for name, one in arrays.mapped(file).items()}


@pytest.mark.parametrize('scan', [False, True])
@pytest.mark.parametrize('name', NAMES)
def test_what_is_read_and_written_has_the_same_bits(name, scan, tmp_path):
  model = dataclasses.replace(pretrained.model_config(MODELS / name), scan=scan)
  params = jax.tree.map(np.asarray, decoder.start(model, str(MODELS / name), 0))
  hugging_face.write(tmp_path / 'out', decoder.export(model, params), MODELS / name)
  ours, theirs = _tensors(tmp_path / 'out'), _tensors(MODELS / name)
  assert ours.keys() == theirs.keys()
  for key, tensor in theirs.items():
    assert (ours[key].dtype, ours[key].shape) == (tensor.dtype, tensor.shape), key
    np.testing.assert_array_equal(ours[key], tensor)
  for file in ('config.json', 'tokenizer.json', 'tokenizer_config.json', 'generation_config.json'):
    assert (tmp_path / 'out' / file).read_bytes() == (MODELS / name / file).read_bytes()
  assert not (tmp_path / 'out' / 'model.safetensors.index.json').exists()  # it is one file now
  with pytest.raises(ValueError, match='out exists, and stays as it is'):
    hugging_face.write(tmp_path / 'out', {}, MODELS / name)


def test_a_key_that_is_not_known_is_refused_by_name(tmp_path):
  assert _model(LLAMA_3_2_1B | {'use_cache': True, 'a_new_switch': None}, tmp_path)
  with pytest.raises(ValueError, match="config.json has {'residual_multiplier': 0.22}"):
    _model(LLAMA_3_2_1B | {'residual_multiplier': 0.22}, tmp_path)


BASE = {
  'model.norm.weight': np.ones(8, np.float32),
  'model.embed_tokens.weight': np.ones((16, 8), np.float32),
}
LIKE = {'final_norm': np.zeros(8, np.float32), 'embedding': np.zeros((16, 8), np.float32)}


def test_what_the_model_does_not_need_is_not_read(tmp_path):
  unused = {'model.layers.0.self_attn.rotary_emb.inv_freq': np.ones(4, np.float64)}
  safetensors.numpy.save_file(BASE | unused, tmp_path / 'model.safetensors')
  assert hugging_face.read(str(tmp_path), LIKE)['final_norm'][0] == 1
  wide = {'model.norm.weight': np.ones(8, np.float64)}
  safetensors.numpy.save_file(BASE | wide, tmp_path / 'model.safetensors')
  with pytest.raises(ValueError, match='model.norm.weight is F64, which is not read: write it as'):
    hugging_face.read(str(tmp_path), LIKE)


_READS = """
import sys
import numpy as np
from diloco_jax.storage import hugging_face
like = {'final_norm': np.zeros(8, 'f'), 'embedding': np.zeros((16, 8), 'f')}
print(hugging_face.read(sys.argv[1], like)['final_norm'][0])
"""


def test_each_tensor_comes_from_the_file_that_the_index_names(tmp_path):
  """Whatever the order of a set: another file has an old copy of it."""
  old = {'model.norm.weight': np.full(8, 5, np.float32)}
  safetensors.numpy.save_file(BASE, tmp_path / 'b.safetensors')
  safetensors.numpy.save_file(old, tmp_path / 'a.safetensors')
  safetensors.numpy.save_file(old, tmp_path / 'c.safetensors')
  places = dict.fromkeys(BASE, 'b.safetensors')
  places |= {'x.rotary_emb.inv_freq': 'a.safetensors', 'y.rotary_emb.inv_freq': 'c.safetensors'}
  index = tmp_path / 'model.safetensors.index.json'
  index.write_text(json.dumps({'weight_map': places}), 'utf-8')
  for seed in '12':
    done = subprocess.run(
      [sys.executable, '-c', _READS, tmp_path],
      env={**os.environ, 'PYTHONHASHSEED': seed, 'PYTHONPATH': str(MODELS.parents[2])},
      capture_output=True,
      text=True,
    )
    assert done.stdout == '1.0\n', done.stderr
  index.write_text(json.dumps({'weight_map': places | {'z': 'a.safetensors'}}), 'utf-8')
  with pytest.raises(ValueError, match='z is not in a.safetensors, where the index has it'):
    hugging_face.read(str(tmp_path), LIKE)


def test_a_folder_is_mapped_and_not_read():
  model = pretrained.model_config(MODELS / 'gemma')
  for leaf in jax.tree.leaves(decoder.start(model, str(MODELS / 'gemma'), 0)):
    while not isinstance(leaf, np.memmap):
      assert leaf.base is not None
      leaf = leaf.base


def test_lora_begins_with_a_folder_or_a_file_and_is_merged_into_the_folder(tmp_path):
  config = pretrained.get_config(str(MODELS / 'llama'))
  task = lora_decoder.task(config, rank=2)
  params = task.start(config.train.init_from, 3)
  arrays.export(tmp_path / 'base.safetensors', params['base'], {})
  jax.tree.map(np.testing.assert_array_equal, task.start(f'{tmp_path}/base.safetensors', 3), params)
  pair = params['lora']['layers'][1]['out']
  pair['b'] = pair['b'] + 1
  merged, before = task.export(params), _tensors(MODELS / 'llama')
  changed = 'model.layers.1.self_attn.o_proj.weight'
  added = np.broadcast_to(pair['a'].sum(axis=1), (32, 32))
  np.testing.assert_allclose(merged[changed], before.pop(changed) + added, atol=1e-6)
  assert all(np.array_equal(merged[name], tensor) for name, tensor in before.items())


def test_another_model_is_refused_by_the_name_of_the_tensor(tmp_path):
  model = pretrained.model_config(MODELS / 'gemma')
  with pytest.raises(ValueError, match=r'forward_layernorm.weight is \(32,\), in the .* absent'):
    decoder.start(model, str(MODELS / 'gemma3'), 0)
  with pytest.raises(ValueError, match=r'lm_head.weight is absent, in the .* \(320, 32\)'):
    decoder.start(dataclasses.replace(model, tied_head=False), str(MODELS / 'gemma'), 0)
  shutil.copytree(MODELS / 'llama', tmp_path / 'llama')
  (tmp_path / 'llama' / 'model-00002-of-00003.safetensors').unlink()
  with pytest.raises(ValueError, match='cannot read the model in .*llama: .*00002-of'):
    decoder.start(pretrained.model_config(MODELS / 'llama'), str(tmp_path / 'llama'), 0)
  experts = decoder.init_params(config_lib.ModelConfig(num_experts=2), 0)
  with pytest.raises(ValueError, match='no Hugging Face folder .* has layers/0/experts'):
    decoder.export(config_lib.ModelConfig(num_experts=2), experts)


def test_configs_of_the_hub_are_understood(tmp_path):
  assert _model(LLAMA_3_2_1B, tmp_path) == config_lib.ModelConfig(
    vocab_size=128256,
    num_layers=16,
    embed_dim=2048,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    hidden_dim=8192,
    style='llama',
    norm_eps=1e-5,
    qk_norm=False,
    rope_theta=500_000.0,
    rope_factor=32.0,
    logit_softcap=0.0,
    param_dtype='bfloat16',
  )
  gemma = _model(GEMMA_3_1B, tmp_path)
  assert gemma == config_lib.ModelConfig(
    vocab_size=262144,
    num_layers=26,
    embed_dim=1152,
    num_heads=4,
    num_kv_heads=1,
    head_dim=256,
    hidden_dim=6912,
    post_norms=True,
    rope_theta=1_000_000,
    rope_local_theta=10_000,
    window=512,
    global_every=6,
    logit_softcap=0.0,
    param_dtype='bfloat16',
  )
  assert [number for number, sees in enumerate(gemma.sees_all, 1) if sees] == [6, 12, 18, 24]


@pytest.mark.parametrize(
  ('told', 'change', 'text'),
  [
    (LLAMA_3_2_1B, {'model_type': 'gpt2'}, "model_type is 'gpt2'; known are llama, qwen3"),
    (LLAMA_3_2_1B, {'attention_bias': True}, "the decoder has no {'attention_bias': True}"),
    (LLAMA_3_2_1B, {'hidden_act': 'relu'}, "no {'hidden_act': 'relu'}"),
    (LLAMA_3_2_1B, {'rope_scaling': {'type': 'linear', 'factor': 2.0}}, "'rope_type': 'linear'"),
    (LLAMA_3_2_1B, {'layer_types': ['sliding_attention'] * 16}, "no {'layer_types': ['sliding_"),
    (
      LLAMA_3_2_1B,
      {'rope_parameters': {'rope_theta': 1e4, 'partial_rotary_factor': 0.5}},
      "config.json has {'partial_rotary_factor': 0.5}",
    ),
    (GEMMA_3_1B, {'attn_logit_softcapping': 50.0}, "no {'attn_logit_softcapping': 50.0}"),
    (GEMMA_3_1B, {'query_pre_attn_scalar': 168}, "no {'query_pre_attn_scalar': 168}"),
    (GEMMA_3_1B, {'layer_types': ['full_attention'] * 26}, ''),
    (
      GEMMA_3_1B,
      {'num_hidden_layers': 2, 'layer_types': ['full_attention', 'sliding_attention']},
      "no {'layer_types': ['full_attention', 'sliding_attention']}",
    ),
  ],
)
def test_what_the_decoder_would_compute_in_another_way_is_refused(told, change, text, tmp_path):
  if not text:
    assert all(_model(told | change, tmp_path).sees_all)
    return
  with pytest.raises(ValueError, match=re.escape(text)):
    _model(told | change, tmp_path)
