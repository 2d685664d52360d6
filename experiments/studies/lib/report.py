"""The report of a study: a table in Markdown, a CSV file, and a plot."""

import csv
import json
import pathlib
import statistics

import matplotlib.figure

from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

COLUMNS = (
  'arm',
  'seed',
  'loss',
  'behind',
  'merged',
  'when_due',
  'participants',
  'live',
  'wait',
  'deaths',
  'moments',
  'tokens',
  'steps',
  'up_bytes',
  'down_bytes',
  'seconds',
  'cpu_seconds',
  'device',
  'theta_sha256',
)
KEPT = ('key', *COLUMNS, 'curve')


def write(study: study_lib.Study, quick: bool, book: study_lib.Book, out: pathlib.Path) -> str:
  """Writes OUT/NAME.csv, NAME.md, NAME.png, and NAME.jsonl, the rows with their curves, of the arms
  that have run; returns the table."""
  planned = {arm.key: arm for arm in study.plan(quick, book)}
  rows = [(arm, row) for arm in planned.values() if (row := book.row(arm))]
  by_arm = {(arm.name, arm.seed): row for arm, row in rows}
  for arm, row in rows:
    row['arm'], row['behind'] = arm.name, behind(row, by_arm.get((arm.against, arm.seed)))
  with (out / f'{study.name}.csv').open('w', newline='', encoding='utf-8') as file:
    writer = csv.DictWriter(file, COLUMNS, extrasaction='ignore')
    writer.writeheader()
    writer.writerows(row for _, row in rows)
  kept = [{name: row[name] for name in KEPT if name in row} for _, row in rows]
  lines = (json.dumps(row | {'study': study.name}) + '\n' for row in kept)
  (out / f'{study.name}.jsonl').write_text(''.join(lines), 'utf-8')
  text = table(study, rows)
  if quick and (left := left_out(study)):
    text += f'\n`--quick` leaves out: {"; ".join(left)}.\n'
  if study.conclude is not None:
    text += '\n' + study.conclude(quick, book, out)
  else:
    _plot(study, rows, out / f'{study.name}.png')
  (out / f'{study.name}.md').write_text(text, 'utf-8')
  return text


def left_out(study: study_lib.Study) -> list[str]:
  """The arms of the whole study, as far as they are known before one has run, without those of the
  quick one."""
  full, quick = (study.plan(quickly, study_lib.Book()) for quickly in (False, True))
  return sorted({arm.name for arm in full} - {arm.name for arm in quick})


def behind(row: study_lib.Row, other: study_lib.Row | None) -> float | None:
  """By what share the loss is higher than the other's; None if there is no loss or no other."""
  if other is None or row['loss'] is None:
    return None
  return row['loss'] / other['loss'] - 1


def line(row: study_lib.Row) -> str:
  """A finished arm, for the screen."""
  loss = '' if row['loss'] is None else f' loss {row["loss"]:.4f}'
  merged = f' merged {row["merged"]:.1%}' if 'merged' in row else ''
  began = f' moments {row["moments"]}' if row.get('moments') else ''
  name = f'{row["study"]}: {row["arm"]}, seed {row["seed"]}'
  return f'{name}:{loss}{merged}{began}, {row["seconds"]:.0f} s'


def table(study: study_lib.Study, rows: list[tuple[arms.Arm, study_lib.Row]]) -> str:
  """One line per arm, with the means over its seeds."""
  lines = [
    f'## {study.title}',
    '',
    '| arm | seeds | loss | against | behind | merged | when due | discarded | participants | '
    'wait, steps |',
    '|---|---|---|---|---|---|---|---|---|---|',
  ]
  by_name: dict[str, list[tuple[arms.Arm, study_lib.Row]]] = {}
  for arm, row in rows:
    by_name.setdefault(arm.name, []).append((arm, row))
  for name, group in by_name.items():
    members = [row for _, row in group]
    arm = group[0][0]
    against = f'{arm.against} ({arm.unequal})' if arm.unequal else arm.against
    cells = [
      name,
      ' '.join(str(row['seed']) for row in members),
      _mean(members, 'loss', '.4f'),
      against,
      _behind(members),
      _merged(members),
      _mean(members, 'when_due', '.1%'),
      _reasons(members),
      _participants(members),
      _mean(members, 'wait', '.2f'),
    ]
    lines.append('| ' + ' | '.join(cells) + ' |')
  return '\n'.join([*lines, ''])


