"""Meshes, islands, and the partition of tensors over them.

A mesh has three axes: `data` splits the batch and replicates parameters, `fsdp` splits both,
`tensor` splits heads and hidden units. Axis types are Auto: the partitioner places the collectives;
the partition of the task (task.py) is its only input. Meshes are passed explicitly, never set
globally, since several islands may share one process.

A partition maps a regular expression on the end of a leaf's path ("layers/3/query") to a spec.
The path of an optimizer moment ends in the path of its parameter, so both have the same partition.
Leaves without a match (norm scales, counters) are replicated.
"""

import collections
import contextlib
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import colocated_python
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from diloco_jax.train import config as train_config
from diloco_jax.train import task as task_lib

AXES = ('data', 'fsdp', 'tensor')
BATCH = P(('data', 'fsdp'))


def make_mesh(
  config: train_config.MeshConfig, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
  """Returns the mesh of one island over exactly `devices` (default: all local devices)."""
  devices = list(jax.local_devices() if devices is None else devices)
  if len(devices) != config.num_devices:
    raise ValueError(
      f'mesh data {config.data} x fsdp {config.fsdp} x tensor {config.tensor} needs '
      f'{config.num_devices} devices, got {len(devices)}: change the mesh, or pass '
      f'`devices` (on a CPU, JAX_NUM_CPU_DEVICES={config.num_devices})'
    )
  shape = (config.data, config.fsdp, config.tensor)
  types = (jax.sharding.AxisType.Auto,) * len(AXES)
  return jax.make_mesh(shape, AXES, devices=devices, axis_types=types)


def islands(devices: Sequence[jax.Device], sizes: Sequence[int]) -> list[list[jax.Device]]:
  """Assigns devices to islands of these sizes: whole slices if devices have a `slice_index`, else
  runs. Raises ValueError: there are too few, or an island would have a part of a slice.

  Fast links join the devices of a slice; an island across two slices would train at the speed of
  the slow links between them.
  """
  index = lambda device: getattr(device, 'slice_index', None) or 0
  ordered = iter(sorted(devices, key=lambda device: (index(device), device.id)))
  dealt = [list(itertools.islice(ordered, size)) for size in sizes]
  slices = collections.Counter(map(index, devices))
  for island, size in zip(dealt, sizes):
    parts = collections.Counter(map(index, island))
    if len(island) < size or (len(slices) > 1 and not parts.items() <= slices.items()):
      raise ValueError(
        f'{len(devices)} devices in {len(slices)} slices do not make islands of {list(sizes)} '
        'devices, each of whole slices: change the meshes or the number of learners'
      )
  return dealt


def syncer_devices(
  devices: Sequence[jax.Device], islands: Sequence[Sequence[jax.Device]]
) -> list[jax.Device]:
  """Where the global model lies: the CPU devices of the hosts of accelerators, which on Pathways
  are those of the slices; else at most two CPU devices that no island uses; else the first."""
  used = [device for island in islands for device in island]
  accelerators = [device for device in used if device.device_kind != 'cpu']
  with contextlib.suppress(Exception):  # an experiment of jax, whose errors are of many kinds
    if accelerators:  # one CPU device for each, often the same
      return list(dict.fromkeys(colocated_python.colocated_cpu_devices(accelerators)))
  with contextlib.suppress(RuntimeError):  # there are accelerators only
    hosts = jax.local_devices(backend='cpu')
    return [device for device in hosts if device not in used][-2:] or hosts[:1]
  return [*devices][:1]


def tree_shardings(mesh: jax.sharding.Mesh, tree: Any, partition: task_lib.Partition) -> Any:
  """Returns the NamedSharding of every leaf; `tree` holds arrays or ShapeDtypeStructs."""

  def leaf_sharding(keys: jax.tree_util.KeyPath, leaf: Any) -> NamedSharding:
    path, shape = jax.tree_util.keystr(keys, simple=True, separator='/'), leaf.shape
    spec = task_lib.first_match(partition, path, P())
    if len(spec) > len(shape):
      raise ValueError(f'{path} has shape {shape}, too few axes for its partition {spec}')
    for size, axis in zip(shape, spec):
      axes = axis if isinstance(axis, tuple) else (axis,) if axis else ()
      ways = math.prod(mesh.shape[name] for name in axes)
      if size % ways:
        raise ValueError(
          f'{path} has shape {shape}: {size} does not split {ways} ways over mesh '
          f'axis {axis!r}; change the model or the mesh'
        )
    return NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(leaf_sharding, tree)


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
  return NamedSharding(mesh, P())


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
  return NamedSharding(mesh, BATCH)


def put(values: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
  """Puts a host array on the devices, or a leaf that is drawn when it is read (initial.py); each
  host of an island passes the whole and keeps its part."""
  return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def put_batch(mesh: jax.sharding.Mesh, batch: task_lib.Batch) -> Any:
  """Puts the host arrays of a batch there, with their rows split over `data` and `fsdp`. Raises
  ValueError for a leaf without rows, or with a number of them that does not split."""
  ways = mesh.shape['data'] * mesh.shape['fsdp']

  def put_leaf(path: jax.tree_util.KeyPath, values: np.ndarray) -> jax.Array:
    if not np.ndim(values) or len(values) % ways:
      name = jax.tree_util.keystr(path) or 'the array'
      raise ValueError(
        f'{name} of a batch has shape {np.shape(values)}: each leaf of a batch has the batch as '
        f'its first axis, here a multiple of {ways} rows. Nothing is lost: repeat a number once '
        'per row, or close over it in the loss'
      )
    own = np.array(values)  # it may be a view of a buffer that is reused
    return put(own, batch_sharding(mesh))

  return jax.tree_util.tree_map_with_path(put_leaf, batch)
