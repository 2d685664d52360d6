"""A run as its folder has it: of `diloco train`, of a notebook, or of a syncer or learners that
were started one by one; ended, killed, or under way."""

import dataclasses
import math
import pathlib
import sys
from typing import Any

from diloco_jax.config import load, run_config
from diloco_jax.protocol import ids
from diloco_jax.report import records as records_lib
from diloco_jax.report import run_facts
from diloco_jax.storage import folders

UNKNOWN = f'not recorded: there is no {load.FILE}, which the syncer writes when it starts'


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
  """A run that was read; `config` None: UNKNOWN."""

  workdir: pathlib.Path
  config: run_config.Config | None
  run: run_facts.RunFacts


def choose(workdir: str | pathlib.Path | None) -> str | pathlib.Path:
  """The folder that a command was given; without one, that of the run under ./runs which has the
  newest record, and a line on stderr says which. Raises ValueError: there is none."""
  if workdir:
    return workdir
  if not (workdirs := runs()):
    raise ValueError(f'there is no run in {folders.RUNS}/ here: name its folder, --workdir=DIR')
  newest = f'{workdirs[-1]}, the newest of {len(workdirs)} in {folders.RUNS}/'
  print(newest, file=sys.stderr, flush=True)
  return workdirs[-1]


def runs() -> list[str]:
  """The folders of runs under ./runs; the one with the newest record is the last."""
  dated = []
  for path in pathlib.Path(folders.RUNS).glob('*'):
    kept = sorted((path / records_lib.RECORDS).glob('*.jsonl'))
    if (path / load.FILE).is_file() or any(record.stem == 'syncer' for record in kept):
      dated.append((max((record.stat().st_mtime for record in kept), default=0.0), str(path)))
  return [path for _, path in sorted(dated)]


def read(workdir: str | pathlib.Path) -> Read:
  """Reads the run in a folder.

  Raises:
    ValueError: there is no run in the folder.
  """
  folder = pathlib.Path(workdir).absolute()
  config, names = config_of(folder), _names(folder)
  learners = [name for name in names if name not in ids.NO_LEARNERS]
  if not learners and config and config.task != run_config.OWN_LOOP:
    learners = run_config.learner_ids(config.sync.learners)
  syncer = 'syncer' in names or not names
  run = run_facts.RunFacts(learners, syncer=syncer, **pace(config))
  return Read(folder, config, run.take(records_lib.TailAll(folder).stream()))


def has_ended(folder: pathlib.Path) -> bool:
  """Whether all is done for the run in a folder, as its records have it: the last step, the model,
  and the last evaluation, which a signal may have ended. Raises ValueError: there is no run."""
  if 'syncer' in _names(folder) and not (folder / 'model').is_dir():
    return False  # without reading the records
  run = read(folder).run
  ends = (
    [learner.state for learner in run.learners.values()] if run.syncer is None else [run.syncer]
  )
  evaluated = not run.evaluations or run.evaluations[-1].step >= run.total_steps
  return run.progress >= 1 and evaluated and set(ends) == {'done'}


def config_of(folder: pathlib.Path) -> run_config.Config | None:
  """The config of the run in a folder; None: there are records alone. Raises ValueError."""
  if (folder / load.FILE).is_file():
    return load.read(folder)
  if _names(folder):  # of learners whose syncer has not started, or has another folder
    return None
  raise ValueError(f'there is no run in {folder}: it has neither {load.FILE} nor records')


def _names(folder: pathlib.Path) -> list[str]:
  return sorted(path.stem for path in (folder / records_lib.RECORDS).glob('*.jsonl'))


def loss_unit(config: run_config.Config | None, run: run_facts.RunFacts) -> str:
  """'' if only the user knows it: of a task without a tokenizer."""
  if config is None or (config.task != run_config.DECODER and not run.of_text):
    return ''
  return 'nats per token' if config.data.tokenizer else 'nats per byte'


def pace(config: run_config.Config | None) -> dict[str, Any]:
  """Arguments of RunFacts: its end, the quorum, inner steps between two outer steps, and what is
  silence."""
  if config is None:
    return {'total_steps': math.inf}
  sync = config.sync
  return {
    'total_steps': config.train.steps,
    'silent_s': max(run_facts.SILENT_S, sync.lease_s / 2),
    'quorum': sync.quorum,
    'steps_per_sync': sync.period / sync.fragments,
  }
