"""The script for a machine with a GPU, as far as a machine without one can show it."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from scripts.accelerator import figures

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_log_of_a_phase_counts_each_program_once():
  miss = "[l0] compiler.py:135] PERSISTENT COMPILATION CACHE MISS for 'jit_f' with key 'jit_f-{}'\n"
  log = miss.format('ab') + miss.format('cd') + miss.format('ab').replace('[l0]', '[l1]')
  log += '[l0] dispatch.py:204] Finished XLA compilation of jit(f) in 0.25 sec\n' * 3
  log += "[l2] compiler.py:125] Persistent compilation cache hit for 'jit_f' with key 'jit_f-ab'\n"
  values = figures.compilations(log)
  assert values == {'programs': 2, 'compile_s': 0.8, 'compiled_twice': ['jit_f']}


@pytest.mark.full
def test_a_rehearsal_that_is_killed_keeps_the_figures_of_the_phases_before(tmp_path):
  """Its second phase is under way when SIGTERM comes; no process of it stays."""
  command = [sys.executable, '-m', 'scripts.accelerator', '--rehearse', '--only=single,processes']
  with subprocess.Popen(
    [*command, f'--out={tmp_path}'],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | {'JAX_NUM_CPU_DEVICES': '1'},
  ) as rehearsal:
    assert any(line.startswith('single: compiled_twice') for line in rehearsal.stdout)
    while not (tmp_path / 'processes.log').exists() and rehearsal.poll() is None:
      time.sleep(0.05)
    rehearsal.send_signal(signal.SIGTERM)
    assert rehearsal.wait(60) == 143
  phases = json.loads((tmp_path / figures.FILE).read_text('utf-8'))
  assert phases['single']['ended'] == 'in order', phases
  assert phases['single']['payloads_through_the_host'] == phases['single']['ledger_off_by'] == 0
  assert 'ended' not in phases.get('processes', {})
  left = subprocess.run(['pgrep', '-f', f'--out={tmp_path}'], capture_output=True, text=True)
  assert not left.stdout
