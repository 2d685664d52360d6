"""How soon the reward of experiments/examples/reinforce.py grows, by the number of its processes.

    python experiments/reinforce_bench.py     # 8 minutes

The parts are threads of this process, and none is killed. A row: from the first rollout on, the
seconds until the mean reward of ten rollouts is 0.8, and that mean after 20, 30 and 40 s. The last
rows have a step that takes 0.25 s, as the verifier does.
"""

import dataclasses
import pathlib
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import numpy as np

import diloco_jax
from experiments.examples import reinforce

STEPS, MEAN_OF, WAIT_S = 300, 10, 600.0
AT_S = (20, 30, 40)
FAST = reinforce.step


def slow(*given):
  time.sleep(0.25)
  return FAST(*given)


def alone() -> list[tuple[float, float]]:
  """(when, reward) of each rollout."""
  params, rng, found = reinforce.init(), np.random.default_rng(0), []
  opt_state = reinforce.TX.init(params)
  for _ in range(STEPS):
    rollout = reinforce.roll_out(params, 0, rng)
    params, opt_state, metrics = jax.block_until_ready(reinforce.step(params, opt_state, rollout))
    found.append((time.time(), float(metrics['reward'])))
  return found


def together(trainers: int, workers: int) -> list[tuple[float, float]]:
  sync = dataclasses.replace(reinforce.SYNC, learners=trainers)
  with tempfile.TemporaryDirectory() as place:
    folder = pathlib.Path(place)
    (folder / 'rollouts').mkdir()
    made = {'total_steps': STEPS, 'shards': None, 'workdir': folder}
    with diloco_jax.run_syncer(reinforce.init, sync=sync, **made) as server:
      parts = [(reinforce.train, f'l{number}') for number in range(trainers)]
      parts += [(reinforce.work, f'w{number}') for number in range(workers)]
      threads = [
        threading.Thread(target=part, args=(name, folder), daemon=True) for part, name in parts
      ]
      for thread in threads:
        thread.start()
      server.wait(WAIT_S)
      for thread in threads:
        thread.join(WAIT_S)
    facts = [one for one in diloco_jax.records(folder) if one['name'] == 'metrics']
  return [(one['time'], one['values']['reward']) for one in facts if 'version' in one['values']]


def tell(name: str, found: list[tuple[float, float]]) -> None:
  times, rewards = np.array(sorted(found)).T
  means = np.convolve(rewards, np.ones(MEAN_OF) / MEAN_OF, 'valid')
  times = times[MEAN_OF - 1 :] - times[0]
  reached_s = times[means >= 0.8]
  told = ', '.join(f'{means[times <= second][-1]:.2f} at {second} s' for second in AT_S)
  after = f'{reached_s[0]:.0f} s' if len(reached_s) else 'never'
  print(f'[{name}] 0.8 after {after}; {told}; {len(found)} rollouts', flush=True)


def main() -> None:
  tell('alone', alone())
  for trainers, workers in ((1, 2), (2, 2), (1, 4), (2, 4)):
    tell(f'{trainers} trainers, {workers} workers', together(trainers, workers))
  reinforce.step = slow
  for trainers in (1, 2):
    tell(f'slow steps, {trainers} trainers, 4 workers', together(trainers, 4))


if __name__ == '__main__':
  main()
