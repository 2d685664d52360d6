"""A byte-level language model on the text of Python's own standard library.

What it shows: four learners, each a JAX mesh of two devices, train one model over gRPC. With
`--kill` one of them is killed during the run and restarted, and the others keep their speed. Other
variants train the same model with other methods, each a few lines away from the next.

    diloco train --kill=l3@0.45+8                               # cpu: the demo
    diloco train --config=stdlib_lm:diloco
    diloco train --config=stdlib_lm:decoupled --syncer=none     # 1/4 of the tokens
    diloco train --config=stdlib_lm:data_parallel --syncer=none # all the tokens

README.md has the figures of a run, experiments/studies how well the methods learn.

In a notebook: `diloco_jax.run(stdlib_lm.get_config('tiny'), 'runs/notebook')`.

| variant | what it is |
|---|---|
| cpu | Decoupled DiLoCo on one machine: M=4, P=H=12, tau=3, K=1, int8 |
| tiny | the same in seconds, for tests: M=3, P=H=4 |
| decoupled | cpu with more steps |
| streaming | Streaming DiLoCo: K=M, and a learner waits for a sync after tau steps |
| diloco | DiLoCo: K=M, one fragment, no learner trains while it is in flight |
| small | decoupled, with a model for studies: 48 wide, 2 layers |
| bpe | small, on the ids of a tokenizer that is trained on the text first |
| moe | small, with a Mixture of Experts in each layer, and a fragment for each expert |
| data_parallel | one learner with the batch of all four, to compare with |
"""

from collections.abc import Callable

from diloco_jax.config import run_config
from diloco_jax.train import config as train_config


def cpu() -> run_config.Config:
  """Decoupled DiLoCo, sized for two cores."""
  return run_config.Config(
    name='cpu',
    model=train_config.ModelConfig(
      num_layers=2, embed_dim=96, num_heads=4, num_kv_heads=2, head_dim=24, hidden_dim=256
    ),
    optimizer=train_config.OptimizerConfig(learning_rate=3e-3, warmup_steps=30),
    data=train_config.DataConfig(seq_len=128, batch_size=8, shards=16, eval_batches=4),
    mesh=train_config.MeshConfig(data=2),
    sync=run_config.SyncConfig(
      learners=4,
      quorum=1,
      fragments=12,
      period=12,
      overlap=3,
      outer='nesterov(learning_rate=0.7, momentum=0.5)',
      checkpoint_every_syncs=60,
    ),
    train=run_config.TrainConfig(
      steps=850, log_every=50, eval_every=100, checkpoint_every_steps=100
    ),
  )


def tiny() -> run_config.Config:
  """The same in a few seconds, for tests."""
  config = cpu()
  config.model = train_config.ModelConfig(
    num_layers=2, embed_dim=32, num_heads=2, num_kv_heads=1, head_dim=16, hidden_dim=64
  )
  config.optimizer.warmup_steps = 4
  config.data = train_config.DataConfig(
    seq_len=32, batch_size=4, shards=16, eval_batches=1, eval_batch_size=8
  )
  config.sync.learners, config.sync.fragments, config.sync.period = 3, 4, 4
  config.sync.checkpoint_every_syncs = 8
  config.train = run_config.TrainConfig(
    steps=24, log_every=4, eval_every=8, checkpoint_every_steps=8
  )
  return config


def decoupled() -> run_config.Config:
  """No learner waits for another."""
  config = cpu()
  config.train.steps = 1000
  return config


def streaming() -> run_config.Config:
  """Every learner waits for the slowest one, but trains tau steps first, which hide the network."""
  config = decoupled()
  config.sync.quorum = config.sync.learners
  config.sync.max_lag = config.sync.overlap
  return config


def diloco() -> run_config.Config:
  """All parameters every H steps; no learner trains during the exchange."""
  config = streaming()
  config.sync.fragments = 1
  config.sync.overlap = config.sync.max_lag = 0
  return config


def small() -> run_config.Config:
  """A model of 63,264 parameters on windows of 32 bytes: a step takes 5 ms on one core."""
  config = decoupled()
  config.model = train_config.ModelConfig(
    num_layers=2, embed_dim=48, num_heads=4, num_kv_heads=2, head_dim=12, hidden_dim=128
  )
  config.optimizer.learning_rate = 6e-3
  config.data.seq_len, config.data.eval_batches, config.data.eval_batch_size = 32, 8, 64
  config.mesh.data = 1
  return config


def bpe() -> run_config.Config:
  """Small, on ids of byte-level BPE, of which each stands for about three bytes. Needs the extra
  [data]; the text is encoded once, in half a minute."""
  config = small()
  config.data.tokenizer, config.model.vocab_size = 'bpe(size=2048)', 2048
  config.train.steps = 500
  return config


def moe() -> run_config.Config:
  """Small, with a Mixture of Experts: a token is given to two of four experts, each half as wide as
  the dense block, so that a step computes as much."""
  config = small()
  config.model.num_experts, config.model.experts_per_token, config.model.hidden_dim = 4, 2, 64
  return config


def data_parallel() -> run_config.Config:
  """One learner that sees all the tokens."""
  config = decoupled()
  config.data.batch_size *= config.sync.learners
  config.sync.learners = config.sync.quorum = config.data.shards = 1
  return config


VARIANTS: dict[str, Callable[[], run_config.Config]] = {
  make.__name__: make
  for make in (cpu, tiny, decoupled, streaming, diloco, small, bpe, moe, data_parallel)
}


def get_config(variant: str = 'cpu') -> run_config.Config:
  """Makes the config of a variant. Raises ValueError, which lists all variants."""
  if variant not in VARIANTS:
    raise ValueError(f'there is no variant {variant!r}; use one of: {", ".join(VARIANTS)}')
  config = VARIANTS[variant]()
  config.name = variant
  return config
