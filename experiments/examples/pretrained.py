"""Fine-tunes a model of the Llama, Qwen3 or Gemma family from a Hugging Face folder.

    diloco train --config=experiments/examples/pretrained.py:FOLDER --config.data.corpus=/data/text

FOLDER has config.json, *.safetensors and tokenizer.json. All parameters are trained, by AdamW; for
LoRA add `--config.task='lora_decoder.py:task(rank=8)'` and a higher rate. `diloco export
--out=NEW_FOLDER` writes the trained model in the same layout.
"""

import pathlib
from collections.abc import Iterable
from typing import Any

from diloco_jax.config import run_config
from diloco_jax.storage import hugging_face, json_files
from diloco_jax.train import config as train_config

GEMMA3 = 'gemma3_text'
FAMILIES = {  # by `model_type`: style, qk_norm, post_norms
  'llama': ('llama', False, False),
  'qwen3': ('llama', True, False),
  'gemma': ('gemma', False, False),
  GEMMA3: ('gemma', True, True),
}
LLAMA3 = {  # the one scaling of RoPE that the decoder has, of Llama 3.1 to 3.3
  'rope_type': 'llama3',
  'type': 'llama3',  # its name in older files
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 8192,
}
FULL, SLIDING = 'full_attention', 'sliding_attention'
OFF = """
  attention_bias mlp_bias use_sliding_window use_bidirectional_attention attn_logit_softcapping
  attention_dropout rope_interleaved
""".split()
# Of other programs, of generation, or of how a model was first made: no logit depends on it.
WITHOUT_EFFECT = """
  _name_or_path architectures transformers_version bos_token_id eos_token_id pad_token_id use_cache
  initializer_range max_position_embeddings max_window_layers cache_implementation
  is_llama_config unsloth_fixed unsloth_version
""".split()
SIZES = 'num_attention_heads hidden_size vocab_size num_hidden_layers intermediate_size'.split()
USED = {  # by every family
  'model_type': str,
  'rms_norm_eps': float,
  'tie_word_embeddings': bool | None,
  'layer_types': list[str] | None,
  'rope_theta': float | None,
  **dict.fromkeys(SIZES, int),
  **dict.fromkeys(('num_key_value_heads', 'head_dim'), int | None),
  **dict.fromkeys(('rope_scaling', 'rope_parameters'), dict[str, Any] | None),
  **dict.fromkeys(('hidden_act', 'dtype', 'torch_dtype'), str | None),
}
PATTERN = '_sliding_window_pattern', 'sliding_window_pattern'
USED_BY = {
  'llama': {},
  'qwen3': {'sliding_window': int | None},  # without effect, as `use_sliding_window` is off
  'gemma': {'hidden_activation': str | None},
  GEMMA3: {
    'hidden_activation': str | None,
    'sliding_window': int,
    **dict.fromkeys(('final_logit_softcapping', 'rope_local_base_freq'), float | None),
    **dict.fromkeys(PATTERN, int | None),
  },
}
ROPE = {'rope_theta': float, 'rope_type': str | None, 'type': str | None}


def get_config(folder: str = '.') -> run_config.Config:
  model = model_config(pathlib.Path(folder))
  model.remat, model.loss_chunk = 'full', 32
  tokenizer = str(pathlib.Path(folder, 'tokenizer.json'))
  return run_config.Config(
    name='pretrained',
    model=model,
    optimizer=train_config.OptimizerConfig(learning_rate=2e-5, warmup_steps=20, weight_decay=0.0),
    data=train_config.DataConfig(tokenizer=tokenizer, seq_len=512, eval_batch_size=8),
    sync=run_config.SyncConfig(learners=3, fragments=8, period=8, overlap=2),
    train=run_config.TrainConfig(steps=500, init_from=folder),
  )


