"""Routers of a Mixture of Experts on several learners: how far they are apart, and the gain if they
are averaged in each step (experts.md).

    python -m experiments.studies.experts --size=63k --seed=0

Four learners in lock step: one fragment is merged after each step, and the learners adopt it. The
routers are merged with their fragments, or averaged over the learners after each step.
"""

import argparse
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.config import build
from diloco_jax.numerics import fragments
from diloco_jax.train import config as train_config
from diloco_jax.train import decoder
from diloco_jax.train import experts as experts_lib
from diloco_jax.train import island as island_lib
from diloco_jax.verification.virtual import arrays
from experiments.studies import scale
from experiments.studies.lib import arms, in_step

LEARNERS = 4
RATES = {'63k': 4.8e-2, '230k': 2.4e-2}
EXPERTS, CHOSEN = 8, 2  # half as wide as the dense block, so a token computes as much
ROUTERS = ('merged', 'averaged in each step')
SHARES = (0.25, 0.5, 0.75, 1.0)  # of the run, after which the routers are compared
TITLES = 'run', 'after', 'loss', 'overlap', 'distance', 'entropy', 'entropy of the load'


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--size', choices=list(RATES), default=scale.SMALL)
  parser.add_argument('--rate', type=float, default=0.0)
  parser.add_argument('--seed', type=int, default=0)
  flags = parser.parse_args()
  arms.get_ready()
  for cells in (TITLES, ['---'] * len(TITLES)):
    print('|', ' | '.join(cells), '|')
  rate = flags.rate or RATES[flags.size]
  for routers in (None, *ROUTERS):
    run(flags.size, rate, flags.seed, routers)


def run(size: str, rate: float, seed: int, routers: str | None) -> None:
  """Trains and prints; `routers`: one of ROUTERS; None: data-parallel training."""
  method = ('decoupled', LEARNERS) if routers else scale.BASE
  config = scale.arm(scale.Case(size, scale.SHORT, 'muon', *method), rate, seed).config
  config.optimizer.momentum_weight = 0.7
  model = config.model
  model.num_experts, model.experts_per_token = EXPERTS, CHOSEN
  model.hidden_dim //= CHOSEN
  own = lambda path: fragments.LOCAL if _is_router(path) else decoder_label(path)
  decoder_label = decoder.label
  with mock.patch.object(decoder, 'label', own if routers == ROUTERS[1] else decoder_label):
    assembled = build.assemble(config)
  first = arrays.fresh_island(assembled)
  learners = [first, *(first.twin() for _ in range(method[1] - 1))]
  for shard, learner in enumerate(learners):
    learner.read_from(shard)
  sync = Sync(assembled) if routers else None
  steps = config.train.steps
  ends = {round(share * steps): share for share in SHARES}
  routing = jax.jit(functools.partial(choices, config.model))
  for clock in range(steps):
    for learner in learners:
      learner.step(clock)
    if share := ends.get(clock + 1):
      tokens_BxL = np.asarray(assembled.task.eval_batches()[0])[:, :-1]
      found = [routing(one.params, tokens_BxL) for one in learners]
      loss = first.evaluate(sync.theta_params(learners) if sync else None)
      show(f'{size}, {routers or "data-parallel"}, seed {seed}', share, loss, learners, found)
    if routers == ROUTERS[1]:
      average_routers(learners)
    if sync:
      sync.step(clock, learners)


