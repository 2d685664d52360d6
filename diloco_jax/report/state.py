"""The state of a run as JSON, which the page shows (report/page.py) and a server sends."""

import bisect
import dataclasses
import heapq
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from diloco_jax.config import run_config
from diloco_jax.protocol import ids
from diloco_jax.report import condition, programs, run_facts
from diloco_jax.report import folder as folder_lib

POINTS = 400  # of a curve
PAUSE_S = 30.0  # a longer time without a process is drawn as so much
_SMOOTH_STEPS = 10  # a point of a long curve is the mean loss of so many steps
_EVENTS = 60
_RUN_FIELDS = 'end_s total_steps tokens_per_second seconds_left'.split()
_LEARNER_FIELDS = 'step staleness incarnation'.split()


def state(
  run: run_facts.RunFacts, config: run_config.Config | None, folder_name: str = ''
) -> dict[str, Any]:
  """A run so far, with about POINTS points of each curve, however long it is. Times are in s since
  the first fact; a number that is not finite is None."""
  wire, about = run.wire, list(run.layout.lines) if run.layout else []
  if run.period:
    about.append(f'a period of {run.period} inner steps, chosen by the syncer')
  if not config:
    about.append(f'config {folder_lib.UNKNOWN}')
  merges = run.merges_s, run.participants, run.live, run.staleness
  connected = [_connected(run, name) for name in run.learners]
  stepped_s = [
    learner.steps[-1].at_s
    for name, learner in run.learners.items()
    if learner.steps and run.works(name)
  ]
  values = {name: getattr(run, name) for name in _RUN_FIELDS} | {
    'name': config.name if config else 'run',
    'folder': folder_name.encode(errors='replace').decode(),  # what no encoding has, as ?
    'progress': run.progress if config else None,
    'tokens': run.trained,
    'began_s': run.began_s and round(run.began_s),
    'looked_s': run.looked_s,
    'rate_s': run.looked_s - max(stepped_s, default=run.looked_s),
    'condition': _so(condition.of_run(run)),
    'notices': condition.notices(run),
    'about': '; '.join(about),
    'loss_unit': folder_lib.loss_unit(config, run),
    'outer_steps': len(run.merges_s),
    'learners_connected': sum(filter(None, connected)) if {*connected} - {None} else None,
    'held_out': _held_out(run),
    'mean_tokens_per_second': _mean_pace(run, run.tokens, [*run.learners.values()]),
    'figures': dataclasses.asdict(run.figures) if run.figures else {},
    'wire': {'up': wire.bytes_up, 'down': wire.bytes_down, 'parallel': wire.bytes_data_parallel},
    'followers': run.followers.count,
    'versions_behind': run.followers.behind,
    'syncer_lives': _drawn(run.syncer_processes, run.end_s),
    'learners': {name: _learner(run, name) for name in run.ordered},
    'pauses': _pauses(run),
    'spent_note': run.spent_note,
    'merges': [column[:: _stride(run.merges_s)].tolist() for column in merges],
    'events': heapq.nlargest(_EVENTS, _events(run)),
  }
  digits = lambda text: float(f'{float(text):.5g}')
  return json.loads(json.dumps(values), parse_float=digits, parse_constant=lambda _: None)


def _so(so: condition.Condition) -> dict[str, Any]:
  return {name: getattr(so, name) for name in ('state', 'kind', 'text', 'meaning')}


def _learner(run: run_facts.RunFacts, name: str) -> dict[str, Any]:
  learner = run.learners[name]
  spent = run.book.partition(name, round(run.end_s * 1e9)) if name in run.book.learners else {}
  return {name: getattr(learner, name) for name in _LEARNER_FIELDS} | {
    'connected': _connected(run, name),
    'loss': learner.loss,
    'tokens_per_second': learner.tokens_per_second if run.works(name) else 0.0,
    'condition': _so(run.condition(name)),
    'mean_tokens_per_second': _mean_pace(run, learner.tokens, [learner]),
    'goodput': run.training(name),
    'merged': len(learner.merged_s),
    'merges_s': learner.merged_s[:: _stride(learner.merged_s)].tolist(),
    'curve': _curve(learner),
    'held_out': _columns(learner.held_out),
    'lives': _drawn(learner.processes, run.end_s),
    'spent_s': {category: ns / 1e9 for category, ns in spent.items() if ns > 1e7},
  }


def _connected(run: run_facts.RunFacts, name: str) -> int | None:
  """1 or 0; None: it is not known, as only the syncer's records have it."""
  syncer, learner = run.syncer_facts and run.condition(ids.SYNCER), run.learners[name]
  takes_part = syncer is not None and syncer.kind in (condition.WORKS, condition.WAITS)
  return int(learner.is_live and takes_part) if learner.joined else None


def _mean_pace(
  run: run_facts.RunFacts, tokens: int, learners: Sequence[programs.LearnerFacts]
) -> float | None:
  """Tokens a second from the first step to the last one, without the long part of pauses."""
  all_steps = [learner.steps for learner in learners if learner.steps]
  began_s = min((steps[0].at_s for steps in all_steps), default=0)
  ended_s = max((steps[-1].at_s for steps in all_steps), default=0)
  took_s = shorten(pauses := _pauses(run), ended_s) - shorten(pauses, began_s)
  return tokens / took_s if took_s > 0 else None


