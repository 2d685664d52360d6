"""Seeds keep every promise.

Another seed or the story of one: `diloco simulate --help`.
"""

from typing import Any

import pytest

from diloco_jax.protocol import messages
from diloco_jax.protocol.learner import machine as learner_machine
from diloco_jax.protocol.syncer import machine as syncer_machine
from diloco_jax.protocol.syncer import published as published_lib
from diloco_jax.protocol.tape import observers
from diloco_jax.verification.sim import many_seeds, narrate
from diloco_jax.verification.sim import seeds as seeds_lib
from tests import visits

PROCESSES = 2
# Seeds that have failed once, by what was wrong; those of the first thousand always run.
EVER_FAILED = [
  int(seed)
  for line in """
  1133 2351 3109: a syncer that was asked to stop left tokens unsettled
  1066 3167 3811: a fragment starved: a repair always overtook the next payload
  1165 1170: a machine state shared a list with the machine
  2339 75223: words on a session that was being closed, or before the join
  4373: a new process got the verdict on its predecessor's payload
  24342 60016 60570 63974 71579 88572: a fenced learner ended in the middle of its checkpoint
  48541 54451 64880 81108 83418 87678: Finish was sent before the end was durable
  1131: a faulty norm, alone or of two, made honest ones too small
  50013: the period was no lower bound of the usual length
  852: `settled_to` of a whole fragment counted an outer step in progress
  4122: right bits, or a process that had replaced a participant, were repaired
  20948: the period of the run changed before a sync had opened
  1626 2950 3089 3650 38302 50115 60034: the simulator was wrong
  1453 2721 3367 3394 3574 3703 3722 8433 8866 9325 10155: the checker was wrong
  12096 22098 30012 30200 44806 50141 50442 73008 75725 76491 81708: the same
  """.splitlines()
  for seed in line.partition(':')[0].split()
]


def test_no_seed_has_a_violation(counts):
  """Nor has one that failed before."""
  seeds_run = [*range(counts.seeds), *EVER_FAILED]
  total = many_seeds.Summary()
  for part in many_seeds.run(seeds_run, PROCESSES):
    total.add(part)
  assert not total.failed, '\n'.join(
    many_seeds.explain(outcome, 'here') for outcome in total.failed[:2]
  )
  assert total.seeds == len(seeds_run)
  for kind in total.faults:
    visits.saw('faults', kind)


def test_learners_of_which_many_bytes_are_in_flight_lag(monkeypatch):
  """At most four deltas of all fragments are in flight to a learner."""
  monkeypatch.setattr(messages, 'MAX_DELTA_BYTES', 0)
  lags = []
  send_delta = published_lib.Published.send_delta

  def count(self, member, publish, payload_id):
    before = [copy.state for copy in member.copies].count('lags')
    send_delta(self, member, publish, payload_id)
    if len(member.copies[publish.fragment].in_flight) < messages.MAX_VERSIONS_IN_FLIGHT:
      lags.append([copy.state for copy in member.copies].count('lags') - before)

  monkeypatch.setattr(published_lib.Published, 'send_delta', count)
  for seed in range(12):
    outcome = seeds_lib.run_seed(seed)
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
  outcome = seeds_lib.run_seed(3)
  assert outcome.violation.invariant == 'crash' and 'a seeded bug' in outcome.violation.detail
  text = many_seeds.explain(outcome, 'here')
  assert text.startswith('seed 3 at commit here breaks crash: No machine raises.')
  assert text.endswith('replay: diloco simulate --seed=3 --story')
  story = []
  seeds_lib.run_seed(3, [narrate.Story(story.append)])
  assert when == 'start' or 'raises KeyError' in story[-1]


class Again(observers.Observer):
  """Shows every turn to a second machine, too."""

  def __init__(self):
    self._machines: dict[int, Any] = {}

  def born(self, now_ns, process) -> None:
    self._machines[process.number] = process.start.make()

  def saw(self, process, now_ns, event, out) -> None:
    again = self._machines[process.number].handle(now_ns, event)
    assert tuple(again) == tuple(out), (process.start.node, event)


def test_machines_have_no_other_input(counts):
  """Of two machines with the same start and the same events, both ask for the same actions."""
  for seed in range(counts.seeds // 10):
    assert seeds_lib.run_seed(seed, [Again()]).violation is None
