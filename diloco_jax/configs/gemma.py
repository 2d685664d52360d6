"""The shapes of Gemma 3 (arXiv 2503.19786), text only: `--config=gemma:1b`, `4b` or `12b`.

Tied embeddings of 262,144 words, grouped-query attention with heads of 256, five layers that see a
window between two that see everything, GeGLU. Not as there: no norm behind a block (decoder.py),
one wavelength of RoPE for all layers; and the text is read as bytes, for a tokenizer comes with a
task of one's own.

The layers are one stack under a scan, fragments are groups of layers, parameters are bfloat16 with
anchors and moments in float32. The mesh is for the smallest slice on which each fits (below); each
learner chooses its own.
"""

from diloco_jax.config import run_config
from diloco_jax.train import config as train_config

VARIANTS = {
  '1b': (26, 1152, 4, 1, 6912, 512),
  '4b': (34, 2560, 8, 4, 10240, 1024),
  '12b': (48, 3840, 16, 8, 15360, 1024),
}
_DEVICES = {'1b': 16, '4b': 64, '12b': 64}  # v6e:4x4, v6e:8x8, v5p:4x4x4


def get_config(variant: str = '1b') -> run_config.Config:
  """Makes the config of a variant. Raises ValueError, which lists all variants."""
  if variant not in VARIANTS:
    raise ValueError(f'there is no variant {variant!r}; use one of: {", ".join(VARIANTS)}')
  layers, width, heads, kv_heads, hidden, window = VARIANTS[variant]
  devices = _DEVICES[variant]
  return run_config.Config(
    name=f'gemma_{variant}',
    model=train_config.ModelConfig(
      vocab_size=262_144,
      num_layers=layers,
      embed_dim=width,
      num_heads=heads,
      num_kv_heads=kv_heads,
      head_dim=256,
      hidden_dim=hidden,
      rope_theta=1_000_000.0,
      logit_softcap=0.0,
      dtype='bfloat16',
      param_dtype='bfloat16',
      window=window,
      global_every=6,
      scan=True,
      remat='full',
      loss_chunk=512,
    ),
    optimizer=train_config.OptimizerConfig(learning_rate=1e-3, warmup_steps=1_000),
    data=train_config.DataConfig(
      corpus='/data/text', seq_len=4096, batch_size=devices, shards=64, eval_batch_size=devices
    ),
    mesh=train_config.MeshConfig(fsdp=devices),
    sync=run_config.SyncConfig(
      learners=4,
      fragments=layers // 2,
      period=layers // 2,
      overlap=2,
      lease_s=60.0,
      checkpoint_every_syncs=240,
    ),
    train=run_config.TrainConfig(
      steps=100_000, log_every=20, eval_every=2_400, checkpoint_every_steps=1_000
    ),
  )
