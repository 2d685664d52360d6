"""Runs studies: every arm once, then a table, a CSV file and a plot of each study.

    python -m experiments.studies.run --study=parity
    python -m experiments.studies.run --quick            # all of them, short and with one seed

Rows of finished arms are kept in OUT/rows.jsonl, and a run with the same --out runs only the arms
that it lacks. So Ctrl-C loses no more than the arms in progress, and an arm whose settings changed
runs again.
"""

import concurrent.futures
import importlib
import multiprocessing
import os
import pathlib
import sys
from collections.abc import Callable, Sequence

from absl import app, flags
from rich import progress

from diloco_jax.launch import die_with_parent
from experiments.studies.lib import arms, report
from experiments.studies.lib import study as study_lib

STUDIES = (
  'parity',
  'settings',
  'canary',
  'links',
  'liars',
  'outage',
  'scale',
  'scale.tuned',
  'scale.rungs',
  'scale.records',
  'scale.delays',
)
_STUDY = flags.DEFINE_list('study', list(STUDIES), 'which studies')
_QUICK = flags.DEFINE_bool('quick', False, 'short: fewer arms, a third of the steps, one seed')
_OUT = flags.DEFINE_string('out', '', 'folder; default runs/studies, with --quick runs/quick')
_REPORT = flags.DEFINE_bool('report', False, 'run nothing: report on the arms that have run')
_ONLY = flags.DEFINE_string('only', '', 'run the arms whose names begin with this, as 230k')
_JOBS = flags.DEFINE_integer('jobs', 2, 'processes, each with one thread', lower_bound=1)


def main(argv: list[str]) -> None:
  if argv[1:]:
    raise app.UsageError(f'unexpected words: {" ".join(argv[1:])}')
  unknown = sorted(set(_STUDY.value) - set(STUDIES))
  if unknown:
    raise app.UsageError(f'there is no study {unknown[0]!r}; use some of: {", ".join(STUDIES)}')
  out = pathlib.Path(_OUT.value or ('runs/quick' if _QUICK.value else 'runs/studies'))
  out.mkdir(parents=True, exist_ok=True)
  if _REPORT.value:
    for name in _STUDY.value:
      print(report.write(load(name), _QUICK.value, study_lib.Book(out / 'rows.jsonl'), out))
    return
  with _pool(_JOBS.value, out / 'cache') as pool:
    studies = [load(name) for name in _STUDY.value]
    run(studies, out, quick=_QUICK.value, pool=pool, jobs=_JOBS.value, only=_ONLY.value)


def load(name: str) -> study_lib.Study:
  """The study of a name."""
  return importlib.import_module(f'experiments.studies.{name}').STUDY


def run(
  studies: Sequence[study_lib.Study],
  out: pathlib.Path,
  *,
  quick: bool,
  pool: concurrent.futures.Executor,
  jobs: int,
  only: str = '',
) -> None:
  """Runs the arms that the folder lacks, `jobs` at a time, and writes the reports. `only`: those
  whose names begin so."""
  book = study_lib.Book(out / 'rows.jsonl')
  bar = progress.Progress(disable=not sys.stdout.isatty(), transient=True)
  with bar:
    task = bar.add_task('arms')
    _run_all(
      pool,
      lambda: {
        arm.key: arm
        for study in studies
        for arm in study.missing(quick, book)
        if arm.name.startswith(only)
      },
      book,
      jobs,
      lambda done, of: bar.update(task, completed=done, total=of),
    )
  for study in studies:
    print(report.write(study, quick, book, out))


def _pool(jobs: int, cache: pathlib.Path) -> concurrent.futures.ProcessPoolExecutor:
  """Processes with one thread each on CPUs; or on what JAX_PLATFORMS names, with XLA_FLAGS as they
  are: equal bits in each run may need --xla_gpu_deterministic_ops=true."""
  if os.environ.setdefault('JAX_PLATFORMS', 'cpu') == 'cpu':
    os.environ['XLA_FLAGS'] = '--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1'
  os.environ |= {  # for the processes of the pool
    'JAX_COMPILATION_CACHE_DIR': str(cache.resolve()),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
  }
  spawn = multiprocessing.get_context('spawn')
  return concurrent.futures.ProcessPoolExecutor(jobs, spawn, _get_ready)


def _get_ready() -> None:
  die_with_parent.die_with_parent()  # a killed study leaves no arm behind that nothing will read
  arms.get_ready()


def _run_all(
  pool: concurrent.futures.Executor,
  missing: Callable[[], dict[str, arms.Arm]],
  book: study_lib.Book,
  jobs: int,
  shown: Callable[[float, float], None],
) -> None:
  """Runs the first missing arms, `jobs` at a time; the row of each is in the book as soon as it
  ends, and may make others known. If one fails, those in progress end; then its error is raised."""
  running: dict[concurrent.futures.Future, arms.Arm] = {}
  done, failed = 0.0, None
  try:
    while True:
      waiting = {} if failed else missing()
      shown(done, done + sum(arm.work for arm in waiting.values()))
      begun = {arm.key for arm in running.values()}
      waiting = [arm for key, arm in waiting.items() if key not in begun]
      for arm in waiting[: jobs - len(running)]:
        running[pool.submit(arms.run, arm)] = arm
      if not running:
        break
      ended, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
      for future in ended:
        arm = running.pop(future)
        if error := future.exception():
          failed = failed or error
          continue
        book.add(future.result())
        done += arm.work
        print(report.line(future.result()), flush=True)
  except BaseException:
    pool.shutdown(cancel_futures=True)
    raise
  if failed:
    raise failed


if __name__ == '__main__':
  app.run(main)
