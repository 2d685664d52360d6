"""Where the seconds of a test run went, printed at its end and kept for `--changed`.

Seconds of tests by lane and by folder, from the reports of all workers, fixtures included; in them
the seconds that JAX compiled, from its own events. Workers overlap, so the sum is longer than the
run. Real processes compile, too, unseen from here.
"""

import collections
import json
import pathlib

import jax
import pytest

KEPT = pathlib.Path(__file__).resolve().parents[1] / '.cache' / 'test-seconds.json'
_COMPILES = 'compile_s'
_LEFT_OUT = {'long', 'full'}  # marks of tests that `--changed` does not run


def kept() -> dict[str, float]:
  """The seconds of the default lane's tests of each file when it ran last; empty before that."""
  return json.loads(KEPT.read_text('utf-8')) if KEPT.exists() else {}


class Seconds:
  """A pytest plugin: counts in each worker, prints in the process that started them."""

  def __init__(self, real: tuple[str, ...]):
    self._real = real
    self._files: collections.Counter[str] = collections.Counter()
    self._usual: collections.Counter[str] = collections.Counter()
    self._compile_s = 0.0
    jax.monitoring.register_event_duration_secs_listener(self._compiled)

  def _compiled(self, event: str, seconds: float, **_: object) -> None:
    if event.startswith('/jax/core/compile/'):
      self._compile_s += seconds

  def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
    file = report.nodeid.split('::')[0]
    self._files[file] += report.duration
    self._usual[file] += 0.0 if _LEFT_OUT & report.keywords.keys() else report.duration

  def pytest_sessionfinish(self, session: pytest.Session) -> None:
    if hasattr(session.config, 'workeroutput'):
      session.config.workeroutput[_COMPILES] = self._compile_s

  @pytest.hookimpl(optionalhook=True)
  def pytest_testnodedown(self, node) -> None:
    self._compile_s += getattr(node, 'workeroutput', {}).get(_COMPILES, 0.0)

  def pytest_terminal_summary(self, terminalreporter) -> None:
    if not self._files:
      return
    kinds: collections.Counter[str] = collections.Counter()
    for file, seconds in self._files.items():
      kinds[self._kind(file)] += seconds
    text = ', '.join(f'{kind} {seconds:.0f}' for kind, seconds in kinds.most_common())
    terminalreporter.write_line(
      f'seconds of all workers: {text}; of them JAX compiled for {self._compile_s:.0f}'
    )
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(json.dumps(kept() | self._usual, indent=1), 'utf-8')

  def _kind(self, file: str) -> str:
    if file.startswith(self._real):
      return 'real runs'
    return 'simulator' if file.startswith('tests/verification/') else 'units'
