"""Hugging Face folders: the same logits as the reference, and there and back.

The folders in tests/storage/hugging_face are tiny models that the reference has written, with what
it computes (reference.py there).
"""

import dataclasses
import functools
import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from diloco_jax.storage import arrays, hugging_face
from diloco_jax.train import config as train_config
from diloco_jax.train import decoder
from diloco_jax.train import task as task_lib
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


FULL_ROPE = {'full_attention': {'rope_theta': 1e6}}
YARN = {'type': 'llama3', 'rope_type': 'yarn', 'factor': 1.0}
SCALED = {'sliding_attention': {'rope_theta': 1e4, 'factor': 8.0}}
PARTIAL = {'rope_theta': 1e4, 'partial_rotary_factor': 0.5}
MIXED = {'num_hidden_layers': 2, 'layer_types': ['full_attention', 'sliding_attention']}
GEMMA = {
  **{key: LLAMA_3_2_1B[key] for key in LLAMA_3_2_1B if not key.startswith(('rope', 'mlp'))},
  'model_type': 'gemma',
  'hidden_act': 'gelu_pytorch_tanh',
}


def _golden(name: str) -> dict:
  return json.loads((MODELS / name / 'golden' / 'ids.json').read_text('utf-8'))


def _logits(model: train_config.ModelConfig, params, ids) -> np.ndarray:
  params = jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float32), params)
  ids_BxL = np.asarray(ids[:32], np.int32).reshape(2, 16)
  return np.asarray(jax.jit(functools.partial(decoder.apply, model))(params, ids_BxL))


def _model(fields: dict, folder: pathlib.Path) -> train_config.ModelConfig:
  (folder / 'config.json').write_text(json.dumps(fields), 'utf-8')
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
  tensors = [item for file in files for item in arrays.tensors_in(file).items()]
  return {name: tensor.map() for name, tensor in tensors}


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
  for key, value in (('residual_multiplier', 0.22), ('use_rope', False), ('clip', 0), ('to', [])):
    with pytest.raises(ValueError, match=re.escape(f'config.json has {{{key!r}: {value}}}')):
      _model(LLAMA_3_2_1B | {key: value}, tmp_path)


BASE = {
  'model.norm.weight': np.ones(8, np.float32),
  'model.embed_tokens.weight': np.ones((16, 8), np.float32),
}
LIKE = {'final_norm': np.zeros(8, np.float32), 'embedding': np.zeros((16, 8), np.float32)}
EMBEDDING, NORM = 'model.embed_tokens.weight', 'model.norm.weight'


def _require_read(folder: pathlib.Path) -> None:
  """The tensors are those of BASE."""
  tensors = hugging_face.read(str(folder), LIKE)
  assert (tensors['final_norm'] == 1).all() and (tensors['embedding'] == 1).all()


def _require_refused(folder: pathlib.Path, words: str) -> None:
  with pytest.raises(ValueError, match=words):
    hugging_face.read(str(folder), LIKE)


