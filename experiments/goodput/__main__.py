"""The paper's tables about goodput, from simulated machines, from islands alone, from formulas.

    python -m experiments.goodput --table=failures       # minutes on two cores
    python -m experiments.goodput --quick                # all tables, shorter times

Prints the published figures beside ours, and writes OUT/TABLE.csv, .png and .txt. What each figure
was made of stands with it: *machines* (the production machines in virtual time), *islands*
(failures alone), *ring* (an all-reduce between sites) or *formula*.
"""

import concurrent.futures
import multiprocessing
import os
import pathlib
import sys
import time

from absl import app, flags
from rich import progress

from experiments.goodput import bandwidth, views
from experiments.goodput import tables as tables_lib

TABLES = {**tables_lib.TABLES, 'bandwidth': bandwidth.table}
_TABLE = flags.DEFINE_list('table', list(TABLES), 'which tables')
_QUICK = flags.DEFINE_bool('quick', False, 'shorter simulated times')
_OUT = flags.DEFINE_string('out', 'runs/goodput', 'folder of the CSV files and plots')
_JOBS = flags.DEFINE_integer('jobs', 0, 'processes; 0: one per core', lower_bound=0)


def main(argv: list[str]) -> None:
  if argv[1:]:
    raise app.UsageError(f'unexpected words: {" ".join(argv[1:])}')
  unknown = sorted(set(_TABLE.value) - set(TABLES))
  if unknown:
    raise app.UsageError(f'there is no table {unknown[0]!r}; use some of: {", ".join(TABLES)}')
  out = pathlib.Path(_OUT.value)
  out.mkdir(parents=True, exist_ok=True)
  context = multiprocessing.get_context('spawn')
  with concurrent.futures.ProcessPoolExecutor(_JOBS.value or os.cpu_count(), context) as pool:
    for name in _TABLE.value:
      table, began = TABLES[name](_QUICK.value), time.monotonic()
      figures = run(table, pool)
      text = f'{views.text_of(table, figures)}\n{time.monotonic() - began:.0f} s\n'
      views.write_csv(figures, out / f'{name}.csv')
      views.plot(table, figures, out / f'{name}.png')
      (out / f'{name}.txt').write_text(text, 'utf-8')
      print(text)


def run(table: tables_lib.Table, pool: concurrent.futures.Executor) -> list[tables_lib.Figure]:
  """Runs all jobs of a table, the longest first; returns their figures in the table's order."""
  bar = progress.Progress(disable=not sys.stderr.isatty(), transient=True)
  with bar:
    task = bar.add_task(table.title, total=sum(job.cost for job in table.jobs))
    began = sorted(table.jobs, key=lambda job: -job.cost)
    futures = {pool.submit(job.make): job for job in began}
    try:
      for future in concurrent.futures.as_completed(futures):
        future.result()
        bar.advance(task, futures[future].cost)
    except BaseException:
      pool.shutdown(wait=False, cancel_futures=True)
      raise
  made = {job.name: future.result() for future, job in futures.items()}
  return [figure for job in table.jobs for figure in made[job.name]]


# --- Reports --------------------------------------------------------------------------------------


if __name__ == '__main__':
  app.run(main)
