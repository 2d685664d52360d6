"""Tunix: its trainer asks for a batch after each step, and there the boundary is.

diloco syncer --config=own_loop --config.train.steps=300 --workdir=runs/start
python quickstart_tunix.py l0    # in a terminal of its own
python quickstart_tunix.py l1    # in another one; if it is killed, start it again
"""

import sys
from collections.abc import Iterator

import numpy as np
import optax
from flax import nnx
from tunix.sft import peft_trainer

import diloco_jax


class Trainer(peft_trainer.PeftTrainer):
  def _post_process_train_step(self, aux) -> None:
    self.loss = aux


def loss_of(model: nnx.Module, x_Bx8: np.ndarray, y_B: np.ndarray):
  loss = ((model(x_Bx8)[:, 0] - y_B) ** 2).mean()
  return loss, loss


def init() -> Trainer:
  rngs = nnx.Rngs(0)
  model = nnx.Sequential(nnx.Linear(8, 16, rngs=rngs), nnx.gelu, nnx.Linear(16, 1, rngs=rngs))
  config = peft_trainer.TrainingConfig(eval_every_n_steps=10**9)
  return Trainer(model, optax.adam(1e-2), config).with_loss_fn(loss_of, has_aux=True)


def read(shard: int, index: int) -> tuple[np.ndarray, np.ndarray]:
  x_Bx8 = np.random.default_rng([shard, index]).standard_normal((64, 8), np.float32)
  return x_Bx8, np.sin(x_Bx8).sum(axis=1)


def batches(peer: diloco_jax.Peer, trainer: Trainer) -> Iterator[dict[str, np.ndarray]]:
  for _, (x_Bx8, y_B) in peer.steps(read):
    yield {'x_Bx8': x_Bx8, 'y_B': y_B}
    peer.sync((trainer.model, trainer.optimizer), tokens=64, metrics={'loss': trainer.loss})


def train(**run: str | None) -> None:
  trainer = init()
  with diloco_jax.join((trainer.model, trainer.optimizer), **run) as peer:
    trainer.train(batches(peer, trainer))


if __name__ == '__main__':
  train(learner=sys.argv[1], syncer='file:runs/start/syncer/address', workdir='runs/start')
