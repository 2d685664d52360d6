"""Keyed seals: HMAC-SHA256 over what a later process believes.

CRCs, digests and the chain of the log find accidents: a writer who computes them again is believed.
With a key (`--seal_key=FILE`, one per run, kept outside its folder) the chain of the log is an HMAC
(wal.py), and so are the seals of manifests, of the note of a restore, and of checkpoints,
whose seal covers every byte of every file. A file that a process without the key has written is
then refused.

Not covered: a file put back to an older state that was sealed, and a log cut off behind a record.
"""

import contextlib
import dataclasses
import hashlib
import hmac
import os
import pathlib
import re
import secrets
import stat

from diloco_jax.protocol import safe_json
from diloco_jax.storage import json_files

KEY_BYTES = 32
_TEXT = re.compile(rb'([0-9a-f]{%d})\n' % (2 * KEY_BYTES))


class Unproved(ValueError):
  """A seal is missing or of another key; the text says of what, and what to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
  """A key, and the file that it is from, for messages."""

  path: str
  secret: bytes = dataclasses.field(repr=False)

  def seal(self, kind: str, *words: str) -> str:
    """The seal of some words, as 64 hex digits. `kind` keeps seals of different things apart."""
    made = hmac.new(self.secret, digestmod=hashlib.sha256)
    for word in (kind, *words):
      data = word.encode()
      made.update(len(data).to_bytes(8, 'little') + data)
    return made.hexdigest()

  def proves(self, seal: object, kind: str, *words: str) -> bool:
    return isinstance(seal, str) and hmac.compare_digest(
      seal.encode(), self.seal(kind, *words).encode()
    )

  @property
  def of_log(self) -> bytes:
    """The key of the log's chain."""
    return bytes.fromhex(self.seal('log'))


def require(key: Key | None, seal: object, what: str, kind: str, *words: str) -> None:
  """Raises Unproved unless the key made the seal of `what`."""
  if key is None:
    raise Unproved(f'{what} has a seal, and there is no --seal_key to prove it')
  if not key.proves(seal, kind, *words):
    raise Unproved(
      f'{what} has no seal of the key {key.path}: it was written without the key or with another '
      'one, or changed'
    )


def load(path: pathlib.Path, workdir: pathlib.Path, make: bool = False) -> Key:
  """Reads a key file; with `make`, writes a new one if there is none.

  Raises:
    ValueError: there is none, it is no key, others may read it, or it lies in the run's folder,
      where a writer of the files could take it.
    OSError: it cannot be read.
  """
  path = path.absolute()
  if workdir.resolve() in path.resolve().parents:
    raise ValueError(f'--seal_key={path} lies in the folder of the run: keep it elsewhere')
  if make and not path.exists():
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f'{path.name}.{secrets.token_hex(4)}.new')
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
      with open(os.open(new, flags, 0o600), 'wb') as file:
        file.write(secrets.token_hex(KEY_BYTES).encode() + b'\n')
        file.flush()
        os.fsync(file.fileno())
      with contextlib.suppress(FileExistsError):  # of a run that began together with this one
        os.link(new, path)
    finally:
      new.unlink(missing_ok=True)
    json_files.fsync(path.parent)
  elif not path.exists():
    raise ValueError(
      f'--seal_key={path} does not exist: copy the one of the run there. `diloco syncer` and '
      '`diloco train` make it when a run begins'
    )
  try:
    match = _TEXT.fullmatch(json_files.read_bytes(path, 4096))
  except safe_json.Unreadable as error:
    raise ValueError(f'--seal_key={path}: {error}') from None
  mode = stat.S_IMODE(path.stat().st_mode)
  if mode & 0o077:
    raise ValueError(f'--seal_key={path} has mode {mode:04o}: others can use it; chmod 600 it')
  if match is None:
    raise ValueError(
      f'--seal_key={path} is no key: it must hold {2 * KEY_BYTES} hex digits and a line break'
    )
  return Key(str(path), bytes.fromhex(match[1].decode()))


def digest_of(folder: pathlib.Path, but: str) -> str:
  """The SHA-256 of every file in a folder, names and bytes; `but`: the name of one that is left
  out. Raises Unreadable if there is anything but plain files and folders, and OSError."""
  whole = hashlib.sha256()
  for path in json_files.files_in(folder):
    name = str(path.relative_to(folder))
    if name != but:
      with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), 'rb') as file:
        content = hashlib.file_digest(file, 'sha256').hexdigest()
      whole.update(f'{len(name)} {name} {content}\n'.encode())
  return whole.hexdigest()
