"""Runs as threads of one process: a run that has ended is given more steps."""

import json
import os
import pathlib
import shutil
import signal
import threading
import time

import jax
import pytest

import diloco_jax
from diloco_jax.api import single_controller
from diloco_jax.config import load, run_config
from diloco_jax.configs import stdlib_lm
from diloco_jax.node import loop
from diloco_jax.protocol import events
from diloco_jax.syncer import node as syncer_node
from tests.runs.lib import slow_data

STEPS, MORE = 8, 24
DEADLINE_S = 120


def _config(steps: int, learners: int = 2) -> run_config.Config:
  config = stdlib_lm.get_config('tiny')
  config.sync.learners = config.sync.quorum = learners
  config.sync.fragments = config.sync.period = 2
  config.sync.overlap = config.mesh.data = 1
  config.train.steps, config.train.eval_every = steps, 0
  config.validate()
  return config


def _facts(folder: pathlib.Path, node: str, name: str) -> list[dict]:
  rows = (folder / 'records' / f'{node}.jsonl').read_text().splitlines()
  return [fact for fact in map(json.loads, rows) if fact['name'] == name]


@pytest.mark.long
def test_a_run_that_has_ended_is_given_more_steps(tmp_path, monkeypatch, capsys):
  """The clock continues one period after the old end, with the same log, checkpoints and ledger."""

  def run(steps: int) -> dict:
    exits = single_controller.run(_config(steps, learners=1), tmp_path).exits
    assert {end.code for end in exits.values()} == {0}, exits
    return _facts(tmp_path, 'syncer', 'ledger')[-1]

  first = run(STEPS)
  assert not single_controller.run(_config(STEPS, learners=1), tmp_path).exits
  assert f'has ended at clock {STEPS}: nothing was started' in capsys.readouterr().out
  second = run(MORE)
  (recovered,) = _facts(tmp_path, 'syncer', 'recovered')
  assert sum(recovered['versions']) == first['synced'] > 0
  assert second['synced'] > first['synced'] and second['trained'] > first['trained']
  period = _config(STEPS).sync.period
  steps = [fact['step'] for fact in _facts(tmp_path, 'l0', 'step')]
  assert (max(steps[: steps.index(STEPS) + 1]), max(steps)) == (STEPS, MORE)
  assert min(steps[steps.index(STEPS) + 1 :]) == STEPS + period + 1
  for ledger in (first, second):
    assert ledger['trained'] * ledger['fragments'] == (
      ledger['merged'] + sum(ledger['discarded'].values())
    )

  # A third run, whose end was interrupted, has nothing to train: its learner hears so before the
  # syncer hangs up, and never says that it is not connected.
  shutil.rmtree(tmp_path / 'model')
  posted, heard, over = [], [], events.Stop(reason='the run is over')
  post, export = loop.EventQueue.post, syncer_node._export

  def posts(event_queue: loop.EventQueue, event: events.Event) -> None:
    posted.append(event)
    post(event_queue, event)

  def exports(*args) -> None:
    heard.append(over in posted)
    export(*args)

  monkeypatch.setattr(loop.EventQueue, 'post', posts)
  monkeypatch.setattr(syncer_node, '_export', exports)
  run(MORE)
  assert heard == [True]


@pytest.mark.long
def test_two_learners_with_the_same_text_of_their_own_run_to_the_end(tmp_path):
  """All of it is merged, nothing is a duplicate, and the syncer reads nobody's files."""
  config = _config(MORE)
  for name in ('l0', 'l1'):
    (tmp_path / name).mkdir()
    (tmp_path / name / 'notes.txt').write_text('the same few words of both of them\n' * 400)
  config.data.corpus, config.data.local = str(tmp_path / '{node}'), True
  exits = single_controller.run(config, tmp_path / 'run').exits
  assert {end.code for end in exits.values()} == {0}, exits
  assert not _facts(tmp_path / 'run', 'syncer', 'eval')
  ledger = _facts(tmp_path / 'run', 'syncer', 'ledger')[-1]
  assert ledger['merged'] == ledger['fragments'] * ledger['trained'] > 0, ledger
  losses = {name: [row['loss'] for row in _facts(tmp_path / 'run', name, 'step')] for name in exits}
  assert losses.pop('syncer') == [] and all(loss[-1] < loss[0] - 1.0 for loss in losses.values())
  assert losses['l0'] != losses['l1'], 'both have read their text in the same order'


