"""The engine of this machine, with the supervisor of `diloco train` (launch/supervisor.py).

It runs a whole run, or a part of one whose other programs are on other machines.
"""

import functools
import pathlib
from collections.abc import Callable, Sequence

from absl import flags

from diloco_jax.launch import cli, local_run
from diloco_jax.launch import spec as spec_lib
from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.process import exits, run_folder
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import folders

RESUME = flags.DEFINE_bool(
  'resume', False, 'With --engine=local or ray: continue the run in --workdir.'
)
_LISTEN = flags.DEFINE_string(
  'listen', '', 'With --engine=local or systemd: HOST:PORT for learners elsewhere, with --tls.'
)


def choose(request: spec_lib.Request) -> spec_lib.Choices:
  if request.topology:
    raise ValueError('--topology: learners on this machine take the accelerators that it has')
  if request.tls and not (_LISTEN.value or request.syncer):
    raise ValueError(
      f'--tls={request.tls}: the programs of one machine need no certificates; leave it out, or '
      'give --listen=HOST:PORT for learners on other machines'
    )
  workdir = request.workdir or folders.new_run(request.run)
  tls = str(pathlib.Path(request.tls).absolute()) if request.tls else ''
  return local_run.choose(pathlib.Path(workdir).absolute(), _LISTEN.value, tls)


def run(
  described: spec_lib.Spec,
  request: spec_lib.Request,
  choices: spec_lib.Choices,
  programs: Callable[[spec_lib.Spec], list[supervisor_lib.LocalProgram]] = local_run.programs,
  more: Sequence[str] = (),
) -> int:
  """`programs`: of the supervisor. `more`: flags of the command that continues the run."""
  config, workdir = request.config, pathlib.Path(choices.workdir)
  here = programs is local_run.programs  # not on other machines
  whole = here and local_run.is_whole(config, described)
  with exits.never_retry(ValueError, files_lib.DirectoryError):
    try:
      run_folder.open_workdir(
        config, workdir, resume=RESUME.value, changed=cli.overrides(), whole=whole
      )
    except run_folder.NothingLeft as ended:
      print(ended)
      return 0
  carry_out = functools.partial(local_run.run_processes, config, workdir, described, programs)
  words = {
    'name': request.name,
    'topology': request.topology,
    'tls': request.tls,
    'listen': _LISTEN.value,
    'syncer': request.syncer,
    'loop': request.loop,
    'only': ','.join(request.only),
  }
  again = [f'--{name}={value}' for name, value in words.items() if value]
  return local_run.run(config, workdir, carry_out, ['launch', *more, *again])
