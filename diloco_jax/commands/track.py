"""Sends the curves of a run to Weights & Biases: one line per learner and one of the syncer.

    diloco track --workdir=runs/x --project=diloco              # what there is, and ends
    diloco track --workdir=runs/x --project=diloco --follow     # until Ctrl-C
    diloco train --wandb=diloco                                 # the same during a run

It reads the records in the folder, so no learner waits for a network, and a run that has ended, or
that is on a machine without one, can be sent later. WORKDIR/wandb.json holds the ids of the lines:
a run that is continued continues them. WANDB_MODE=offline writes them to WORKDIR/wandb. Exit codes:
0 done; 42 there is no run in the folder, or wandb is missing.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import secrets
import signal
import threading
from collections.abc import Iterator
from typing import Any

from absl import flags

from diloco_jax.config import load
from diloco_jax.launch import cli
from diloco_jax.protocol import facts as protocol_facts
from diloco_jax.report import facts
from diloco_jax.report import records as records_lib
from diloco_jax.storage import json_files

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.', required=True)
_PROJECT = flags.DEFINE_string('project', 'diloco', 'The project that the run belongs to.')
_FOLLOW = flags.DEFINE_bool('follow', False, 'Send what is added, until Ctrl-C.')
FILE = 'wandb.json'
READ_S = 1.0


def main(argv: list[str]) -> int:
  del argv
  if importlib.util.find_spec('wandb') is None:
    raise cli.NeverRetry('wandb is not installed: pip install "diloco-jax[wandb]"')
  workdir = pathlib.Path(_WORKDIR.value).absolute()
  if not (workdir / records_lib.RECORDS).is_dir() and not _FOLLOW.value:
    raise cli.NeverRetry(f'there is no run in {workdir}: it has no folder {records_lib.RECORDS}/')
  parent, ended = os.getppid(), threading.Event()
  for number in cli.end_signals():
    signal.signal(number, lambda number, frame: ended.set())
  tails = records_lib.TailAll(workdir)
  with contextlib.closing(Tracker(workdir, _PROJECT.value)) as tracker:
    tracker.take(tails.stream())
    while _FOLLOW.value and not ended.wait(READ_S) and os.getppid() == parent:
      tracker.take(tails.stream())
    tracker.take(tails.stream())
  return 0


class Tracker:
  """The lines of a run. Each row of the records is sent once."""

  def __init__(self, workdir: pathlib.Path, project: str):
    self._workdir, self._project = workdir, project
    self._path = workdir / FILE
    self._lines: dict[str, dict[str, Any]] = {}  # of a process: id, and time of the newest row sent
    if self._path.exists():
      with cli.never_retry(ValueError, OSError):
        self._lines = json_files.read(self._path)
    self._runs: dict[str, Any] = {}

  def take(self, rows: Iterator[tuple[str, dict[str, Any]]]) -> None:
    """Sends new rows."""
    took = False
    for process, row in rows:
      fact = facts.parse(row)
      values = fact and curves(fact)
      if values and row['time'] > self._lines.get(process, {}).get('time', 0.0):
        self._run(process).log(values)
        self._lines[process]['time'] = row['time']
        took = True
    if took:
      json_files.replace(self._path, json.dumps(self._lines).encode())

  def _run(self, process: str) -> Any:
    import wandb

    if process not in self._runs:
      line = self._lines.setdefault(process, {'id': secrets.token_hex(8), 'time': 0.0})
      has_config = (self._workdir / load.FILE).is_file()
      run = self._runs[process] = wandb.init(
        project=self._project,
        group=self._workdir.name,
        name=process,
        id=line['id'],
        resume='allow',
        reinit='create_new',
        dir=self._workdir,
        config=load.read(self._workdir).to_dict() if has_config else None,
        settings=wandb.Settings(silent=True, console='off', x_disable_stats=True, disable_git=True),
      )
      run.define_metric('*', step_metric='clock')
      print(f'{process}: {run.dir if run.offline else run.url}', flush=True)
    return self._runs[process]

  def close(self) -> None:
    """Waits until all is sent."""
    for run in self._runs.values():
      run.finish()


def curves(fact: facts.Fact) -> dict[str, float]:
  """The points of a fact, with its clock; {}: it has none."""
  match fact:
    case facts.Step():
      return {
        'clock': fact.step,
        'learning/loss': fact.loss,
        'perf/step_time_seconds': fact.seconds,
        'perf/tokens': fact.tokens,
      }
    case facts.Metrics():
      return {'clock': fact.step, **{f'learning/{name}': v for name, v in fact.values.items()}}
    case facts.Eval():
      return {'clock': fact.step, 'evaluation/loss': fact.loss}
    case protocol_facts.Synced():
      return {
        'clock': fact.sync,
        'sync/participants': len(fact.participants),
        'sync/staleness': fact.staleness,
        'sync/waited_seconds': fact.waited_ns / 1e9,
        'sync/tokens': fact.tokens,
      }
  return {}
