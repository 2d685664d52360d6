"""The loops of experiments/examples."""

import importlib.util
import pathlib
import types

FOLDER = pathlib.Path(__file__).resolve().parents[3] / 'experiments' / 'examples'


def load(name: str) -> types.ModuleType:
  spec = importlib.util.spec_from_file_location(name, FOLDER / f'{name}.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module
