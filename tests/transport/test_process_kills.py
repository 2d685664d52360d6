"""A real run whose syncer has transport processes, which are killed."""

import contextlib
import os
import signal
import time

import psutil
import pytest

from diloco_jax.verification.faults import chaos_report
from diloco_jax.verification.faults import conductor as conductor_lib
from diloco_jax.verification.replay import tape_files
from tests.runs import test_processes
from tests.runs.lib import records, slow_data

start = test_processes._start
FLAGS = (
  '--config=stdlib_lm:tiny',
  '--config.train.steps=1000000',
  '--config.sync.learners=2',
  '--config.train.eval_every=0',
  '--config.train.log_every=10',
  slow_data.FLAG,
)
DEADLINE_S = 60


def _transport_processes(syncer: int) -> list[int]:
  """Those of a syncer that live, which has no other children."""
  pids = []
  for child in psutil.Process(syncer).children():
    with contextlib.suppress(psutil.Error):
      if child.status() != psutil.STATUS_ZOMBIE:
        pids.append(child.pid)
  return pids


@pytest.mark.long
def test_killed_transport_processes_cost_no_outer_step(start, tmp_path):
  """Each dies once while the run goes on: others take their places, learners dial again, and every
  invariant holds."""
  workdir = tmp_path / 'run'
  flags = (*FLAGS, f'--workdir={workdir}', '--plaintext_loopback')
  syncer = start('syncer', *flags, '--listen=127.0.0.1:0', '--transport_processes=2')
  address = f'--syncer=file:{workdir}/syncer/address'
  learners = [start('learner', *flags, address, f'--learner=l{m}') for m in range(2)]
  for learner in learners:
    learner.wait_for('completed step: ')
  for victim in _transport_processes(syncer.process.pid):
    before = _transport_processes(syncer.process.pid)
    os.kill(victim, signal.SIGKILL)
    new = lambda: set(_transport_processes(syncer.process.pid)) - set(before)
    end_s = time.monotonic() + DEADLINE_S
    while len(new()) != 1:
      assert time.monotonic() < end_s, 'no transport process is back'
      time.sleep(0.02)
    syncer.wait_for('Another process starts')
    for learner in learners:
      learner.wait_for('completed step: ')
  programs = *learners, syncer
  for program in programs:
    program.process.send_signal(signal.SIGTERM)
  ends = [program.end() for program in programs]
  assert ends == [0, 0, 0], [program.lines for program in programs]
  verdict = conductor_lib.judge(workdir)
  assert verdict.broken is None and not verdict.unread, verdict.text()
  for process_tape in tape_files.find(workdir):
    assert tape_files.replay(process_tape).identical, process_tape.name
  ledger = records.facts(workdir, 'syncer', 'ledger')
  assert chaos_report.balance(ledger[-1]) == 0
