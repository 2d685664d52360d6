"""SIGTERM to a process that does not end in time, a second SIGTERM, and SIGTERM on a full disk.

tests/runs/test_syncer_kills.py has that of a learner and of a syncer under load.
"""

import re
import resource
import signal
import time

import pytest

from diloco_jax.process import exits, run_folder
from tests import programs
from tests.runs.lib import conductor

NOTICE_S = 20.0  # a preempted process ends within 10 s; a busy machine takes longer
OVERRIDES = {**conductor.ENDLESS, 'sync.learners': 2, 'train.checkpoint_every_steps': 40}


STUBBORN = """
import sys, time
from diloco_jax.process import lifecycle
stop = lambda reason: print('asked:', reason, flush=True)
with lifecycle.ending_on_signals(stop, 0.5, 'Is safe.', 75):
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
  common = [*conductor.flags(OVERRIDES), f'--workdir={tmp_path}', '--config.train.drain_s=2']
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
