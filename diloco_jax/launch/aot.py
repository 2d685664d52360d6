"""What the TPU compiler says of a config, on a machine without TPUs: `look_up` makes its topology,
`compile_all` compiles a learner's functions for it, `verdict` says whether they fit.

All sizes are bytes on one chip.
"""

import collections
import importlib.metadata
import importlib.util
import math
import os
import re
import sys
import time
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

GIB = 1 << 30
HBM = {'v5e': 16 * GIB, 'v6e': 32 * GIB, 'v5p': 95 * GIB}
_TOPOLOGY = re.compile(r'(?:v5e|v6e):\d+x\d+|v5p:\d+x\d+x\d+')
_COLLECTIVE = r'(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\('
_UNITS = {'K': 1 << 10, 'M': 1 << 20, 'G': GIB, 'T': 1 << 40}
_USED = re.compile(r'RESOURCE_EXHAUSTED.*?(?:HLO temporaries \(|Used )([\d.]+)([KMGT])', re.DOTALL)
_REMEDIES = {
  'parameters': 'more chips along mesh.fsdp or mesh.tensor',
  'moments': 'more chips along mesh.fsdp or mesh.tensor, or optimizer.name=muon',
  'anchors': 'more chips along mesh.fsdp or mesh.tensor',
  'captures': 'more chips, or sync.codec_up=int4',
  'batch': 'a smaller data.batch_size',
  'step': 'a smaller data.batch_size or data.seq_len, or remat of the layers',
}


class Function(NamedTuple):
  """A compiled function.

  Attributes:
    arguments, outputs, temporaries, code: memory; `outputs` without the donated arguments.
      `temporaries` is all that it needs, if the compiler has refused it.
    collectives: how many of each kind.
    flops: as the compiler counts them: the body of a scan once, no Pallas kernel.
  """

  name: str
  arguments: int
  outputs: int
  temporaries: int
  code: int
  collectives: Mapping[str, int]
  flops: float
  cpu_s: float


class DoesNotFit(Exception):
  """A config needs more memory than a chip has: the largest item, and what to do."""


def prepare() -> None:
  """Sets what libtpu reads, before jax is loaded. Raises ValueError without libtpu."""
  if importlib.util.find_spec('libtpu') is None:
    packages = importlib.metadata.requires('jax') or ()
    pins = [text.partition(';')[0].strip() for text in packages if text.startswith('libtpu')]
    raise ValueError(
      f'the TPU compiler is not installed: {sys.executable} -m pip install '
      f'"{pins[0] if pins else "libtpu"}" (200 MB; the extra [aot])'
    )
  os.environ |= {
    'JAX_PLATFORMS': 'cpu',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',  # else a second process fails, at a file in /tmp
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_ACCELERATOR_TYPE': os.environ.get('TPU_ACCELERATOR_TYPE', 'v6e-4'),  # or it warns
  }


def chip(topology: str) -> str:
  """The kind of the chips of a topology. Raises ValueError.

  >>> chip('v6e:4x4')
  'v6e'
  """
  if not _TOPOLOGY.fullmatch(topology):
    raise ValueError(
      f'--topology is {topology!r}: name one, for example v6e:4x4, v5e:2x4 or v5p:2x2x1'
    )
  return topology.partition(':')[0]


def look_up(topology: str) -> list[Any]:
  """The chips of a topology, as devices of jax. Raises ValueError."""
  from jax.experimental import topologies

  chip(topology)
  try:
    return list(topologies.get_topology_desc(topology, platform='tpu').devices)
  except Exception as error:  # of several types
    raise ValueError(f'there is no topology {topology}: {error}') from error


