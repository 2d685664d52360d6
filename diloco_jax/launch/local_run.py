"""Runs a whole experiment on this machine: starts its programs, writes the report."""

import asyncio
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence

from diloco_jax.config import run_config
from diloco_jax.launch import accelerators, cli, kill_plan, run_folder
from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.report import folder, live, run_facts
from diloco_jax.report import records as records_lib
from diloco_jax.report import summary as summary_lib
from diloco_jax.storage import files

SUPERVISOR = 'supervisor'

# By default glibc returns freed pages to the kernel and takes new ones, one page fault for 4 KiB;
# for buffers that live as long as one fragment this costs more than the arithmetic. So it keeps
# them (32 MiB is the largest threshold that it accepts), and asks for pages of 2 MiB.
_MALLOC = ':'.join(
  f'glibc.malloc.{name}={value}'
  for name, value in {
    'hugetlb': 1,
    'mmap_threshold': 32 << 20,
    'trim_threshold': 1 << 30,
    'top_pad': 16 << 20,
  }.items()
)


def environment(devices: int, base: Mapping[str, str] = os.environ) -> dict[str, str]:
  """The environment of a process that has `devices` emulated devices if jax finds no accelerator;
  the user's settings win."""
  ours = {
    'JAX_COMPILATION_CACHE_DIR': str(cli.cache_folder(base)),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    'TF_CPP_MIN_LOG_LEVEL': '2',
    'GRPC_VERBOSITY': 'ERROR',
  }
  path = os.pathsep.join(filter(None, [str(cli.CHECKOUT or ''), base.get('PYTHONPATH', '')]))
  return {
    **ours,
    **base,
    'GLIBC_TUNABLES': ':'.join(filter(None, [_MALLOC, base.get('GLIBC_TUNABLES')])),
    'JAX_NUM_CPU_DEVICES': str(devices),
    'PYTHONUNBUFFERED': '1',
    **({'PYTHONPATH': path} if path else {}),
  }


def learner_environments(
  processes: int, devices: int, found: accelerators.Accelerators | None
) -> list[dict[str, str]]:
  """The environment of each process of the learners: accelerators of its own if there are enough,
  else emulated CPU devices. A user's JAX_PLATFORMS wins; a user's CUDA_VISIBLE_DEVICES is what they
  share."""
  shares = accelerators.share(found, processes, devices)
  if shares is None:
    shares = [{'JAX_PLATFORMS': os.environ.get('JAX_PLATFORMS', 'cpu')}] * processes
    if found and 'JAX_PLATFORMS' not in os.environ:
      print(
        f'{processes} processes with {devices} devices each cannot share the {found.count} '
        f'{found.kind} devices that are visible here: they use emulated CPU devices',
        flush=True,
      )
  return [{**environment(devices), **share} for share in shares]


def available_cpus() -> list[int]:
  """The CPUs that this process may use; empty if the system has no such call."""
  if not hasattr(os, 'sched_getaffinity'):
    return []
  return sorted(os.sched_getaffinity(0))


