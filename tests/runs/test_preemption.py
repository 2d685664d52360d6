"""SIGTERM, the polite way to end: a learner pushes, saves, leaves; a syncer saves and is back.

One run of real processes under the supervisor serves the first tests: l1 is preempted and comes
back, then the syncer is restarted twice under load. Then single processes: a full disk, one that
does not end in its time, a second SIGTERM.
"""

import asyncio
import dataclasses
import os
import pathlib
import random
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from diloco_jax.launch import local, program
from diloco_jax.proof.faults import chaos_report
from diloco_jax.report import records
from tests.runs import conductor

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE_S = 280
NOTICE_S = 10.0  # what a preempted process has at most
LEARNERS = ('l0', 'l1')
RESTARTS = 2
OVERRIDES = {
  **conductor.ENDLESS,
  'sync.learners': 2,
  'train.checkpoint_every_steps': 1_000,
  'sync.checkpoint_every_syncs': 1_000,
}


@dataclasses.dataclass
class Run(conductor.Run):
  """And when each was sent SIGTERM."""

  asked_ns: dict[str, list[int]]

  def ends(self, child: str) -> list[dict]:
    """Of those lives that were sent SIGTERM."""
    return [fact for fact in self.of('supervisor', 'exit') if fact['child'] == child][
      : len(self.asked_ns[child])
    ]


class Conductor(conductor.Conductor):
  """Preempts, and waits for facts."""

  def __init__(self, workdir: pathlib.Path, recorder: records.Recorder):
    super().__init__(workdir, recorder, OVERRIDES)
    self._draw = random.Random(3)
    self.asked_ns: dict[str, list[int]] = {'l1': [], 'syncer': []}

  async def carry_out(self) -> None:
    await self.until(lambda: self.merges('l1') >= 3)
    for name in ('l1', *('syncer',) * RESTARTS):
      await asyncio.sleep(0.3 * self._draw.random())  # at any moment
      self.asked_ns[name].append(time.monotonic_ns())
      assert self.supervisor.bring_down(name, 0.0, 'preempted', politely=True)
      starts = self.supervisor.fates[name].starts
      await self.until(lambda: self.supervisor.fates[name].starts == starts + 1)
      self.look()
      at = len(self.facts)
      await self.until(lambda: self.merges('l1', at) >= 3)
    self.supervisor.retire()


@pytest.fixture(scope='module', name='run')
def _run(tmp_path_factory) -> Run:
  conducted, left = conductor.play(tmp_path_factory.mktemp('preemption'), Conductor, DEADLINE_S)
  return Run(**vars(left), asked_ns=conducted.asked_ns)


def test_a_preempted_learner_leaves_in_order_and_in_time(run):
  assert run.outcome.code == 0
  [end] = run.ends('l1')
  assert end['code'] == 0
  assert end['t_ns'] - run.asked_ns['l1'][0] < NOTICE_S * 1e9
  [left] = [
    fact
    for fact in run.of('syncer', 'member')
    if fact['learner'] == 'l1' and fact['state'] == 'lost'
  ][:1]
  assert left['reason'] == 'left: preempted'
  assert run.asked_ns['l1'][0] < left['t_ns'] < end['t_ns']


def test_what_it_gave_is_merged_before_it_leaves(run):
  """Everything it was asked for has its verdict; its steps and tokens are known to the last one."""
  left_ns = next(
    fact['t_ns']
    for fact in run.of('syncer', 'member')
    if fact['learner'] == 'l1' and fact['state'] == 'lost'
  )
  steps = [fact for fact in run.of('l1', 'step') if fact['t_ns'] < left_ns]
  ledger = next(fact for fact in run.of('syncer', 'ledger') if fact['t_ns'] > left_ns)
  row = ledger['learners']['l1']
  assert row['tokens'] == steps[-1]['tokens'] and row['steps'] == steps[-1]['steps']
  fragments = ledger['fragments']
  assert fragments * row['tokens'] == row['merged'] + row['discarded']


def test_it_comes_back_from_what_it_saved(run):
  lives = {fact['incarnation'] for fact in run.of('l1', 'state') if fact['state'] == 'joined'}
  assert lives == {1, 2}
  [end] = run.ends('l1')
  assert any(
    'l1' in fact['participants']
    for fact in run.of('syncer', 'synced')
    if fact['t_ns'] > end['t_ns']
  )


