"""Four ways to train through failures, side by side, as real processes on this machine.

    python experiments/chaos_bench.py             # 3 seeds, under 25 minutes on two cores
    python experiments/chaos_bench.py --quick     # one seed, under 6 minutes

Decoupled DiLoCo, lock-step DiLoCo, restart-all and ideal elastic data-parallel training
(experiments/side_by_side/systems.py) train the same model with the same batch. Each learner is
killed once a minute on average, at the same times in each system, and started again 8 s later. A
step ends 0.2 s after the one before at the earliest, so that a death gives the others neither a
faster core nor a faster exchange.

Every run is measured first without and then with kills, and divided by its own rate without.
*Goodput* are the steps that the chips made, also those that are made again after a restart; *token
goodput* are the tokens that came into the model. The held-out loss is that of the model at the end,
after equal wall time.

Writes OUT/rows.jsonl, chaos_bench.csv, .md and .png. A run with the same --out runs only what is
missing there. On a machine that is busy with something else the figures mean little.
"""

import csv
import pathlib
import shutil
import statistics
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import matplotlib.figure
from absl import app, flags, logging
from rich import progress

from diloco_jax.process import exits
from diloco_jax.storage import folders
from diloco_jax.verification.faults import conductor as conductor_lib
from experiments.side_by_side import run, systems
from experiments.studies.lib import study as study_lib

Row = dict[str, Any]
SEEDS = (0, 1, 2)
CLEAN_S, KILLS_S = 12.0, 75.0
SHORT_CLEAN_S, SHORT_KILLS_S = 8.0, 40.0
BUSY = 1.1  # times its floor: a step that takes longer has waited for the machine
OTHER_S = 25.0  # about what a run takes besides what is measured
COLUMNS = (
  'system',
  'seed',
  'kills',
  'rate',
  'cycle_s',
  'exchange_s',
  'goodput',
  'token_goodput',
  'own',
  'others',
  'restarts_s',
  'waits_s',
  'loss',
  'seconds',
)


def cells(short: bool) -> list[run.Cell]:
  """The runs. All systems of a seed come one after the other, so that a load of the machine which
  comes and goes does not meet one system only."""
  seeds, clean_s, kills_s = (
    (SEEDS[:1], SHORT_CLEAN_S, SHORT_KILLS_S) if short else (SEEDS, CLEAN_S, KILLS_S)
  )
  return [
    run.Cell(system=system, seed=seed, clean_s=clean_s, kills_s=kills_s)
    for seed in seeds
    for system in systems.SYSTEMS
  ]


def main(argv: list[str]) -> int:
  if argv[1:]:
    raise app.UsageError(f'unexpected words: {" ".join(argv[1:])}')
  short = flags.FLAGS.quick
  out = pathlib.Path(flags.FLAGS.out or ('runs/chaos_short' if short else 'runs/chaos_bench'))
  out.mkdir(parents=True, exist_ok=True)
  logging.set_verbosity(logging.WARNING)  # Orbax tells of each load
  jax.config.update('jax_platforms', 'cpu')  # for the evaluations; learners are other processes
  jax.config.update('jax_compilation_cache_dir', str(folders.compiled()))
  book = study_lib.Book(out / 'rows.jsonl')
  planned = cells(short)
  rehearsed: set[str] = set()
  missing = [cell for cell in planned if book.row(cell) is None]
  try:
    with progress.Progress(disable=not sys.stderr.isatty(), transient=True) as bar:
      for cell in missing:
        book.add(_measure(cell, out, bar, rehearse=cell.system not in rehearsed))
        rehearsed.add(cell.system)
  except KeyboardInterrupt:
    return exits.INTERRUPTED
  except conductor_lib.EndedEarly as error:
    print(error.outcome.text if error.outcome.interrupted else error, file=sys.stderr)
    return error.outcome.code or 1
  except (TimeoutError, ValueError) as error:
    why = str(error) or 'a run did not end in time'
    print(
      f'error: {why}. Finished runs are kept; the same command makes the others', file=sys.stderr
    )
    return 1
  rows = [book.row(cell) for cell in planned]
  text = table(rows)
  (out / 'chaos_bench.md').write_text(text, 'utf-8')
  write_csv(rows, out / 'chaos_bench.csv')
  plot(rows, out / 'chaos_bench.png')
  print(text)
  return 0


def _measure(cell: run.Cell, out: pathlib.Path, bar: progress.Progress, rehearse: bool) -> Row:
  """Runs a cell in a folder of its own and shows how far it is."""
  total_s = OTHER_S + cell.clean_s + cell.kills_s
  task = bar.add_task(f'{cell.system}, seed {cell.seed}', total=total_s)
  workdir = out / f'{cell.config.name}-{cell.seed}'
  shutil.rmtree(workdir, ignore_errors=True)  # of a run that was interrupted
  row = run.measure(cell, workdir, rehearse, lambda seconds: bar.update(task, completed=seconds))
  bar.update(task, completed=total_s)
  print(line(row), flush=True)
  return row


# --- Reports --------------------------------------------------------------------------------------


def line(row: Row) -> str:
  """A finished run, for the screen."""
  return (
    f'{row["system"]}, seed {row["seed"]}: {row["rate"]:.2f} steps/s without failures, '
    f'{row["kills"]} kills, goodput {row["goodput"]:.1%}, in the model {row["token_goodput"]:.1%}, '
    f'loss {row["loss"]:.4f}, kill to next step {_restarts([row]) or "unknown"}, '
    f'{row["seconds"]:.0f} s'
  )


