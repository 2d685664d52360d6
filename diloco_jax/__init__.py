"""Decoupled DiLoCo in JAX: learners train, a syncer merges, no learner waits for another.

The names below are imported on first use, so that `import diloco_jax` does not import jax.
"""

import importlib

__version__ = '0.1.0'

_HOME = {
  'Ended': 'api.peer',
  'Peer': 'api.peer',
  'Run': 'api.run',
  'SyncConfig': 'config.run_config',
  'Task': 'train.task',
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
  'join',
  'load_params',
  'open_run',
  'records',
  'run',
  'run_syncer',
]


def __getattr__(name: str) -> object:
  if name not in _HOME:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  from diloco_jax.api import interrupts

  _warn_of_an_old_jax()
  with interrupts.put_off():
    return getattr(importlib.import_module(f'{__name__}.{_HOME[name]}'), name)


def _warn_of_an_old_jax() -> None:
  """A notebook may have imported jax before `pip install` replaced it."""
  import importlib.metadata
  import sys
  import warnings

  imported = getattr(sys.modules.get('jax'), '__version__', None)
  if imported and imported != (installed := importlib.metadata.version('jax')):
    warnings.warn(
      f'jax {imported} was imported before jax {installed} was installed: restart the kernel '
      '(in Colab: Runtime, Restart session)',
      stacklevel=3,
    )


def __dir__() -> list[str]:
  return sorted([*globals(), *_HOME])
