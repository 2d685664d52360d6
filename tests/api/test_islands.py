"""Islands of a single controller fail alone and come back.

Steps wait 40 ms for their batches, so that a step takes about as long with any load. A verdict is
about the order of events: an island that has failed comes back after steps of all others.
"""

import contextlib
import json
import pathlib
import threading
import time
from collections.abc import Callable, Iterator

import jax
import pytest

from diloco_jax.api import single_controller
from diloco_jax.config import run_config
from diloco_jax.configs import stdlib_lm
from diloco_jax.learner import work as learner_work
from diloco_jax.process import restarts
from diloco_jax.syncer import work as syncer_work
from diloco_jax.verification.faults import chaos_report
from diloco_jax.verification.faults import conductor as conductor_lib
from tests.runs.lib import slow_data

PATIENCE_S = 240
FOR_EVER = 1_000_000


def _config(learners: int, quorum: int = 1, steps: int = FOR_EVER) -> run_config.Config:
  config = stdlib_lm.get_config('tiny')
  config.sync.learners, config.sync.quorum = learners, quorum
  config.sync.fragments = config.sync.period = 2
  config.sync.overlap = config.mesh.data = config.model.num_layers = 1
  config.train.steps, config.train.eval_every = steps, 0
  config.train.checkpoint_every_steps, config.train.log_every = 20, FOR_EVER
  config.task = f'{slow_data.__file__}:task'
  config.validate()
  return config


