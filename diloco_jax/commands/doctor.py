"""Says what this machine has, what would not work on it, and what to do.

    diloco doctor
    diloco doctor --workdir=/data/runs      # also whether a run can be written there

One line per check: `ok`, or `BAD` with the remedy. Exit codes: 0 all is well, 1 otherwise.
"""

import importlib.metadata
import os
import pathlib
import resource
import shlex
import shutil
import socket
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence

from absl import flags
from packaging import requirements

from diloco_jax.launch import accelerators, cli, local_run
from diloco_jax.storage import files, folders

_WORKDIR = flags.DEFINE_string('workdir', '', 'folder of a run; default runs, in this folder')

PYTHON = (3, 11)
MEMORY_GIB = 4  # the demo: five processes of about half a GiB, and their compilers
DISK_GIB = 2  # the demo writes a few hundred MiB
OPEN_FILES = 1024
_SHOWN = ('jax', 'flax', 'orbax-checkpoint')
_OFF = ('', '0', 'false', 'f', 'no', 'off')
_GIB = 1 << 30


class Bad(Exception):
  """A check that failed: what is wrong, and the remedy."""


def main(argv: list[str]) -> int:
  del argv
  workdir = pathlib.Path(_WORKDIR.value or 'runs').absolute()
  checks: dict[str, Callable[[], str]] = {
    'python': python,
    'packages': packages,
    'settings': lambda: settings(os.environ),
    'devices': devices,
    'cores': cores,
    'host': files.host_name,
    'memory': lambda: memory(accelerators.available_memory()),
    'open files': lambda: open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    'ports': ports,
    'disk': lambda: disk(workdir),
    'cache': cache,
  }
  return report(checks)


def report(checks: dict[str, Callable[[], str]]) -> int:
  """Makes the checks, prints a line for each, and returns the exit code."""
  failed = 0
  for name, check in checks.items():
    try:
      verdict, text = 'ok', check()
    except Bad as error:
      verdict, text = 'BAD', cli.one_line(error)
    except Exception as error:
      verdict, text = 'BAD', f'{type(error).__name__}: {cli.one_line(error)}'
    failed += verdict == 'BAD'
    print(f'{verdict:3}  {name:{max(map(len, checks))}}  {text}', flush=True)
  print(f'{failed} of {len(checks)} checks failed' if failed else 'all is well')
  return int(failed > 0)


def python(version: Sequence[int] = sys.version_info) -> str:
  found = '.'.join(map(str, version[:3]))
  if tuple(version[:2]) < PYTHON:
    raise Bad(f'{found} at {sys.executable}: install Python {PYTHON[0]}.{PYTHON[1]} or newer')
  return f'{found} at {sys.executable}'


def packages(needed: Sequence[str] = ()) -> str:
  """The packages that this one needs (PEP 508), and their versions."""
  found, missing = [], []
  for one in map(requirements.Requirement, needed or _needed()):
    try:
      version = importlib.metadata.version(one.name)
    except importlib.metadata.PackageNotFoundError:
      version = 'not installed'
    fits = version != 'not installed' and one.specifier.contains(version, prereleases=True)
    (found if fits else missing).append((one, version))
  if missing:
    install = shlex.join(
      [sys.executable, '-m', 'pip', 'install', *(str(one) for one, _ in missing)]
    )
    raise Bad(f'{", ".join(f"{one.name} {version}" for one, version in missing)}: {install}')
  first = [f'{one.name} {version}' for one, version in found if one.name in _SHOWN]
  return f'{len(found)} fit, among them {", ".join(first)}'


def _needed() -> list[str]:
  if cli.CHECKOUT:
    project = tomllib.loads((cli.CHECKOUT / 'pyproject.toml').read_text('utf-8'))
    return project['project']['dependencies']
  return [one for one in importlib.metadata.requires('diloco-jax') or () if 'extra ==' not in one]


