"""Evaluations never pile up, and a stop waits for none of them."""

import dataclasses
import threading

import pytest

from diloco_jax.config import build
from diloco_jax.configs import stdlib_lm
from diloco_jax.node import loop
from diloco_jax.protocol import actions, events
from diloco_jax.report import facts as report_facts
from diloco_jax.report import records as records_lib
from diloco_jax.syncer import evaluation as evaluation_lib
from diloco_jax.syncer import global_model
from diloco_jax.syncer import node as syncer_node
from diloco_jax.transport import in_process
from diloco_jax.verification.virtual import arrays

DEADLINE_S = 60


class Gate:
  """Held-out batches that are there once the gate opens; then every evaluation is counted."""

  def __init__(self, task):
    self.began, self.open = threading.Event(), threading.Event()
    self.task = dataclasses.replace(task, eval_batches=self._batches)
    self._eval_batches = task.eval_batches

  def _batches(self):
    self.began.set()
    assert self.open.wait(DEADLINE_S)
    return self._eval_batches()


class Records(records_lib.Recorder):
  """Records that keep the steps of the evaluations, too."""

  def __init__(self, folder):
    super().__init__(folder, 'syncer', tensorboard=False)
    self.steps = []

  def report(self, fact):
    super().report(fact)
    if isinstance(fact, report_facts.Eval):
      self.steps.append(fact.step)


@pytest.fixture(scope='module', name='assembled')
def _assembled():
  config = stdlib_lm.get_config('tiny')
  config.sync.learners = config.sync.quorum = 1
  return build.assemble(config)


@pytest.fixture(name='records')
def _records(tmp_path):
  records = Records(tmp_path)
  yield records
  records.close()


@pytest.fixture(name='gate')
def _gate(assembled):
  gate = Gate(assembled.task)
  yield gate
  gate.open.set()


def test_at_most_one_model_waits_and_it_is_the_newest(assembled, gate, records):
  """The last syncs have numbers after the last clock, of which the model is."""
  theta = global_model.Theta(assembled)
  evaluations = evaluation_lib.Evaluation(gate.task, theta, records, total_steps=40)
  evaluations.submit(0)
  assert gate.began.wait(DEADLINE_S)
  for step in range(1, 50):
    evaluations.submit(step)
  gate.open.set()
  assert evaluations.wait(DEADLINE_S)
  evaluations.stop()
  assert records.steps == [0, 40]


def test_a_stopped_syncer_ends_during_an_evaluation(assembled, gate, records, tmp_path):
  """And drops the evaluation that waits."""
  event_queue = loop.EventQueue()
  hub, ended = in_process.InProcessHub(), []
  run = threading.Thread(
    target=lambda: ended.append(
      syncer_node.run(
        dataclasses.replace(assembled, task=gate.task),
        global_model.Theta(assembled),
        tmp_path,
        event_queue,
        hub.syncer_transport,
        records,
      )
    ),
    daemon=True,
  )
  run.start()
  assert gate.began.wait(DEADLINE_S)
  event_queue.post(events.Stop(reason='preempted'))
  run.join(DEADLINE_S)
  assert ended and ended[0].code == 0 and not records.steps


def test_a_stop_ends_the_wait_for_the_last_evaluation(assembled, gate, records):
  event_queue = loop.EventQueue()
  last = evaluation_lib.Evaluation(gate.task, global_model.Theta(assembled), records, 7)
  last.submit(7)
  assert gate.began.wait(DEADLINE_S)
  event_queue.post(events.Stop(reason='preempted'))
  assert syncer_node._wait_or_stop(last, event_queue)
  last.stop()
  assert not records.steps


def test_a_failed_evaluation_is_printed_and_fails_nothing_else(assembled, records, capsys):
  """Without it a finished run would be started again and again, and fail each time."""

  def unread():
    raise OSError('the held-out text is gone')

  task = dataclasses.replace(assembled.task, eval_batches=unread)
  evaluations = evaluation_lib.Evaluation(task, global_model.Theta(assembled), records, 2)
  for step in (1, 2):
    evaluations.submit(step)
    assert evaluations.wait(DEADLINE_S)
  evaluations.stop()
  assert records.steps == []
  printed = capsys.readouterr().out
  assert printed.count('the held-out text is gone') == 1
  assert 'the run continues without held-out losses' in printed


@pytest.mark.parametrize('stuck, step', [(False, 104), (True, 109)])
def test_the_first_evaluation_after_an_outage_waits_for_all_fragments_but_not_for_ever(
  assembled, stuck, step
):
  """P = H = 4, an evaluation in 8 steps. The last sync before the outage was 8."""
  evaluated, last_sync = [], [5, 6, 7, 8]
  theta, payloads = global_model.Theta(assembled), arrays._Payloads({})
  work = arrays.Syncer(assembled, theta, payloads, evaluated.append)
  for sync in range(101, 112):
    p = (sync - 1) % 4
    state = {'last_sync': list(last_sync)}
    merge = actions.Merge(sync=sync, fragment=p, version=1, participants=(), machine_state=state)
    if not (stuck and p == 3):
      work._evaluate(merge)
      last_sync[p] = sync
  assert evaluated == [step]
