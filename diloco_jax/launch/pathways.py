"""How a single controller starts on Pathways: `diloco train --controller=single --pathways`.

There jax is a client of a proxy, in front of all slices. All their devices count as local to this
process, process 0; `slice_index` tells the slices apart. jax's own CPU devices stay those of the
controller. docs/accelerators.md lists what was tried. Source: pathwaysutils 0.1.13, and "Port JAX
workloads to Pathways" of Google Cloud.
"""

import importlib.util
import os
from collections.abc import Mapping

from diloco_jax.launch import cli, local_run
from diloco_jax.process import exits

_TARGET = 'JAX_BACKEND_TARGET'
_PERSISTENCE = 'ENABLE_PATHWAYS_PERSISTENCE'


def require(single: bool, base: Mapping[str, str] = os.environ) -> None:
  """Refuses what cannot work, before jax is imported and a folder is made.

  Args:
    single: one process drives all nodes.
    base: the environment of this process.

  Raises:
    ValueError: with the remedy.
  """
  if not single:
    raise ValueError('--pathways needs --controller=single: one process drives all slices')
  if importlib.util.find_spec('pathwaysutils') is None:
    raise ValueError("--pathways needs pathwaysutils: pip install 'diloco-jax[pathways]'")
  if not (base.get('JAX_PLATFORMS') or 'proxy').startswith('proxy'):
    # pathwaysutils would do nothing then, and the run would train on the controller.
    raise ValueError(
      f'JAX_PLATFORMS={base["JAX_PLATFORMS"]} hides the slices from --pathways: unset it, or set '
      'JAX_PLATFORMS=proxy,cpu'
    )
  if not base.get(_TARGET):
    raise ValueError(
      f'--pathways needs {_TARGET}, the address of the proxy: {_TARGET}=grpc://127.0.0.1:29000 if '
      'it is in the same pod'
    )
  if base.get(_PERSISTENCE, '0') != '0':
    raise ValueError(
      f'{_PERSISTENCE}={base[_PERSISTENCE]} makes the workers read and write checkpoints, those on '
      'meshes only, and the syncer has no mesh: unset it, and they pass through the controller'
    )


def start(devices: int) -> None:
  """Connects jax, which must not have been used, to the proxy.

  Args:
    devices: as many as all islands need.

  Raises:
    NeverRetry: the slices have fewer devices.
    NotInTime: the proxy does not answer.
  """
  os.environ.update(local_run.environment(devices=1))
  with cli.importing_jax():
    import jax
    import pathwaysutils

    from diloco_jax.process import lifecycle

  # A config of the user's may have imported jax before, which read the environment then.
  jax.config.update('jax_platforms', 'proxy,cpu')  # also the controller's own
  jax.config.update('jax_num_cpu_devices', 1)
  jax.config.update('jax_enable_compilation_cache', False)  # Pathways keeps what it compiles
  pathwaysutils.initialize()
  try:
    present = jax.devices()
  except RuntimeError as error:
    raise exits.NotInTime(
      f'no Pathways proxy answers at {_TARGET}={os.environ[_TARGET]} ({exits.one_line(error)}): '
      'start it, or correct the address; nothing was trained'
    ) from error
  lifecycle.prepare_jax(devices=1)
  # Else an island would compute with a chip of another one what is nowhere yet, and fail with it.
  jax.config.update('jax_default_device', jax.local_devices(backend='cpu')[0])
  if len(present) < devices:
    slices = len({getattr(device, 'slice_index', 0) for device in present})
    raise exits.NeverRetry(
      f'all islands need {devices} devices, Pathways has {len(present)} in {slices} slices: add '
      'slices, or lower sync.learners or config.mesh'
    )
