"""Eight TPU hosts of two kinds, four v5p and four v6e, with different speeds, far apart.

    diloco syncer --config=experiments/configs/v5p_v6e.py --workdir=runs/v5p_v6e \
      --listen=0.0.0.0:7070 --tls=certs/syncer

Too large for a CPU. The model is Gemma's 1B shape over bytes (26 layers, 1152 wide, 4 query heads
and 1 key head of 256): 0.70B parameters, almost none of them in the embedding. M=8, P=H=24. A
learner is a host of 4 chips (of 8: --config.mesh.fsdp=8 on that host alone); one sync moves 1/24 of
the parameters as int8, 30 MB each way.
"""

from diloco_jax.config import run_config
from diloco_jax.train import config as train_config


def get_config() -> run_config.Config:
  learners = 8
  return run_config.Config(
    name='v5p_v6e',
    model=train_config.ModelConfig(
      num_layers=26,
      embed_dim=1152,
      num_heads=4,
      num_kv_heads=1,
      head_dim=256,
      hidden_dim=6912,
      dtype='bfloat16',
    ),
    optimizer=train_config.OptimizerConfig(learning_rate=1e-3, warmup_steps=1_000),
    data=train_config.DataConfig(
      corpus='/data/text',
      seq_len=4096,
      batch_size=8,
      shards=64,
      eval_batches=8,
      eval_batch_size=8,
    ),
    mesh=train_config.MeshConfig(fsdp=4),
    sync=run_config.SyncConfig(
      learners=learners,
      quorum=1,
      fragments=24,
      period=24,
      overlap=2,
      codec_up='int8',
      codec_down='int8',
      outer='nesterov(learning_rate=0.7, momentum=0.9)',
      lease_s=60.0,
      heartbeat_s=10.0,
      checkpoint_every_syncs=240,
    ),
    train=run_config.TrainConfig(
      steps=100_000, log_every=20, eval_every=2_400, checkpoint_every_steps=1_000
    ),
  )