def settings(environment: os._Environ[str] | dict[str, str]) -> str:
  """The settings of jax in the environment."""
  if environment.get('JAX_DISABLE_JIT', '').lower() not in _OFF:
    raise Bad(accelerators.NO_JIT)
  found = [
    f'{name}={value}' for name, value in environment.items() if name.startswith(('JAX_', 'XLA_'))
  ]
  return (
    f'{", ".join(sorted(found)) or "no setting of jax in the environment"}; the processes of a '
    'run switch asynchronous dispatch on CPU off, in a notebook do so, too'
  )


def devices() -> str:
  """The devices of jax."""
  import jax  # pylint: disable=g-import-not-at-top  # a check of its own, which may fail

  try:
    found = jax.devices()
  except Exception as error:  # of several types, also AssertionError
    raise Bad(accelerators.no_device(error)) from error
  kinds = sorted({f'{one.platform} ({one.device_kind})' for one in found})
  text = f'{len(found)} of {", ".join(kinds)}'
  if found[0].platform != 'cpu':
    return text
  there = accelerators.find()
  hint = f', though there are {there.count} of {there.kind}' if there else ''
  return f'{text}{hint}; learners emulate the devices of their mesh'


def cores() -> str:
  usable = len(local_run.available_cpus()) or os.cpu_count()
  slow = '; the demo needs two for its two minutes' if usable < 2 else ''
  return f'{usable} of {os.cpu_count()} may be used{slow}'


def memory(available: int) -> str:
  text = f'{available / _GIB:.1f} GiB available'
  if available < MEMORY_GIB * _GIB:
    raise Bad(
      f'{text}, the demo takes about {MEMORY_GIB}: end other programs, or run fewer learners'
    )
  return text


def open_files(limit: int) -> str:
  if limit == resource.RLIM_INFINITY:
    return 'no limit'
  if limit < OPEN_FILES:
    raise Bad(f'at most {limit}: ulimit -n {4 * OPEN_FILES}')
  return f'at most {limit}'


def ports(host: str = '127.0.0.1') -> str:
  """A port of the loopback interface can be bound and connected to."""
  try:
    with socket.create_server((host, 0)) as server:
      port = server.getsockname()[1]
      socket.create_connection((host, port), timeout=5).close()
  except OSError as error:
    raise Bad(
      f'no connection over {host}: {error}; runs on several machines and `diloco chaos` use TCP, '
      'allow it in the firewall or the sandbox'
    ) from error
  return f'a port of {host} can be bound and connected to'


def disk(workdir: pathlib.Path) -> str:
  """Space, and whether the folder or the nearest one above it can be written."""
  try:
    files.require_name(workdir)
  except ValueError as error:
    raise Bad(str(error)) from error
  folder = next(one for one in (workdir, *workdir.parents) if one.exists())
  _require_writable(folder, 'choose another --workdir')
  free = shutil.disk_usage(folder).free / _GIB
  if free < DISK_GIB:
    raise Bad(f'{free:.1f} GiB free in {folder}: make space, or choose another --workdir')
  return f'{free:.1f} GiB free in {folder}'


def cache() -> str:
  """The folder of compiled functions."""
  folder = pathlib.Path(os.environ.get('JAX_COMPILATION_CACHE_DIR') or cli.cache_folder())
  remedy = 'set JAX_COMPILATION_CACHE_DIR to a folder that this user may write'
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise Bad(f'{folder}: {error.strerror}; {remedy}') from error
  _require_writable(folder, remedy)
  why = '' if folders.home_cache() else ', as this user has no home that can be written'
  return f'{folder} can be written; other caches are in {folders.cache()}{why}'


def _require_writable(folder: pathlib.Path, remedy: str) -> None:
  try:
    with tempfile.NamedTemporaryFile(dir=folder):
      pass
  except OSError as error:
    raise Bad(f'{folder} cannot be written: {error.strerror}; {remedy}') from error
