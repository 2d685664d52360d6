"""Benchmarks are run by hand: these tests notice when one no longer fits the code."""

import contextlib
import importlib
import pathlib

from scripts.benchmarks import __main__ as command
from scripts.benchmarks import scale

SHARED = {'__main__', 'measured', 'processes'}


def test_the_command_runs_every_benchmark_of_the_folder():
  files = {path.stem for path in command.FOLDER.glob('*.py')}
  assert files == command.NAMES.keys() | SHARED


def test_every_benchmark_imports_what_there_is():
  for name in command.NAMES:
    assert importlib.import_module(f'scripts.benchmarks.{name}').main, name


def test_an_outer_step_of_the_rig_is_carried_out(tmp_path: pathlib.Path):
  with contextlib.closing(scale.Rig(1, tmp_path)) as rig:
    parts = rig.outer_step(participants=2)
  assert parts['all'] > 0 and parts.keys() >= set(scale.PARTS)
