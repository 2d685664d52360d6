"""Islands of a single controller: they fail alone, have unequal sizes, come and go.

Steps wait 40 ms for their batches, so that a step takes about as long with any load. A verdict is
about the order of events: an island that has failed comes back after steps of all others.
"""

import contextlib
import json
import pathlib
import random
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent import futures

import jax
import pytest

from diloco_jax.api import islands as islands_lib
from diloco_jax.api import single_controller
from diloco_jax.config import run_config
from diloco_jax.configs import stdlib_lm
from diloco_jax.launch import supervisor
from diloco_jax.learner import work as learner_work
from diloco_jax.report import folder as folder_lib
from diloco_jax.report import summary
from diloco_jax.storage import checkpoint, folders
from diloco_jax.syncer import work as syncer_work
from diloco_jax.train import config as config_lib
from diloco_jax.verification.faults import chaos_report, conductor
from tests.runs.lib import slow_data

PATIENCE_S = 240
FOR_EVER = 1_000_000


def _config(learners: int, quorum: int = 1, steps: int = FOR_EVER) -> run_config.Config:
  config = stdlib_lm.get_config('tiny')
  config.sync.learners, config.sync.quorum = learners, quorum
  config.sync.fragments = config.sync.period = 2
  config.sync.overlap = config.mesh.data = 1
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

  def __init__(self, folder: pathlib.Path, config: run_config.Config, **settings):
    self.folder, self.config = folder, config
    self.controller = single_controller.SingleController(config, folder, **settings)
    self.lost: dict[str, int] = {}
    self.others_first = False

  def build(self, original: Callable[..., None], work: learner_work.LearnerWork, *rest) -> None:
    name = threading.current_thread().name.split()[0]
    if self.others_first and (ends := self.facts(name, 'exit')):
      others = [one for one in self.controller.keepers if one != name]
      since = lambda one: [s for s in self.facts(one, 'step') if s['t_ns'] > ends[-1]['t_ns']]
      self.until(lambda: all(len(since(one)) >= 3 for one in others))
    original(work, *rest)

  def step(self, original: Callable[..., None], work: learner_work.LearnerWork, clock: int) -> None:
    name = threading.current_thread().name.split()[0]
    if self.lost.get(name):
      self.lost[name] -= 1
      raise jax.errors.JaxRuntimeError(f'UNAVAILABLE: injected: no devices at clock {clock}')
    original(work, clock)

  def facts(self, node: str, name: str, **values) -> list[dict]:
    path = self.folder / 'records' / f'{node}.jsonl'
    rows = path.read_text().split('\n')[:-1] if path.exists() else []
    found = [fact for fact in map(json.loads, rows) if fact['name'] == name]
    return [fact for fact in found if values.items() <= fact.items()]

  def steps(self, node: str) -> int:
    return len(self.facts(node, 'step'))

  def warm(self) -> bool:
    """Each learner has made some steps in its present life, so that all its functions exist."""
    newest = [self.facts(name, 'step')[-1:] for name in self.controller.keepers]
    return all(one and one[0]['steps'] >= 10 for one in newest)

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

  def end(self, down: str = '') -> None:
    """Ends the run; every node ends in order (but one that is down), the ledger adds up, every
    invariant holds."""
    self.controller.retire()
    exits = self.controller.join(PATIENCE_S)
    assert all((one.code == 0) == (name != down) for name, one in exits.items()), exits
    assert self.controller.outcome().code == 0
    ledger = self.facts('syncer', 'ledger')[-1]
    assert chaos_report.balance(ledger) == 0, ledger
    assert ledger['merged'] > 0
    verdict = conductor.judge(self.folder)
    assert verdict.broken is None, verdict.text()
    assert not {one.name.split()[0] for one in threading.enumerate()} & {'syncer', *exits}


@contextlib.contextmanager
def _running(folder: pathlib.Path, config: run_config.Config, **settings) -> Iterator[_Run]:
  run = _Run(folder, config, **settings)
  step, build = learner_work.LearnerWork._step, learner_work.LearnerWork.__init__
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(learner_work.LearnerWork, '_step', lambda *rest: run.step(step, *rest))
    patch.setattr(learner_work.LearnerWork, '__init__', lambda *rest: run.build(build, *rest))
    run.controller.start()
    try:
      yield run
    finally:
      for keeper in run.controller.keepers.values():
        if keeper.life:
          keeper.life.thaw()
      run.controller.stop('the test has ended')
      for thread in run.controller._threads:
        thread.join(PATIENCE_S)


def _hang(life: islands_lib.Life) -> None:
  life.freeze()
  life.watchdog_s = 0.5


