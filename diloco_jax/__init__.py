"""Decoupled DiLoCo in JAX: learners train, a syncer merges, no learner waits for another.

The names below are imported on first use, so that `import diloco_jax` does not import jax.
"""

import importlib
from typing import TYPE_CHECKING

from diloco_jax.version import __version__ as __version__

if TYPE_CHECKING:
  from diloco_jax.api.follow import follow
  from diloco_jax.api.load_params import load_params
  from diloco_jax.api.peer import Ended, Peer, join
  from diloco_jax.api.run import Run, open_run
  from diloco_jax.api.run_syncer import run_syncer
  from diloco_jax.api.single_controller import run
  from diloco_jax.config.run_config import SyncConfig
  from diloco_jax.report.records import records
  from diloco_jax.train.task import Task

_HOME = {
  'Ended': 'api.peer',
  'Peer': 'api.peer',
  'Run': 'api.run',
  'SyncConfig': 'config.run_config',
  'Task': 'train.task',
  'follow': 'api.follow',
  'join': 'api.peer',
  'load_params': 'api.load_params',
  'open_run': 'api.run',
  'records': 'report.records',
  'run': 'api.single_controller',
  'run_syncer': 'api.run_syncer',
}
__all__ = [
  'Ended',
  'Peer',
  'Run',
  'SyncConfig',
  'Task',
  'follow',
  'join',
  'load_params',
  'open_run',
  'records',
  'run',
  'run_syncer',
]


if not TYPE_CHECKING:  # a checker would take every other name for one of ours

  def __getattr__(name: str) -> object:
    if name not in _HOME:
      raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module(f'{__name__}.{_HOME[name]}'), name)


def __dir__() -> list[str]:
  return sorted({*globals(), *_HOME} - {'TYPE_CHECKING', 'importlib'})
