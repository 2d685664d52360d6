"""The figures of all phases, in one file of JSON that is replaced as a whole, and those of the
compilations in the log of a phase."""

import collections
import json
import os
import pathlib
import platform
import re
from typing import Any

FILE = 'figures.json'
LOGGED = (
  'jax._src.compiler,jax._src.dispatch'  # JAX_DEBUG_LOG_MODULES: `compilations` reads their lines
)
_MISS = re.compile(r"PERSISTENT COMPILATION CACHE MISS for '\S+' with key '(\S+)'")
_FINISHED = re.compile(r'Finished XLA compilation of .* in ([0-9.]+) sec')


def read(out: pathlib.Path) -> dict[str, Any]:
  """By phase; {} before the first one."""
  path = out / FILE
  return json.loads(path.read_text('utf-8')) if path.exists() else {}


def add(out: pathlib.Path, phase: str, **values: Any) -> None:
  """Adds figures of a phase, durably, and prints them. One process at a time."""
  figures = read(out)
  figures.setdefault(phase, {}).update(values)
  new = out / f'{FILE}.new'
  with new.open('w', encoding='utf-8') as file:
    file.write(json.dumps(figures, indent=1) + '\n')
    file.flush()
    os.fsync(file.fileno())
  new.replace(out / FILE)
  for name, value in values.items():
    print(f'{phase}: {name}: {json.dumps(value)}', flush=True)


def machine(out: pathlib.Path) -> None:
  """Adds what this process runs on."""
  import jax  # the driver has no need of it

  device = jax.local_devices()[0]
  add(
    out,
    'machine',
    device=device.device_kind,
    platform=device.platform,
    jax=jax.__version__,
    python=platform.python_version(),
    cores=len(os.sched_getaffinity(0)),
  )


def compilations(log: str) -> dict[str, Any]:
  """The distinct programs that the processes of a phase have compiled, the seconds of all their
  compilations, and the names of those that were compiled more than once. A process that finds a
  program in the cache has not compiled it."""
  keys = collections.Counter(_MISS.findall(log))
  return {
    'programs': len(keys),
    'compile_s': round(sum(map(float, _FINISHED.findall(log))), 1),
    'compiled_twice': sorted(key.rpartition('-')[0] or key for key, n in keys.items() if n > 1),
  }