class Sync:
  """The outer steps, one fragment after each step."""

  def __init__(self, assembled: build.Assembly):
    self._assembled, layout = assembled, assembled.layout
    self._theta = arrays.fresh_theta(assembled)
    self._at = [0] * layout.num_fragments  # the step after which each was merged
    jitted = lambda call: [
      jax.jit(functools.partial(call, layout, p)) for p in range(layout.num_fragments)
    ]
    self._gather, self._scatter = jitted(fragments.gather), jitted(fragments.scatter)

  def step(self, clock: int, learners: Sequence[island_lib.Island]) -> None:
    """Merges the fragments whose turn it is after this step; the learners adopt them."""
    period = self._assembled.config.sync.period
    for p in [one for one in range(len(self._at)) if (clock + 1 - one) % period == 0]:
      anchor_N, steps = self._theta.published(p), clock + 1 - self._at[p]
      values = [self._gather[p](one.params) for one in learners]
      tokens = steps * learners[0].tokens_per_step
      in_step.merge(self._assembled, self._theta, p, anchor_N, values, tokens, steps)
      self._at[p] = clock + 1
      for one in learners:
        one.params = self._scatter[p](one.params, self._theta.published(p))

  def theta_params(self, learners: Sequence[island_lib.Island]) -> Any:
    """The global model, with the mean of what is not in it."""
    own = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *(one.params for one in learners))
    for p, scatter in enumerate(self._scatter):
      own = scatter(own, self._theta.published(p))
    return own


def average_routers(learners: Sequence[island_lib.Island]) -> None:
  """Each learner has the mean of the routers from now on."""
  trees = [fragments.by_path(one.params) for one in learners]
  structure = jax.tree.structure(learners[0].params)
  paths = [path for path in trees[0] if _is_router(path)]
  means = {path: sum(tree[path] for tree in trees) / len(trees) for path in paths}
  for one, tree in zip(learners, trees, strict=True):
    new = {path: jnp.copy(means[path]) if path in means else leaf for path, leaf in tree.items()}
    one.params = jax.tree.unflatten(structure, new.values())


def choices(
  model: train_config.ModelConfig, params: Any, tokens_BxL: jax.Array
) -> list[tuple[jax.Array, jax.Array]]:
  """Of each layer the probabilities and the chosen experts, [B, L, E] and [B, L, C]."""
  found = []

  def routing(*arguments: jax.Array) -> jax.Array:
    found.append(arguments)
    return jnp.zeros(3, jnp.float32)

  with mock.patch.object(experts_lib, 'routing', routing):
    decoder.apply(model, params, tokens_BxL)
  return found


def show(
  name: str,
  share: float,
  loss: float,
  learners: Sequence[island_lib.Island],
  found: Sequence[list[tuple[jax.Array, jax.Array]]],
) -> None:
  """Prints a row: means over layers, tokens, and learners or pairs of learners."""
  member = lambda chosen_BxLxC: np.asarray(jax.nn.one_hot(chosen_BxLxC, EXPERTS).sum(axis=-2))
  sets = [np.stack([member(chosen) for _, chosen in layers]) for layers in found]
  pairs = list(itertools.combinations(range(len(learners)), 2))
  overlaps = [np.mean((sets[i] * sets[j]).sum(axis=-1)) / CHOSEN for i, j in pairs]
  routers = [_routers(one.params) for one in learners]
  length = np.linalg.norm(sum(routers) / len(routers))
  distances = [np.linalg.norm(routers[i] - routers[j]) / length for i, j in pairs]
  sure = np.stack([[np.asarray(p) for p, _ in layers] for layers in found])
  loads = np.stack([one.mean(axis=(1, 2)) for one in sets]) / CHOSEN
  mean = lambda values: f'{np.mean(values):.3f}' if values else ''
  cells = [name, f'{share:g}', f'{loss:.4f}', mean(overlaps), mean(distances)]
  cells += [f'{entropy(sure):.3f}', f'{entropy(loads):.3f}']
  print('|', ' | '.join(cells), '|', flush=True)


def entropy(p_xE: np.ndarray) -> float:
  """The mean, in units of its largest value, ln E."""
  p_xE = np.maximum(p_xE, 1e-30)
  return float(-(p_xE * np.log(p_xE)).sum(axis=-1).mean() / math.log(EXPERTS))


def _is_router(path: str) -> bool:
  return path.endswith('/router')


def _routers(params: Any) -> np.ndarray:
  leaves = fragments.by_path(params)
  return np.concatenate([np.ravel(leaf) for path, leaf in leaves.items() if _is_router(path)])


if __name__ == '__main__':
  main()
