"""Ways to exchange over thin links, side by side, as real processes in network namespaces.

    python experiments/bandwidth_bench.py             # 40 minutes on two cores
    python experiments/bandwidth_bench.py --short     # 8 minutes

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
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from absl import app, flags

from diloco_jax.launch import cli
from experiments.links import cells, measure, report, shaped
from experiments.studies.lib import study
from scripts import networks
from scripts.benchmarks import measured, outer_round

ATTEMPTS = 2  # at a link that was measured with a wrong rate


def main(argv: list[str]) -> int:
  if argv[1:]:
    raise app.UsageError(f'unexpected words: {" ".join(argv[1:])}')
  short = flags.FLAGS.short
  out = pathlib.Path(flags.FLAGS.out or f'runs/bandwidth_{"short" if short else "bench"}')
  out.mkdir(parents=True, exist_ok=True)
  book = study.Book(out / 'rows.jsonl')
  only = re.compile(flags.FLAGS.only)
  planned = [cell for cell in cells.plan(short) if only.search(cell.name)]
  missing = [cell for cell in planned if book.row(cell) is None]
  began_s = time.monotonic()
  failed = 0
  try:
    with shaped.open_links(cells.LEARNERS) as links:
      for cell in missing:
        failed += not _run(cell, links, book)
        _write(book, planned, out)
  except KeyboardInterrupt:
    return cli.INTERRUPTED
  rows = _write(book, planned, out)
  print(report.table(rows))
  print(f'{time.monotonic() - began_s:.0f} s')
  return 1 if failed else 0


def _run(cell: cells.Cell, links: shaped.Links, book: study.Book) -> bool:
  """Measures a cell, and prints it. False: it could not be measured."""
  torch_python = ''
  if cells.METHODS[cell.method].program == cells.TORCHFT:
    torch_python = outer_round.torch_python()
    if not torch_python:
      return False
  for attempt in range(ATTEMPTS):
    try:
      row = measure.measure(cell, links, torch_python)
    except (shaped.WrongRate, RuntimeError, TimeoutError) as error:
      notes = '\n'.join(getattr(error, '__notes__', ()))
      again = isinstance(error, shaped.WrongRate) and attempt + 1 < ATTEMPTS
      print(f'{cell.name}: {error}' if again else f'failed: {error}\n{notes}', flush=True)
      if not again:
        return False
    else:
      book.add(row)
      print(report.line(row), flush=True)
      return True
  return False


def _write(book: study.Book, planned: list[cells.Cell], out: pathlib.Path) -> list[measure.Row]:
  rows = [row for cell in planned if (row := book.row(cell)) is not None]
  found = {'machine': measured.machine(), 'cells': rows}
  (out / 'cells.json').write_text(json.dumps(found, indent=1) + '\n', 'utf-8')
  return rows


if __name__ == '__main__':
  code = networks.inside(__file__, 'tc')
  if code is not None:
    sys.exit(code)
  flags.DEFINE_bool('short', False, 'one link, and fewer steps')
  flags.DEFINE_string('out', '', 'folder; default runs/bandwidth_bench or runs/bandwidth_short')
  flags.DEFINE_string('only', '', 'a regular expression: cells whose name it finds')
  app.run(main)
