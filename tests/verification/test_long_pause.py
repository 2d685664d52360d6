"""Counts of a run of real size: two learners train alone for 100,000 steps of 524,288 tokens, since
one of them is cut off and the quorum is both. Then their contributions are merged."""

import numpy as np
import pytest

from diloco_jax.numerics import merge
from diloco_jax.protocol import actions, facts
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.tape import observers
from diloco_jax.verification.checks import checkers as checkers_lib
from diloco_jax.verification.sim import engine as engine_lib
from diloco_jax.verification.sim import seeds as seeds_lib
from diloco_jax.verification.sim import world as world_lib

MS = engine_lib.MS
STEP_NS = MS
TOKENS = 100_000 * 524_288


class Weights(observers.Observer):
  """Weighs each merge as the global model does (syncer/global_model.py)."""

  def __init__(self):
    self.most_tokens = 0

  def saw(self, process, now_ns, event, out):
    for action in out:
      if isinstance(action, actions.Merge):
        tokens = [participant.tokens for participant in action.participants]
        weights = merge.token_weights(
          tokens, [participant.steps for participant in action.participants]
        )
        assert np.isfinite(weights).all() and weights.min() > 0.0, action
        self.most_tokens = max(self.most_tokens, *tokens)


@pytest.mark.parametrize('steps', [2_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_a_pause_of_many_tokens_is_merged_and_the_ledger_is_exact(steps):
  """With fewer steps each has more tokens."""
  config = config_lib.ProtocolConfig(
    learners=2,
    quorum=2,
    period=100,
    fragments=2,
    overlap=20,
    max_lag=None,
    total_steps=steps + 1_000,
    lease_ns=1_000 * MS,
    save_steps=0,
    max_step_tokens=TOKENS // steps,
  )
  weights, checkers = Weights(), checkers_lib.Checkers(config)
  world = world_lib.World(config, watchers=(weights, checkers))
  for name in ('l0', 'l1'):
    island = world.island(name)
    island.step_ns, island.tokens = STEP_NS, TOKENS // steps
    world.start(name)
  link = world.link('l0')
  world.engine.at(500 * MS, lambda: link.cut.update(('up', 'down')))
  world.run(500 * MS + steps * STEP_NS)
  world.network.heal(link)
  world.run(world.now_ns + seeds_lib.CALM_NS, done=lambda: world.finished)
  assert world.finished and weights.most_tokens >= 0.9 * TOKENS > 2**31
  assert world.syncer.reports[facts.Ledger].merged >= 0.9 * TOKENS
  seeds_lib._check_ledger(world)
