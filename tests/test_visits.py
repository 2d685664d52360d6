"""An entry that no test has visited is named, and fails the run that has to visit it."""

import collections
import types

import pytest

from tests import visits


def test_an_entry_that_is_missing_fails_the_run():
  here = visits.Visits(must=True)
  here.seen = collections.defaultdict(dict)
  for what, names in visits.lists().items():
    worker = {'visits': {what: dict.fromkeys(names, 'tests/one.py::test')}}
    here.pytest_testnodedown(types.SimpleNamespace(workeroutput=worker))
  session = types.SimpleNamespace(config=types.SimpleNamespace(), exitstatus=0)
  here.pytest_sessionfinish(session)
  assert (here.missing(), session.exitstatus) == ([], 0)
  del here.seen['faults']['rot']
  here.pytest_sessionfinish(session)
  assert (here.missing(), session.exitstatus) == (['faults rot'], pytest.ExitCode.TESTS_FAILED)
  count = len(visits.lists()['faults'])
  assert f'faults {count - 1} of {count}, ' in here.line()


def test_an_entry_that_does_not_exist_is_no_visit():
  with pytest.raises(AssertionError, match='no such place'):
    visits.saw('failpoints', 'no such place')
