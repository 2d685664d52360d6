"""The report of a run, in WORKDIR/report: report.txt for people, summary.json, pictures.

All of it comes from the records. The ledger counts *fragment-tokens* (a token trains every fragment
and each fragment is merged separately; protocol/syncer/ledger.py); the report divides them by the
number of fragments and rounds so that the sums still add up.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import os
import pathlib
import shlex
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from diloco_jax.config import load, run_config
from diloco_jax.report import book as book_lib
from diloco_jax.report import condition, header, page, programs, run_facts
from diloco_jax.report import facts as report_facts
from diloco_jax.report import folder as folder_lib
from diloco_jax.report import records as records_lib
from diloco_jax.report import state as state_lib
from diloco_jax.storage import folders, json_files

REPORT, TEXT, SUMMARY = 'report', 'report.txt', 'summary.json'
TIMELINE, PAGE = 'timeline.png', 'index.html'
COLUMNS = 80
KILL_WINDOW_S = 10
MANY = 12  # learners, from which on only the unusual ones have a line each
_SPREADS = {'steps': 'steps', 'tokens': 'tokens', 'loss': 'loss', 'merged': 'contributions_merged'}


def write(
  workdir: pathlib.Path, plot: bool = True, out: pathlib.Path | None = None
) -> dict[str, Any]:
  """Writes the report of the run in a folder to `out` (None: WORKDIR/report) and returns the
  summary; an error line names each file that is missing, and `missing` in the summary all of them.
  Raises ValueError: there is no run in the folder."""
  read = folder_lib.read(workdir)
  read.run.look(time.time())
  summary, shown = summarize(read), state_of(read)
  folder = out or workdir / REPORT
  views: dict[str, Callable[[], str | bytes]] = {
    SUMMARY: lambda: json.dumps(summary, indent=2) + '\n',
    PAGE: lambda: page.inline([shown]),
  }
  if plot and any(learner.steps for learner in read.run.learners.values()):
    views[TIMELINE] = lambda: _png(shown)
  with contextlib.suppress(OSError):
    (folder / TIMELINE).unlink()  # of the run before it continued
  views[TEXT] = lambda: text(summary, workdir, out=folder)
  if missing := write_views(folder, views, f'diloco report {shlex.quote(str(workdir))}'):
    summary['missing'] = missing
  return summary


def state_of(read: folder_lib.Read) -> dict[str, Any]:
  return state_lib.state(read.run, read.config, read.workdir.name)


def _png(shown: dict[str, Any]) -> bytes:
  if not folders.home_cache():
    os.environ.setdefault('MPLCONFIGDIR', str(folders.cache() / 'matplotlib'))
  from diloco_jax.report import picture  # 1 s

  picture.draw(shown).savefig(file := io.BytesIO(), dpi=picture.DPI)
  return file.getvalue()


def write_views(folder: pathlib.Path, views: Mapping[str, Any], later: str) -> list[str]:
  """Replaces files, and returns the names of those for which that was not possible."""
  put = lambda name: functools.partial(_replace, folder / name, views[name])
  return [name for name in views if not header.try_to_show(put(name), str(folder / name), later)]


def _replace(path: pathlib.Path, make: Callable[[], str | bytes]) -> None:
  path.unlink(missing_ok=True)  # an old view would be taken for the new one
  view = make()
  json_files.replace(path, view if isinstance(view, bytes) else view.encode(errors='replace'))


def summarize(read: folder_lib.Read) -> dict[str, Any]:
  """The summary; token counts obey trained = merged + sum(discarded). None: it is not known."""
  config, run = read.config, read.run
  ledger, evaluations = run.ledger, run.evaluations
  tokens = _tokens(run)
  between = [n for learner in run.learners.values() for n in learner.steps_between]
  return {
    'name': config and config.name,
    'task': config and config.task,
    'store': config and config.train.store,
    'init_from': config and config.train.init_from,
    'steps': config and config.train.steps,
    'clock': max((learner.step for learner in run.learners.values()), default=0),
    'layout': run.layout.lines if run.layout else [],
    'loss_unit': folder_lib.loss_unit(config, run),
    'eval_loss_start': evaluations[0].loss if evaluations else None,
    'eval_loss_end': evaluations[-1].loss if evaluations else None,
    'bits_per_byte_end': (evaluations[-1].bits_per_byte or None) if evaluations else None,
    'evaluations': [
      {
        'step': evaluation.step,
        'tokens': tokens,
        'seconds': round(at_s, 3),
        'loss': evaluation.loss,
        'bits_per_byte': evaluation.bits_per_byte or None,
      }
      for evaluation, tokens, at_s in zip(evaluations, run.evaluated_tokens, run.evaluated_s)
    ],
    'tokens_trained': tokens['trained'],
    'tokens_merged': tokens['merged'],
    'tokens_discarded': tokens['discarded'],
    'outer_steps': ledger.synced if ledger else len(run.merges_s),
    'period_chosen': run.period or None,
    'cosines': {label: statistics.fmean(values) for label, values in sorted(run.cosines.items())},
    'inner_steps_between_syncs_mean': statistics.fmean(between) if between else None,
    'participants_mean': statistics.fmean(run.participants) if run.participants else None,
    'live_mean': statistics.fmean(run.live) if run.live else None,
    'waited_steps_median': _waited_steps(run),
    'learners': {name: _learner(name, read) for name in run.ordered},
    'condition': condition.of_run(run).text,
    'looked_at': run.looked_at,
    'kills': [
      _kill(run, name, process.ended_s)
      for name, learner in run.learners.items()
      for process in learner.processes
      if process.ended == 'killed' and process.ended_s is not None
    ],
    'goodput': run.figures and run.book.summary(round(run.end_s * 1e9)) | {'note': run.spent_note},
    'missing_facts': {
      process: {'facts': sum(gap[2] for gap in run.missing if gap[1] == process), 'error': error}
      for _, process, _, error in run.missing
    },
    'wire_bytes_up': run.wire.bytes_up,
    'wire_bytes_down': run.wire.bytes_down,
    'wire_bytes_data_parallel': run.wire.bytes_data_parallel,
    'wall_seconds': round(run.end_s, 3),
  }


def _waited_steps(run: run_facts.RunFacts) -> float | None:
  """The median time from the opening of a sync to its merge decision, in median inner steps."""
  steps = [step.seconds for learner in run.learners.values() for step in learner.steps]
  if not run.waited_ns or not steps:
    return None
  waited_ns = statistics.median(run.waited_ns)
  return round(waited_ns / 1e9 / statistics.median(steps), 3)


def _learner(name: str, read: folder_lib.Read) -> dict[str, Any]:
  run, learner = read.run, read.run.learners[name]
  account = run.ledger.learners.get(name, {}) if run.ledger else {}
  cost, median_s = learner.cost, _median([step.seconds for step in learner.steps])
  return {
    'incarnations': max(account.get('incarnations', 0), learner.incarnation),
    'staleness': learner.staleness,
    'steps': max(account.get('steps', 0), len(learner.steps)),
    'tokens': max(account.get('tokens', 0), round(learner.tokens_per_step * len(learner.steps))),
    'tokens_per_step': learner.tokens_per_step,
    'loss': learner.loss,
    'eval_loss_start': learner.held_out[0][1] if learner.held_out else None,
    'eval_loss_end': learner.held_out[-1][1] if learner.held_out else None,
    'seconds_down': round(learner.seconds_down(run.end_s), 3),
    'contributions_merged': len(learner.merged_s),
    'processes': len(learner.processes),
    'kills': sum(process.ended == 'killed' for process in learner.processes),
    'lost': sum(process.ended == 'lost' for process in learner.processes),
    'fresh_moments': learner.fresh,
    'status': run.fate(name),
    'condition': _condition_text(run.condition(name)),
    'step_seconds_median': median_s,
    'cost': cost and dataclasses.asdict(cost),
    'speed': cost and cost.speed(median_s or 0.0),
  }


def _condition_text(so: condition.Condition) -> str:
  """What is so of a learner, in words of a text that is read later; '' of one that is done."""
  if so.state in ('done', 'no step'):
    return so.text if so.why else ''
  if so.is_gone or so.state == 'down':
    return f'{so.state}: {so.why}'.removesuffix(': ')
  if not so.silent:
    return f'{so.brief} when its records ended'
  ago = header.duration(so.now_s - so.heard_s)
  return f'{so.state} when its records ended, {ago} before this report'


def _kill(run: run_facts.RunFacts, victim: str, at_s: float) -> dict[str, Any]:
  """How a kill affected the others: the median time of their steps in the 10 s before and after."""

  def median(start_s: float, end_s: float) -> float | None:
    return _median(
      [
        step.seconds
        for name, learner in run.learners.items()
        if name != victim
        for step in learner.steps
        if start_s <= step.at_s < end_s
      ]
    )

  return {
    'learner': victim,
    'at_seconds': round(at_s, 3),
    'survivors_step_seconds_before': median(at_s - KILL_WINDOW_S, at_s),
    'survivors_step_seconds_after': median(at_s, at_s + KILL_WINDOW_S),
  }


def _tokens(run: run_facts.RunFacts) -> dict[str, Any]:
  """Fragment-tokens as tokens, rounded so that merged and discarded add up to trained."""
  ledger = run.ledger
  if ledger is None:
    return {'trained': run.trained, 'merged': 0, 'discarded': {}}
  parts = {'merged': ledger.merged, **ledger.discarded}
  if ledger.unsettled:
    parts['unsettled'] = ledger.unsettled
  if untold := run.trained - ledger.trained:
    parts['untold'] = untold * ledger.fragments
  shares = share_out(parts, ledger.fragments)
  return {'trained': run.trained, 'merged': shares.pop('merged'), 'discarded': shares}


def merged_line(summary: Mapping[str, Any]) -> str:
  """What became of the tokens, and where that is explained; '' if nearly all were merged."""
  trained, merged = summary['tokens_trained'], summary['tokens_merged']
  if not summary['outer_steps'] or merged >= 0.95 * trained:
    return ''
  parts = {'merged': merged, **summary['tokens_discarded']}.items()
  shares = [f'{name} {count / trained:.0%}' for name, count in parts if count >= 0.01 * trained]
  return f'trained {trained:,} tokens, {", ".join(shares)}: see docs/howto/report.md' * bool(shares)


def share_out(parts: Mapping[str, int], divisor: int) -> dict[str, int]:
  """Divides every part and rounds to integers whose sum is the rounded total (largest remainders).

  >>> share_out({'merged': 20, 'late': 5, 'stale': 5}, 3)
  {'merged': 7, 'late': 2, 'stale': 1}
  """
  shares = {name: value // divisor for name, value in parts.items()}
  missing = sum(parts.values()) // divisor - sum(shares.values())
  for name in sorted(parts, key=lambda name: -(parts[name] % divisor))[:missing]:
    shares[name] += 1
  return shares


def _median(values: list[float]) -> float | None:
  return round(statistics.median(values), 4) if values else None


def text(
  summary: Mapping[str, Any],
  workdir: pathlib.Path,
  width: int = COLUMNS,
  out: pathlib.Path | None = None,
) -> str:
  """The summary for people, in lines of at most `width` columns, but for what is pasted. The
  headline comes first and last, as a terminal shows the end."""
  paths = _file_lines(summary, workdir, out or workdir / REPORT)
  lines = [*_disk_lines(summary), *_headline(summary), '']
  lines += [f'{"" if number else "run":13}{line}' for number, line in enumerate(summary['layout'])]
  lines += _learner_lines(summary)
  if summary['outer_steps']:
    lines += ['', *_token_lines(summary), '', *_wire_lines(summary)]
  if summary['goodput']:
    lines += ['', *goodput_lines(summary['goodput'], width)]
  lines += ['', *paths, '', *_headline(summary), *_kill_lines(summary)]
  pasted = {line for line in paths if line.startswith((' ', 'model', 'curves'))}
  wrapped = ([line] if line in pasted else header.wrap(line, width) for line in lines)
  return '\n'.join(itertools.chain.from_iterable(wrapped)) + '\n'


def _is_measured_twice(row: Mapping[str, Any]) -> bool:
  return row['eval_loss_end'] != row['eval_loss_start']


def _before_after(row: Mapping[str, Any]) -> str:
  after = f'{row["eval_loss_end"]:.3f} after' if _is_measured_twice(row) else 'not measured later'
  return f'{row["eval_loss_start"]:.3f} before, {after}'


def _headline(summary: Mapping[str, Any]) -> list[str]:
  took = header.duration(summary['wall_seconds'])
  lines = [f'{summary["name"] or "run"}: {took}, {summary["tokens_trained"]:,} tokens']
  if summary['outer_steps']:
    lines[0] += f' in {summary["outer_steps"]} outer steps'
  rows = {name: row for name, row in summary['learners'].items() if row['steps']}
  own = {name: row for name, row in rows.items() if row['eval_loss_end'] is not None}
  unit = summary['loss_unit'] and f'{summary["loss_unit"]}, '
  if own:
    lines.append(
      f'held-out loss  of each learner, whose model is in part its own ({unit}on unseen data)'
    )
    lines += [f'{name:>13}  {_before_after(row)}' for name, row in own.items()]
  elif summary['eval_loss_start'] is not None:
    lines.append(f'held-out loss  {_before_after(summary)} ({unit}on unseen data)')
    bits = summary['bits_per_byte_end']
    if bits and _is_measured_twice(summary):
      lines.append(f'               {bits:.3f} bits per byte after')
  else:
    lines.append('held-out loss  was not measured')
    losses = [f'{name} {row["loss"]:.3f}' for name, row in rows.items() if row['loss'] is not None]
    lines += [
      f'training loss  {", ".join(losses)}: mean of the last {programs.LAST_STEPS} steps'
    ] * any(losses)
  if line := merged_line(summary):
    lines.append(f'tokens         {line}')
  if summary['steps'] is None:
    lines.append(f'config         {folder_lib.UNKNOWN}')
  elif summary['condition'] != 'over':
    when = time.strftime('%H:%M:%S', time.localtime(summary['looked_at']))
    clock = f'at clock {summary["clock"]} of {summary["steps"]}: {summary["condition"]}'
    lines.append(f'not ended      {clock}, as of {when}')
  return lines


def _file_lines(
  summary: Mapping[str, Any], workdir: pathlib.Path, report: pathlib.Path
) -> list[str]:
  """Where the files of the run are, and the model; an interrupted run has fewer."""
  shown, report_shown = (
    min(str(path), os.path.relpath(path), key=len) for path in (workdir, report)
  )
  files = [name for name in (SUMMARY, PAGE, TIMELINE) if (report / name).is_file()]
  saved = [f'{shown}/{name}' for name in (folders.ISLANDS, 'syncer') if (workdir / name).is_dir()]
  lines = [f'report       {report_shown}: {", ".join([TEXT, *files])}'] if files else []
  if saved:
    lines.append(f'checkpoints  {" and ".join(filter(None, [*saved, summary["store"]]))}')
  if saved and (workdir / load.FILE).is_file():  # else the syncer has another folder
    lines.append(f'model        import diloco_jax; diloco_jax.load_params({shown!r})')
    begun = summary['init_from']  # from a Hugging Face folder, perhaps
    folder = begun and any(pathlib.Path(begun).glob('model.safetensors*'))
    out = 'NEW_FOLDER' if folder else 'model.safetensors'
    lines.append(f'             diloco export --workdir={shlex.quote(shown)} --out={out}')
    if (workdir / 'model').is_dir():
      load_it = f'v1.load({str(workdir.absolute() / "model")!r})'
      lines.append(f'             from orbax.checkpoint import v1; {load_it}')
    if summary['task'] == run_config.DECODER:
      lines.append(f'             diloco sample --workdir={shlex.quote(shown)}')
  if (workdir / records_lib.TENSORBOARD).is_dir():
    lines.append(
      f'curves       tensorboard --logdir={shlex.quote(shown)}/{records_lib.TENSORBOARD}'
    )
  return [*lines, 'figures      in plain words: docs/howto/report.md, "What the figures mean"']


def _disk_lines(summary: Mapping[str, Any]) -> list[str]:
  """The facts that a full disk has cost; nothing else in the report shows it."""
  return [
    f'disk           {row["facts"]} facts of {name} could not be written ({row["error"]}): '
    'its figures are too small'
    for name, row in summary['missing_facts'].items()
  ]


def _learner_lines(summary: Mapping[str, Any]) -> list[str]:
  rows = {
    name: row for name, row in summary['learners'].items() if row['processes'] or row['steps']
  }
  lines, many = [], len(rows) > MANY
  if many:
    lines.append(f'{len(rows)} learners; least, median and most of all:')
    lines += [f'  {word:11}{_spread(rows.values(), what)}' for word, what in _SPREADS.items()]
    lines.append('Those of which more is to be said:')
  for name, row in rows.items():
    if many and not _describe_status(row):
      continue
    line = f'learner {name}  {row["steps"]} steps, {row["tokens"]:,} tokens'
    if row['step_seconds_median']:
      rate = row['tokens_per_step'] / row['step_seconds_median']
      line += f', {rate:,.0f} tokens/s in a usual step'
    if row['loss'] is not None:
      line += f', loss {row["loss"]:.3f}'
    if row['cost']:
      line += f', {row["cost"]["devices"]} x {row["cost"]["kind"]}'
    if row['speed']:
      line += f', {report_facts.speed_text(row["speed"])}'
    if summary['outer_steps']:
      line += f', {row["contributions_merged"]} updates of a fragment merged'
    if row['incarnations'] > 1 or row['staleness']:
      line += f', incarnation {row["incarnations"]}, staleness {row["staleness"]}'
    lines.append(line + _describe_status(row))
  if between := summary['inner_steps_between_syncs_mean']:
    lines.append(f'{between:.1f} inner steps between two syncs of a fragment, on average')
  if period := summary['period_chosen']:
    lines.append(f'the syncer chose a period of {period} inner steps, as most links asked for it')
  if cosines := summary['cosines']:
    texts = ', '.join(f'{label} {cosine:.2f}' for label, cosine in cosines.items())
    lines.append(f'cosines      between the updates of two learners, on average: {texts}')
  return lines + _clock_lines(summary)


def _spread(rows: Iterable[Mapping[str, Any]], what: str) -> str:
  known = sorted(row[what] for row in rows if row[what] is not None)
  if not known:
    return 'not known'
  form = '{:,.3f}' if isinstance(known[0], float) else '{:,}'
  return ', '.join(form.format(value) for value in (known[0], known[len(known) // 2], known[-1]))


def _clock_lines(summary: Mapping[str, Any]) -> list[str]:
  """Why the steps of the learners do not add up, and what to compare the run with."""
  rows = [row for row in summary['learners'].values() if row['steps']]
  lines = []
  if summary['outer_steps'] and any(row['steps'] < summary['clock'] for row in rows):
    lines.append(
      'clock        train.steps is a clock, not a number of steps: the clock '
      'of a learner that is behind jumps ahead when it adopts a newer version'
    )
  each = {row['tokens_per_step'] for row in rows}
  if summary['outer_steps'] and len(each) == 1 and min(each) > 0:
    steps = round(summary['tokens_trained'] / min(each))
    lines.append(
      f'alone        a learner alone trains as many tokens in {steps:,} steps: compare with that'
      + f' (--syncer=none --config.train.steps={steps})' * bool(summary['task'])
    )
  return lines


def _kill_lines(summary: Mapping[str, Any]) -> list[str]:
  lines = []
  for kill in summary['kills']:
    before, after = kill['survivors_step_seconds_before'], kill['survivors_step_seconds_after']
    if before and after:
      lines.append(
        f"when {kill['learner']} was killed: the others' median step took {before:.3f} s in the "
        f'{KILL_WINDOW_S} s before, {after:.3f} s in the {KILL_WINDOW_S} s after'
      )
  return lines


def _describe_status(row: Mapping[str, Any]) -> str:
  text = ''
  if row['kills']:
    times = 'once' if row['kills'] == 1 else f'{row["kills"]} times'
    text = f'; killed {times}, down for {row["seconds_down"]:.1f} s'
  elif row['seconds_down']:
    text = f'; {"lost, " if row["lost"] else ""}down for {row["seconds_down"]:.1f} s'
  if row['fresh_moments']:
    text += f'; {row["fresh_moments"]} of its starts with fresh moments'
  return text + (f'; {row["condition"]}' if row['condition'] else '')


def _token_lines(summary: Mapping[str, Any]) -> list[str]:
  trained = max(1, summary['tokens_trained'])
  lines = [
    f'tokens trained {summary["tokens_trained"]:>12,}  in {summary["outer_steps"]} outer steps',
    f'  merged       {summary["tokens_merged"]:>12,}  {summary["tokens_merged"] / trained:6.1%}',
  ]
  for reason, count in summary['tokens_discarded'].items():
    if count:
      lines.append(f'  discarded    {count:>12,}  {count / trained:6.1%}  {reason}')
  if summary['waited_steps_median'] is not None:
    lines += [
      f'participants   {summary["participants_mean"]:.2f} of {summary["live_mean"]:.2f} connected '
      'learners are in an outer step, on average',
      f'               the syncer waits for their updates as long as '
      f'{summary["waited_steps_median"]:.2f} inner steps take (median)',
    ]
  return lines


def goodput_lines(goodput: Mapping[str, Any], width: int = COLUMNS) -> list[str]:
  """Book.summary for people: a table of categories and learners, then the figures."""
  lines = []
  rows = list(goodput['learners'].items())
  if len(rows) > MANY:
    orders = [sorted(row['shares'].get(what, 0) for _, row in rows) for what in book_lib.CATEGORIES]
    three = (('least', 0), ('median', len(rows) // 2), ('most', -1))
    pick = lambda at: {what: all_[at] for what, all_ in zip(book_lib.CATEGORIES, orders)}
    rows = [(name, {'shares': pick(at)}) for name, at in three]
  cell = max([6, *(len(name) for name, _ in rows)]) + 2
  across = max(1, (width - 26) // cell)
  for some in (rows[first : first + across] for first in range(0, len(rows), across)):
    lines.append('wall time, %'.ljust(26) + ''.join(name.rjust(cell) for name, _ in some))
    for category in book_lib.CATEGORIES:
      shares = [f'{100 * row["shares"].get(category, 0):z.1f}' for _, row in some]
      if any(share != '0.0' for share in shares):
        lines.append(f'  {category:24}' + ''.join(share.rjust(cell) for share in shares))
  note = [f'               {goodput["note"]}'] if goodput['note'] else []
  return [
    *lines,
    f'goodput        {goodput["training"]:.1%} of the time of all learners in inner steps at the '
    f'ideal pace, merged or not; {goodput["training_since_joined"]:.1%} since they joined',
    f'token goodput  {goodput["token"]:.1%} of what they could have trained since then is in the '
    f'model',
    *note,
    f'uptime         {goodput["uptime"]:.1%} with a quorum that trained, '
    f'{goodput["system_uptime"]:.1%} without long gaps between outer steps',
  ]


def _wire_lines(summary: Mapping[str, Any]) -> list[str]:
  up, down = summary['wire_bytes_up'], summary['wire_bytes_down']
  baseline = summary['wire_bytes_data_parallel']
  lines = [f'on the wire    {header.size(up)} up, {header.size(down)} down']
  if baseline and up + down:
    lines.append(
      f'               data-parallel training (a ring all-reduce of bfloat16 gradients) '
      f'would have moved {header.size(baseline)}, {baseline / (up + down):.0f} times '
      'as much'
    )
  return lines