def _fail(run: _Run, victim: str, kind: str) -> None:
  """One fault of an island, until it is back with the next incarnation."""
  before, ends = run.joined(victim), len(run.facts(victim, 'exit'))
  life = run.controller.child(victim)
  lives = 2 if kind == 'loses its devices' else 1  # that end
  if kind == 'hangs':
    _hang(life)
  else:
    run.lost[victim] = lives
  run.until(lambda: len(run.facts(victim, 'exit')) > ends)
  run.until(lambda: len(run.joined(victim)) >= len(before) + lives)
  if kind == 'hangs':
    steps = run.steps(victim)
    life.thaw()
    run.until(lambda: run.steps(victim) > steps + 2)
  assert run.joined(victim)[len(before) :] == [before[-1] + 1 + n for n in range(lives)]
  codes = [fact['code'] for fact in run.facts(victim, 'exit')[ends:]]
  assert codes == [1] * lives, codes


def _faults(folder: pathlib.Path, plan: list[tuple[str, str]], learners: int, devices: int) -> None:
  config = _config(learners)
  config.mesh.data = devices
  draw = random.Random(len(plan))
  with _running(folder, config) as run:
    run.others_first = True
    assert [device.id for device in run.controller.syncer_devices] == [6, 7]
    for victim, kind in plan:
      run.until(run.warm)
      at = run.steps(victim) + draw.randrange(1, 6)
      run.until(lambda victim=victim, at=at: run.steps(victim) >= at)
      _fail(run, victim, kind)
    run.end()
    down = {fact['text'] for name in run.controller.keepers for fact in run.facts(name, 'process')}
    assert any('injected' in text and 'built again' in text for text in down), down


def test_an_island_that_raises_or_hangs_comes_back_and_the_others_go_on(tmp_path):
  _faults(tmp_path, [('l0', 'raises'), ('l1', 'hangs')], learners=2, devices=1)


@pytest.mark.full
@pytest.mark.parametrize('seed', range(2))
def test_twenty_islands_fail(tmp_path, seed):
  """At most four short lives of each learner, as the limit allows."""
  kinds = ['raises', 'hangs', 'loses its devices', 'raises', 'hangs'] * 2
  draw = random.Random(seed)
  victims = ['l0', 'l1', 'l2'] * 4
  while True:
    draw.shuffle(victims)
    plan = list(zip(victims, kinds))
    lives = [sum(2 if k[0] == 'l' else 1 for v, k in plan if v == name) for name in set(victims)]
    if max(lives) < supervisor.MAX_SHORT_LIVES:
      break
  _faults(tmp_path, plan, learners=3, devices=2)


@pytest.mark.full
def test_islands_of_unequal_size_come_and_go(tmp_path):
  """Islands of 1, 2 and 4 devices; then one leaves, and another one joins on its devices."""
  mesh = config_lib.MeshConfig
  meshes = {'l0': mesh(), 'l1': mesh(data=2), 'l2': mesh(data=2, fsdp=2)}
  with _running(tmp_path, _config(3), islands=meshes) as run:
    controller = run.controller
    assert [len(devices) for devices in controller.devices.values()] == [1, 2, 4]
    assert [device.id for device in controller.syncer_devices] == [7]
    with pytest.raises(ValueError, match='need 1, there are 0'):
      controller.add('l3', mesh())
    run.until(lambda: all(run.steps(name) >= 10 for name in ('l0', 'l1', 'l2')))
    controller.remove('l1')
    run.until(lambda: 'l1' in controller._exits)
    last = run.facts('l1', 'step')[-1]
    run.until(lambda: run.facts('syncer', 'synced')[-1]['sync'] > last['step'])
    controller.add('l3', mesh(fsdp=2))
    merged = lambda name: [
      fact for fact in run.facts('syncer', 'synced') if name in fact['participants']
    ]
    run.until(lambda: len(merged('l3')) >= 3)
    run.end()
    left, joined = run.facts('l1', 'exit')[0], run.facts('l3', 'state', state='joined')[0]
    assert left['t_ns'] < joined['t_ns'] and all(map(merged, ('l0', 'l1', 'l2')))
    # It has saved all its steps; their clock may have risen by an adoption before the save.
    node = tmp_path / 'islands' / 'l1'
    saved = checkpoint.machine_state(node / 'ckpt' / str(folders.checkpoints(node)[-1]))
    assert saved['protocol']['steps'] == last['steps'] and last['step'] < joined['clock']


