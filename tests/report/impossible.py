"""Figures that cannot be, whatever a run did: a check over the records of every real run of the
suite (tests/conftest.py), and of those that a test invents to fail it."""

import math
import pathlib
import re
import statistics
from collections.abc import Iterator

from diloco_jax.report import folder as folder_lib
from diloco_jax.report import records as records_lib
from diloco_jax.report import serve
from diloco_jax.report import state as state_lib
from diloco_jax.report import summary as summary_lib

SLACK_S = 1.0  # between a step and its record, on a busy machine
FEW = 16  # steps, of which the median may be that of a busy moment
FASTEST = 50  # no step is so many times faster than the median of its process


def runs(under: pathlib.Path) -> Iterator[pathlib.Path]:
  """The folders of runs below a folder."""
  for path in sorted(under.glob('**/' + records_lib.RECORDS)):
    if any(path.glob('*.jsonl')):
      yield path.parent


def figures(workdir: pathlib.Path) -> list[str]:
  """What is impossible in the records of a run, and in what the surfaces make of them."""
  return [*_steps(workdir), *_surfaces(workdir)]


def _steps(workdir: pathlib.Path) -> Iterator[str]:
  """A process makes one step after the other, and reads no batch in no time."""
  for path in filter(pathlib.Path.is_file, sorted((workdir / records_lib.RECORDS).glob('*.jsonl'))):
    processes: list[list[dict]] = []
    for row in records_lib.Tail(path).stream():
      if row['name'] == 'step' and {'steps', 'seconds', 't_ns'} <= row.keys():
        if not processes or row['steps'] <= processes[-1][-1]['steps']:
          processes.append([])
        processes[-1].append(row)
    for rows in processes:
      seconds = [row['seconds'] for row in rows]
      wall_s = (rows[-1]['t_ns'] - rows[0]['t_ns']) / 1e9 + seconds[0] + SLACK_S
      if sum(seconds) > wall_s:
        yield f'{path.stem}: {len(rows)} steps of {sum(seconds):.3f} s in {wall_s:.3f} s'
      usual = statistics.median(seconds) if len(seconds) >= FEW else 0.0  # the first one compiles
      if min(seconds) <= 0 or min(seconds) * FASTEST < usual:
        yield f'{path.stem}: a step of {min(seconds):.6f} s, usual is {statistics.median(seconds)}'
      if any(not 0 <= row.get('data_s', 0) <= row['seconds'] + 1e-9 for row in rows):
        yield f'{path.stem}: a batch was awaited for longer than its step took'


def _surfaces(workdir: pathlib.Path) -> Iterator[str]:
  read = folder_lib.read(workdir)
  shown, summary = state_lib.state(read.run, read.config), summary_lib.summarize(read)
  discarded = shown['figures'].pop('discarded', {})
  shares = {'progress': shown['progress'], **discarded, **shown['figures']}
  for name, learner in shown['learners'].items():
    shares[f'goodput of {name}'] = learner['goodput']
    if learner['step'] > (shown['total_steps'] or math.inf):
      yield f'{name} is at clock {learner["step"]} of {shown["total_steps"]}'
    shares |= {f'{what} of {name}': s for what, s in learner['spent_s'].items() if s < 0}
  for row in records_lib.records(workdir):
    if row['name'] == 'eval' and row['step'] > (shown['total_steps'] or math.inf):
      yield f'a loss at clock {row["step"]} of {shown["total_steps"]}'
  for name, share in shares.items():
    if share is not None and not (math.isfinite(share) and -1e-9 <= share <= 1 + 1e-6):
      yield f'{name} is {share}'
  metric = re.search(r'^diloco_tokens (\S+)$', serve.metrics(shown | {'figures': {}}), re.M)
  trained, merged = summary['tokens_trained'], summary['tokens_merged']
  tokens = {shown['tokens'], trained, *map(float, metric.groups() if metric else ())}
  if len(tokens) > 1 and max(tokens) > 1.0001 * min(tokens):
    yield f'tokens are {tokens}'
  if merged + sum(summary['tokens_discarded'].values()) > trained + 1:
    yield f'{merged} merged, {summary["tokens_discarded"]} of {trained}'
  lines = summary_lib.text(summary, workdir)
  for share in re.findall(r'(-?[\d.]+)\s?%', lines):
    if not 0 <= float(share) <= 100:
      yield f'{share} % in the report'
  if (left := shown['seconds_left']) is not None and left < 0:
    yield f'{left} s left'
