"""The description of a run: its programs, and what each of them needs.

`make` is a pure function of what the user asks for (`Request`) and of what only the engine knows
(`Choices`). Every engine (launch/engines) gets the same description: some run its programs, some
write it as text for another system. `exits.end` says what an exit code means to all of them.
"""

import dataclasses
import math
import pathlib
import re
import shlex
from collections.abc import Mapping, Sequence

from diloco_jax.certs import check as check_lib
from diloco_jax.certs import names
from diloco_jax.config import run_config
from diloco_jax.launch import aot
from diloco_jax.transport import payloads as payloads_lib

SYNCER, LEARNER = names.SYNCER, names.LEARNER
ALONE = 'none'  # instead of the syncer's address
CPU = 'cpu'  # instead of a topology
CHIPS_PER_HOST = 4  # of a TPU slice
_SPARE_S = 10  # beside train.drain_s

ENVIRONMENT = {
  'GLIBC_TUNABLES': payloads_lib.GLIBC_TUNABLES,
  'GRPC_VERBOSITY': 'NONE',
  'PYTHONUNBUFFERED': '1',
  'TF_CPP_MIN_LOG_LEVEL': '2',
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
  """A program to keep running until it is done.

  Attributes:
    name: 'syncer', or the id of a learner.
    role: SYNCER or LEARNER.
    argv: its command, which begins with 'diloco', where an engine puts its interpreter (`command`);
      or the command of the user's own loop.
    environment: what it needs beside the environment of its machine.
    hosts: the machines on which the command runs at the same time, more than one for a learner of
      several hosts; they start and end together.
    chips: accelerators of each host; 0: it needs none.
    topology: of the TPU slice that all hosts are, as 'v6e:4x4'; '' for other machines.
    disk_gib: the size of the disk that must outlive its machine; 0: it needs none.
  """

  name: str
  role: str
  argv: Sequence[str]
  environment: Mapping[str, str]
  hosts: int = 1
  chips: int = 0
  topology: str = ''
  disk_gib: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
  """The programs of a run, or a part of them. `name`: a part of a DNS name."""

  name: str
  programs: Sequence[Program]

  @property
  def learners(self) -> list[Program]:
    return [program for program in self.programs if program.role == LEARNER]

  @property
  def has_syncer(self) -> bool:
    return len(self.learners) < len(self.programs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
  """What the user asks for.

  Attributes:
    config: of the run.
    config_flags: the same on the command line of a program.
    name: of the run; '': `config.name`.
    workdir: the folder of the run; '': the engine chooses one.
    tls: the folder of this machine that `diloco certs` made, or the folder of one program in it;
      '': no certificates.
    topology: of the TPU slice of each learner; '' or CPU: config.mesh.hosts other machines.
    syncer: the address of a syncer that runs elsewhere, or ALONE; '': it is part of the run.
    loop: the command of each learner of a run of own loops, in which {learner}, {syncer},
      {workdir}, {tls} and {store} are replaced by the values of that learner.
    port: where the syncer listens; None: the engine chooses.
    only: names of the programs to start; none: all.
    disk_gib: the size of the disk of the syncer.
  """

  config: run_config.Config
  config_flags: Sequence[str]
  name: str = ''
  workdir: str = ''
  tls: str = ''
  topology: str = ''
  syncer: str = ''
  loop: str = ''
  port: int | None = None
  only: Sequence[str] = ()
  disk_gib: int = 0

  @property
  def tpus(self) -> str:
    """The TPU slice of each learner; '': other machines."""
    return '' if self.topology == CPU else self.topology

  @property
  def stop_s(self) -> int:
    """How long a program may take to end in order."""
    return math.ceil(self.config.train.drain_s) + _SPARE_S

  @property
  def run(self) -> str:
    """The name of the run, as a part of a DNS name. Raises ValueError."""
    name = self.name or self.config.name
    part = re.sub('[^a-z0-9]+', '-', name.lower()).lstrip('-0123456789')[:40].rstrip('-')
    if not part:
      raise ValueError(f'the name of the run, {name!r}, has no letter: give --name=TEXT')
    return part


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
  """What only the engine can choose.

  Attributes:
    workdir: the folder of the run on the machines of its programs.
    syncer: the address that learners dial (commands/learner.py).
    listen: where the syncer listens; '': a Unix socket in `workdir`.
    tls: a folder with a folder of certificates for each program, by its name; '': none.
    host_flags: flags by which the hosts of a learner find each other.
    flags: of every program, with the whole config, where it cannot read the file; none:
      `Request.config_flags`.
  """

  workdir: str
  syncer: str
  listen: str = ''
  tls: str = ''
  host_flags: Sequence[str] = ()
  flags: Sequence[str] = ()


def make(request: Request, choices: Choices) -> Spec:
  """The description of a run. Raises ValueError: one line with a remedy."""
  config = request.config
  programs = [] if request.syncer else [_syncer(request, choices)]
  if request.loop and config.task != run_config.OWN_LOOP:
    raise ValueError(f'--loop={request.loop} is for a config without a task, as own_loop')
  if config.task != run_config.OWN_LOOP or request.loop:
    learners = 1 if request.syncer == ALONE else config.sync.learners
    programs += [_learner(request, choices, name) for name in run_config.learner_ids(learners)]
  elif request.syncer:
    raise ValueError(
      "this config has no task: its learners are loops of the user's own, which diloco_jax.join "
      f'connects to --syncer={request.syncer}; give --loop=COMMAND to start them'
    )
  names = [program.name for program in programs]
  for name in request.only:
    if name not in names:
      raise ValueError(f'--only={name}: there is no such program; use some of {", ".join(names)}')
  chosen = request.only or names
  return Spec(
    name=request.run, programs=[program for program in programs if program.name in chosen]
  )


def _syncer(request: Request, choices: Choices) -> Program:
  listen = [f'--listen={choices.listen}'] if choices.listen else []
  return Program(
    name=SYNCER,
    role=SYNCER,
    argv=[*_command('syncer', SYNCER, request, choices), *listen],
    environment=ENVIRONMENT,
    disk_gib=request.disk_gib,
  )


def _learner(request: Request, choices: Choices, name: str) -> Program:
  hosts, chips = _hosts(request)
  return Program(
    name=name,
    role=LEARNER,
    argv=loop(request, choices, name)
    or [
      *_command('learner', name, request, choices),
      f'--learner={name}',
      f'--syncer={request.syncer or choices.syncer}',
      *(choices.host_flags if hosts > 1 else ()),
    ],
    environment=ENVIRONMENT,
    hosts=hosts,
    chips=chips,
    topology=request.tpus,
  )


def loop(request: Request, choices: Choices, name: str) -> list[str]:
  """The command of a learner that is a loop of the user's own; [] for others."""
  own = {
    '{learner}': name,
    '{syncer}': request.syncer or choices.syncer,
    '{workdir}': choices.workdir,
    '{tls}': str(check_lib.folder(pathlib.Path(choices.tls), name)) if choices.tls else '',
    '{store}': request.config.train.store,
  }
  fill = lambda word: re.sub('|'.join(own), lambda match: own[match[0]], word)
  return [fill(word) for word in shlex.split(request.loop)]


def command(program: Program, diloco: Sequence[str]) -> list[str]:
  """The command of a program where `diloco` is this command."""
  is_ours = program.argv[0] == 'diloco'
  return [*diloco, *program.argv[1:]] if is_ours else list(program.argv)


def _command(command: str, name: str, request: Request, choices: Choices) -> list[str]:
  tls = [f'--tls={check_lib.folder(pathlib.Path(choices.tls), name)}'] if choices.tls else []
  flags = choices.flags or request.config_flags
  return ['diloco', command, *flags, f'--workdir={choices.workdir}', *tls]


def _hosts(request: Request) -> tuple[int, int]:
  """The number of hosts of a learner, and of accelerators of each. Raises ValueError."""
  mesh, topology = request.config.mesh, request.tpus
  if not topology:
    return mesh.hosts, mesh.num_devices // mesh.hosts
  aot.chip(topology)
  chips = math.prod(map(int, topology.partition(':')[2].split('x')))
  hosts = max(1, chips // CHIPS_PER_HOST)
  if chips % hosts or not chips:
    raise ValueError(f'--topology={topology}: {chips} chips are no whole hosts of {CHIPS_PER_HOST}')
  if chips != mesh.num_devices:
    raise ValueError(
      f'--topology={topology} has {chips} chips, the mesh of the config {mesh.num_devices} '
      'devices: give another topology, or for example --config.mesh.data=1 '
      f'--config.mesh.fsdp={chips} --config.mesh.tensor=1'
    )
  return hosts, chips // hosts
