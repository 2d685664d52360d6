"""SIGTERM: a learner pushes, saves and leaves; a syncer saves, and the next one continues.

The run of lib/day.py serves the first tests: l1 is preempted and rejoins, then the syncer is
restarted under load. Then single processes: a full disk, a process that does not end in time, a
second SIGTERM.
"""

import contextlib
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time

from diloco_jax.launch import cli, run_folder
from diloco_jax.verification.faults import chaos_report
from tests.runs.lib import conductor
from tests.runs.lib import day as day_lib

ROOT = pathlib.Path(__file__).resolve().parents[2]
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
from diloco_jax.launch import nodes
with nodes.stops(lambda reason: print('asked:', reason, flush=True), 0.5, 'Is safe.', 75):
  print('ready', flush=True)
  time.sleep(600)
"""


def _environment() -> dict[str, str]:
  return {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    'PYTHONPATH': str(ROOT),
    'PYTHONWARNINGS': '',
    'PYTHONUNBUFFERED': '1',
  }


def _start(*command: str) -> subprocess.Popen:
  return subprocess.Popen(
    command,
    cwd=ROOT,
    env=_environment(),
    text=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
  )


def _wait_for(process: subprocess.Popen, text: str) -> str:
  for line in process.stdout:
    if text in line:
      return line
  raise AssertionError(f'{text!r} never came')


def test_a_process_that_does_not_end_in_time_is_ended():
  process = _start(sys.executable, '-c', STUBBORN)
  _wait_for(process, 'ready')
  process.send_signal(signal.SIGTERM)
  output, _ = process.communicate(timeout=60)
  assert process.returncode == 75
  assert 'asked: preempted' in output and 'within 0.5 s' in output and 'Is safe.' in output


def test_a_second_sigterm_ends_it_at_once():
  process = _start(sys.executable, '-c', STUBBORN.replace('0.5', '600'))
  _wait_for(process, 'ready')
  asked_s = time.monotonic()
  process.send_signal(signal.SIGTERM)
  _wait_for(process, 'asked: preempted')
  deadline_s = time.monotonic() + 60
  while process.poll() is None and time.monotonic() < deadline_s:
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(0.05)
  assert process.returncode == 128 + signal.SIGTERM
  process.communicate()
  assert time.monotonic() >= asked_s + cli.EndRequests.WITHIN_S


def test_sigterm_on_a_full_disk_ends_the_syncer_in_time_and_says_what_is_safe(tmp_path):
  """An outer step waits for space for ever; a limit of 1 KiB per file simulates the full disk."""
  common = [
    *conductor.flags(day_lib.OVERRIDES),
    f'--workdir={tmp_path}',
    '--config.train.drain_s=2',
  ]
  syncer = _start(sys.executable, '-m', 'diloco_jax', 'syncer', *common)
  learner = _start(
    sys.executable,
    '-m',
    'diloco_jax',
    'learner',
    *common,
    '--learner=l0',
    f'--syncer=file:{tmp_path}/{run_folder.ADDRESS}',
  )
  try:
    while len(list(tmp_path.glob('syncer/wal/*.rec'))) < 3:
      assert syncer.poll() is None and learner.poll() is None
      time.sleep(0.05)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.prlimit(syncer.pid, resource.RLIMIT_FSIZE, (1 << 10, hard))
    words = _wait_for(syncer, 'No space')
    safe = int(re.search(r'last committed record (\d+) is safe', words)[1])
    began_s = time.monotonic()
    syncer.send_signal(signal.SIGTERM)
    output, _ = syncer.communicate(timeout=60)
    assert time.monotonic() - began_s < NOTICE_S
    assert syncer.returncode == cli.DISK_FAILED, output
    assert 'within 2 s' in output and 'The log holds every outer step' in output
    assert safe > 0
  finally:
    for process in (syncer, learner):
      process.kill()
      process.communicate()
