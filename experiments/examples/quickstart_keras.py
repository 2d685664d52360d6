"""Keras 3 on JAX: `fit` with a callback that exchanges the trained variables, and saves all others.

diloco syncer --config=own_loop --config.train.steps=300 --workdir=runs/k --config.data.local
python quickstart_keras.py l0    # in a terminal of its own
python quickstart_keras.py l1    # in another one; if it is killed, start it again
"""

import os
import sys

os.environ['KERAS_BACKEND'] = 'jax'
import keras
import numpy as np

import diloco_jax


class Diloco(keras.callbacks.Callback):
  peer: diloco_jax.Peer

  def on_train_batch_end(self, batch, logs=None):
    self.model.jax_state_sync()  # from `fit` into the variables
    put(self.model, self.peer.sync(state_of(self.model), tokens=64, metrics=logs))
    self.model.stop_training = self.peer.clock is None


def state_of(model: keras.Model) -> dict:
  of = lambda variables: {variable.path: variable.value for variable in variables}
  rest = [*model.non_trainable_variables, *model.optimizer.variables]
  return {'params': of(model.trainable_variables), 'rest': of(rest)}


def put(model: keras.Model, state: dict) -> None:
  values = state['params'] | state['rest']
  for variable in [*model.variables, *model.optimizer.variables]:
    variable.assign(values[variable.path])


def read(shard: int, index: int) -> tuple[np.ndarray, np.ndarray]:
  x_Bx8 = np.random.default_rng([shard, index]).standard_normal((64, 8), np.float32)
  return x_Bx8, np.sin(x_Bx8).sum(axis=1)


def train(**run: str | None) -> None:
  keras.utils.set_random_seed(0)
  model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)])
  model.compile(keras.optimizers.Adam(1e-2), 'mse')
  model.optimizer.build(model.trainable_variables)
  with diloco_jax.join(state_of(model), exchange=lambda s: s['params'], shards=None, **run) as peer:
    put(model, peer.params)
    shard, index = peer.shard  # that of this learner, and how far it has read
    batches = (read(shard, n) for n in range(index, 10**9))
    callback = Diloco()
    callback.peer = peer
    if peer.clock is not None:  # else the run has ended
      model.fit(batches, steps_per_epoch=10**9, callbacks=[callback], verbose=0)


if __name__ == '__main__':
  train(learner=sys.argv[1], syncer='file:runs/k/syncer/address', workdir='runs/k')
