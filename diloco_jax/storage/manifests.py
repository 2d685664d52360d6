"""Run snapshots on disk: their manifests and the checkpoints that these pin.

    WORKDIR/snapshots/N.json        the manifest of snapshot N, written last
    WORKDIR/syncer/ckpt/NUMBER/     the syncer's checkpoints (storage/checkpoint.py)
    WORKDIR/islands/ID/ckpt/NUMBER/ a learner's

A manifest is JSON and names the checkpoints that it pins, each with the SHA-256 of its record,
which in turn holds a digest of every leaf: so the manifest detects every later change. Its own
`digest` is the SHA-256 of all its other fields. Without a manifest there is no snapshot: what
was saved for it are ordinary checkpoints.

The file `RESTORING` exists while a restore (restore.py) runs: no syncer may start from a folder
that is half restored. The file `RESTORED` tells the syncer of it.

What is read here is typed before any of it becomes a path: names are learner ids, numbers are in
range.
"""

import dataclasses
import hashlib
import json
import pathlib
import re
from collections.abc import Collection
from typing import Any

from diloco_jax.protocol import actions, ids
from diloco_jax.protocol.tape import codec
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import json_files

FORMAT = 1
FOLDER = 'snapshots'
CHECKPOINTS = 'ckpt'
RESTORING = 'restoring.json'
RESTORED = 'restored.json'
MAX_NUMBER = 1 << 53
_SUFFIX = '.json'
_SHA256 = re.compile(r'[0-9a-f]{64}', re.ASCII)


class Unfit(ValueError):
  """A manifest cannot be read or does not verify; the text says which and why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
  """A run snapshot.

  Attributes:
    snapshot: its number.
    step: the sync at which it was taken.
    checkpoint, record_sha256: the syncer's part.
    parts: the learners'.
    missing: the learners without a part, each with the reason.
    unverified: the learners whose parts the syncer could not find under this folder.
    agreement: of the run.
    place: the folder in which it was taken.
    commit, time: for people only.
  """

  format: int = FORMAT
  snapshot: int
  step: int
  checkpoint: int
  record_sha256: str
  parts: tuple[actions.Part, ...]
  missing: tuple[tuple[str, str], ...]
  unverified: tuple[str, ...]
  agreement: str
  place: str
  commit: str
  time: str

  def __post_init__(self):
    """Raises ValueError if a value is out of its range."""
    if self.format != FORMAT:
      raise ValueError(f'it has format {self.format}, this release reads {FORMAT}')
    require_number('snapshot', self.snapshot, 1)
    require_number('step', self.step)
    for part in self.parts:
      require_learner(part.learner)
      require_number('incarnation', part.incarnation)
    for part in (self, *self.parts):
      require_number('checkpoint', part.checkpoint)
      require_sha256(part.record_sha256)
    for name in (*dict(self.missing), *self.unverified):
      require_learner(name)
    names = [part.learner for part in self.parts] + [name for name, _ in self.missing]
    if len(set(names)) < len(names) or not set(self.unverified) <= set(self.learners):
      raise ValueError('it names a learner twice, or one without a part as unverified')

  @property
  def learners(self) -> dict[str, actions.Part]:
    """The parts by learner."""
    return {part.learner: part for part in self.parts}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
  """What a restore tells the syncer.

  Attributes:
    log: the position in the log of the checkpoint that the run went back to.
    gone: learners that count as having left.
    back: learners that were restored with moments of their own.
  """

  log: int
  gone: tuple[str, ...]
  back: tuple[str, ...]

  def __post_init__(self):
    """Raises ValueError if a value is out of its range."""
    require_number('log', self.log)
    for name in (*self.gone, *self.back):
      require_learner(name)


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


def syncer_folder(workdir: pathlib.Path) -> pathlib.Path:
  return workdir / 'syncer'


def island_folder(workdir: pathlib.Path, learner: str) -> pathlib.Path:
  return workdir / 'islands' / require_learner(learner)


def checkpoints(node: pathlib.Path) -> list[int]:
  """The numbers of a node's checkpoints, whole or damaged, ascending."""
  return json_files.numbers(path.name for path in (node / CHECKPOINTS).glob('*'))


