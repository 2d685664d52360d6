"""Kills that the command line names."""

import pytest

from diloco_jax.launch import kill_plan

_NAMES = ['syncer', 'l0', 'l1']


def test_kills_are_in_order_of_time():
  kills = kill_plan.parse(['l1@0.9', 'l0@0.1+3', 'syncer@1+0.2'], _NAMES)
  assert kills == [
    kill_plan.Kill('l0', 0.1, 3.0),
    kill_plan.Kill('l1', 0.9, 0.0),
    kill_plan.Kill('syncer', 1.0, 0.2),
  ]


@pytest.mark.parametrize('text', ['l9@0.5', 'l0', 'l0@1.5', 'l0@-1', 'l0@0.5+', 'l0@0.5+-1', ''])
def test_what_cannot_be_is_refused(text):
  with pytest.raises(ValueError, match='use NAME@FRACTION.SECONDS.* names syncer, l0, l1'):
    kill_plan.parse([text], _NAMES)


def test_due_splits_at_the_progress():
  kills = kill_plan.parse(['l0@0.1', 'l0@0.5', 'l1@0.9'], _NAMES)
  due, later = kill_plan.due(kills, 0.5)
  assert [kill.at_fraction for kill in due] == [0.1, 0.5]
  assert [kill.at_fraction for kill in later] == [0.9]
