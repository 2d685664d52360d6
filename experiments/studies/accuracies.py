"""Accuracies on held-out questions: Decoupled against data-parallel training (accuracies.md)."""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from diloco_jax.config import run_config
from diloco_jax.configs import stdlib_lm
from diloco_jax.verification.virtual import conditions
from experiments.examples import digits_vlm
from experiments.studies.lib import arms
from experiments.studies.lib import study as study_lib

MODELS: dict[str, Callable[[], run_config.Config]] = {
  'dense': stdlib_lm.small,
  'MoE': lambda: stdlib_lm.get_config('moe'),
  'vision': digits_vlm.get_config,
}
SEQ_LEN = 64  # of text: 32 bytes show too little of what is nested and indented
BASELINE, ALIVE, DEATHS = 'data-parallel', 'decoupled', 'decoupled, deaths'
DYING = {'death_every': 100.0, 'down': 24.0}
# The paper's averages of benchmarks, (text, vision), of the arms above; None: there is no such row.
PAPER = {
  'dense': ((70.1, 58.7), None, (69.8, 58.6)),
  'MoE': ((68.4, 54.9), (68.4, 55.1), None),
}


def plan(quick: bool, book: study_lib.Book) -> list[arms.Arm]:
  """Seed by seed. A data-parallel run that begins again from its checkpoint has the same bits as
  one without deaths, so there is no arm of it."""
  del book
  pairs = itertools.product(study_lib.seeds(quick), MODELS)
  return [arm for seed, name in pairs for arm in _of(name, seed, quick)]


def _of(name: str, seed: int, quick: bool) -> list[arms.Arm]:
  made = []
  for method in (ALIVE, DEATHS):
    model = MODELS[name]()
    arm = arms.decoupled(
      'accuracies',
      f'{name}, {method}',
      quick,
      seed=seed,
      steps=model.train.steps,
      against=f'{name}, {BASELINE}',
      fragmentation=model.sync.fragmentation,
    )
    config = arm.config
    config.task, config.model, config.data = model.task, model.model, model.data
    config.data.seed = seed
    if name != 'vision':
      config.data.seq_len = SEQ_LEN
    if method == DEATHS:
      config.train.checkpoint_every_steps = 25
      arm.where['faults'] = conditions.Faults(**DYING)
    made.append(arm)
  made.insert(0, arms.data_parallel(made[0], made[0].against))
  return [dataclasses.replace(arm, suite=True) for arm in made]


def tables(rows: Sequence[study_lib.Row]) -> str:
  """Every kind of question, the paper's scores beside the means of ours, and every run."""
  found: dict[str, list[study_lib.Row]] = {}
  for row in rows:
    found.setdefault(row['arm'], []).append(row)
  lines = [
    '| model | questions | data-parallel | Decoupled | points | with deaths | points |',
    '|---|---|---|---|---|---|---|',
  ]
  means = {}
  for model in MODELS:
    of = [found.get(f'{model}, {method}', []) for method in (BASELINE, ALIVE, DEATHS)]
    kinds = of[0][0]['right'] if all(of) else ()
    each = [[_against(one, of[0], kind) for one in of] for kind in kinds]
    named = list(zip(kinds, each))
    if kinds:
      means[model] = [_mean([kind[place] for kind in each]) for place in range(3)]
      named += [('**mean**', means[model])] if len(each) > 1 else []
    for kind, ((base, *_), *others) in named:
      cells = [f'{percent:.2f} | {_points(*rest)}' for percent, *rest in others]
      lines.append(f'| {model} | {kind} | {base:.2f} | {" | ".join(cells)} |')
  runs = ['| arm | seed | loss | deaths | minutes | sha256 |', '|---|---|---|---|---|---|']
  for row in rows:
    cells = f'{row["loss"]:.4f} | {row.get("deaths", 0)} | {row["seconds"] / 60:.1f}'
    runs.append(f'| {row["arm"]} | {row["seed"]} | {cells} | {row["theta_sha256"][:12]} |')
  return '\n'.join([*lines, '', *_beside_the_paper(means), '', *runs, ''])


_Found = tuple[float, float, float, list[float]]  # percent, points behind, their error, by seed


def _against(one: list[study_lib.Row], base: list[study_lib.Row], kind: str) -> _Found:
  """The difference of each question is paired, and a mean over the seeds that both arms have; the
  error of their mean is that over the questions."""
  of = [{row['seed']: np.array(row['right'][kind]) for row in rows} for rows in (one, base)]
  both = sorted(of[0].keys() & of[1].keys())
  off_SxN = 100 * np.stack([of[0][seed] - of[1][seed] for seed in both])
  percent = 100 * float(np.mean([of[0][seed].mean() for seed in both]))
  error = float(off_SxN.mean(axis=0).std()) / off_SxN.shape[1] ** 0.5
  return percent, float(off_SxN.mean()), error, off_SxN.mean(axis=1).tolist()


def _mean(found: list[_Found]) -> _Found:
  percents, points, errors, by_seed = zip(*found)
  error = float(np.linalg.norm(errors)) / len(found)
  return np.mean(percents), np.mean(points), error, np.mean(by_seed, axis=0).tolist()


def _points(points: float, error: float, by_seed: list[float]) -> str:
  return f'{points:+.2f} ± {error:.2f} ({", ".join(f"{one:+.1f}" for one in by_seed)})'


def _beside_the_paper(means: dict[str, list[_Found]]) -> list[str]:
  """The vision model is dense."""
  lines = [
    '| row | paper, text | paper, vision | ours, text | ours, vision |',
    '|---|---|---|---|---|',
  ]
  for model, rows in PAPER.items():
    for place, method in enumerate((BASELINE, ALIVE, DEATHS)):
      paper = [f'{one}' for one in rows[place] or ('', '')]
      ours = [
        f'{means[one][place][0]:.2f}' if one in means else ''
        for one in (model, 'vision' if model == 'dense' else '')
      ]
      lines.append(f'| {model}, {method} | {" | ".join(paper + ours)} |')
  return lines


def conclude(quick: bool, book: study_lib.Book, folder: pathlib.Path) -> str:
  del folder
  return tables([row for arm in plan(quick, book) if (row := book.row(arm))])


STUDY = study_lib.Study(
  name='accuracies', title='Accuracies on held-out questions', plan=plan, conclude=conclude
)