def numbers(workdir: pathlib.Path) -> list[int]:
  """The snapshots that have a manifest, whole or damaged, ascending."""
  return json_files.numbers(path.stem for path in (workdir / FOLDER).glob('*' + _SUFFIX))


def read(workdir: pathlib.Path, number: int) -> Manifest:
  """Reads and verifies the manifest of a snapshot.

  Raises:
    Unfit: it is not one, or not what was written.
  """
  path = workdir / FOLDER / f'{number}{_SUFFIX}'
  try:
    manifest = _open(path, Manifest)
  except (OSError, ValueError) as error:
    raise Unfit(f'its manifest {path} does not read back: {error}') from None
  if manifest.snapshot != number:
    raise Unfit(f'its manifest {path} is that of snapshot {manifest.snapshot}')
  return manifest


def write(workdir: pathlib.Path, manifest: Manifest) -> None:
  """Writes the manifest of a snapshot, durable on return. Raises OSError."""
  _close(workdir / FOLDER / f'{manifest.snapshot}{_SUFFIX}', manifest)


def read_restored(workdir: pathlib.Path) -> Restored | None:
  """The last restore's message to the syncer, if there was a restore. Raises ValueError."""
  path = syncer_folder(workdir) / RESTORED
  try:
    return _open(path, Restored)
  except FileNotFoundError:
    return None
  except (OSError, ValueError) as error:
    raise ValueError(
      f'{path} does not read back: {error}. Nothing was started; run diloco restore again'
    ) from error


def write_restored(workdir: pathlib.Path, note: Restored) -> None:
  """Raises OSError."""
  _close(syncer_folder(workdir) / RESTORED, note)


def _open(path: pathlib.Path, kind: type) -> Any:
  """Reads a file with its digest. Raises OSError, ValueError."""
  values = json_files.read(path)
  digest = values.pop('digest', None)
  if digest != sha256(values):
    raise ValueError('it is not what was written')
  try:
    return codec.decode(kind, values, 'it')
  except codec.TapeError as error:
    raise ValueError(str(error)) from None


def _close(path: pathlib.Path, value: Any) -> None:
  """Writes a file with its digest. Raises OSError."""
  values = json.loads(codec.encode(value))
  json_files.write(path, {**values, 'digest': sha256(values)})


def remove_all_but(workdir: pathlib.Path, keep: Collection[int]) -> None:
  """Removes the manifests of other snapshots, durably; then the checkpoints that they pinned may be
  deleted. Raises OSError."""
  for number in set(numbers(workdir)) - set(keep):
    (workdir / FOLDER / f'{number}{_SUFFIX}').unlink()
  json_files.fsync(workdir / FOLDER)  # no manifest may outlive its checkpoints


def require_no_restore(workdir: pathlib.Path) -> None:
  """Raises DirectoryError if a restore has begun but not ended."""
  path = syncer_folder(workdir) / RESTORING
  if path.exists():
    raise files_lib.DirectoryError(
      f'{workdir} is in the middle of a restore ({path}). Nothing is lost, nothing was started. '
      'Run diloco restore again, with the same --to.'
    )


def sha256(values: dict[str, Any]) -> str:
  """The SHA-256 of a manifest or of a checkpoint's record, as hex digits."""
  text = json.dumps(values, sort_keys=True, separators=(',', ':'))
  return hashlib.sha256(text.encode()).hexdigest()


def require_writable(checkpoints: pathlib.Path) -> None:
  """Makes a folder for checkpoints. Raises ValueError if this process may not write there."""
  try:
    checkpoints.mkdir(parents=True, exist_ok=True)
    probe = checkpoints / '.writable'
    probe.write_text('')
    probe.unlink()
  except OSError as error:
    raise ValueError(
      f'cannot write checkpoints under {checkpoints}: {error}; choose a folder that this process '
      'may write to'
    ) from error
