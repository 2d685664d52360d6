"""Fine-tunes a model of the Llama, Qwen3 or Gemma family from a Hugging Face folder.

    diloco train --config=experiments/examples/pretrained.py:FOLDER --config.data.corpus=/data/text

FOLDER has config.json, *.safetensors and tokenizer.json. All parameters are trained, by AdamW; for
LoRA add `--config.task='lora_decoder.py:task(rank=8)'` and a higher rate. `diloco export
--out=NEW_FOLDER` writes the trained model in the same layout.
"""

import json
import pathlib
from typing import Any

from diloco_jax.config import run_config
from diloco_jax.train import config as train_config

FAMILIES = {  # by `model_type`: style, qk_norm, post_norms
  'llama': ('llama', False, False),
  'qwen3': ('llama', True, False),
  'gemma': ('gemma', False, False),
  'gemma3_text': ('gemma', True, True),
}
LLAMA3 = {  # the one scaling of RoPE that the decoder has, of Llama 3.1 to 3.3
  'rope_type': 'llama3',
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 8192,
}
UNKNOWN = (
  'attention_bias',
  'mlp_bias',
  'use_sliding_window',
  'use_bidirectional_attention',
  'attn_logit_softcapping',
)
FULL = 'full_attention'
USED = """
  model_type num_attention_heads hidden_size vocab_size num_hidden_layers num_key_value_heads
  head_dim intermediate_size tie_word_embeddings rms_norm_eps final_logit_softcapping dtype
  torch_dtype rope_theta rope_scaling rope_parameters rope_local_base_freq layer_types
  sliding_window sliding_window_pattern _sliding_window_pattern query_pre_attn_scalar hidden_act
  hidden_activation
""".split()
# Of other programs, of generation, or of how a model was first made: no logit depends on it.
WITHOUT_EFFECT = """
  _name_or_path architectures transformers_version bos_token_id eos_token_id pad_token_id use_cache
  initializer_range max_position_embeddings max_window_layers cache_implementation
  unsloth_fixed unsloth_version
""".split()


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
  told = json.loads((folder / 'config.json').read_text('utf-8'))
  family, scaling, local = told['model_type'], *rope(told)
  if family not in FAMILIES:
    raise ValueError(f'model_type is {family!r}; known are {", ".join(FAMILIES)}')
  style, qk_norm, post_norms = FAMILIES[family]
  heads, width = told['num_attention_heads'], told['hidden_size']
  made = train_config.ModelConfig(
    vocab_size=told['vocab_size'],
    num_layers=told['num_hidden_layers'],
    embed_dim=width,
    num_heads=heads,
    num_kv_heads=told.get('num_key_value_heads') or heads,
    head_dim=told.get('head_dim') or width // heads,
    hidden_dim=told['intermediate_size'],
    tied_head=told.get('tie_word_embeddings', style == 'gemma'),
    style=style,
    norm_eps=told['rms_norm_eps'],
    qk_norm=qk_norm,
    post_norms=post_norms,
    rope_theta=scaling['rope_theta'],
    rope_local_theta=local['rope_theta'],
    rope_factor=scaling.get('factor', 1.0),
    logit_softcap=told.get('final_logit_softcapping') or 0.0,
  )
  if told.get('dtype', told.get('torch_dtype')) == 'bfloat16':
    made.param_dtype = 'bfloat16'
  if post_norms:
    made.window, made.global_every = windows(told)
  require(told, made, scaling)
  return made


def rope(told: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
  """Of layers without a window, and of those with one; as transformers 5 writes them, or 4."""
  older = {'rope_theta': told.get('rope_theta', 1e4)} | (told.get('rope_scaling') or {})
  both = told.get('rope_parameters') or older
  local = {'rope_theta': told.get('rope_local_base_freq', 0.0)}
  return both.get(FULL, both), both.get('sliding_attention', local)


def windows(told: dict[str, Any]) -> tuple[int, int]:
  """`window` and `global_every` of Gemma 3; transformers 4 may write the second one only."""
  kinds = told.get('layer_types')
  every = [*kinds, FULL].index(FULL) + 1 if kinds else told.get('sliding_window_pattern', 6)
  return told['sliding_window'], every


def require(told: dict[str, Any], made: train_config.ModelConfig, scaling: dict[str, Any]) -> None:
  """Raises ValueError, which names what the decoder would compute in another way, or may: a key
  that is neither used nor known to be without effect, unless it is off (null, false, 0)."""
  wanted: dict[str, Any] = dict.fromkeys(UNKNOWN) | {'query_pre_attn_scalar': made.head_dim}
  wanted['pretraining_tp'] = 1
  wanted['layer_types'] = [FULL if full else 'sliding_attention' for full in made.sees_all]
  known = {*USED, *WITHOUT_EFFECT, *wanted, 'type', 'factor', *LLAMA3}
  if strange := {key: one for key, one in (told | scaling).items() if one and key not in known}:
    raise ValueError(
      f'config.json has {strange}, of which this reader does not know what it does to the logits: '
      'if it is without effect, remove it there'
    )
  if made.style == 'llama':
    wanted['hidden_act'] = 'silu'
  if (kind := scaling.get('rope_type', scaling.get('type', 'default'))) != 'default':
    told, wanted = told | scaling | {'rope_type': kind}, wanted | LLAMA3
  other = {key: told[key] for key, value in wanted.items() if (told.get(key) or value) != value}
  if other:
    raise ValueError(f'the decoder has no {other}')
