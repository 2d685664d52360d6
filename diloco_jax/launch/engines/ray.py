"""The engine of a Ray cluster, under the supervisor of `diloco train` (launch/supervisor.py).

Ray has an environment of its own. Instead of each program the supervisor runs `RAY_PYTHON -I
ray_driver.py WORKDIR/ray.json NAME`, which runs the program on machines of the cluster, and writes
and ends as the program does (ray_driver.py). So this machine has the logs and records of all.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import sys

from absl import flags

from diloco_jax.certs import allowlist
from diloco_jax.certs import check as check_lib
from diloco_jax.launch import children
from diloco_jax.launch import spec as spec_lib
from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.launch.engines import local, ray_driver
from diloco_jax.process import exits
from diloco_jax.storage import folders

_DRIVER = pathlib.Path(ray_driver.__file__)
flags.declare_key_flag(local.RESUME.name)
_PYTHON = flags.DEFINE_string('ray_python', '', "ray: the Python of Ray's environment here.")
_ADDRESS = flags.DEFINE_string(
  'ray_address', 'auto', 'ray: HOST:PORT of the cluster; auto: the one that runs on this machine.'
)
_RESOURCES = flags.DEFINE_string(
  'ray_resources',
  '{}',
  'ray: JSON, what a program takes of each of its machines, by its name or role, as {"syncer": '
  '{"CPU": 4}, "l0": {"TPU": 4, "my-slice": 1}}; default: its chips of --topology, or one CPU.',
)
_NODE_PYTHON = flags.DEFINE_string(
  'node_python', sys.executable, 'ray: the Python of the programs, on every machine.'
)


def choose(request: spec_lib.Request) -> spec_lib.Choices:
  """Words in braces are known once Ray has found the machines."""
  del request
  return spec_lib.Choices(
    workdir='{workdir}',
    syncer='file:{workdir}/address',
    listen='{ip}:0',
    tls='{workdir}/certs',
    host_flags=('--hosts={hosts}', '--host={host}', '--coordinator={coordinator}'),
  )


def needs(described: spec_lib.Spec, request: spec_lib.Request) -> dict[str, object]:
  alone = all(program.hosts == 1 for program in described.programs)
  return {
    f'--ray_python, a Python with Ray, and not {_PYTHON.value!r}: `python3 -m venv RAY && '
    'RAY/bin/pip install ray`, then --ray_python=RAY/bin/python': shutil.which(_PYTHON.value),
    '--tls, a folder that diloco certs made, see its --help': request.tls,
    '--config.train.store=FOLDER or gs://..., as the hosts of a learner have no common disk': alone
    or request.config.train.store,
  }


def run(described: spec_lib.Spec, request: spec_lib.Request, choices: spec_lib.Choices) -> int:
  named = request.workdir or folders.new_run(request.run)
  if named[0] not in '~$':  # those are others on other machines
    named = os.path.abspath(named)
  workdir = pathlib.Path(os.path.expanduser(os.path.expandvars(named)))
  with exits.never_retry(ValueError):
    text = json.dumps(describe(described, request.tls, f'{named}/machine'), indent=1)

  def programs(described: spec_lib.Spec) -> list[supervisor_lib.LocalProgram]:
    for name in ('address', ray_driver.PLACED):
      (workdir / name).unlink(missing_ok=True)  # of an ended run
    (workdir / 'ray.json').write_text(text, 'utf-8')
    driver = [_PYTHON.value, '-I', str(_DRIVER), str(workdir / 'ray.json')]
    return [
      supervisor_lib.LocalProgram(
        name=program.name, command=[*driver, program.name], environment=os.environ
      )
      for program in described.programs
    ]

  given = [flag for flag in flags.FLAGS.get_key_flags_for_module(__name__) if flag.present]
  more = ['--engine=ray', *(flag.serialize() for flag in given if flag.name != 'resume')]
  more += [f'--workdir={named}'] if named != str(workdir) else []
  choices = dataclasses.replace(choices, workdir=str(workdir))
  return local.run(described, request, choices, programs, more)


def describe(described: spec_lib.Spec, tls: str, workdir: str) -> dict:
  """What the drivers read. Raises ValueError."""
  try:
    resources = json.loads(_RESOURCES.value)
  except ValueError as error:
    raise ValueError(f'--ray_resources={_RESOURCES.value} is not JSON: {error}') from error
  path = {'PYTHONPATH': str(folders.CHECKOUT)} if folders.CHECKOUT else {}
  python = _NODE_PYTHON.value, '-P', '-X', 'utf8'
  programs = {}
  for program in described.programs:
    files = (*check_lib.FILES, *([allowlist.FILE] if program.role == spec_lib.SYNCER else []))
    default = {'TPU': program.chips} if program.topology else {'CPU': 1}
    programs[program.name] = {
      'name': program.name,
      'argv': spec_lib.command(program, [*python, '-m', 'diloco_jax']),
      'environment': {**program.environment, **path},
      'hosts': program.hosts,
      'resources': resources.get(program.name, resources.get(program.role, default)),
      'secrets': [str(pathlib.Path(tls, program.name, file).absolute()) for file in files],
    }
  return {
    'address': _ADDRESS.value,
    'workdir': workdir,
    'cwd': os.getcwd(),
    'tether': children.TETHER.read_text('utf-8'),
    'never_retry': exits.NEVER_RETRY,
    'programs': programs,
  }
