"""How evenly fragments leave a learner, and how little a capped uplink costs."""

import collections

import pytest

from diloco_jax.protocol import actions, events, messages
from diloco_jax.protocol.tape import observers
from diloco_jax.verification.sim import engine as engine_lib
from diloco_jax.verification.sim import no_arrays
from diloco_jax.verification.sim import world as world_lib
from diloco_jax.verification.virtual import conditions
from experiments.goodput import machines

LEARNERS = 4
CONFIG = machines.settings(LEARNERS)
WARM_UP = 30  # inner steps


class Uplinks(observers.Observer):
  """By learner and its own inner step: how many payloads leave."""

  def __init__(self):
    self.payloads = collections.defaultdict(lambda: [0])

  def born(self, now_ns, life):
    pass

  def saw(self, life, now_ns, event, out):
    if life.start.role == 'syncer':
      return
    counts = self.payloads[life.start.node]
    if isinstance(event, events.StepDone):
      counts.append(0)
    sent = [action.message for action in out if isinstance(action, actions.Send)]
    counts[-1] += sum(isinstance(message, messages.Contribution) for message in sent)


def test_equal_learners_send_one_fragment_in_every_inner_step():
  uplinks = Uplinks()
  run = world_lib.World(CONFIG, 0, (uplinks,), no_arrays.equal(CONFIG.fragments))
  names = [f'l{which}' for which in range(LEARNERS)]
  where = conditions.delays('lan', step_s=1.0, gaussian=0.02)
  conditions.furnish(run, names, where['hardware'], where['network'], tokens=1_000)
  for name in names:
    run.start(name)
  run.run((WARM_UP + 60) * engine_lib.SECOND)
  for counts in uplinks.payloads.values():
    assert set(counts[WARM_UP:-1]) == {1}


@pytest.mark.parametrize('slowness', [(1.0,), (1.0, 1.18)])
def test_an_uplink_of_four_thirds_of_the_mean_loses_nothing_and_delays_little(slowness):
  result = machines.run(
    CONFIG,
    delays='capped',
    slowness=slowness,
    noise=0.1,
    warm_up_s=WARM_UP,
    measured_s=120,
    checked=False,
  )
  assert result.merged > 0.98 and result.on_time > 0.9
