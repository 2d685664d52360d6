"""Runs a whole experiment on this machine: starts its programs, writes the report."""

import asyncio
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence

from diloco_jax.config import run_config
from diloco_jax.launch import cli
from diloco_jax.launch import spec as spec_lib
from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.process import accelerators, exits, run_folder
from diloco_jax.protocol import formats
from diloco_jax.report import folder as folder_lib
from diloco_jax.report import header, live, run_facts
from diloco_jax.report import records as records_lib
from diloco_jax.report import summary as summary_lib
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import folders

SUPERVISOR = 'supervisor'


def environment(devices: int, base: Mapping[str, str] = os.environ) -> dict[str, str]:
  """The environment of a process that has `devices` emulated devices if jax finds no accelerator;
  the user's settings win."""
  path = os.pathsep.join(filter(None, base.get('PYTHONPATH', '').split(os.pathsep)))
  tunables = [spec_lib.ENVIRONMENT['GLIBC_TUNABLES'], base.get('GLIBC_TUNABLES')]
  return {
    'JAX_COMPILATION_CACHE_DIR': str(folders.compiled(base)),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    **spec_lib.ENVIRONMENT,
    **base,
    'GLIBC_TUNABLES': ':'.join(filter(None, tunables)),
    'JAX_NUM_CPU_DEVICES': str(devices),
    'PYTHONUNBUFFERED': '1',
    'PYTHONPATH': path,  # an empty part would be the folder of the start
  }


def learner_environments(
  processes: int, devices: int, available: accelerators.Accelerators | None
) -> list[dict[str, str]]:
  """The environment of each process of the learners: accelerators of its own if there are enough,
  else emulated CPU devices. A user's JAX_PLATFORMS wins; a user's CUDA_VISIBLE_DEVICES is what they
  share."""
  shares = accelerators.share(available, processes, devices)
  if shares is None:
    shares = [{'JAX_PLATFORMS': os.environ.get('JAX_PLATFORMS', 'cpu')}] * processes
    if available and 'JAX_PLATFORMS' not in os.environ:
      print(
        f'{processes} processes with {devices} devices each cannot share the {available.count} '
        f'{available.kind} devices that are visible here: they use emulated CPU devices',
        flush=True,
      )
  return [{**environment(devices), **share} for share in shares]


def emulate(config: run_config.Config) -> None:
  """Prepares this process, which has not imported jax, for all nodes of a run, and one device more,
  for the global model. Raises NeverRetry."""
  devices = config.mesh.num_devices * config.sync.learners + 1
  os.environ.update({'JAX_PLATFORMS': 'cpu', **environment(devices)})
  with cli.importing_jax():
    from diloco_jax.process import lifecycle
  lifecycle.prepare_jax(devices)