def _held_out(run: run_facts.RunFacts) -> list[list]:
  """Tokens and losses. A None lies between points that are unusually far apart, and after the one
  before the first step, where a loss falls fast: no line shows what was not measured."""
  points: list[tuple[float, float | None]] = []
  apart = [b - a for a, b in itertools.pairwise(run.evaluated_tokens)]
  far = max(run.tokens / 5, 2 * min(apart[:-1] or apart or [0]))  # the last one may come early
  for tokens, evaluation in zip(run.evaluated_tokens, run.evaluations):
    if points and tokens - points[-1][0] > (far if points[-1][0] else run.tokens / 20):
      points.append(((tokens + points[-1][0]) / 2, None))
    points.append((tokens, evaluation.loss))
  return _columns(points)


def _columns(points: Sequence[tuple[float, float | None]]) -> list[list]:
  return [list(column) for column in zip(*points)] or [[], []]


def _stride(column: Sequence) -> int:
  return max(1, -(-len(column) // POINTS))


def _curve(learner: programs.LearnerFacts) -> list[list]:
  """Columns: tokens; loss; how a process ended, at its last step. A None follows it, so that no
  line bridges an absence."""
  steps, points = learner.steps, []
  starts = [process.started_s for process in learner.processes[1:]]
  firsts = [bisect.bisect_left(steps, at_s, key=lambda step: step.at_s) for at_s in starts]
  for process, begin, end in zip(learner.processes, [0, *firsts], [*firsts, len(steps)]):
    first, smooth = len(points), min(_SMOOTH_STEPS, 1 + (end - begin) // 20)
    for last in [*range(begin, end - 1, _stride(steps)), *([end - 1] if begin < end else [])]:
      some = steps.losses(max(begin, last + 1 - smooth), last + 1)
      points.append((steps[last].tokens, sum(some) / len(some), ''))
    if begin < end:  # a loss that became NaN has its end where it was one
      own = range(first, len(points))
      last = max((i for i in own if math.isfinite(points[i][1])), default=-1)
      points[last] = (*points[last][:2], process.ended)
      points.append((points[-1][0] + 1, None, ''))
  return [list(column) for column in zip(*points)] or [[], [], []]


def _drawn(processes: list[programs.ProcessFacts], now_s: float = 0.0) -> list[list]:
  """For each process: began, first step, end, and how it ended ('': not known). If it has not, to
  its last fact; before its first step, as it may compile for long, to `now_s`."""
  lasts = [max(p.last_s, now_s) if p.first_step_s is None else p.last_s for p in processes]
  ends = [last_s if p.ended_s is None else p.ended_s for p, last_s in zip(processes, lasts)]
  return [[p.started_s, p.first_step_s, end_s, p.ended] for p, end_s in zip(processes, ends)]


def _pauses(run: run_facts.RunFacts) -> list[tuple[float, float]]:
  """(when, seconds) of each long time without a process."""
  pauses, until_s = [], 0.0
  programs = [run.syncer_processes, *(learner.processes for learner in run.learners.values())]
  drawn = itertools.chain(*map(_drawn, programs))
  for began_s, _, end_s, _ in sorted(drawn, key=lambda process: process[0]):
    if began_s - until_s > PAUSE_S:
      pauses.append((until_s, began_s - until_s))
    until_s = max(until_s, end_s)
  return pauses


def shorten(pauses: Sequence[Sequence[float]], at_s: float) -> float:
  """A time without the long part of each pause before it, so that a run which was continued on the
  next day can be drawn.

  >>> shorten([(10.0, 100.0)], 115.0)
  45.0
  """
  return at_s - sum(max(0.0, min(long_s, at_s - when_s) - PAUSE_S) for when_s, long_s in pauses)


def _events(run: run_facts.RunFacts) -> Iterator[tuple[float, str, str]]:
  """(when, who, what), in no order."""
  programs = {name: learner.processes for name, learner in run.learners.items()}
  for name, processes in {'syncer': run.syncer_processes, **programs}.items():
    for number, process in enumerate(processes, 1):
      yield process.started_s, name, f'process {number} starts' if number > 1 else 'starts'
      explained = process.ended == 'lost' and name != 'syncer'  # below, with the reason
      if process.ended_s is not None and not explained:
        yield process.ended_s, name, process.ended
  for at_s, name, count, error in run.missing:
    yield at_s, name, f'{count} facts could not be written: {error}'
  for at_s, clock in run.went_back:
    yield at_s, 'syncer', f'continues from clock {clock} after a restore'
  for name, learner in run.learners.items():
    for at_s, incarnation in learner.joined:
      yield at_s, name, 'joins' if incarnation < 2 else f'joins as incarnation {incarnation}'
    deaths_s = [p.ended_s or 0 for p in learner.processes if p.ended in ('killed', 'failed')]
    for at_s, reason in learner.lost:
      is_event = any(abs(died_s - at_s) < 2 for died_s in deaths_s)  # as its end is one, too
      if not is_event or reason.startswith('quarantined'):
        yield at_s, name, reason if reason.startswith('left') else f'lost: {reason}'