def _mean(rows: list[study_lib.Row], name: str, form: str) -> str:
  values = [row[name] for row in rows if row.get(name) is not None]
  return format(statistics.mean(values), form) if values else ''


def _behind(rows: list[study_lib.Row]) -> str:
  """Of each seed; of four and more seeds also the mean and its standard error. The differences are
  paired: two arms of a seed have the same data and the same initial parameters."""
  shares_behind = [row['behind'] for row in rows if row['behind'] is not None]
  each = ', '.join(f'{share:+.2%}' for share in shares_behind)
  if len(shares_behind) < 4 or not any(shares_behind):
    return each
  error = statistics.stdev(shares_behind) / len(shares_behind) ** 0.5
  return f'{statistics.mean(shares_behind):+.2%} ± {error:.2%} ({each})'


def _merged(rows: list[study_lib.Row]) -> str:
  """The mean share of all learners, and of the one with the least if that is much less."""
  every = [row['merged_of'] for row in rows if row.get('merged_of')]
  text = _mean(rows, 'merged', '.1%')
  if not every:
    return text
  least = min(every[0], key=lambda name: sum(shares.get(name, 1.0) for shares in every))
  share = statistics.mean(shares.get(least, 1.0) for shares in every)
  return text if share > 0.98 else f'{text}, {least} {share:.1%}'


def _participants(rows: list[study_lib.Row]) -> str:
  live = _mean(rows, 'live', '.2f')
  return f'{_mean(rows, "participants", ".2f")} of {live}' if live else ''


def _reasons(rows: list[study_lib.Row]) -> str:
  shares: dict[str, float] = {}
  for row in rows:
    for reason, share in row.get('discarded', {}).items():
      shares[reason] = shares.get(reason, 0) + share / len(rows)
  return ', '.join(f'{reason} {share:.1%}' for reason, share in sorted(shares.items()))


def _plot(
  study: study_lib.Study, rows: list[tuple[arms.Arm, study_lib.Row]], path: pathlib.Path
) -> None:
  """Held-out loss against trained tokens; for a study without losses, what was merged."""
  figure = matplotlib.figure.Figure(figsize=(9, 6), layout='constrained')
  axes = figure.subplots()
  if any(row['curve'] for _, row in rows):
    for arm, row in rows:
      if row['curve']:
        tokens = [point['tokens'] for point in row['curve']]
        losses = [point['loss'] for point in row['curve']]
        axes.plot(tokens, losses, label=f'{arm.name}, seed {arm.seed}')
    axes.set(xlabel='trained tokens', ylabel='held-out loss, nats per byte', yscale='log')
    axes.legend(fontsize=7)
  else:
    axes.barh([arm.name for arm, _ in rows], [row['merged'] for _, row in rows])
    axes.invert_yaxis()
    axes.set(xlabel='share of trained fragment-tokens that were merged')
  axes.set_title(study.title)
  figure.savefig(path, dpi=120)


def changes(losses: dict[int, float], others: dict[int, float]) -> str:
  """The mean of the seeds, its standard error, and each."""
  gains = [losses[seed] / others[seed] - 1 for seed in sorted(losses) if seed in others]
  if not any(gains):
    return ''
  error = f' ± {statistics.stdev(gains) / len(gains) ** 0.5:.2%}' if gains[1:] else ''
  return f'{statistics.mean(gains):+.2%}{error} ({", ".join(f"{gain:+.2%}" for gain in gains)})'
