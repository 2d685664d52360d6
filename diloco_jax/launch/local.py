"""Runs a whole experiment on this machine: makes the folder, starts programs, writes the report.

WORKDIR/config.json        the config that started the run
WORKDIR/records/           facts of every process        (report/records.py)
WORKDIR/logs/              output of every process
WORKDIR/tapes/             every turn of every machine   (storage/tapes.py)
WORKDIR/tensorboard/       curves
WORKDIR/syncer/, islands/  checkpoints
WORKDIR/syncer/wal/        the log of outer steps        (storage/outer_log.py)
WORKDIR/snapshots/         run snapshots                 (storage/manifests.py)
WORKDIR/aside-1/           files that a restore moved    (launch/restore.py)
WORKDIR/report/            summary.json, timeline.png    (report/summary.py)
"""

import asyncio
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from diloco_jax.config import run_config
from diloco_jax.launch import kill_plan, program
from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.protocol import agreement
from diloco_jax.report import live, run_facts
from diloco_jax.report import records as records_lib
from diloco_jax.report import summary as summary_lib
from diloco_jax.storage import files
from diloco_jax.train import corpus_files

_ROOT = pathlib.Path(__file__).resolve().parents[2]
SUPERVISOR = 'supervisor'
ADDRESS = 'syncer/address'
_ERROR = 'error: '

# By default glibc returns freed pages to the kernel and takes new ones, one page fault each; for
# buffers that live as long as one fragment this costs more than the arithmetic. 32 MiB is the
# largest threshold that glibc accepts.
_MALLOC = {
  'MALLOC_MMAP_THRESHOLD_': str(32 << 20),
  'MALLOC_TRIM_THRESHOLD_': str(1 << 30),
  'MALLOC_TOP_PAD_': str(16 << 20),
}


def open_workdir(
  config: run_config.Config, workdir: pathlib.Path | None, resume: bool, restored: bool = False
) -> pathlib.Path:
  """Makes the folder of a run, or opens the one to continue; `restored`: a restore has just brought
  it back (restore.py), perhaps with other learners. Raises ValueError."""
  if workdir is None:
    if resume or restored:
      flag = '--restore' if restored else '--resume'
      raise ValueError(f'{flag} needs --workdir=DIR, the run to continue')
    workdir = pathlib.Path('runs') / f'{config.name}-{time.strftime("%Y%m%d-%H%M%S")}'
  workdir = workdir.absolute()
  if resume or restored:
    _check_same_run(config, workdir, restored)
  elif workdir.is_dir() and any(workdir.iterdir()):
    raise ValueError(
      f'{workdir} already holds a run: continue it (--resume), or choose another --workdir'
    )
  corpus_files.list_files(config.data.corpus)
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / ADDRESS).unlink(missing_ok=True)  # the address of an ended run
    (workdir / run_config.FILE).write_text(json.dumps(config.to_dict(), indent=2) + '\n')
  except OSError as error:
    raise ValueError(
      f'cannot write {workdir} ({error.strerror}); choose another --workdir'
    ) from None
  return workdir


def restore(config: run_config.Config, workdir: pathlib.Path, which: str) -> None:
  """Brings the run in a folder back to a run snapshot or a checkpoint (restore.py, in a separate
  process, which imports jax) and prints each change. Call `open_workdir` with `restored` next.

  Raises:
    ValueError: the restore is impossible; nothing was changed.
    DiskFailed: the disk failed during the restore; repeat it.
  """
  if not (workdir / run_config.FILE).is_file():
    raise ValueError(f'there is no run in {workdir} to restore')
  done = subprocess.run(
    [sys.executable, '-m', 'diloco_jax.launch.restore', str(workdir.absolute()), which],
    env=environment(1),
    input=json.dumps(config.to_dict()),
    stdout=subprocess.PIPE,
    text=True,
    check=False,
  )
  *lines, last = done.stdout.splitlines() or ['']
  for line in (*lines, last):
    if not line.startswith(_ERROR):
      print(line, flush=True)
  if done.returncode:
    text = last.removeprefix(_ERROR) or f'the restore ended with exit code {done.returncode}'
    raise (program.DiskFailed if done.returncode == program.DISK_FAILED else ValueError)(text)


def _check_same_run(
  config: run_config.Config, workdir: pathlib.Path, restored: bool = False
) -> None:
  """Refuses another run's config; after a restore (`restored`) restore.py has compared them."""
  path = workdir / run_config.FILE
  if not path.is_file():
    raise ValueError(f'there is no run in {workdir} to continue; leave --resume out to start one')
  if restored:
    return
  before = run_config.Config.from_dict(json.loads(path.read_text())).agreement()
  found = agreement.differences(agreement.encode(config.agreement()), agreement.encode(before))
  if found:
    raise ValueError(
      f'the run in {workdir} was started with another config: {"; ".join(found)}; '
      'continue it with its own config, or choose another --workdir'
    )


