"""What a notebook gets: imports that an interrupt cannot halve, and a warning of a stale jax."""

import signal
import subprocess
import sys
import types

import jax
import pytest

import diloco_jax
from diloco_jax.api import importing, run
from diloco_jax.config import load

_HALVED = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
import diloco_jax

class Interrupts:  # as jax begins to be imported
  def find_spec(self, name, path=None, target=None):
    if name == 'jax._src':
      sys.meta_path.remove(self)
      os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
try:
  diloco_jax.SyncConfig, diloco_jax.join
except KeyboardInterrupt:
  print('interrupted', 'jax' in sys.modules)
print(diloco_jax.join.__name__)
"""


def test_an_interrupt_during_the_import_comes_after_it():
  """jax cannot be imported again after an import that ended in the middle."""
  done = subprocess.run(
    [sys.executable, '-c', _HALVED], capture_output=True, text=True, timeout=240, check=True
  )
  assert done.stdout.split() == ['interrupted', 'True', 'join']


def test_a_second_interrupt_comes_at_once():
  reached = []
  with pytest.raises(KeyboardInterrupt), importing.uninterrupted():
    signal.raise_signal(signal.SIGINT)
    reached.append('behind the first')
    signal.raise_signal(signal.SIGINT)
    reached.append('behind the second')
  assert reached == ['behind the first']
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_warns_of_a_jax_that_was_imported_before_an_upgrade(monkeypatch):
  monkeypatch.setitem(sys.modules, 'jax', types.SimpleNamespace(__version__='0.4.0'))
  with pytest.warns(UserWarning, match=f'jax 0.4.0 was .* before jax {jax.__version__} .*restart'):
    assert diloco_jax.records


def test_a_line_that_cannot_be_shown_is_no_fault_of_the_run(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(run.live, 'status_line', lambda *what: what[-1]['no such field'])
  display = run.Display(tmp_path, load.load('stdlib_lm:tiny'), alone=False)
  display.draw()
  display.draw()
  assert capsys.readouterr().err.count('error: the state is missing (TypeError') == 1
