"""Ways to exchange over thin links, side by side, as real processes in network namespaces.

    python experiments/bandwidth_bench.py             # 46 minutes on two busy cores
    python experiments/bandwidth_bench.py --quick     # 8 minutes

A syncer and four learners have a network namespace each. The kernel shapes each learner's link both
ways, and a transfer over TCP checks it before each run. The model has 25 million values; an inner
step takes 0.25 s at least, so what a learner waits beyond it is the exchange. The processes start
and train a period over links that are not shaped, since a model alone takes 80 s at 10 Mbit/s.

Decoupled DiLoCo in int8 and int4, DiLoCo in lock step, one all-reduce of gloo a step, and torchft's
DiLoCo, for which pip installs PyTorch and torchft into an environment of their own under .cache.
Then a small model trains over links that are as thin for its payloads (experiments/links/small.py).

Writes OUT/rows.jsonl, cells.json, bandwidth_bench.md and .png. A run with the same --out runs only
what is missing there. On a machine that is busy with something else the figures mean little. Where
network namespaces are not allowed nothing is measured: it prints so, and its exit code is 0.
"""

import json
import pathlib
import re
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
from absl import app, flags, logging

from diloco_jax.nodes import exits
from experiments.links import cells, measure, report, shaped, small
from experiments.studies.lib import study
from scripts import networks
from scripts.benchmarks import measured, outer_round

ATTEMPTS = 2  # at a link that was measured with a wrong rate


def main(argv: list[str]) -> int:
  if argv[1:]:
    raise app.UsageError(f'unexpected words: {" ".join(argv[1:])}')
  short = flags.FLAGS.quick
  out = pathlib.Path(flags.FLAGS.out or f'runs/bandwidth_{"short" if short else "bench"}')
  out.mkdir(parents=True, exist_ok=True)
  book = study.Book(out / 'rows.jsonl')
  only = re.compile(flags.FLAGS.only)
  began_s = time.monotonic()
  rows: list[measure.Row] = []
  failed = 0
  logging.set_verbosity(logging.WARNING)  # Orbax tells of each load
  jax.config.update('jax_platforms', 'cpu')  # for the evaluations; learners are other processes
  try:
    with shaped.open_links(cells.LEARNERS) as links:
      for plan in (cells.plan(short), small.plan(short), None):
        if plan is None:
          plan = [] if short else small.plan_time(rows)
        for cell in plan:
          if not only.search(cell.name):
            continue
          if book.row(cell) is None:
            _run(cell, links, book)
          row = book.row(cell)
          failed += row is None
          rows += [row] if row is not None else []
          _write(rows, out)
  except KeyboardInterrupt:
    return exits.INTERRUPTED
  text = report.table(rows)
  (out / 'bandwidth_bench.md').write_text(text, 'utf-8')
  report.plot(rows, out / 'bandwidth_bench.png')
  print(text)
  print(f'{time.monotonic() - began_s:.0f} s')
  return 1 if failed else 0


def _run(cell: cells.Cell | small.Cell, links: shaped.Links, book: study.Book) -> None:
  """Measures a cell, prints its row and adds it to the book; prints why, if it cannot."""
  for attempt in range(ATTEMPTS):
    try:
      row = _measure(cell, links)
    except (shaped.WrongRate, RuntimeError, subprocess.SubprocessError, TimeoutError) as error:
      notes = '\n'.join(getattr(error, '__notes__', ()))
      print(f'failed: {error}\n{notes}', flush=True)
      if not isinstance(error, shaped.WrongRate) or attempt + 1 == ATTEMPTS:
        return
    else:
      book.add(row)
      print(report.line(row), flush=True)
      return


def _measure(cell: cells.Cell | small.Cell, links: shaped.Links) -> measure.Row:
  if isinstance(cell, small.Cell):
    return small.measured(cell, links)
  torch_python = ''
  if cells.METHODS[cell.method].program == cells.TORCHFT:
    torch_python = outer_round.torch_python()
    if not torch_python:
      raise RuntimeError(f'{cell.name}: no environment with PyTorch')
  return measure.measure(cell, links, torch_python)


def _write(rows: list[measure.Row], out: pathlib.Path) -> None:
  found = {'machine': measured.machine(), 'cells': rows}
  (out / 'cells.json').write_text(json.dumps(found, indent=1) + '\n', 'utf-8')


if __name__ == '__main__':
  code = networks.inside(__file__, 'tc')
  if code is not None:
    sys.exit(code)
  flags.DEFINE_bool('quick', False, 'one link, and fewer steps')
  flags.DEFINE_string('out', '', 'folder; default runs/bandwidth_bench or runs/bandwidth_short')
  flags.DEFINE_string('only', '', 'a regular expression: cells whose name it finds')
  app.run(main)
