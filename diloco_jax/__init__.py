"""Decoupled DiLoCo in JAX: learners train, a syncer merges, no learner waits for another.

The names below are imported on first use, so that `import diloco_jax` does not import jax.
"""

import importlib

__version__ = '0.1.0'

_HOME = {
  'Ended': 'launch.peer',
  'Peer': 'launch.peer',
  'SyncConfig': 'config.run_config',
  'Task': 'train.task',
  'join': 'launch.peer',
  'load_params': 'launch.trained',
  'records': 'report.records',
  'run': 'launch.one_process',
  'run_syncer': 'launch.own_syncer',
}
__all__ = [
  'Ended',
  'Peer',
  'SyncConfig',
  'Task',
  'join',
  'load_params',
  'records',
  'run',
  'run_syncer',
]


def __getattr__(name: str) -> object:
  if name not in _HOME:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(f'{__name__}.{_HOME[name]}'), name)


def __dir__() -> list[str]:
  return sorted([*globals(), *_HOME])