def share_cpus(learners: int, cpus: Sequence[int]) -> list[Sequence[int]]:
  """Assigns CPUs to each learner, as if each island had its own hardware.

  Without this, four learners with two emulated devices each compete for two cores, and some steps
  take four times as long as others.

  >>> share_cpus(4, [0, 1])
  [[0], [1], [0], [1]]
  >>> share_cpus(2, [0, 1, 2, 3])
  [[0, 1], [2, 3]]
  """
  if not cpus:  # the system does not say which there are
    return [()] * learners
  if learners >= len(cpus):
    return [[cpus[index % len(cpus)]] for index in range(learners)]
  return [
    list(cpus[index * len(cpus) // learners : (index + 1) * len(cpus) // learners])
    for index in range(learners)
  ]


def describe(
  config: run_config.Config,
  workdir: pathlib.Path,
  config_flags: Sequence[str],
  alone: bool = False,
) -> spec_lib.Spec:
  """The description of a run on this machine. `alone`: one learner and no syncer."""
  request = spec_lib.Request(
    config=config, config_flags=config_flags, syncer=spec_lib.ALONE if alone else ''
  )
  return spec_lib.make(request, choose(workdir))


def choose(workdir: pathlib.Path, listen: str = '', tls: str = '') -> spec_lib.Choices:
  """Learners read the address file at every dial, so they may start before the syncer, and a
  restarted syncer may listen on another port."""
  return spec_lib.Choices(
    workdir=str(workdir), syncer=f'file:{workdir / run_folder.ADDRESS}', listen=listen, tls=tls
  )


def programs(described: spec_lib.Spec) -> list[supervisor_lib.LocalProgram]:
  """The same programs for the supervisor: with an interpreter, and shares of this machine."""
  learners = described.learners
  may_use = sorted(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else []
  cpus = share_cpus(len(learners), may_use)
  environments = iter(())
  if learners:
    processes = sum(learner.hosts for learner in learners)
    environments = iter(learner_environments(processes, learners[0].chips, accelerators.find()))
  local_programs = []
  for program in described.programs:
    is_syncer = program.role == spec_lib.SYNCER
    hosts = [environment(1)] if is_syncer else [next(environments) for _ in range(program.hosts)]
    local_programs.append(
      supervisor_lib.LocalProgram(
        name=program.name,
        command=spec_lib.command(program, cli.PROGRAM),
        environment={**program.environment, **hosts[0]},
        hosts=hosts if len(hosts) > 1 else ({},),
        cpus=() if is_syncer else cpus[learners.index(program)],
      )
    )
  return local_programs


def run(
  config: run_config.Config,
  workdir: pathlib.Path,
  carry_out: Callable[[], supervisor_lib.Outcome],
  again: Sequence[str],
) -> int:
  """Runs the experiment, writes the report, prints the summary and returns the exit code.

  Args:
    carry_out: runs the programs to their end.
    again: the command that continues the run, but for its folder.
  """
  folder = min(str(workdir), os.path.relpath(workdir), key=len)
  # Lines that no terminal shows have no limit.
  columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
  watch = f'watch it: {cli.command("status", f"--workdir={folder}", "--open")}'
  print(f'run {config.name} in {folder}\n{header.shell(watch, columns)}', flush=True)
  with exits.never_retry(files_lib.DirectoryError, formats.OtherFormat):
    outcome = carry_out()
  if outcome.code == exits.NEVER_RETRY:
    raise exits.NeverRetry(f'{outcome.text}{_never_began(workdir)}')

  def print_summary() -> None:
    summary = summary_lib.write(workdir, plot=not outcome.interrupted)
    text = summary_lib.text(summary, workdir, shutil.get_terminal_size().columns)
    print('\n' + text, end='', flush=True)

  if not header.try_to_show(print_summary, 'the summary', cli.command('report', str(workdir))):
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the old one may be full
  if outcome.code:
    words = [again[0], '--resume', f'--workdir={workdir}', *again[1:]]
    print(f'{outcome.text}; continue with: {cli.command(*words)}', file=sys.stderr)
  return outcome.code


def _never_began(workdir: pathlib.Path) -> str:
  """What to do with the folder of a run that was refused before its first step; '' after one."""
  if any(fact['name'] == 'step' for fact in records_lib.records(workdir)):
    return ''
  return (
    f'. The run has made no step, and {workdir} holds nothing of worth: remove it, or choose '
    'another --workdir, and start again'
  )


def run_processes(
  config: run_config.Config,
  workdir: pathlib.Path,
  described: spec_lib.Spec,
  make: Callable[[spec_lib.Spec], list[supervisor_lib.LocalProgram]] = programs,
  kills: Sequence[supervisor_lib.Kill] = (),
) -> supervisor_lib.Outcome:
  """Runs the programs under the supervisor. `make`: turns the programs into those that the
  supervisor runs. `kills`: of programs, on the way."""
  names = [learner.name for learner in described.learners]
  display = live.Display()
  recorder = records_lib.Recorder(workdir, SUPERVISOR, tensorboard=False)
  supervisor = supervisor_lib.Supervisor(
    make(described),
    workdir,
    run_facts.RunFacts(names, syncer=described.has_syncer, **folder_lib.pace(config)),
    recorder,
    kills=kills,
    listen=display.listen,
    tick=display.tick,
    stop_s=max(supervisor_lib.STOP_S, config.train.drain_s),
  )
  try:
    return asyncio.run(supervisor.run())
  finally:
    recorder.close()


def is_whole(config: run_config.Config, described: spec_lib.Spec) -> bool:
  """Whether the syncer and all learners are described, so no part of the run is elsewhere."""
  return len(described.programs) == 1 + config.sync.learners