def table(rows: Sequence[Row]) -> str:
  """One line for each system, with the means over its seeds, and what must hold."""
  by_system = {system: [r for r in rows if r['system'] == system] for system in systems.SYSTEMS}
  first = rows[0]
  lines = [
    '## Training through failures, side by side',
    '',
    f'{first["learners"]} learners, each killed once in {systems.EVERY_S:g} s on average and '
    f'started again {systems.DOWN_S:g} s later; {first["kills_s"]:g} s with kills a run; means '
    f'over seeds {", ".join(str(r["seed"]) for r in by_system[systems.DECOUPLED])}, in brackets '
    'the least and the greatest.',
    '',
    '| system | steps/s without failures | step to step | of it exchange and barrier | kills | '
    'goodput | token goodput | lost to own kills | lost waiting for others | kill to next step | '
    'the others wait, a kill | held-out loss |',
    '|---|---|---|---|---|---|---|---|---|---|---|---|',
  ]
  for system, group in by_system.items():
    cells = [
      system,
      mean(group, 'rate', '.2f'),
      f'{1000 * statistics.mean(row["cycle_s"] for row in group):.0f} ms',
      f'{1000 * statistics.mean(row["exchange_s"] for row in group):.0f} ms',
      str(sum(row['kills'] for row in group)),
      mean(group, 'goodput', '.1%'),
      mean(group, 'token_goodput', '.1%'),
      mean(group, 'own', '.1%'),
      mean(group, 'others', '.1%'),
      _restarts(group),
      f'{statistics.mean(row["waits_s"] for row in group):.1f} s',
      mean(group, 'loss', '.3f'),
    ]
    lines.append('| ' + ' | '.join(cells) + ' |')
  return '\n'.join([*lines, '', *_verdicts(by_system), *_busy(rows), ''])


def _verdicts(by_system: dict[str, list[Row]]) -> list[str]:
  """What must hold, with its figures."""
  ours, restarts, elastic = (
    statistics.mean(row['goodput'] for row in by_system[system])
    for system in (systems.DECOUPLED, systems.RESTART_ALL, systems.ELASTIC)
  )
  kept = {True: 'holds', False: 'DOES NOT HOLD'}
  return [
    f'* {kept[ours >= 1.5 * restarts]}: the goodput of Decoupled is {ours / restarts:.2f} times '
    "restart-all's (1.5 at least).",
    f'* {kept[ours >= elastic]}: it is {100 * (ours - elastic):+.1f} points from that of ideal '
    'elastic (0 at least).',
  ]


def _busy(rows: Sequence[Row]) -> list[str]:
  """A line if something else has used the machine: then a death does give the others more of it."""
  slow = [row for row in rows if row['cycle_s'] > BUSY * row['floor_s']]
  if not slow:
    return []
  worst = max(slow, key=lambda row: row['cycle_s'])
  return [
    f'* THE MACHINE WAS BUSY in {len(slow)} of {len(rows)} runs: a step took up to '
    f'{1000 * worst["cycle_s"]:.0f} ms ({worst["system"]}, seed {worst["seed"]}), not '
    f'{1000 * worst["floor_s"]:.0f}, without a failure. Run it again when nothing else runs.'
  ]


def mean(rows: Sequence[Row], name: str, form: str) -> str:
  """The mean over seeds; with several, also the least and the greatest.

  >>> mean([{'goodput': 0.5}, {'goodput': 0.7}], 'goodput', '.0%')
  '60% (50%, 70%)'
  """
  values = [row[name] for row in rows]
  text = format(statistics.mean(values), form)
  return text if len(values) == 1 else f'{text} ({min(values):{form}}, {max(values):{form}})'


def _restarts(rows: Sequence[Row]) -> str:
  """The mean time from a kill to the next step of its learner, and of how many kills it is known:
  a learner that was killed again before, or at the end of the window, made none."""
  known = [seconds for row in rows for seconds in row['restarts_s']]
  return f'{statistics.mean(known):.1f} s ({len(known)})' if known else ''


def write_csv(rows: Sequence[Row], path: pathlib.Path) -> None:
  with path.open('w', newline='', encoding='utf-8') as file:
    writer = csv.DictWriter(file, COLUMNS, extrasaction='ignore')
    writer.writeheader()
    writer.writerows(rows)


def plot(rows: Sequence[Row], path: pathlib.Path) -> None:
  """Goodput by system, and the steps of the first seed over time."""
  figure = matplotlib.figure.Figure(figsize=(11, 4.5), layout='constrained')
  bars, lines = figure.subplots(1, 2)
  for place, system in enumerate(systems.SYSTEMS):
    group = [row for row in rows if row['system'] == system]
    for shift, name in ((-0.2, 'goodput'), (0.2, 'token_goodput')):
      values = [100 * row[name] for row in group]
      colour = f'C{place}'
      bars.bar(place + shift, statistics.mean(values), 0.38, color=colour, alpha=0.7 - shift)
      bars.plot([place + shift] * len(values), values, 'k.', markersize=4)
    curve = group[0]['curve']
    usual = group[0]['rate']
    lines.plot(range(len(curve)), [done / usual for done in curve], color=colour, label=system)
  bars.set_xticks(range(len(systems.SYSTEMS)), systems.SYSTEMS, fontsize=8)
  bars.set(ylabel='% of the rate without failures', title='goodput and, lighter, token goodput')
  lines.axvline(rows[0]['clean_s'], color='black', linewidth=0.8, linestyle=':')
  lines.set(
    xlabel='seconds; learners are killed from the dotted line on',
    ylabel='steps made, in seconds without failures',
    title=f'seed {rows[0]["seed"]}',
  )
  lines.legend(fontsize=8)
  figure.savefig(path, dpi=120)


if __name__ == '__main__':
  flags.DEFINE_bool('quick', False, 'one seed, and fewer kills')
  flags.DEFINE_string('out', '', 'folder; default runs/chaos_bench or runs/chaos_short')
  app.run(main)