def share_cpus(learners: int, cpus: Sequence[int]) -> list[Sequence[int]]:
  """Assigns CPUs to each learner, as if each island had its own hardware.

  Without this, four learners with two emulated devices each compete for two cores, and some steps
  take four times as long as others.

  >>> share_cpus(4, [0, 1])
  [[0], [1], [0], [1]]
  >>> share_cpus(2, [0, 1, 2, 3])
  [[0, 1], [2, 3]]
  """
  if not cpus:
    return [()] * learners
  if learners >= len(cpus):
    return [[cpus[index % len(cpus)]] for index in range(learners)]
  return [
    list(cpus[index * len(cpus) // learners : (index + 1) * len(cpus) // learners])
    for index in range(learners)
  ]


def programs(
  config: run_config.Config,
  workdir: pathlib.Path,
  config_flags: Sequence[str],
  alone: bool,
) -> list[supervisor_lib.Program]:
  """The programs of a run. `alone`: one learner and no syncer."""
  common = [*config_flags, f'--workdir={workdir}']
  # Learners read the address file at every dial, so they may start before the syncer, and a
  # restarted syncer may listen on another port.
  address = 'none' if alone else f'file:{workdir / run_folder.ADDRESS}'

  names = run_config.learner_ids(1 if alone else config.sync.learners)
  cpus = dict(zip(names, share_cpus(len(names), available_cpus())))
  hosts = config.mesh.hosts
  environments = learner_environments(
    len(names) * hosts, config.mesh.num_devices // hosts, accelerators.find()
  )

  def learner(name: str) -> supervisor_lib.Program:
    first = names.index(name) * hosts
    return supervisor_lib.Program(
      name=name,
      environment=environments[first],
      hosts=environments[first : first + hosts] if hosts > 1 else ({},),
      cpus=cpus[name],
      command=[
        sys.executable,
        '-m',
        'diloco_jax',
        'learner',
        *common,
        f'--learner_id={name}',
        f'--syncer={address}',
      ],
    )

  if alone:
    return [learner(names[0])]
  syncer = supervisor_lib.Program(
    name=supervisor_lib.SYNCER,
    environment=environment(1),
    command=[sys.executable, '-m', 'diloco_jax', 'syncer', *common],
  )
  return [syncer, *(learner(name) for name in names)]


def run(
  config: run_config.Config,
  workdir: pathlib.Path,
  config_flags: Sequence[str],
  alone: bool = False,
  single: Callable[[], supervisor_lib.Outcome] | None = None,
) -> int:
  """Runs the experiment, writes the report, prints the summary and returns the exit code.

  single: runs all nodes in this process instead of starting a process for each.
  """
  print(f'run {config.name} in {workdir}', flush=True)
  if (single or alone) and config.chaos.enabled and config.chaos.kills:
    which = '--controller=single' if single else '--syncer=none'
    print(f'no chaos with {which}: after a kill nothing would train on', flush=True)
  if single:
    outcome = single()
  else:
    with cli.never_retry(files.DirectoryError):
      outcome = _run_processes(config, workdir, config_flags, alone)
  if outcome.code == cli.NEVER_RETRY:
    raise cli.NeverRetry(f'{outcome.text}{_never_began(workdir)}')
  summary = summary_lib.write(workdir, plot=not outcome.interrupted)
  print('\n' + summary_lib.text(summary, workdir, shutil.get_terminal_size().columns), end='')
  if outcome.code:
    given = {'--syncer=none': alone, '--controller=single': single is not None}
    words = [word for word, is_given in given.items() if is_given] + cli.file_flags()
    again = cli.command('train', '--resume', f'--workdir={workdir}', *words)
    print(f'{outcome.text}; continue with: {again}', file=sys.stderr)
  return outcome.code


def _never_began(workdir: pathlib.Path) -> str:
  """What to do with the folder of a run that was refused before its first step; '' after one."""
  if any(fact['name'] == 'step' for fact in records_lib.records(workdir)):
    return ''
  return (
    f'. The run has made no step, and {workdir} holds nothing of worth: remove it, or choose '
    'another --workdir, and start again'
  )


def _run_processes(
  config: run_config.Config,
  workdir: pathlib.Path,
  config_flags: Sequence[str],
  alone: bool,
) -> supervisor_lib.Outcome:
  names = run_config.learner_ids(1 if alone else config.sync.learners)
  display = live.make()
  recorder = records_lib.Recorder(workdir, SUPERVISOR, tensorboard=False)
  supervisor = supervisor_lib.Supervisor(
    programs(config, workdir, config_flags, alone),
    workdir,
    run_facts.RunFacts(names, config.train.steps, syncer=not alone, **folder.pace(config)),
    recorder,
    kills=() if alone else kill_plan.plan(config.chaos, names),
    listen=display.listen,
    tick=display.tick,
    stop_s=max(supervisor_lib.STOP_S, config.train.drain_s),
  )
  try:
    return asyncio.run(supervisor.run())
  finally:
    display.close()
    recorder.close()