def model_config(folder: pathlib.Path) -> train_config.ModelConfig:
  """The decoder that config.json describes. Raises ValueError: the decoder cannot compute it."""
  path = folder / 'config.json'
  config = hugging_face.read_object(path, {'model_type': str})
  family = config['model_type']
  if family not in FAMILIES:
    raise ValueError(f'{path}: model_type is {family!r}; known are {", ".join(FAMILIES)}')
  json_files.require_keys(path, config, USED | USED_BY[family])
  style, qk_norm, post_norms = FAMILIES[family]
  heads, width, scaling, local = (
    config['num_attention_heads'],
    config['hidden_size'],
    *rope(path, config),
  )
  model = train_config.ModelConfig(
    vocab_size=config['vocab_size'],
    num_layers=config['num_hidden_layers'],
    embed_dim=width,
    num_heads=heads,
    num_kv_heads=config.get('num_key_value_heads') or heads,
    head_dim=config.get('head_dim') or width // max(heads, 1),
    hidden_dim=config['intermediate_size'],
    tied_head=bool(config.get('tie_word_embeddings', style == 'gemma')),
    style=style,
    norm_eps=config['rms_norm_eps'],
    qk_norm=qk_norm,
    post_norms=post_norms,
    rope_theta=scaling['rope_theta'],
    rope_local_theta=local['rope_theta'] if family == GEMMA3 else 0.0,
    rope_factor=scaling.get('factor') or 1.0,
    logit_softcap=config.get('final_logit_softcapping') or 0.0,
  )
  if config.get('dtype', config.get('torch_dtype')) == 'bfloat16':
    model.param_dtype = 'bfloat16'
  if family == GEMMA3:
    model.window, model.global_every = windows(config)
  require(path, config, model)
  return model


def rope(path: pathlib.Path, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
  """Of layers without a window, and of those with one; as transformers 5 writes them, or 4. Raises
  ValueError: a key of them is not known, or the decoder has no such scaling."""
  is_gemma3 = config['model_type'] == GEMMA3
  older = {'rope_theta': config.get('rope_theta', 1e6 if is_gemma3 else 1e4)}
  both = config.get('rope_parameters') or older | (config.get('rope_scaling') or {})
  local = {'rope_theta': config.get('rope_local_base_freq', 1e4)}
  if is_gemma3 and FULL in both:
    refuse_others(path, both, {FULL, SLIDING}, {})
    both, local = both[FULL], both.get(SLIDING, local)
  for half in (both, local):
    json_files.require_keys(f'{path}: RoPE', half, ROPE)
    keys, wanted = ROPE, {'rope_type': 'default', 'type': 'default'}
    if half is both and 'llama3' in (half.get('rope_type'), half.get('type')):
      keys, wanted = ROPE | {'factor': float}, LLAMA3
    refuse_others(path, json_files.require_keys(f'{path}: RoPE', half, keys), keys, wanted)
  return both, local


def windows(config: dict[str, Any]) -> tuple[int, int]:
  """`window` and `global_every` of Gemma 3; transformers 4 may write the second one only."""
  kinds, patterns = config.get('layer_types'), [config.get(name) for name in PATTERN]
  every = [*kinds, FULL].index(FULL) + 1 if kinds else next(filter(None, patterns), 6)
  return config['sliding_window'], every


def require(path: pathlib.Path, config: dict[str, Any], model: train_config.ModelConfig) -> None:
  """Raises ValueError, which names what the decoder would compute in another way, or may."""
  wanted: dict[str, Any] = dict.fromkeys(OFF) | {'query_pre_attn_scalar': model.head_dim}
  wanted['pretraining_tp'] = 1
  wanted['layer_types'] = [FULL if full else SLIDING for full in model.sees_all]
  wanted['hidden_act'] = 'silu'
  if model.style == 'gemma':
    act = 'hidden_activation' if config.get('hidden_activation') else 'hidden_act'  # it comes first
    wanted |= {'hidden_act': config.get('hidden_act'), act: 'gelu_pytorch_tanh'}
  if config.get('rope_parameters'):  # the older keys are not read
    wanted |= {'rope_theta': model.rope_theta, 'rope_scaling': None}
    wanted['rope_local_base_freq'] = model.rope_local_theta
  refuse_others(path, config, {*USED, *USED_BY[config['model_type']], *WITHOUT_EFFECT}, wanted)


def refuse_others(
  path: pathlib.Path, config: dict[str, Any], known: Iterable[str], wanted: dict[str, Any]
) -> None:
  """Raises ValueError for a key that is neither known nor wanted, unless it is null, and for one
  that has another value than the wanted one, unless it is off (null, false, 0)."""
  if other := {
    key: config[key] for key, usual in wanted.items() if (config.get(key) or usual) != usual
  }:
    raise ValueError(f'{path}: the decoder has no {other}')
  known = {*known, *wanted}
  if strange := {k: value for k, value in config.items() if value is not None and k not in known}:
    raise ValueError(
      f'{path} has {strange}, of which this reader does not know what it does to the logits: if it '
      'is without effect, remove it there'
    )