class _Run:
  """A run, and what its records tell by now.

  Attributes:
    lost: by learner, how many of its next steps find no devices, in as many lives.
    others_first: a learner that is built again joins when each other one has made three steps since
      its end.
  """

  def __init__(self, folder: pathlib.Path, config: run_config.Config):
    self.folder, self.config = folder, config
    self.controller = single_controller.SingleController(config, folder)
    self.lost: dict[str, int] = {}
    self.others_first = False

  def build(self, original: Callable[..., None], work: learner_work.LearnerWork, *rest) -> None:
    name = threading.current_thread().name
    if self.others_first and (ends := self.facts(name, 'exit')):
      others = [device for device in self.controller.devices if device != name]
      since = lambda other: [s for s in self.facts(other, 'step') if s['t_ns'] > ends[-1]['t_ns']]
      self.until(lambda: all(len(since(other)) >= 3 for other in others))
    original(work, *rest)

  def step(self, original: Callable[..., None], work: learner_work.LearnerWork, clock: int) -> None:
    name = threading.current_thread().name
    if self.lost.get(name):
      self.lost[name] -= 1
      raise jax.errors.JaxRuntimeError(f'UNAVAILABLE: injected: no devices at clock {clock}')
    original(work, clock)

  def facts(self, node: str, name: str, **values) -> list[dict]:
    path = self.folder / 'records' / f'{node}.jsonl'
    rows = path.read_text().split('\n')[:-1] if path.exists() else []
    named = [fact for fact in map(json.loads, rows) if fact['name'] == name]
    return [fact for fact in named if values.items() <= fact.items()]

  def steps(self, node: str) -> int:
    return len(self.facts(node, 'step'))

  def joined(self, node: str) -> list[int]:
    return [fact['incarnation'] for fact in self.facts(node, 'state', state='joined')]

  def until(self, condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
      assert time.monotonic() < deadline_s, 'it has not happened'
      for end in list(self.controller._exits.values()):
        if isinstance(end, BaseException):
          raise end
      time.sleep(0.1)  # to read them holds up the steps

  def end(self) -> None:
    """Ends the run; every node ends in order, the ledger adds up, every invariant holds."""
    self.controller.stop('the plan was carried out')
    exits = self.controller.join(PATIENCE_S)
    assert not any(end.code for end in exits.values()), exits
    assert self.controller.outcome().code == 0
    ledger = self.facts('syncer', 'ledger')[-1]
    assert chaos_report.balance(ledger) == 0, ledger
    assert ledger['merged'] > 0
    verdict = conductor_lib.judge(self.folder)
    assert verdict.broken is None, verdict.text()
    assert not {thread.name for thread in threading.enumerate()} & {'syncer', *exits}


@contextlib.contextmanager
def _running(folder: pathlib.Path, config: run_config.Config) -> Iterator[_Run]:
  run = _Run(folder, config)
  step, build = learner_work.LearnerWork._step, learner_work.LearnerWork.__init__
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(learner_work.LearnerWork, '_step', lambda *rest: run.step(step, *rest))
    patch.setattr(learner_work.LearnerWork, '__init__', lambda *rest: run.build(build, *rest))
    run.controller.start()
    try:
      yield run
    finally:
      run.controller.stop('the test has ended')
      for thread in run.controller._threads:
        thread.join(PATIENCE_S)


@pytest.mark.long
def test_an_island_that_loses_its_devices_comes_back_and_the_others_go_on(tmp_path):
  """The second life of l1 finds none either."""
  with _running(tmp_path, _config(2)) as run:
    run.others_first = True
    assert [device.id for device in run.controller.syncer_devices] == [6, 7]
    run.until(lambda: all(run.steps(name) >= 4 for name in ('l0', 'l1')))
    run.lost['l1'] = 2
    run.until(lambda: len(run.joined('l1')) == 3)
    assert run.joined('l1') == [1, 2, 3]
    codes = [fact['code'] for fact in run.facts('l1', 'exit')]
    assert codes == [1, 1], codes
    run.end()
    down = {fact['text'] for name in run.controller.devices for fact in run.facts(name, 'process')}
    assert any('injected' in text and 'built again' in text for text in down), down


@pytest.mark.full
def test_an_island_whose_devices_stay_away_is_given_up(tmp_path, monkeypatch, capsys):
  """The run goes on while a quorum is left, and ends with a line that can be read after that."""
  monkeypatch.setattr(restarts, 'MAX_SHORT_PROCESSES', 2)
  monkeypatch.setattr(restarts, 'SHORT_S', 10 * PATIENCE_S)  # however busy the machine is
  with _running(tmp_path, _config(2, quorum=1)) as run:
    run.until(lambda: all(run.steps(name) >= 2 for name in ('l0', 'l1')))
    run.lost['l1'] = 2
    run.until(lambda: run.facts('l1', 'process', state='failed'))
    steps = run.steps('l0')
    run.until(lambda: run.steps('l0') > steps + 3)
    run.lost['l0'] = 2
    failed = single_controller.IslandsFailed
    with pytest.raises(failed, match='the same call continues') as caught:
      run.controller.join(PATIENCE_S)
    assert '\n' not in str(caught.value) and 'no devices at clock' in str(caught.value)
    assert run.controller.outcome().code == 1
  printed = capsys.readouterr().out
  assert 'It is built again in' in printed and 'Traceback' not in printed


@pytest.mark.full
@pytest.mark.parametrize('owner, name', [(syncer_work.SyncerWork, '_merge'),
                                         (learner_work.LearnerWork, '_step')])  # fmt: skip
def test_any_other_error_ends_the_run_in_order(tmp_path, monkeypatch, owner, name):
  """Each learner saves; the error is that of the node."""

  def fail(*args) -> None:
    raise ZeroDivisionError('in the node')

  with _running(tmp_path, _config(2)) as run:
    run.until(lambda: all(run.steps(name) >= 3 for name in ('l0', 'l1')))
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(ZeroDivisionError, match='in the node'):
      run.controller.join(PATIENCE_S)
    for learner in ('l0', 'l1') if name == '_merge' else ():
      last = run.facts(learner, 'step')[-1]['step']
      saved = [int(path.name) for path in (tmp_path / 'islands' / learner / 'ckpt').glob('[0-9]*')]
      assert max(saved) == last, (saved, last)
