"""WORKDIR/syncer/restore.json: whether the last restore (launch/restore.py) has ended, and what it
tells the syncer. No syncer starts from a folder that is half restored."""

import dataclasses
import json
import pathlib
import re

from diloco_jax.protocol import formats
from diloco_jax.protocol.tape import codec
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import folders, json_files

FILE = 'restore.json'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Note:
  """A restore.

  Attributes:
    done: whether it has ended.
    log: the position in the log of the checkpoint that the run went back to.
    gone: learners that count as having left.
    id: of this restore, which the store of the run follows once (syncer/stored.py).
  """

  done: bool
  log: int = 0
  gone: tuple[str, ...] = ()
  id: str = ''

  def __post_init__(self):
    """Raises ValueError if a value is out of its range."""
    folders.require_number('log', self.log)
    for name in self.gone:
      folders.require_learner(name)
    if not re.fullmatch('[0-9a-f]{8}|', self.id):
      raise ValueError(f'id is {codec.short(self.id)}')


def read(workdir: pathlib.Path) -> Note | None:
  """The last restore, if there was one. Raises DirectoryError if it has not ended, and ValueError
  if the note is not what was written."""
  path = folders.syncer_folder(workdir) / FILE
  try:
    values = json_files.read(path)
    if values.pop('digest', None) != json_files.sha256(values):
      raise ValueError('it is not what was written')
    note = codec.decode(Note, formats.taken('restore note', values, path), 'it')
  except FileNotFoundError:
    return None
  except formats.OtherFormat:
    raise
  except (OSError, ValueError, codec.TapeError) as error:
    raise ValueError(
      f'{path} does not read back: {error}. Nothing was started; run diloco restore again'
    ) from error
  if not note.done:
    raise files_lib.DirectoryError(
      f'{workdir} is in the middle of a restore ({path}). Nothing is lost, nothing was started. '
      'Run diloco restore again, with the same --to.'
    )
  return note


def write(workdir: pathlib.Path, note: Note) -> None:
  """Replaces the note, durably. Raises OSError."""
  values = formats.stamp('restore note') | json.loads(codec.encode(note))
  path = folders.syncer_folder(workdir) / FILE
  json_files.write(path, {**values, 'digest': json_files.sha256(values)})
