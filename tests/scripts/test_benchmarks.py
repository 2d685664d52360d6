"""Benchmarks are run by hand: these tests notice when one no longer fits the code."""

import contextlib
import importlib
import pathlib

from diloco_jax.transport import addresses
from scripts.benchmarks import __main__ as command
from scripts.benchmarks import scale, tls

SHARED = {'__main__', 'measured', 'processes'}
A_TEST = {'stalls'}


def test_the_command_runs_every_benchmark_of_the_folder():
  files = {path.stem for path in command.FOLDER.glob('*.py')}
  assert files == command.NAMES.keys() | SHARED | A_TEST


def test_every_benchmark_imports_what_there_is():
  for name in command.NAMES:
    assert importlib.import_module(f'scripts.benchmarks.{name}').main, name


def test_an_outer_step_of_the_rig_is_carried_out(tmp_path: pathlib.Path):
  with contextlib.closing(scale.Rig(1, tmp_path)) as rig:
    found = rig.outer_step(participants=2)
  assert found['all'] > 0 and found.keys() >= set(scale.PARTS)


def test_payloads_cross_the_transport_of_the_benchmark():
  plain = addresses.Access(plaintext_loopback=True)
  cpu_s, seconds = tls.measure('127.0.0.1:0', plain, plain, 8)
  assert cpu_s > 0 and seconds > 0
