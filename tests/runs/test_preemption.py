"""SIGTERM: a learner pushes, saves and leaves; a syncer saves, and the next one continues.

The run of lib/day.py serves the first tests: l1 is preempted and rejoins, then the syncer is
restarted under load. Then single processes: a full disk, a process that does not end in time, a
second SIGTERM.
"""

import re
import resource
import signal
import time

import pytest

from diloco_jax.nodes import exits, run_folder
from diloco_jax.verification.faults import chaos_report
from tests import programs
from tests.runs.lib import conductor
from tests.runs.lib import day as day_lib

NOTICE_S = 20.0  # a preempted process ends within 10 s; a busy machine takes longer


def test_a_preempted_learner_leaves_in_order_and_in_time(day):
  assert day.outcome.code == 0
  end = day.end('l1')
  assert end['code'] == 0
  assert end['t_ns'] - day.asked_ns['l1'] < NOTICE_S * 1e9
  [left] = [
    fact
    for fact in day.of('syncer', 'member')
    if fact['learner'] == 'l1' and fact['state'] == 'lost'
  ][:1]
  assert left['reason'] == 'left: preempted'
  assert day.asked_ns['l1'] < left['t_ns'] < end['t_ns']


def test_a_preempted_learner_rejoins_from_its_checkpoint(day):
  end = day.end('l1')
  lives = {
    fact['incarnation']
    for fact in day.of('l1', 'state')
    if fact['state'] == 'joined' and fact['t_ns'] < day.killed_ns
  }
  assert lives == {1, 2}
  assert any(
    'l1' in fact['participants']
    for fact in day.of('syncer', 'synced')
    if end['t_ns'] < fact['t_ns'] < day.killed_ns
  )


def test_a_restart_of_the_syncer_loses_no_version_and_stops_no_learner(day):
  asked_ns, end, back = day.asked_ns['syncer'], day.end('syncer'), day.of('syncer', 'recovered')[0]
  assert end['code'] == 0 and end['t_ns'] - asked_ns < NOTICE_S * 1e9
  assert back['replayed'] == 0  # it was saved
  assert all(
    chaos_report.within([fact['t_ns'] for fact in day.of(name, 'step')], asked_ns, back['t_ns'])
    for name in day_lib.LEARNERS
  )
  seen = [
    fact
    for name in day_lib.LEARNERS
    for fact in day.of(name, 'adopted')
    if fact['t_ns'] < back['t_ns']
  ]
  assert seen and all(back['versions'][one['fragment']] >= one['version'] for one in seen)
  ledgers = [fact for fact in day.of('syncer', 'ledger') if fact['t_ns'] < day.killed_ns]
  assert not ledgers[-1]['discarded'].get('lost_with_process')


# --- Single processes -----------------------------------------------------------------------------

STUBBORN = """
import sys, time
from diloco_jax.nodes import lifecycle
with lifecycle.stops(lambda reason: print('asked:', reason, flush=True), 0.5, 'Is safe.', 75):
  print('ready', flush=True)
  time.sleep(600)
"""


@pytest.fixture(name='start')
def _start():
  with programs.starting() as start:
    yield start


def test_a_process_that_does_not_end_in_time_is_ended(start):
  process = start('-c', STUBBORN)
  process.wait_for('ready')
  process.send(signal.SIGTERM)
  assert process.end() == 75
  assert 'asked: preempted' in process.text, process
  assert 'within 0.5 s' in process.text and 'Is safe.' in process.text, process


def test_a_second_sigterm_ends_it_at_once(start):
  process = start('-c', STUBBORN.replace('0.5', '600'))
  process.wait_for('ready')
  asked_s = time.monotonic()
  process.send(signal.SIGTERM)
  process.wait_for('asked: preempted')

  def ended() -> bool:
    process.send(signal.SIGTERM)
    return not process.running

  programs.until(ended, process)
  assert process.end() == 128 + signal.SIGTERM
  assert time.monotonic() >= asked_s + exits.EndRequests.WITHIN_S


@pytest.mark.long
def test_sigterm_on_a_full_disk_ends_the_syncer_in_time_and_says_what_is_safe(start, tmp_path):
  """An outer step waits for space for ever; a limit of 1 KiB per file simulates the full disk."""
  common = [
    *conductor.flags(day_lib.OVERRIDES),
    f'--workdir={tmp_path}',
    '--config.train.drain_s=2',
  ]
  syncer = start(*programs.diloco('syncer', *common))
  place = f'--syncer=file:{tmp_path}/{run_folder.ADDRESS}'
  learner = start(*programs.diloco('learner', *common, '--learner=l0', place))
  programs.until(lambda: len(list(tmp_path.glob('syncer/wal/*.rec'))) >= 3, syncer, learner)
  _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.prlimit(syncer.process.pid, resource.RLIMIT_FSIZE, (1 << 10, hard))
  words = syncer.wait_for('No space')
  safe = int(re.search(r'last committed record (\d+) is safe', words)[1])
  began_s = time.monotonic()
  syncer.send(signal.SIGTERM)
  assert syncer.end() == exits.DISK_FAILED, syncer
  assert time.monotonic() - began_s < NOTICE_S
  assert 'within 2 s' in syncer.text and 'The log holds every outer step' in syncer.text, syncer
  assert safe > 0