class CompiledLearner:
  """A learner of a config on these devices, made of shapes. Raises ValueError.

  Attributes:
    kind: of the fragment that takes the most memory.
    arrays: bytes that are on a chip all the time, with every fragment captured.
    flops: of a step on a chip, by the formula of the task; 0: it has none.
  """

  def __init__(self, config: Any, devices: list[Any]):
    import jax
    import numpy as np

    from diloco_jax.config import build, run_config
    from diloco_jax.learner import on_device
    from diloco_jax.train import mesh as mesh_lib
    from diloco_jax.train import optimizer as optimizer_lib
    from diloco_jax.train import step as step_lib

    self.assembled = build.assemble(config, data=False)
    self.devices, task = devices, self.assembled.task
    if task is None:
      raise ValueError('a loop of your own has no step here: compile it with jax itself')
    if config.mesh.num_devices != len(devices):
      raise ValueError(
        f'the topology has {len(devices)} chips and the mesh {config.mesh.num_devices}: '
        f'for example --config.mesh.data=1 --config.mesh.fsdp={len(devices)}'
      )
    mesh = mesh_lib.make_mesh(config.mesh, devices)
    tx = optimizer_lib.make_optimizer(config.optimizer, task)
    abstract = jax.eval_shape(
      lambda tree: step_lib.TrainState(tree, tx.init(task.trained(tree))), self.assembled.shapes
    )
    shardings = mesh_lib.tree_shardings(mesh, abstract, task.partition)
    like = lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)
    state = jax.tree.map(like, abstract, shardings)
    if config.task == run_config.DECODER:  # without its corpus, which may be elsewhere
      batch = np.broadcast_to(
        np.uint8(0), (task.tokens_per_batch // config.data.seq_len, config.data.seq_len + 1)
      )
    else:
      batch = task.batches(0)[0]
    rows = mesh_lib.batch_sharding(mesh)
    batch = jax.tree.map(lambda leaf: like(leaf, rows), batch)
    self._step = step_lib.make_train_step(task, tx, mesh, shardings)
    self._arguments = state, batch, jax.ShapeDtypeStruct((), np.float32)
    self._exchange = on_device.Exchange(
      self.assembled,
      types.SimpleNamespace(
        params=state.params, shardings=shardings, replicated=mesh_lib.replicated(mesh)
      ),
    )
    self.kind = max(self._exchange.kinds, key=lambda kind: kind.size)
    values = sum(kind.size for kind in self._exchange.kinds)
    self.flops = task.flops_per_token * task.tokens_per_batch / len(devices)
    self.arrays = {
      'parameters': _bytes(state.params),
      'moments': _bytes(state.opt_state),
      'anchors': 4 * values,
      'captures': self.assembled.codec_up.encoded_size(values),
      'batch': _bytes(batch),
    }

  def functions(self) -> Iterator[Function]:
    """Compiles the step, and for the largest fragment encode, adopt and apply."""
    yield _compile('step', lambda: self._step.lower(*self._arguments))
    for name in ('encode', 'adopt', 'apply'):
      lower = getattr(self._exchange, f'lower_{name}')
      yield _compile(name, lambda: lower(self.kind))


def _bytes(tree: Any) -> int:
  """The bytes of arrays on one device."""
  import jax

  part = lambda leaf: math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
  return sum(map(part, jax.tree.leaves(tree)))


def _compile(name: str, lower: Any) -> Function:
  import jax

  begun_s = time.process_time()
  try:
    compiled = lower().compile()
  except jax.errors.JaxRuntimeError as error:
    used = _USED.search(str(error))
    if used is None:
      raise
    needed = int(float(used[1]) * _UNITS[used[2]])
    return Function(name, 0, 0, needed, 0, {}, 0.0, time.process_time() - begun_s)
  sizes = compiled.memory_analysis()
  counts = collections.Counter(re.findall(_COLLECTIVE, compiled.as_text()))
  return Function(
    name,
    sizes.argument_size_in_bytes,
    sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
    sizes.temp_size_in_bytes,
    sizes.generated_code_size_in_bytes,
    dict(counts),
    compiled.cost_analysis().get('flops', 0.0),
    time.process_time() - begun_s,
  )


def peak(arrays: Mapping[str, int], function: Function) -> int:
  """The most bytes on a chip while a function runs."""
  return sum(arrays.values()) + function.outputs + function.temporaries


def verdict(hbm: int, arrays: Mapping[str, int], functions: list[Function]) -> str:
  """Says how full a chip is.

  Args:
    hbm: of a chip.
    arrays: bytes that are on a chip all the time.
    functions: they run one at a time, each with its bytes beside `arrays`.

  Raises:
    DoesNotFit: all of it is more than `hbm`.
  """
  fullest = max(functions, key=lambda function: peak(arrays, function), default=None)
  most = sum(function.code for function in functions)
  most += peak(arrays, fullest) if fullest else sum(arrays.values())
  during = f' while {fullest.name} runs' if fullest else ''
  if most <= hbm:
    return f'fits: at most {most / GIB:.2f} of {hbm / GIB:.0f} GiB{during}, {most / hbm:.0%}'
  items = collections.Counter(arrays)
  if fullest:
    items[f'temporaries of {fullest.name}'] = fullest.temporaries
  item, size = items.most_common(1)[0]
  remedy = _REMEDIES.get(item.removeprefix('temporaries of '), 'more and smaller sync.fragments')
  raise DoesNotFit(
    f'does not fit: {most / GIB:.2f} of {hbm / GIB:.0f} GiB{during}; the largest item: {item}, '
    f'{size / GIB:.2f} GiB; use {remedy}'
  )
