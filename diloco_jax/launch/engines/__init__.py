"""Engines: each carries the description of a run (launch/spec.py) out, or writes it as text.

A module here without an underscore in its name is an engine: `diloco launch --engine=NAME`. It has

  places(request) -> spec.Places                      what only it knows
  needs(described, request) -> {text: whether it is there}           if it needs anything
  run(described, request, places) -> int              runs the programs to their end; the exit code
  or
  render(described, request, places) -> {file name: text}

and defines the flags that it alone reads. `places` raises ValueError, one line with a remedy,
for what cannot be. All engines are imported, so none imports anything heavy at its top.
"""

import importlib
import pkgutil
import types


def names() -> list[str]:
  return [one.name for one in pkgutil.iter_modules(__path__) if '_' not in one.name]


def load(name: str) -> types.ModuleType:
  return importlib.import_module(f'{__name__}.{name}')
