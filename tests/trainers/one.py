"""A quickstart in the environment of its framework.

python tests/trainers/one.py NAME same             # its losses alone, and as the only learner
python tests/trainers/one.py NAME LEARNER GATE     # a learner that waits at batch HELD
"""

import contextlib
import importlib
import itertools
import pathlib
import sys
import time

import jax

import diloco_jax
from diloco_jax.configs import own_loop

NAME = sys.argv[1]
HELD, STEPS = 70, 40
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / 'experiments' / 'examples'))


class Alone:
  """What a loop does without us: nothing is between its steps."""

  def __init__(self, state, opt_state, losses):
    self.params, self.opt_state, self.shard, self.clock = state, opt_state, (0, 0), 0
    self._losses = losses

  def steps(self, read):
    while self.clock is not None:
      yield self.clock, read(0, self.clock)

  def sync(self, state, *, tokens, metrics, opt_state=None):
    self._losses.append(float(metrics['loss']))
    self.opt_state = opt_state
    self.clock = self.clock + 1 if self.clock + 1 < STEPS else None
    return state


def require_same_bits(module) -> None:
  join, alone, losses = diloco_jax.join, [], []
  diloco_jax.join = lambda state, opt_state=None, **_: contextlib.nullcontext(
    Alone(state, opt_state, alone)
  )
  module.train()

  @contextlib.contextmanager
  def recorded(*given, **named):
    with join(*given, **named) as peer:
      sync = peer.sync
      record = lambda *state, metrics, **rest: (
        losses.append(float(metrics['loss'])),
        sync(*state, metrics=metrics, **rest),
      )[1]
      peer.sync = record
      yield peer

  diloco_jax.join = recorded
  shards = None if NAME == 'keras' else 16  # `fit` reads what it likes
  settings = own_loop.get_config('alone').sync
  with diloco_jax.run_syncer(total_steps=STEPS, sync=settings, shards=shards) as server:
    module.train(learner='l0', syncer=server.address)
    server.wait(120)
  assert len(alone) == STEPS and alone[-1] < alone[0]
  assert losses == alone, [*itertools.zip_longest(alone, losses)]
  print('the same bits')


def main(what: str, gate: str = '') -> None:
  if NAME == 'maxtext':  # it divides its state among the devices
    jax.config.update('jax_num_cpu_devices', 2)
  module = importlib.import_module(f'quickstart_{NAME}')
  if what == 'same':
    require_same_bits(module)
    return
  read = module.read

  def gated(shard: int, index: int):
    while index >= HELD and not pathlib.Path(gate).exists():
      time.sleep(0.05)
    return read(shard, index)

  module.read = gated
  [workdir] = pathlib.Path.cwd().glob('runs/*')
  module.train(learner=what, syncer=f'file:{workdir}/syncer/address', workdir=workdir)


if __name__ == '__main__':
  main(*sys.argv[2:])