def test_nobody_waits_for_who_has_left(run):
  """Syncs that were open for it go on without it, and others follow at once."""
  [end] = run.ends('l1')
  following = [fact for fact in run.of('syncer', 'synced') if fact['t_ns'] > end['t_ns']]
  assert following[0]['participants'] == ['l0']


def test_a_rolling_restart_of_the_syncer_loses_nothing_and_stops_nobody(run):
  ends = run.ends('syncer')
  assert [end['code'] for end in ends] == [0] * RESTARTS
  recovered = run.of('syncer', 'recovered')
  for asked_ns, end, back in zip(run.asked_ns['syncer'], ends, recovered, strict=True):
    assert end['t_ns'] - asked_ns < NOTICE_S * 1e9
    assert back['replayed'] == 0  # it was saved
    assert all(
      chaos_report.within([fact['t_ns'] for fact in run.of(name, 'step')], asked_ns, back['t_ns'])
      for name in LEARNERS
    )
    seen = [
      fact for name in LEARNERS for fact in run.of(name, 'adopted') if fact['t_ns'] < back['t_ns']
    ]
    assert seen and all(back['versions'][one['fragment']] >= one['version'] for one in seen)
  ledger = run.of('syncer', 'ledger')[-1]
  assert ledger['unsettled'] == 0 and chaos_report.balance(ledger) == 0
  for name in LEARNERS:
    trained = sum(run_of[-1]['tokens'] for run_of in _lives(run.of(name, 'step')))
    assert ledger['learners'][name]['tokens'] == trained  # not one is missing


def _lives(steps: list[dict]) -> list[list[dict]]:
  """The steps of each process: its own count begins anew."""
  found: list[list[dict]] = []
  for fact in steps:
    if fact['steps'] == 1:
      found.append([])
    found[-1].append(fact)
  return found


# --- Single processes -----------------------------------------------------------------------------

STUBBORN = """
import sys, time
from diloco_jax.launch import entrypoints
with entrypoints.stops(lambda reason: print('asked:', reason, flush=True), 0.5, 'What is safe.', 75):
  print('ready', flush=True)
  time.sleep(600)
"""


def _environment() -> dict[str, str]:
  return {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    'PYTHONPATH': str(ROOT),
    'PYTHONWARNINGS': '',
    'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
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


def test_who_does_not_end_in_its_time_leaves_anyway():
  process = _start(sys.executable, '-c', STUBBORN)
  _wait_for(process, 'ready')
  process.send_signal(signal.SIGTERM)
  output, _ = process.communicate(timeout=60)
  assert process.returncode == 75
  assert 'asked: preempted' in output and 'within 0.5 s' in output and 'What is safe.' in output


def test_a_second_sigterm_ends_it_at_once():
  process = _start(sys.executable, '-c', STUBBORN.replace('0.5', '600'))
  _wait_for(process, 'ready')
  process.send_signal(signal.SIGTERM)
  _wait_for(process, 'asked: preempted')
  process.send_signal(signal.SIGTERM)
  process.communicate(timeout=60)
  assert process.returncode == 128 + signal.SIGTERM


def test_sigterm_on_a_full_disk_ends_the_syncer_in_time_and_says_what_is_safe(tmp_path):
  """An outer step waits for space for ever; files may have 32 KiB, which stands in for the disk."""
  common = [*conductor.flags(OVERRIDES), f'--workdir={tmp_path}', '--config.train.drain_s=2']
  limited = shlex.join([sys.executable, '-m', 'experiments.syncer', *common])
  syncer = _start('bash', '-c', f'ulimit -f 32; exec {limited}')
  learner = _start(
    sys.executable,
    '-m',
    'experiments.learner',
    *common,
    '--learner_id=l0',
    f'--syncer=file:{tmp_path}/{local.ADDRESS}',
  )
  try:
    words = _wait_for(syncer, 'DD401 No space')
    safe = int(re.search(r'last committed record (\d+) is safe', words)[1])
    began_s = time.monotonic()
    syncer.send_signal(signal.SIGTERM)
    output, _ = syncer.communicate(timeout=60)
    assert time.monotonic() - began_s < NOTICE_S
    assert syncer.returncode == program.DISK_FAILED, output
    assert 'within 2 s' in output and 'Every outer step that anybody has heard of' in output
    assert safe > 0
  finally:
    for process in (syncer, learner):
      process.kill()
      process.communicate()
