"""A run whose processes end in every way: it continues, and keeps every promise."""

import signal

from tests.runs.lib import promises


def test_the_run_succeeds(day):
  assert day.outcome.code == 0, '\n'.join(day.said)
  starts = {name: status.starts for name, status in day.outcome.statuses.items()}
  assert starts == {'syncer': 4, 'l0': 2, 'l1': 4}


def test_a_syncer_that_ends_or_dies_is_restarted(day):
  assert sum('[local] syncer: restarted' in line for line in day.said) == 3
  codes = [fact['code'] for fact in day.of('supervisor', 'exit') if fact['child'] == 'syncer']
  assert codes == [0, -signal.SIGKILL, -signal.SIGKILL, 0]


def test_a_recovered_syncer_has_every_adopted_version(day):
  """No version that a learner has adopted is missing."""
  assert day.lost_versions() == [0] * 3


def test_the_run_keeps_every_promise(day):
  promises.check(day)
