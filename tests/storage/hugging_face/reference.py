"""The reference for models in the layout of Hugging Face: the library transformers, in an
environment of its own that has PyTorch and nothing of this project.

    python3 -m venv .cache/reference
    .cache/reference/bin/pip install torch==2.14.1 transformers==5.24.0
    cd tests/storage/hugging_face
    ../../../.cache/reference/bin/python reference.py --record
    ../../../.cache/reference/bin/python reference.py --read=FOLDER --logits=FILE.npy

--record writes the folders beside this file anew: tiny models with random values, each with a
tokenizer, what it makes of a text, and the logits of that in float32. --read loads a folder as a
user would, and writes the logits of the same ids.
"""

import argparse
import dataclasses
import json
import pathlib
import shutil
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers

HERE = pathlib.Path(__file__).parent
TEXT = 'def add(one, other):\n  """Adds two numbers, or texts."""\n  return one + other\n'
WORDS, IDS = 320, (2, 16)
SIZES = {
  'vocab_size': WORDS,
  'hidden_size': 32,
  'intermediate_size': 48,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'max_position_embeddings': 64,
  'bos_token_id': None,
  'eos_token_id': 0,
  'pad_token_id': None,
}
SCALED = {  # as Llama 3.2, but with wavelengths that are short, of a middle length and long
  'rope_type': 'llama3',
  'rope_theta': 200_000.0,
  'factor': 32.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 8192,
}
LOCAL = {'rope_type': 'default', 'rope_theta': 10.0}
GLOBAL = {'rope_type': 'default', 'rope_theta': 1000.0}


@dataclasses.dataclass(frozen=True)
class Recorded:
  """A model to record.

  Attributes:
    kind: the class of its config.
    own: what its config has beside SIZES.
    dtype: of its file.
    shard: the most bytes of a file.
  """

  kind: type
  own: dict[str, Any]
  dtype: torch.dtype = torch.bfloat16
  shard: str = '1GB'


MODELS = {
  'llama': Recorded(
    transformers.LlamaConfig,
    {'rope_parameters': SCALED, 'rms_norm_eps': 1e-5},
    torch.float32,
    '60KB',
  ),
  'qwen3': Recorded(transformers.Qwen3Config, {'head_dim': 16}),
  'gemma': Recorded(transformers.GemmaConfig, {'head_dim': 16}),
  'gemma3': Recorded(
    transformers.Gemma3TextConfig,
    {
      'head_dim': 16,
      'query_pre_attn_scalar': 16,
      'sliding_window': 5,
      'layer_types': ['sliding_attention', 'full_attention'],
      'rope_parameters': {'full_attention': GLOBAL, 'sliding_attention': LOCAL},
      'final_logit_softcapping': 2.0,
    },
  ),
}


def tokenizer() -> transformers.PreTrainedTokenizerFast:
  made = tokenizers.Tokenizer(tokenizers.models.BPE())
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=WORDS - 10,
    special_tokens=['<eos>'],
    initial_alphabet=made.pre_tokenizer.alphabet(),
    show_progress=False,
  )
  made.train_from_iterator([pathlib.Path(__file__).read_text('utf-8')], trainer)
  return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token='<eos>')


def logits(folder: pathlib.Path) -> np.ndarray:
  """Of the ids of the text, as two rows."""
  words = transformers.AutoTokenizer.from_pretrained(folder)
  ids = torch.tensor(words(TEXT, add_special_tokens=False)['input_ids'][: np.prod(IDS)])
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation='eager'
  )
  with torch.no_grad():
    return model(ids.reshape(IDS)).logits.numpy()


def record(name: str, one: Recorded) -> None:
  folder = HERE / name
  shutil.rmtree(folder, ignore_errors=True)
  torch.manual_seed(0)
  model = transformers.AutoModelForCausalLM.from_config(one.kind(**SIZES | one.own))
  with torch.no_grad():
    for leaf in model.parameters():  # those of norms, too, or their formula would not matter
      matrix = leaf.ndim == 2
      noise = torch.randn_like(leaf) * (leaf.shape[-1] ** -0.5 if matrix else 0.3)
      leaf.copy_(noise if matrix else leaf + noise)
  model.to(one.dtype).save_pretrained(folder, max_shard_size=one.shard)
  words = tokenizer()
  words.save_pretrained(folder)
  found = {
    'ids': words(TEXT, add_special_tokens=False)['input_ids'],
    'text': TEXT,
    'torch': torch.__version__,
    'transformers': transformers.__version__,
  }
  (folder / 'golden').mkdir()
  (folder / 'golden' / 'ids.json').write_text(json.dumps(found) + '\n', 'utf-8')
  np.save(folder / 'golden' / 'logits.npy', logits(folder))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--record', action='store_true')
  parser.add_argument('--read', type=pathlib.Path)
  parser.add_argument('--logits', type=pathlib.Path)
  flags = parser.parse_args()
  if flags.record:
    for name, one in MODELS.items():
      record(name, one)
  else:
    np.save(flags.logits, logits(flags.read))


if __name__ == '__main__':
  main()
