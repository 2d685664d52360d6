"""Plans for real processes spare the first learner."""

import pytest

from diloco_jax.verification import plans

LEARNERS = ['l0', 'l1', 'l2', 'l3']


def test_a_storm_has_one_fault_of_each_kind_and_spares_the_first_learner():
  plan = plans.named(plans.STORM, LEARNERS, plans.SECOND_NS)
  assert sorted(fault.kind for fault in plan) == sorted(plans.KINDS)
  assert {fault.node for fault in plan} == {'l1', 'l2', 'l3'}


def test_the_refusal_of_an_unknown_kind_lists_the_known_ones():
  with pytest.raises(ValueError, match="'shrink' is not .* kill, preempt"):
    plans.named('kill,shrink', LEARNERS, plans.SECOND_NS)
