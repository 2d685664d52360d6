"""Sends the curves of a run to Weights & Biases: one line per learner and one of the syncer.

    diloco track --workdir=runs/x --project=diloco              # what there is, and ends
    diloco track --workdir=runs/x --project=diloco --follow     # beside a run, until Ctrl-C

It reads the records in the folder, so no learner waits for a network, and a run that has ended can
be sent later. A run that is continued continues its lines, whose ids are in WORKDIR/wandb.json.
WANDB_MODE=offline writes to WORKDIR/wandb. Exit codes: 0 done; 42 there is no run in the folder, or
wandb is missing or refuses.
"""

import hashlib
import importlib.util
import json
import os
import pathlib
import secrets
import signal
import threading
from typing import Any

from absl import flags

from diloco_jax.config import load
from diloco_jax.process import exits
from diloco_jax.protocol import formats
from diloco_jax.report import folder as folder_lib
from diloco_jax.report import records as records_lib
from diloco_jax.storage import json_files

_WORKDIR = flags.DEFINE_string('workdir', None, 'The folder of the run; else the newest in ./runs.')
_PROJECT = flags.DEFINE_string('project', 'diloco', 'The project that the run belongs to.')
_FOLLOW = flags.DEFINE_bool('follow', False, 'Send what is added, until Ctrl-C.')
_READ_S = 1.0
_CLOCKS = {'step': 'step', 'metrics': 'step', 'eval': 'step', 'synced': 'sync'}  # of these facts


def main(argv: list[str]) -> int:
  del argv
  if importlib.util.find_spec('wandb') is None:
    raise exits.NeverRetry('wandb is not installed: pip install "diloco-jax[wandb]"')
  with exits.never_retry(ValueError):
    workdir = pathlib.Path(folder_lib.choose(_WORKDIR.value)).absolute()
  if not (workdir / records_lib.RECORDS).is_dir() and not _FOLLOW.value:
    raise exits.NeverRetry(f'there is no run in {workdir}: it has no folder {records_lib.RECORDS}/')
  parent, ended = os.getppid(), threading.Event()
  for number in exits.end_signals():
    signal.signal(number, lambda number, frame: ended.set())
  path = workdir / 'wandb.json'
  with exits.never_retry(ValueError, OSError):
    sent = json_files.read(path) if path.exists() else formats.stamp('track')
    # Of a process: its id, how many bytes of its records were sent, and a hash of their end.
    lines = formats.require('track', sent, path).get('lines', {})
  tails, runs, last, begun = records_lib.TailAll(workdir), {}, False, set()
  while not last:
    last = not _FOLLOW.value or ended.wait(_READ_S) or os.getppid() != parent
    changed = False
    for process, tail in tails.all().items():
      line = lines.setdefault(process, {'id': secrets.token_hex(8), 'bytes': 0, 'sha256': ''})
      if process not in begun:
        begun.add(process)
        tail.offset = line['bytes'] if line['sha256'] == _hash(tail.path, line['bytes']) else 0
        if tail.offset < line['bytes']:
          print(f'{process}: all is sent, as {tail.path} is not the file that was sent', flush=True)
      for values in filter(None, map(_curves, tail.stream())):
        if process not in runs:
          runs[process] = _begin(workdir, process, line['id'])
        runs[process].log(values)
      if tail.offset != line['bytes']:
        line |= {'bytes': tail.offset, 'sha256': _hash(tail.path, tail.offset)}
        changed = True
    if changed:
      values = formats.stamp('track') | {'lines': lines}
      json_files.replace(path, json.dumps(values).encode())
  for run in runs.values():
    run.finish()
  return 0


def _hash(path: pathlib.Path, end: int) -> str:
  with open(path, 'rb') as file:
    file.seek(max(0, end - (1 << 16)))
    return hashlib.sha256(file.read(end - file.tell())).hexdigest()


def _begin(workdir: pathlib.Path, process: str, line: str) -> Any:
  import wandb

  try:
    run = wandb.init(
      project=_PROJECT.value,
      group=workdir.name,
      name=process,
      id=line,
      resume='allow',
      reinit='create_new',
      dir=workdir,
      config=load.read(workdir).to_dict() if (workdir / load.FILE).is_file() else None,
      settings=wandb.Settings(silent=True, console='off', x_disable_stats=True, disable_git=True),
    )
  except wandb.errors.Error as error:
    raise exits.NeverRetry(
      f'wandb: {exits.one_line(error)}. The run and its records are as they were: `wandb login`, '
      'or WANDB_MODE=offline, and send them again'
    ) from error
  run.define_metric('*', step_metric='clock')
  print(f'{process}: {run.dir if run.offline else run.url}', flush=True)
  return run


def _curves(row: dict[str, Any]) -> dict[str, float]:
  """The numbers of a fact, with its clock; {}: it has none."""
  clock = row.get(_CLOCKS.get(row['name'], ''))
  if clock is None:
    return {}
  values = {key: value for key, value in row.items() if key not in ('t_ns', 'time')}
  values.update(values.pop('values', {}))
  points = {f'{row["name"]}/{k}': v for k, v in values.items() if isinstance(v, int | float)}
  return {'clock': clock, **points}
