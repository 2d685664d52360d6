"""WORKDIR/syncer/lineage.json: which run a folder is of, and where its state comes from.

A restore (process/restore.py) is a take-over (syncer/stored.py) of the run by its own past. Both
choose a verified state, go back to it, and write the lineage, which every later syncer follows.
Until that is written no syncer starts. The claim of a store (storage/claim.py) has the lineage of
the newest state of the run.
"""

import dataclasses
import json
import pathlib
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diloco_jax.protocol import formats
from diloco_jax.protocol.tape import codec
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import folders, json_files, outer_log, wal

FILE = 'syncer/lineage.json'
RESTORE, TAKE_OVER = 'restore', 'take-over'
_AGAIN = {
  RESTORE: 'Run diloco restore again, with the same --to.',
  TAKE_OVER: 'Start the syncer again with the same train.store.',
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
  """Where the state of a folder comes from.

  Attributes:
    run: the name of the run, which checkpoints, log and learners hold, too, so that a learner of
      another run is refused; '': none has begun.
    disk: the name of the folder in the claim of a store; '': it never had one.
    store: the place of the store in which the run has begun; '': in none.
    restored: the ids of the run's restores, in their order. A store follows each once.
    log: the position in the log of the checkpoint that the last of them went back to.
    gone: learners that count as having left at that position.
    changing: RESTORE or TAKE_OVER while one replaces the state; '': none does.
  """

  run: str = ''
  disk: str = ''
  store: str = ''
  restored: tuple[str, ...] = ()
  log: int = 0
  gone: tuple[str, ...] = ()
  changing: str = ''

  @property
  def part(self) -> str:
    """The part of a store that has the copies and records since the last restore."""
    return f'syncer/restored-{self.restored[-1]}/' if self.restored else 'syncer/'

  def __post_init__(self):
    """Raises ValueError if a value is out of its range."""
    folders.require_number('log', self.log)
    for name in self.gone:
      folders.require_learner(name)
    for name in (self.run, self.disk, *self.restored):
      if not re.fullmatch('[0-9a-f]{8}|[0-9a-f]{16}|', name):
        raise ValueError(f'{codec.short(name)} is no name of a run, a folder or a restore')
    if self.changing not in ('', *_AGAIN):
      raise ValueError(f'changing is {codec.short(self.changing)}')


def read(workdir: pathlib.Path, repeats: str = '') -> Lineage | None:
  """As `peek`. Raises DirectoryError if a restore or a take-over has not ended and the caller does
  not repeat it."""
  lineage = peek(workdir)
  if lineage and lineage.changing not in ('', repeats):
    raise files_lib.DirectoryError(
      f'{workdir} is in the middle of a {lineage.changing} ({workdir / FILE}). Nothing is lost, '
      f'nothing was started. {_AGAIN[lineage.changing]}'
    )
  return lineage


def peek(workdir: pathlib.Path) -> Lineage | None:
  """The lineage of a folder, None if no syncer has begun there. Raises ValueError if the file is
  not what was written."""
  path = workdir / FILE
  try:
    values = json_files.unseal(json_files.read(path))
    return codec.decode(Lineage, formats.require('lineage', values, path), 'it')
  except FileNotFoundError:
    return None
  except formats.OtherFormat:
    raise
  except (OSError, ValueError, codec.TapeError) as error:
    raise ValueError(
      f'{path} does not read back: {error}. Nothing was started or changed. Remove it, then run '
      f'{wal.restore_command(f"{workdir}/syncer/wal")}, which writes it again'
    ) from error


def write(workdir: pathlib.Path, lineage: Lineage) -> None:
  """Replaces the lineage of a folder, durably. Raises OSError."""
  values = formats.stamp('lineage') | json.loads(codec.encode(lineage))
  json_files.write(workdir / FILE, json_files.seal(values))


def begin(workdir: pathlib.Path) -> Lineage:
  """The lineage of a folder; a run that begins there gets its name. Raises as `read`, OSError."""
  lineage = read(workdir) or Lineage()
  if not lineage.run:
    lineage = dataclasses.replace(lineage, run=secrets.token_hex(8))
    write(workdir, lineage)
  return lineage


def go_back(
  workdir: pathlib.Path,
  before: Lineage,
  changing: str,
  later: Mapping[json_files.Place, Sequence[json_files.Place]],
  log_files: files_lib.Files,
  agreement: str,
  position: dict[str, Any] | None,
  put: Callable[[], None] = lambda: None,
) -> list[str]:
  """Goes back to a verified state: moves what is later, and the log, to new folders, and returns
  these; then begins a log behind the state. Nothing is deleted. No syncer starts until the caller
  has written the next lineage. Raises OSError, WalFull, WalBroken.

  Args:
    workdir: of the run, of which `before` is the lineage.
    changing: RESTORE or TAKE_OVER.
    later: what is moved, by the folder that gets an aside-K for it.
    log_files: the folder of the log, locked.
    agreement: of the run.
    position: of the state in the log; None: the run begins.
    put: puts the state there, if it comes from elsewhere.
  """
  write(workdir, dataclasses.replace(before, changing=changing))
  records = folders.log_folder(workdir).iterdir()
  old = [path for path in records if path.name != files_lib.LOCK]
  asides = []
  for place, paths in later.items():
    if moved := [*paths, *(old if place == workdir else ())]:
      asides.append(aside := folders.new_aside(place))
      if place == workdir:
        # What is moved there is complete, also if an earlier try did not end.
        write(workdir / aside.name, dataclasses.replace(before, changing=''))
      for path in moved:
        json_files.move(path, aside / path.relative_to(place))
  put()
  if position is not None:
    json_files.replace(folders.log_folder(workdir) / outer_log.AGREEMENT, agreement.encode())
    outer_log.begin(log_files, agreement, position)
  return [str(aside) for aside in asides]
