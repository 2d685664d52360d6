"""Where the checkpoints of a run are, and checks of what is read before it becomes a path:

WORKDIR/syncer/ckpt/NUMBER/       the syncer's checkpoints (storage/checkpoint.py)
WORKDIR/islands/ID/ckpt/NUMBER/   a learner's
"""

import pathlib
import re
from typing import Any

from diloco_jax.protocol import ids
from diloco_jax.protocol.tape import codec
from diloco_jax.storage import json_files

CHECKPOINTS = 'ckpt'
MAX_NUMBER = 1 << 53
_SHA256 = re.compile(r'[0-9a-f]{64}', re.ASCII)


def syncer_folder(workdir: pathlib.Path) -> pathlib.Path:
  return workdir / 'syncer'


def checkpoints(node: pathlib.Path) -> list[int]:
  """The numbers of a node's checkpoints, whole or damaged, ascending."""
  return json_files.numbers(path.name for path in (node / CHECKPOINTS).glob('*'))


def new_aside(workdir: pathlib.Path) -> pathlib.Path:
  """A new folder for what is moved out of a run's way. Raises OSError."""
  taken = json_files.numbers(path.name.removeprefix('aside-') for path in workdir.glob('aside-*'))
  aside = workdir / f'aside-{max(taken, default=0) + 1}'
  aside.mkdir()
  return aside


def require_number(what: str, value: Any, least: int = 0) -> int:
  """Returns a value that is an int in range, no bool. Raises ValueError."""
  if type(value) is not int or not least <= value <= MAX_NUMBER:
    raise ValueError(f'{what} is {codec.short(value)}, it must be a number from {least} to 2**53')
  return value


def require_learner(name: Any) -> str:
  """Returns a value that is the id of a learner. Raises ValueError."""
  if type(name) is not str or not ids.is_learner(name):
    raise ValueError(f'{codec.short(name)} is not the id of a learner')
  return name


def require_sha256(value: Any) -> str:
  """Returns a value that is 64 hex digits. Raises ValueError."""
  if type(value) is not str or not _SHA256.fullmatch(value):
    raise ValueError(f'{codec.short(value)} is not a SHA-256')
  return value
