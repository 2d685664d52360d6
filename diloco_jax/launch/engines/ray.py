"""The engine of a Ray cluster.

Ray stays in an environment of its own, and our programs in theirs: this module writes what is to
run to WORKDIR/ray.json and becomes `RAY_PYTHON -I ray_driver.py WORKDIR/ray.json` (ray_driver.py).
"""

import json
import os
import pathlib
import sys
from typing import NoReturn

from absl import flags

from diloco_jax.launch import cli, supervisor
from diloco_jax.launch import spec as spec_lib

_DRIVER = pathlib.Path(__file__).with_name('ray_driver.py')
_TETHER = pathlib.Path(__file__).parents[1] / 'die_with_parent.py'
_PYTHON = flags.DEFINE_string('ray_python', '', "The Python of Ray's environment on this machine.")
_ADDRESS = flags.DEFINE_string(
  'ray_address', 'local', 'HOST:PORT of the cluster, or auto; local: start Ray on this machine.'
)
_RESOURCES = flags.DEFINE_string(
  'ray_resources',
  '{}',
  "JSON: what Ray gives each machine of a program, by the program's name or role, for example "
  '{"syncer": {"CPU": 4}, "l0": {"TPU": 4, "my-slice": 1}}; default: its chips of --topology, or '
  'one CPU.',
)
_NODE_PYTHON = flags.DEFINE_string(
  'node_python', '', 'The Python of the programs, on every machine; default: that of this command.'
)


def places(request: spec_lib.Request) -> spec_lib.Places:
  """Words in braces are for the driver, which knows them once Ray has found the machines."""
  if not _PYTHON.value:
    raise ValueError(
      '--engine=ray needs --ray_python: python3 -m venv ray && ray/bin/pip install ray, then '
      '--ray_python=ray/bin/python'
    )
  if not request.tls:
    raise ValueError('--engine=ray needs --tls, a folder that diloco certs made, see its --help')
  return spec_lib.Places(
    workdir='{workdir}',
    syncer='file:{workdir}/address',
    listen='{ip}:0',
    tls='{workdir}/certs',
    meet=('--hosts={hosts}', '--host={host}', '--coordinator={coordinator}'),
  )


def run(described: spec_lib.Spec, request: spec_lib.Request, places: spec_lib.Places) -> NoReturn:
  """Becomes the driver. Raises NeverRetry if it cannot."""
  del places
  workdir = request.workdir or f'~/runs/{request.run}'
  folder = pathlib.Path(os.path.expanduser(os.path.expandvars(workdir))).absolute()
  python = os.path.abspath(_PYTHON.value)
  with cli.never_retry(ValueError, OSError):
    folder.joinpath('logs').mkdir(mode=cli.folder_mode(), parents=True, exist_ok=True)
    file = folder / 'ray.json'
    file.write_text(json.dumps(describe(described, request, workdir, folder / 'logs'), indent=1))
    print(f'run {described.name}: the output of each program is in {folder}/logs', flush=True)
    ours = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    os.execve(python, [python, '-I', str(_DRIVER), str(file)], {**ours, 'RAY_worker_niceness': '0'})


def describe(
  described: spec_lib.Spec, request: spec_lib.Request, workdir: str, logs: pathlib.Path
) -> dict:
  """What the driver reads. Raises ValueError."""
  resources = json.loads(_RESOURCES.value)
  python = _NODE_PYTHON.value or sys.executable
  path = {'PYTHONPATH': str(cli.CHECKOUT)} if cli.CHECKOUT else {}
  for one in described.programs:
    for secret in one.secrets:
      if not pathlib.Path(request.tls, one.name, secret).is_file():
        raise ValueError(
          f'--tls={request.tls} has no {one.name}/{secret}: diloco certs issue {one.name} '
          f'--folder={request.tls}'
        )
  return {
    'address': _ADDRESS.value,
    'workdir': workdir,
    'logs': str(logs),
    'cwd': os.getcwd(),
    'tether': _TETHER.read_text(),
    'ends': cli.ENDS,
    'never_retry': cli.NEVER_RETRY,
    'interrupted': cli.INTERRUPTED,
    'stop_s': max(supervisor.STOP_S, request.config.train.drain_s),
    'programs': [
      {
        'name': one.name,
        'argv': [python, '-m', 'diloco_jax', *one.argv[1:]],
        'environment': {**one.environment, **path},
        'hosts': one.hosts,
        'resources': resources.get(one.name, resources.get(one.role, _resources(one))),
        'secrets': [
          str(pathlib.Path(request.tls, one.name, secret).absolute()) for secret in one.secrets
        ],
        'restarts': one.restarts,
      }
      for one in described.programs
    ],
  }


def _resources(program: spec_lib.Program) -> dict[str, int]:
  return {'TPU': program.chips} if program.topology else {'CPU': 1}