def _write_index(folder: pathlib.Path, weight_map: object) -> None:
  (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': weight_map}))


def test_what_the_model_does_not_need_is_not_read(tmp_path):
  unused = {'model.layers.0.self_attn.rotary_emb.inv_freq': np.ones(4, np.float64)}
  safetensors.numpy.save_file(BASE | unused, tmp_path / 'model.safetensors')
  _require_read(tmp_path)
  wide = {NORM: np.ones(8, np.float64)}
  safetensors.numpy.save_file(BASE | wide, tmp_path / 'model.safetensors')
  _require_refused(tmp_path, 'norm.weight in .*safetensors is F64, which is not read: write')


def _write_changed(path: pathlib.Path, change) -> None:
  """Writes a *.safetensors file whose header `change` has changed, or returned."""
  data = safetensors.numpy.save(BASE)
  size = int.from_bytes(data[:8], 'little')
  header = json.loads(data[8 : 8 + size])
  changed = change(header)
  text = json.dumps(changed if isinstance(changed, dict | list) else header).encode()
  path.write_bytes(len(text).to_bytes(8, 'little') + text + data[8 + size :])


def _set(name: str, key: str, value: object):
  return lambda header: header[name].update({key: value})


@pytest.mark.parametrize(
  'change, why',
  [
    (lambda header: [header], 'it is .*, it must be of type dict'),
    (lambda header: {**header, NORM: 3}, 'norm.weight: it is 3, it must be of type dict'),
    (lambda header: header[NORM].pop('dtype'), 'norm.weight: `dtype` is None'),
    (_set(NORM, 'shape', '8'), "`shape` is '8', it must be a list. Nothing was changed: mend"),
    (_set(NORM, 'shape', [8.0]), r'`shape`\[0\] is 8.0'),
    (_set(NORM, 'shape', [-2, -4]), 'norm.weight in .* has other bytes than its type, its shape'),
    (_set(NORM, 'shape', [9]), 'norm.weight in .* has other bytes'),
    (_set(NORM, 'dtype', 'F16'), 'norm.weight in .* has other bytes'),
    (_set(NORM, 'data_offsets', [512]), 'data_offsets` has 1 items, it must have 2'),
    (_set(NORM, 'data_offsets', [-32, 0]), 'norm.weight in .* has other bytes'),
    (_set(NORM, 'data_offsets', [544, 512]), 'norm.weight in .* has other bytes'),
    (_set(NORM, 'data_offsets', [0, 32]), 'has other bytes'),
    (_set(NORM, 'data_offsets', [516, 548]), 'norm.weight in .* has other bytes'),
    (_set(EMBEDDING, 'data_offsets', [0, 480]), 'embed_tokens.weight in .* has other bytes'),
    (lambda header: header.pop(NORM) and 0, 'model.safetensors has [0-9]+ bytes, by its header'),
  ],
)
def test_a_header_that_does_not_fit_its_file_is_refused(change, why, tmp_path):
  _write_changed(tmp_path / 'model.safetensors', lambda header: None)
  _require_read(tmp_path)
  _write_changed(tmp_path / 'model.safetensors', change)
  with pytest.raises(ValueError, match=f'cannot read the model in {tmp_path}: .*{why}'):
    hugging_face.read(str(tmp_path), LIKE)


@pytest.mark.parametrize('cut', [0, 5, 8, 40, -4])
def test_a_file_that_was_cut_is_refused(cut, tmp_path):
  data = safetensors.numpy.save(BASE)
  (tmp_path / 'model.safetensors').write_bytes(data[:cut])
  _require_refused(tmp_path, f'cannot read the model in {tmp_path}: ')
  (tmp_path / 'model.safetensors').write_bytes(data + b'more')
  _require_refused(tmp_path, 'by its header')


def test_a_tensor_of_another_model_is_named_whatever_its_type(tmp_path):
  more = {'other.weight': np.ones(4, np.float64), 'none.weight': np.ones((0, 3), np.float32)}
  safetensors.numpy.save_file(BASE | more, tmp_path / 'model.safetensors')
  _require_refused(tmp_path, r'(other|none).weight is \(.*\), in the model .* absent')


def test_a_head_beside_a_tied_embedding_is_the_same_or_refused(tmp_path):
  path, head = tmp_path / 'model.safetensors', np.array(BASE[EMBEDDING])
  safetensors.numpy.save_file(BASE | {'lm_head.weight': head}, path)
  _require_read(tmp_path)
  changed = head.copy()
  changed[-1, -1] = 2
  for other in (changed, head[:15].copy()):
    safetensors.numpy.save_file(BASE | {'lm_head.weight': other}, path)
    _require_refused(tmp_path, 'lm_head.weight in .* is not .*: set tie_word_embeddings to fal')


@pytest.mark.parametrize(
  'place', ['../b.safetensors', '/tmp/b.safetensors', '..', '', 3, None, 'b']
)
def test_an_index_names_files_of_its_folder_only(place, tmp_path):
  safetensors.numpy.save_file(BASE, tmp_path / 'b.safetensors')
  (tmp_path / 'model').mkdir()
  _write_index(tmp_path / 'model', dict.fromkeys(BASE, place))
  _require_refused(tmp_path / 'model', re.escape(f' in {place!r}, no *.safetensors beside it'))


@pytest.mark.parametrize('weight_map', [['a'], None])
def test_an_index_without_a_map_is_refused_by_its_key(weight_map, tmp_path):
  _write_index(tmp_path, weight_map)
  _require_refused(tmp_path, 'index.json: `weight_map` is .*, it must be of type dict. N')


def test_each_tensor_comes_from_the_file_that_the_index_names(tmp_path):
  """Files before it and behind it have an old copy."""
  old = BASE | {NORM: np.full(8, 5, np.float32)}
  for name, tensors in (('a', old), ('b', BASE), ('c', old)):
    safetensors.numpy.save_file(tensors, tmp_path / f'{name}.safetensors')
  for name in 'ac':
    weight_map = {NORM: 'b.safetensors', EMBEDDING: f'{name}.safetensors'}
    _write_index(tmp_path, weight_map | {'x.rotary_emb.inv_freq': 'd.safetensors'})
    _require_read(tmp_path)
  _write_index(tmp_path, weight_map | {'z': 'a.safetensors'})
  _require_refused(tmp_path, 'z is not in a.safetensors, where the index has it')


@pytest.mark.parametrize(
  'left_over, why',
  [
    ({}, ''),
    ({NORM: np.full(8, 2, np.float32)}, f'{NORM} is not the same in both'),
    ({EMBEDDING: np.ones((16, 8), np.float16)}, ''),
    ({'more': np.ones(1, np.float32)}, 'more is not the same in both'),
    (None, 'model-00001-of-00001.safetensors is not there'),
  ],
)
def test_two_models_in_one_folder_are_the_same_or_refused_by_name(left_over, why, tmp_path):
  safetensors.numpy.save_file(BASE, tmp_path / 'model.safetensors')
  part, tensors = 'model-00001-of-00001.safetensors', BASE | (left_over or {})
  if left_over is not None:
    safetensors.numpy.save_file(tensors, tmp_path / part)
  _write_index(tmp_path, dict.fromkeys(tensors, part))
  if not why:
    _require_read(tmp_path)
    return
  both = 'model.safetensors and model.safetensors.index.json are there, remove one'
  with pytest.raises(ValueError, match=f'in {tmp_path}: {both}: .*{re.escape(why)}'):
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


def test_an_adapter_far_below_a_step_of_bfloat16_is_computed_with_and_rounded_once():
  w = jnp.asarray(np.random.default_rng(0).standard_normal((32, 32)) / 20, jnp.bfloat16)
  whole = task_lib.Task(
    init=lambda seed: {'layer': {'w': w}}, loss=lambda params, batch, at: params['layer']['w'],
    batches=None, tokens_per_batch=1, label=lambda path: 'body', export=lambda params: params,
  )  # fmt: skip
  task = lora_decoder.lora(whole, 4)
  params = jax.tree.map(jnp.asarray, task.init(0))
  pair = params['lora']['layer']['w']
  pair['b'] = jnp.full_like(pair['b'], 1e-5)
  added = pair['a'] @ pair['b']
  assert 0 < float(jnp.abs(added).max()) < 2**-9 * float(jnp.abs(w).max())
  w32 = w.astype(jnp.float32)
  np.testing.assert_allclose(task.loss(params, None, None) - w32, added, atol=1e-8)
  exported = task.export(params)['layer']['w']
  assert np.array_equal(exported, (w32 + added).astype(jnp.bfloat16))


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
  experts = decoder.initial_params(train_config.ModelConfig(num_experts=2), 0)
  with pytest.raises(ValueError, match='no Hugging Face folder .* has layers/0/experts'):
    decoder.export(train_config.ModelConfig(num_experts=2), experts)


def test_configs_of_the_hub_are_understood(tmp_path):
  assert _model(LLAMA_3_2_1B, tmp_path) == train_config.ModelConfig(
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
  assert gemma == train_config.ModelConfig(
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
  ('fields', 'change', 'text'),
  [
    (LLAMA_3_2_1B, {'model_type': 'gpt2'}, "model_type is 'gpt2'; known are llama, qwen3"),
    (LLAMA_3_2_1B, {'attention_bias': True}, "the decoder has no {'attention_bias': True}"),
    (LLAMA_3_2_1B, {'hidden_act': 'relu'}, "no {'hidden_act': 'relu'}"),
    (LLAMA_3_2_1B, {'rope_scaling': {'type': 'linear', 'factor': 2.0}}, "no {'type': 'linear'}"),
    (LLAMA_3_2_1B, {'rope_scaling': {'factor': 8.0}}, "config.json has {'factor': 8.0}"),
    (LLAMA_3_2_1B, {'rope_scaling': {'type': 'llama3'}}, 'config.json: RoPE: `factor` is None'),
    (LLAMA_3_2_1B, {'rope_scaling': YARN}, "'yarn'}"),
    (LLAMA_3_2_1B, {'rope_parameters': {'rope_theta': 1e4}}, "no {'rope_theta': 500000.0, 'rope"),
    (LLAMA_3_2_1B, {'rope_parameters': FULL_ROPE}, 'config.json: RoPE: `rope_theta` is None'),
    (LLAMA_3_2_1B, {'final_logit_softcapping': 30.0}, "has {'final_logit_softcapping': 30.0}"),
    (LLAMA_3_2_1B, {'sliding_window': 4096}, "config.json has {'sliding_window': 4096}"),
    (LLAMA_3_2_1B, {'attention_dropout': 0.1}, "no {'attention_dropout': 0.1}"),
    (GEMMA, {'hidden_act': 'gelu'}, "no {'hidden_act': 'gelu'}"),
    (GEMMA, {'hidden_activation': 'relu'}, "no {'hidden_activation': 'relu'}"),
    (GEMMA, {'final_logit_softcapping': 30.0}, "has {'final_logit_softcapping': 30.0}"),
    (GEMMA_3_1B, {'rope_parameters': FULL_ROPE | {'a': 1}}, "config.json has {'a': 1}"),
    (GEMMA_3_1B, {'rope_parameters': FULL_ROPE | SCALED}, "config.json has {'factor': 8.0}"),
    (LLAMA_3_2_1B, {'vocab_size': '12'}, "config.json: `vocab_size` is '12', it must be of"),
    (LLAMA_3_2_1B, {'rms_norm_eps': None}, 'config.json: `rms_norm_eps` is None, it must be of'),
    (LLAMA_3_2_1B, {'rope_scaling': []}, 'config.json: `rope_scaling` is [], it must be of type'),
    (LLAMA_3_2_1B, {'num_hidden_layers': True}, '`num_hidden_layers` is True, it must be of type'),
    (GEMMA_3_1B, {'rope_parameters': {'full_attention': 3}}, 'RoPE: it is 3, it must be of type'),
    (GEMMA_3_1B, {'sliding_window': None}, 'config.json: `sliding_window` is None, it must be of'),
    (LLAMA_3_2_1B, {'layer_types': ['sliding_attention'] * 16}, "no {'layer_types': ['sliding_"),
    (LLAMA_3_2_1B, {'rope_parameters': PARTIAL}, "config.json has {'partial_rotary_factor': 0.5}"),
    (GEMMA_3_1B, {'attn_logit_softcapping': 50.0}, "no {'attn_logit_softcapping': 50.0}"),
    (GEMMA_3_1B, {'query_pre_attn_scalar': 168}, "no {'query_pre_attn_scalar': 168}"),
    (GEMMA_3_1B, {'layer_types': ['full_attention'] * 26}, ''),
    (GEMMA_3_1B, MIXED, "no {'layer_types': ['full_attention', 'sliding_attention']}"),
  ],
)
def test_what_the_decoder_would_compute_in_another_way_is_refused(fields, change, text, tmp_path):
  if not text:
    assert all(_model(fields | change, tmp_path).sees_all)
    return
  with pytest.raises(ValueError, match=re.escape(text)):
    _model(fields | change, tmp_path)


def test_what_is_without_effect_is_no_reason_to_refuse(tmp_path):
  both = {'hidden_act': 'gelu', 'hidden_activation': 'gelu_pytorch_tanh'}
  assert _model(GEMMA | both, tmp_path) == _model(GEMMA, tmp_path)
  off = dict.fromkeys(('attention_dropout', 'use_sliding_window', 'mlp_bias'), False)
  assert _model(LLAMA_3_2_1B | off, tmp_path) == _model(LLAMA_3_2_1B, tmp_path)
  pattern = {'sliding_window_pattern': None, '_sliding_window_pattern': 3}
  assert _model(GEMMA_3_1B | pattern, tmp_path).global_every == 3
  bare = {key: value for key, value in GEMMA_3_1B.items() if not key.startswith('rope')}
  assert _model(bare, tmp_path) == _model(GEMMA_3_1B, tmp_path), 'the defaults of the library'


@pytest.mark.parametrize('text', ['', '[]', '{"a": 1', '3', '{}', '[' * 100_000])
@pytest.mark.parametrize('name', ['config.json', 'model.safetensors.index.json'])
def test_a_file_that_is_no_such_object_is_one_clear_line(name, text, tmp_path):
  (tmp_path / name).write_text(text)
  with pytest.raises(ValueError, match=name):
    if name == 'config.json':
      pretrained.model_config(tmp_path)
    hugging_face.read(str(tmp_path), LIKE)
