"""Lists of which the lane of CI has to visit every entry: failpoints, kinds of faults, doors.

A test that has visited an entry says so (`saw`); the line at the end of a run counts them, and with
`-v` a table names the test of each. A whole run with --long or --all fails if an entry is missing.
"""

import collections
import os
from collections.abc import Collection

import pytest

_OUTPUT = 'visits'
_seen: dict[str, dict[str, str]] = collections.defaultdict(dict)


def saw(what: str, name: str) -> None:
  """Records that the present test has visited an entry of the list `what`."""
  assert name in lists()[what], (what, name)
  _seen[what].setdefault(name, os.environ['PYTEST_CURRENT_TEST'].rpartition(' ')[0])


def lists() -> dict[str, Collection[str]]:
  from diloco_jax.protocol import formats
  from diloco_jax.verification import plans
  from tests.runs.lib import failpoints

  faults = plans.KINDS + plans.SIMULATED_KINDS
  return {'failpoints': failpoints.NAMES, 'faults': faults, 'doors': tuple(formats.NUMBERS)}


class Visits:
  """A pytest plugin: collects what the workers have seen, prints and judges it at the end.

  Attributes:
    must: whether a missing entry fails the run.
  """

  def __init__(self, must: bool):
    self.must = must
    self.seen: dict[str, dict[str, str]] = _seen

  def pytest_sessionfinish(self, session: pytest.Session) -> None:
    if hasattr(session.config, 'workeroutput'):
      session.config.workeroutput[_OUTPUT] = dict(self.seen)
    elif self.must and self.missing() and not session.exitstatus:
      session.exitstatus = pytest.ExitCode.TESTS_FAILED

  @pytest.hookimpl(optionalhook=True)
  def pytest_testnodedown(self, node) -> None:
    for what, tests in getattr(node, 'workeroutput', {}).get(_OUTPUT, {}).items():
      self.seen[what] = tests | self.seen[what]

  def pytest_terminal_summary(self, terminalreporter) -> None:
    if not self.seen and not self.must:
      return
    terminalreporter.write_line(self.line())
    if self.must and (missing := self.missing()):
      terminalreporter.write_line(f'no test has visited: {", ".join(missing)}', red=True)
    if terminalreporter.config.getoption('verbose') > 0:
      for what, tests in self.seen.items():
        for name, test in sorted(tests.items()):
          terminalreporter.write_line(f'{what} {name}: {test}')

  def line(self) -> str:
    all_lists = lists().items()
    return ', '.join(f'{what} {len(self.seen[what])} of {len(names)}' for what, names in all_lists)

  def missing(self) -> list[str]:
    all_lists = lists().items()
    return [
      f'{what} {name}' for what, names in all_lists for name in names if name not in self.seen[what]
    ]