@pytest.mark.full
def test_stacked_layers_in_bfloat16_learn_with_anchors_in_float32(tmp_path):
  """Learners of two devices and the syncer hold the same bits all the time. The trained
  model has the type of the parameters."""
  config = _config(MORE)
  config.model.scan, config.model.param_dtype = True, 'bfloat16'
  config.model.window, config.model.global_every = 8, 2
  config.model.remat, config.model.loss_chunk = 'full', 8
  config.mesh.fsdp = 2
  exits = single_controller.run(config, tmp_path).exits
  assert {end.code for end in exits.values()} == {0}, exits
  losses = [fact['loss'] for fact in _facts(tmp_path, 'syncer', 'eval')]
  assert losses[-1] < losses[0] - 1.0, losses
  ledger = _facts(tmp_path, 'syncer', 'ledger')[-1]
  assert ledger['repaired'] == 0 and ledger['merged'] > 0, ledger
  merged = jax.tree.leaves(diloco_jax.load_params(tmp_path))
  assert {leaf.dtype.name for leaf in merged} == {'bfloat16'}


def test_a_run_that_cannot_start_claims_no_folder(tmp_path):
  """Else the mended config would be another run's."""
  config = _config(STEPS)
  config.sync.learners = 16
  with pytest.raises(ValueError, match='_DEVICES=17 before .*or lower sync.learners'):
    single_controller.run(config, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


@pytest.mark.long
def test_an_interrupt_ends_every_node_and_the_same_call_continues_the_run(tmp_path, capsys):
  deadline_s = time.monotonic() + DEADLINE_S
  config = _config(1_000_000)
  config.task = f'{slow_data.__file__}:task(step_s=0.3)'  # the syncer could end long before them

  def interrupt_after(node: str, word: str) -> None:
    records = tmp_path / 'records' / f'{node}.jsonl'
    said = lambda: records.read_text().count(f'"{word}"') if records.is_file() else 0
    before = said()

    def interrupt() -> None:
      while said() == before and time.monotonic() < deadline_s:
        time.sleep(0.05)
      os.kill(os.getpid(), signal.SIGINT)  # the main thread waits for the nodes

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt, match='run the same cell to continue') as caught:
      single_controller.run(config, tmp_path)
    assert caught.value.__context__ is None, 'a long traceback'
    assert said() > before
    assert not {thread.name for thread in threading.enumerate()} & {'syncer', 'l0', 'l1'}

  interrupt_after('syncer', 'synced')
  interrupt_after('syncer', 'recovered')
  interrupt_after('syncer', 'merging')
  # The syncer is there until the last learner has ended.
  printed = capsys.readouterr().out
  assert printed.count('interrupted: each learner') == 3 and 'unreachable' not in printed, printed
  assert 'lost_with_process' not in _facts(tmp_path, 'syncer', 'ledger')[-1]['discarded']


def test_a_baseline_leaves_devices_for_the_learners_of_the_next_run(tmp_path, monkeypatch):
  config, prepared = _config(STEPS), []
  monkeypatch.setattr(single_controller.lifecycle, 'prepare_jax', prepared.append)
  (tmp_path / 'notes.txt').touch()
  for syncer in ('none', 'local'):
    with pytest.raises(ValueError, match='is not empty'):
      single_controller.run(config, tmp_path, syncer)
  devices = config.mesh.num_devices * config.sync.learners + single_controller.SPARE
  assert prepared == [devices] * 2


def test_a_config_may_be_given_by_its_name(tmp_path):
  """As for `diloco train --config`; here the first refusal behind it shows that it was loaded."""
  (tmp_path / 'notes.txt').touch()
  config = _config(STEPS, learners=1)
  load.write(tmp_path / 'before', config)
  with pytest.raises(ValueError, match='is not empty: choose another folder'):
    single_controller.run(str(tmp_path / 'before'), tmp_path)
  with pytest.raises(ValueError, match="there is no config 'stdlib_ml'"):
    single_controller.run('stdlib_ml:tiny', tmp_path)
