"""Compiling once for all learners of a machine, by way of JAX's persistent compilation cache.

Learners of a run compile the same functions. Started together with an empty cache, each would
compile all of them, M times the work; in turns, the first one does and the others read.
"""

import contextlib
import fcntl
import pathlib
from typing import Iterator

import jax


@contextlib.contextmanager
def turn() -> Iterator[None]:
  """Holds the cache's lock (freed by the kernel if the process dies); no cache, no lock."""
  folder = jax.config.jax_compilation_cache_dir
  if not folder:
    yield
    return
  path = pathlib.Path(folder) / '.turn'
  path.parent.mkdir(parents=True, exist_ok=True)
  with open(path, 'w') as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield
