"""The accelerators of this machine, found without importing jax, and their shares for learners."""

import glob
import importlib.util
from typing import NamedTuple


class Accelerators(NamedTuple):
  """Accelerators of one kind that jax on this machine can use.

  Attributes:
    kind: 'cuda' or 'tpu', as in JAX_PLATFORMS.
    count: how many there are.
  """

  kind: str
  count: int


# By kind: the packages that give it to jax, and the device files, one for each accelerator.
_KINDS = {
  'cuda': (('jax_cuda12_plugin', 'jax_cuda13_plugin'), ('/dev/nvidia[0-9]*',)),
  'tpu': (('libtpu',), ('/dev/accel[0-9]*', '/dev/vfio/[0-9]*')),
}


def find() -> Accelerators | None:
  """The accelerators of this machine; None: there is none, or jax has no package for it."""
  for kind, (packages, patterns) in _KINDS.items():
    count = sum(len(glob.glob(pattern)) for pattern in patterns)
    if count and any(map(importlib.util.find_spec, packages)):
      return Accelerators(kind, count)
  return None


def share(found: Accelerators | None, learners: int, devices: int) -> list[dict[str, str]] | None:
  """The environments by which each learner gets `devices` accelerators of its own.

  None: there are too few for all learners, or several processes cannot share this kind, so the
  learners use emulated CPU devices.

  >>> share(Accelerators('cuda', 4), learners=2, devices=2)
  [{'CUDA_VISIBLE_DEVICES': '0,1'}, {'CUDA_VISIBLE_DEVICES': '2,3'}]
  >>> share(Accelerators('cuda', 1), learners=2, devices=1)
  >>> share(Accelerators('tpu', 4), learners=1, devices=4)
  [{}]
  """
  if found is None or found.count < learners * devices:
    return None
  if found.kind == 'tpu':  # one process holds all chips of a host
    return [{}] if learners == 1 and found.count == devices else None
  return [
    {'CUDA_VISIBLE_DEVICES': ','.join(map(str, range(m * devices, (m + 1) * devices)))}
    for m in range(learners)
  ]