def environment(devices: int, base: Mapping[str, str] = os.environ) -> dict[str, str]:
  """The environment of a process with `devices` emulated devices; the user's settings win."""
  cache = _ROOT / '.cache' / 'jax'
  ours = {
    'JAX_PLATFORMS': 'cpu',
    'JAX_COMPILATION_CACHE_DIR': str(cache),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    'TF_CPP_MIN_LOG_LEVEL': '2',
    'GRPC_VERBOSITY': 'ERROR',
    **_MALLOC,
  }
  path = os.pathsep.join(filter(None, [str(_ROOT), base.get('PYTHONPATH', '')]))
  return {
    **ours,
    **base,
    'JAX_NUM_CPU_DEVICES': str(devices),
    'PYTHONUNBUFFERED': '1',
    'PYTHONPATH': path,
  }


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
  standby: bool = True,
) -> list[supervisor_lib.Program]:
  """The programs of a run. `alone`: one learner and no syncer. `standby`: the syncer has a standby
  process."""
  common = [*config_flags, f'--workdir={workdir}']
  # Learners read the address file at every dial, so they may start before the syncer, and a
  # restarted syncer may listen on another port.
  address = 'none' if alone else f'file:{workdir / ADDRESS}'

  names = run_config.learner_ids(1 if alone else config.sync.learners)
  shares = dict(zip(names, share_cpus(len(names), available_cpus())))

  def learner(name: str) -> supervisor_lib.Program:
    return supervisor_lib.Program(
      name=name,
      environment=environment(config.mesh.num_devices),
      cpus=shares[name],
      command=[
        sys.executable,
        '-m',
        'experiments.learner',
        *common,
        f'--learner_id={name}',
        f'--syncer={address}',
      ],
    )

  if alone:
    return [learner(names[0])]
  command = [sys.executable, '-m', 'experiments.syncer', *common, '--port=0']
  syncer = supervisor_lib.Program(
    name=supervisor_lib.SYNCER,
    environment=environment(1),
    command=command,
    standby=[*command, '--standby'] if standby else (),
  )
  return [syncer, *(learner(name) for name in names)]


def run(
  config: run_config.Config,
  workdir: pathlib.Path,
  config_flags: Sequence[str],
  alone: bool = False,
  single: bool = False,
  standby: bool = True,
) -> int:
  """Runs the experiment, writes the report, prints the summary and returns the exit code."""
  print(f'run {config.name} in {workdir}', flush=True)
  started_s = time.monotonic()
  if single:
    if config.chaos.enabled and config.chaos.kills:
      print('no chaos: with --controller=single there is no process to kill', flush=True)
    outcome = _run_single(config, workdir)
  else:
    outcome = _run_processes(config, workdir, config_flags, alone, standby)
  if outcome.code == program.NEVER_RETRY:
    raise program.NeverRetry(outcome.text)
  wall_s = time.monotonic() - started_s
  summary = summary_lib.write(config, workdir, outcome.statuses, wall_s, not outcome.interrupted)
  print(summary_lib.text(summary, workdir))
  if outcome.code:
    print(f'{outcome.text}; continue with: --resume --workdir={workdir}', file=sys.stderr)
  return outcome.code


def _run_processes(
  config: run_config.Config,
  workdir: pathlib.Path,
  config_flags: Sequence[str],
  alone: bool,
  standby: bool,
) -> supervisor_lib.Outcome:
  names = run_config.learner_ids(1 if alone else config.sync.learners)
  display = live.make()
  recorder = records_lib.Recorder(workdir, SUPERVISOR, tensorboard=False)
  supervisor = supervisor_lib.Supervisor(
    programs(config, workdir, config_flags, alone, standby),
    workdir,
    run_facts.RunFacts(names, config.train.steps, syncer=not alone),
    recorder,
    kills=() if alone else kill_plan.plan(config.chaos, names),
    listen=display.listen,
    tick=display.tick,
  )
  try:
    return asyncio.run(supervisor.run())
  finally:
    display.close()
    recorder.close()


def _run_single(config: run_config.Config, workdir: pathlib.Path) -> supervisor_lib.Outcome:
  """Runs all nodes in this process."""
  os.environ.update(environment(config.mesh.num_devices * config.sync.learners))
  from diloco_jax.launch import one_process  # pylint: disable=g-import-not-at-top  # jax

  with program.never_retry():
    controller = one_process.SingleController(config, workdir)
  interrupts = []

  def interrupt(number: int, frame) -> None:
    del number, frame
    interrupts.append(time.monotonic())
    if len(interrupts) > 1:
      os._exit(program.INTERRUPTED)  # a thread inside a step cannot be interrupted
    controller.stop('interrupted')

  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, interrupt)
  controller.start()
  with program.log_failures(), program.never_retry(files.DirectoryError):
    exits = controller.join()
  if interrupts:
    code, text = program.INTERRUPTED, 'interrupted'
  else:
    worst = max(exits.values(), key=lambda item: item.code)
    code, text = worst.code, worst.text
  return supervisor_lib.Outcome(code=code, text=text, statuses={}, interrupted=bool(interrupts))
