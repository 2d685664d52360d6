"""Where the checkpoints of a run are, and checks of what is read before it becomes a path:

WORKDIR/syncer/ckpt/NUMBER/       the syncer's checkpoints (storage/checkpoint.py)
WORKDIR/islands/ID/ckpt/NUMBER/   a learner's; of a run with a store STORE/islands/ID/ckpt/NUMBER/
"""

import contextlib
import importlib
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from etils import epath

from diloco_jax.protocol import ids
from diloco_jax.protocol.tape import codec
from diloco_jax.storage import json_files

_ROOT = pathlib.Path(__file__).resolve().parents[2]
RUNS = 'runs'  # here a run gets its folder if the user names none, and the newest is looked for
ISLANDS, CHECKPOINTS = 'islands', 'ckpt'
MODEL = 'model'  # in a run's folder, and in its store: the trained model, for plain Orbax
OWN_MODEL = 'syncer/model'  # that a loop of the user's own brought (process/own_model.py)
VERSION_0 = 'version 0'  # the name of that state
BUCKET = 'gs://'
SIGNS = 'syncer', 'config.json'  # one of them is in the store of every run that has begun
LIMIT_S = 300  # for a request to a bucket, of some MiB
MAX_NUMBER = 1 << 53
CHECKOUT = _ROOT if (_ROOT / 'pyproject.toml').is_file() else None  # None: the package is installed
_SHA256 = re.compile(r'[0-9a-f]{64}', re.ASCII)


def cache(base: Mapping[str, str] = os.environ) -> pathlib.Path:
  """The folder of this user's caches: XDG_CACHE_HOME, in the home, or among temporary files."""
  if named := base.get('XDG_CACHE_HOME') or home_cache():
    return pathlib.Path(named)
  own = pathlib.Path(tempfile.gettempdir(), f'diloco_jax-{os.getuid()}')
  with contextlib.suppress(FileExistsError):  # perhaps no folder, or that of another user
    own.mkdir(0o700)
  is_own = own.is_dir() and own.lstat().st_uid == os.getuid()  # others could put programs there
  return own if is_own else pathlib.Path(tempfile.mkdtemp(prefix='diloco_jax-'))


def compiled(base: Mapping[str, str] = os.environ) -> pathlib.Path:
  """The folder of compiled functions: in the checkout, else in the user's cache folder."""
  if CHECKOUT:
    return CHECKOUT / '.cache' / 'jax'
  return cache(base) / 'diloco_jax' / 'jax'


def home_cache() -> pathlib.Path | None:
  """The folder of caches in this user's home; None without a home that can be written."""
  folder = pathlib.Path(os.path.expanduser('~/.cache'))  # as it is without HOME and passwd
  existing = folder if os.path.lexists(folder) else folder.parent
  return folder if folder.is_absolute() and os.access(existing, os.W_OK) else None


def place(text: str) -> json_files.Place:
  """A folder, absolute, or gs://BUCKET/PREFIX. Raises ValueError: a library is missing."""
  if not text.startswith(BUCKET):
    return pathlib.Path(text).absolute()
  try:
    importlib.import_module('gcsfs')
    aiohttp = importlib.import_module('aiohttp')
    settings = importlib.import_module('fsspec.config').conf.setdefault('gs', {})
  except ImportError as error:
    raise ValueError(f"{text} needs gcsfs ({error}): pip install 'diloco-jax[gcs]'") from error
  # Other processes write there, and TensorStore, so no list is kept.
  settings.setdefault('use_listings_cache', False)
  settings.setdefault('requests_timeout', aiohttp.ClientTimeout(total=LIMIT_S))
  return epath.Path(text)


def of_learners(workdir: pathlib.Path, store: str) -> json_files.Place:
  """Where the learners of a run save: in its store, if it has one. Raises ValueError."""
  require_apart(workdir, store)
  return place(store) if store else workdir


def is_away(store: str) -> bool:
  """Whether a store that is a folder has nothing of a run that has begun, as below a file system
  that is not mounted."""
  is_folder = store != '' and not store.startswith(BUCKET)
  return is_folder and not any(os.path.lexists(os.path.join(store, sign)) for sign in SIGNS)


def require_apart(workdir: pathlib.Path, store: str) -> None:
  """Raises ValueError if a store and the folder of a run lie in each other, also by links: the disk
  that takes one takes both, and what is moved aside or removed in one is gone from the other."""
  if not store or store.startswith(BUCKET):
    return
  first, second = workdir.resolve(), pathlib.Path(store).resolve()
  if first.is_relative_to(second) or second.is_relative_to(first):
    raise ValueError(
      f'train.store is {second} and the folder of the run is {first}: the one holds the other. '
      'Nothing was started. Choose a store beside the folder, best on another disk, or a bucket'
    )


def new_run(name: str) -> str:
  return f'{RUNS}/{name}-{time.strftime("%Y%m%d-%H%M%S")}'


def syncer_folder(workdir: pathlib.Path) -> pathlib.Path:
  return workdir / 'syncer'


def log_folder(workdir: pathlib.Path) -> pathlib.Path:
  return syncer_folder(workdir) / 'wal'


def checkpoints(node: json_files.Place) -> list[int]:
  """The numbers of a node's checkpoints, whole or damaged, ascending. Raises OSError."""
  return numbers_in(node / CHECKPOINTS)


def numbers_in(root: json_files.Place) -> list[int]:
  """The numbers among the names in a folder, ascending. Raises OSError."""
  with json_files.as_os_errors():
    return json_files.numbers(path.name for path in root.glob('*'))


def new_aside(place: json_files.Place) -> json_files.Place:
  """A new folder for what is moved out of a run's way. Raises OSError."""
  with json_files.as_os_errors():
    names = (path.name.removeprefix('aside-') for path in place.glob('aside-*'))
    aside = place / f'aside-{max(json_files.numbers(names), default=0) + 1}'
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
