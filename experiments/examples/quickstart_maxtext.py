"""MaxText: its settings, mesh, state and jitted step; the boundary is behind the step.

diloco syncer --config=own_loop --config.train.steps=300 --workdir=runs/start
python quickstart_maxtext.py l0    # in a terminal of its own
python quickstart_maxtext.py l1    # in another one; if it is killed, start it again
"""

import sys

import jax
import numpy as np
from flax import nnx
from maxtext.trainers.pre_train import train as pre_train
from maxtext.utils import sharding, train_utils

import diloco_jax

ROWS, LENGTH, VOCAB = 8, 32, 64
SETTINGS = f"""run_name=start hardware=cpu skip_jax_distributed_system=true head_dim=32
  base_emb_dim=64 base_mlp_dim=128 base_num_decoder_layers=2 base_num_query_heads=2
  base_num_kv_heads=2 vocab_size={VOCAB} max_target_length={LENGTH} dataset_type=synthetic steps=300
  per_device_batch_size={ROWS / jax.device_count()} learning_rate=1e-2 enable_checkpointing=false"""


def init() -> tuple:
  config, recorder = pre_train.initialize([pre_train.__file__, *SETTINGS.split()])
  _, _, placed, _, mesh, *_, state = train_utils.setup_train_loop(config, recorder)
  params, placed = sharding.maybe_update_params_sharding_with_opt(config, placed)
  jitted, _ = train_utils.jit_train_and_eval_step(
    config, nnx.graphdef(state), mesh, None, placed, pre_train.train_step, params_shardings=params
  )

  def step(clock: int, batch: dict[str, np.ndarray]) -> jax.Array:
    state.optimizer.opt_state[-1].count[...] = clock  # the schedule's: one rate for all learners
    with jax.set_mesh(mesh), pre_train.logical_axis_rules(config.logical_axis_rules):
      new, metrics = jitted(nnx.state(state), batch)
    nnx.update(state, new)
    return metrics['scalar']['learning/loss']

  return (state.model, state.optimizer), step


def read(shard: int, index: int) -> dict[str, np.ndarray]:
  first_Bx1, by_Bx1 = np.random.default_rng([shard, index]).integers(1, 5, (2, ROWS, 1), np.int32)
  at_BxL = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
  ids_BxL = (first_Bx1 + by_Bx1 * at_BxL) % VOCAB
  more = {'position': at_BxL, 'segmentation': np.ones_like(at_BxL)}
  batch = {'inputs': ids_BxL, 'targets': (ids_BxL + by_Bx1) % VOCAB}
  return batch | {f'{name}_{key}': more[key] for name in batch for key in more}


def train(**run: str | None) -> None:
  state, step = init()
  with diloco_jax.join(state, **run) as peer:
    for clock, batch in peer.steps(read):
      peer.sync(state, tokens=ROWS * LENGTH, metrics={'loss': step(clock, batch)})


if __name__ == '__main__':
  train(learner=sys.argv[1], syncer='file:runs/start/syncer/address', workdir='runs/start')
