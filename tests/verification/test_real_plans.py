"""Plans for real processes are functions of their arguments, and always spare one learner."""

import doctest

import pytest

from diloco_jax.verification import plans

LEARNERS = ['l0', 'l1', 'l2', 'l3']
LONG_NS = 40 * plans.SECOND_NS


def test_a_seed_determines_its_plan_and_seeds_differ():
  drawn = [plans.draw(seed, LEARNERS, LONG_NS) for seed in range(50)]
  assert drawn == [plans.draw(seed, LEARNERS, LONG_NS) for seed in range(50)]
  assert len({tuple(plan) for plan in drawn}) == 50
  assert {fault.kind for plan in drawn for fault in plan} == set(plans.REAL_KINDS)
  assert {fault.node for plan in drawn for fault in plan} == set(LEARNERS)


@pytest.mark.parametrize('seed', range(20))
def test_a_random_plan_spares_one_learner_and_has_one_fault_at_a_time(seed):
  plan = plans.draw(seed, LEARNERS, LONG_NS)
  assert len({fault.node for fault in plan}) == len(LEARNERS) - 1
  for node in LEARNERS:
    faults = [fault for fault in plan if fault.node == node]
    assert all(a.at_ns + a.for_ns < b.at_ns for a, b in zip(faults, faults[1:]))
    assert 'replace' not in [fault.kind for fault in faults[:-1]]
  assert all(0 <= fault.at_ns < LONG_NS and fault.for_ns > 0 for fault in plan)


def test_a_storm_has_one_fault_of_each_kind_and_spares_the_first_learner():
  plan = plans.named(plans.STORM, LEARNERS, plans.SECOND_NS)
  assert sorted(fault.kind for fault in plan) == sorted(plans.REAL_KINDS)
  assert {fault.node for fault in plan} == {'l1', 'l2', 'l3'}


def test_the_refusal_of_an_unknown_kind_lists_the_known_ones():
  with pytest.raises(ValueError, match="'shrink' is not .* kill, preempt"):
    plans.named('kill,shrink', LEARNERS, plans.SECOND_NS)


def test_examples():
  result = doctest.testmod(plans)
  assert result.attempted and not result.failed