@pytest.mark.full
def test_an_island_whose_devices_stay_away_is_given_up(tmp_path, monkeypatch, capsys):
  """The run goes on while a quorum is left, and ends with a line that can be read after that."""
  monkeypatch.setattr(supervisor, 'MAX_SHORT_LIVES', 2)
  config = _config(2, quorum=1)
  with _running(tmp_path, config) as run:
    run.until(lambda: all(run.steps(name) >= 2 for name in ('l0', 'l1')))
    run.lost['l1'] = 2
    run.until(lambda: run.facts('l1', 'process', state='failed'))
    steps = run.steps('l0')
    run.until(lambda: run.steps('l0') > steps + 3)
    with pytest.raises(ValueError, match='l0 cannot leave'):
      run.controller.remove('l0')
    run.controller.add('l1', config.mesh)  # once its devices are back
    run.until(lambda: len(run.joined('l1')) == 3)
    run.lost = {'l0': 2, 'l1': 2}
    with pytest.raises(islands_lib.IslandsFailed, match='the same call continues') as caught:
      run.controller.join(PATIENCE_S)
    assert '\n' not in str(caught.value) and 'no devices at clock' in str(caught.value)
  printed = capsys.readouterr().out
  assert 'It is built again in' in printed and 'Traceback' not in printed


def test_an_island_that_hangs_in_every_life_is_given_up(monkeypatch):
  """Although it takes long to see that it hangs: what counts is how long it made progress."""
  now_s, blocked = [0.0], threading.Event()

  def wait(ones, timeout_s: float) -> types.SimpleNamespace:
    now_s[0] += timeout_s
    return types.SimpleNamespace(not_done=ones)

  waits = types.SimpleNamespace(Future=futures.Future, wait=wait)
  monkeypatch.setattr(islands_lib, 'futures', waits)
  monkeypatch.setattr(islands_lib, 'time', types.SimpleNamespace(monotonic=lambda: now_s[0]))
  monkeypatch.setattr(supervisor, 'backoff_s', lambda failures, draw: 0.0)
  recorder = types.SimpleNamespace(report=lambda fact: None, say=print, ended=lambda code: None)
  keeper = islands_lib.Keeper('l0', lambda life, records: blocked.wait())
  assert keeper.run(recorder).code == 1
  blocked.set()
  assert f'Given up after {supervisor.MAX_SHORT_LIVES} short lives' in keeper.given_up


@pytest.mark.full
def test_an_error_of_the_syncer_ends_the_run_in_order(tmp_path, monkeypatch):
  """Each learner saves; the error is that of the syncer."""
  config = _config(2)

  def merge(*args) -> None:
    raise ZeroDivisionError('in the syncer')

  with _running(tmp_path, config) as run:
    run.until(lambda: all(run.steps(name) >= 3 for name in ('l0', 'l1')))
    monkeypatch.setattr(syncer_work.SyncerWork, '_merge', merge)
    with pytest.raises(ZeroDivisionError, match='in the syncer'):
      run.controller.join(PATIENCE_S)
    for name in ('l0', 'l1'):
      last = run.facts(name, 'step')[-1]['step']
      saved = [int(path.name) for path in (tmp_path / 'islands' / name / 'ckpt').glob('[0-9]*')]
      assert max(saved) == last, (saved, last)


@pytest.mark.full
def test_what_a_hung_thread_does_later_reaches_nobody(tmp_path):
  """An abandoned island has no folder, arrays or functions; its records raise."""
  config = _config(1)
  with _running(tmp_path, config) as run:
    run.until(lambda: run.steps('l0') >= 2)
    life = run.controller.child('l0')
    _hang(life)
    run.until(lambda: run.facts('l0', 'exit'))
    with pytest.raises(islands_lib.Ended):
      life.check()
    with pytest.raises(islands_lib.Ended):
      islands_lib.Records(life, None).say('nothing')
    assert life.island.state is None
    run.until(lambda: len(run.joined('l0')) == 2)
    life.thaw()
    run.end()


@pytest.mark.full
def test_only_errors_of_devices_start_another_life(tmp_path, monkeypatch):
  def step(work: learner_work.LearnerWork, clock: int) -> None:
    raise KeyError('l0')

  monkeypatch.setattr(learner_work.LearnerWork, '_step', step)
  controller = single_controller.SingleController(_config(1), tmp_path)
  controller.start()
  with pytest.raises(KeyError, match='l0'):
    controller.join(PATIENCE_S)


@pytest.mark.full
def test_a_kill_is_in_the_summary(tmp_path):
  with _running(tmp_path, _config(2)) as run:
    run.until(lambda: all(run.steps(name) >= 2 for name in ('l0', 'l1')))
    assert run.controller.bring_down('l1', 0.1, 'killed by the chaos plan')
    run.until(lambda: run.joined('l1') == [1, 2])
    assert run.controller.bring_down('l1', 600, 'killed once more')
    run.until(lambda: len(run.facts('l1', 'exit')) == 2)
    run.end(down='l1')
  found = summary.summarize(folder_lib.read(tmp_path))
  assert [kill['learner'] for kill in found['kills']] == ['l1', 'l1']
