"""Seeds keep every promise.

Another seed or the story of one: `diloco simulate --help`.
"""

from typing import Any

import pytest

from diloco_jax.protocol import messages
from diloco_jax.protocol.learner import machine as learner_machine
from diloco_jax.protocol.syncer import machine as syncer_machine
from diloco_jax.protocol.syncer import published
from diloco_jax.protocol.tape import observers
from diloco_jax.verification.sim import many_seeds, narrate, seeds
from tests import visits

PROCESSES = 2
# Seeds beyond the first thousand that have failed once (docs/findings.md has the bugs).
EVER_FAILED = [
  int(seed)
  for seed in """
  852 1066 1131 1133 1165 1170 1453 1626 2339 2351 2721 2950 3089 3109 3167 3367 3394 3574 3650
  3703 3722 3811 4122 4373 8433 8866 9325 10155 12096 20948 22098 30200 24342 30012 38302 44806
  48541 50013 50115 50141 50442 54451 60016 60034 60570 63974 64880 71579 73008 75223 75725 76491
  81108 81708 83418 87678 88572
  """.split()
]


def test_no_seed_has_a_violation(counts):
  """Nor has one that failed before."""
  seeds_run = [*range(counts.seeds), *EVER_FAILED]
  total = many_seeds.Summary()
  for part in many_seeds.run(seeds_run, PROCESSES):
    total.add(part)
  assert not total.failed, '\n'.join(many_seeds.explain(one, 'here') for one in total.failed[:2])
  assert total.seeds == len(seeds_run)
  for kind in total.faults:
    visits.saw('faults', kind)


def test_learners_of_which_many_bytes_are_in_flight_lag(monkeypatch):
  """At most four deltas of all fragments are in flight to a learner."""
  monkeypatch.setattr(messages, 'MAX_DELTA_BYTES', 0)
  lags = []
  send_delta = published.Published.send_delta

  def count(self, member, publish, payload_id):
    before = [copy.state for copy in member.copies].count('lags')
    send_delta(self, member, publish, payload_id)
    if len(member.copies[publish.fragment].in_flight) < messages.MAX_VERSIONS_IN_FLIGHT:
      lags.append([copy.state for copy in member.copies].count('lags') - before)

  monkeypatch.setattr(published.Published, 'send_delta', count)
  for seed in range(12):
    outcome = seeds.run_seed(seed)
    assert outcome.violation is None, many_seeds.explain(outcome, 'here')
  assert sum(lags) > 10


def _raises(*args):
  raise KeyError('a seeded bug')


@pytest.mark.parametrize(
  'owner, name, when',
  [
    (syncer_machine.SyncerMachine, '_merged', 'turn'),
    (learner_machine.LearnerMachine, '_adopt', 'turn'),
    (learner_machine.LearnerMachine, '__init__', 'start'),
  ],
)
def test_a_machine_that_raises_is_a_violation_with_its_seed_story_and_command(
  owner, name, when, monkeypatch
):
  monkeypatch.setattr(owner, name, _raises)
  outcome = seeds.run_seed(3)
  assert outcome.violation.invariant == 'crash' and 'a seeded bug' in outcome.violation.detail
  text = many_seeds.explain(outcome, 'here')
  assert text.startswith('seed 3 at commit here breaks crash: No machine raises.')
  assert text.endswith('replay: diloco simulate --seed=3 --story')
  story = []
  seeds.run_seed(3, [narrate.Story(story.append)])
  assert when == 'start' or 'raises KeyError' in story[-1]


class Again(observers.Observer):
  """Shows every turn to a second machine, too."""

  def __init__(self):
    self._machines: dict[int, Any] = {}

  def born(self, now_ns, life) -> None:
    self._machines[life.number] = life.start.make()

  def saw(self, life, now_ns, event, out) -> None:
    again = self._machines[life.number].handle(now_ns, event)
    assert tuple(again) == tuple(out), (life.start.node, event)


def test_machines_have_no_other_input(counts):
  """Of two machines with the same start and the same events, both ask for the same actions."""
  for seed in range(counts.seeds // 10):
    assert seeds.run_seed(seed, [Again()]).violation is None
