"""The accelerators of this machine, found without importing jax, their shares for learners, and its
memory."""

import glob
import importlib.util
import itertools
import os
import pathlib
from typing import NamedTuple

_VISIBLE = 'CUDA_VISIBLE_DEVICES'  # set by the user, or by a scheduler such as Slurm

NO_JIT = (
  'JAX_DISABLE_JIT is set: the functions of a run exist only compiled, since they donate and shard '
  'their arrays; unset JAX_DISABLE_JIT'
)


class Accelerators(NamedTuple):
  """Accelerators of one kind that jax on this machine can use.

  Attributes:
    kind: 'cuda' or 'tpu', as in JAX_PLATFORMS.
    names: of each, as in CUDA_VISIBLE_DEVICES.
  """

  kind: str
  names: tuple[str, ...]

  @property
  def count(self) -> int:
    return len(self.names)


# By kind: the packages that give it to jax, and the device files, one for each accelerator.
_KINDS = {
  'cuda': (('jax_cuda12_plugin', 'jax_cuda13_plugin'), ('/dev/nvidia[0-9]*',)),
  'tpu': (('libtpu',), ('/dev/accel[0-9]*', '/dev/vfio/[0-9]*')),
}


def find() -> Accelerators | None:
  """The accelerators of this machine; None: there is none, the environment hides them, or jax has
  no package for it."""
  for kind, (packages, patterns) in _KINDS.items():
    names = tuple(map(str, range(sum(len(glob.glob(pattern)) for pattern in patterns))))
    if names and kind == 'cuda' and _VISIBLE in os.environ:
      names = visible(os.environ[_VISIBLE], len(names))
    if names and any(map(importlib.util.find_spec, packages)):
      return Accelerators(kind, names)
  return None


def visible(listed: str, count: int) -> tuple[str, ...]:
  """What CUDA shows a program with this CUDA_VISIBLE_DEVICES on a machine with `count` GPUs: those
  in front of the first number that is none of a GPU.

  >>> visible('2, GPU-8a5f,7,0', count=4), visible('', count=4), visible('-1', count=4)
  (('2', 'GPU-8a5f'), (), ())
  """
  is_there = lambda name: (
    name.startswith(('GPU-', 'MIG-')) or (name.isdecimal() and int(name) < count)
  )
  return tuple(itertools.takewhile(is_there, map(str.strip, listed.split(','))))


def share(
  available: Accelerators | None, learners: int, devices: int
) -> list[dict[str, str]] | None:
  """The environments by which each learner gets `devices` accelerators of its own.

  None: there are too few for all learners, or several processes cannot share this kind, so the
  learners use emulated CPU devices.

  >>> share(Accelerators('cuda', ('0', '1', '2', '3')), learners=2, devices=2)
  [{'CUDA_VISIBLE_DEVICES': '0,1'}, {'CUDA_VISIBLE_DEVICES': '2,3'}]
  >>> share(Accelerators('cuda', ('0',)), learners=2, devices=1)
  >>> share(Accelerators('tpu', ('0', '1', '2', '3')), learners=1, devices=4)
  [{}]
  """
  if available is None or available.count < learners * devices:
    return None
  if available.kind == 'tpu':  # one process holds all chips of a host
    return [{}] if learners == 1 and available.count == devices else None
  return [
    {_VISIBLE: ','.join(available.names[m * devices : (m + 1) * devices])} for m in range(learners)
  ]


def no_device(error: Exception) -> str:
  """What to do after jax has found no device; its own errors may be empty."""
  said = ' '.join(str(error).split()) or type(error).__name__
  platforms = os.environ.get('JAX_PLATFORMS')
  remedy = f'unset JAX_PLATFORMS={platforms}' if platforms else 'JAX_PLATFORMS=cpu uses the CPU'
  return (
    f'jax finds no device ({said}): another process may hold it, or jax lacks the package for it; '
    f'{remedy}'
  )


def available_memory(group: pathlib.Path = pathlib.Path('/sys/fs/cgroup')) -> int:
  """Bytes that this process and its children may take; a container may have less than its host."""
  import psutil  # here: learners do not need it

  host = psutil.virtual_memory().available
  try:
    limit, used = ((group / f'memory.{name}').read_text('utf-8') for name in ('max', 'current'))
    return min(host, int(limit) - int(used))
  except (OSError, ValueError):  # no control group of version 2, or "max", no limit
    return host
