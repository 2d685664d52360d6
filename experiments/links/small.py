"""How well a small model learns over a link that is as thin for it as the link of a cell.

The links are scaled so that a payload takes as many inner steps as one of 25 million values takes
at 10 and at 2 Mbit/s: 3.4 and 17. So a learner waits and is late as often, and the model is a real
one, that of `stdlib_lm`, with P = H = 4, so that a short run has many exchanges. Its processes
start over links that are not shaped, as those of a cell.

Two kinds of run. Equal tokens: as many steps as over links that are not shaped; what is lost is
lost to the link. Equal time: as many steps as the method makes at the rate that its cell has
measured, with a schedule of inner rates for that many; data-parallel trains in one process, since
its exchange changes no value.
"""

import dataclasses
import hashlib
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax

from diloco_jax.api import load_params
from diloco_jax.config import build, load
from diloco_jax.train import island as island_lib
from experiments.links import cells, measure, programs, shaped

VALUES, PERIOD, FLOOR_S = 227_904, 4, 0.1
STEPS, SHORT_STEPS = 480, 120
BATCH = 8  # windows of a learner's inner step
READY_S, END_S = 240.0, 180.0
FLOOR = 'experiments.side_by_side.floor'
ALONE, ALL_TOKENS = 'one learner alone', cells.ALL_REDUCE
SPARE = 1.25  # times the traffic: the bandwidth that fits it
LONGER = {  # a method with a period that fits: without it, bytes of a value with scales and headers
  'Decoupled int8, a period that fits': (cells.INT8, 1.03),
  'Decoupled int4, a period that fits': (cells.INT4, 0.53),
}
TOKENS, TIME = 'equal tokens', 'equal time'

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
  """One run. `mbit`: of the cell with 25 million values that it stands for; `kind`: what its steps
  are equal in to those of the run over links that are not shaped."""

  method: str
  mbit: float
  steps: int
  kind: str = TOKENS

  @property
  def name(self) -> str:
    return f'small model, {self.method}, as at {cells.link_name(self.mbit)}, {self.kind}'

  @property
  def key(self) -> str:
    spec = [dataclasses.asdict(self), self.flags(), FLOOR_S]
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]

  def flags(self) -> list[str]:
    """Of the config."""
    alone = self.method in (ALONE, ALL_TOKENS)
    batch = BATCH * (cells.LEARNERS if self.method == ALL_TOKENS else 1)
    settings = {
      'data.seq_len': 32,
      'data.batch_size': batch,
      'data.eval_batches': 8,
      'data.eval_batch_size': 64,
      'mesh.data': 1,
      'train.steps': self.steps,
      'train.eval_every': 0,
      'train.log_every': 10**6,
      'train.checkpoint_every_steps': 10**6,
    }
    if self.steps < SHORT_STEPS:
      settings['optimizer.warmup_steps'] = self.steps // 4
    if not alone:
      method, value_bytes = LONGER.get(self.method, (self.method, 0.0))
      sync = cells.METHODS[method].sync
      sync = sync | {'period': PERIOD, 'fragments': min(PERIOD, sync['fragments'])}
      sync |= fitting(self.mbit, value_bytes) if value_bytes else {}
      settings |= {f'sync.{name}': value for name, value in sync.items()}
    return [
      f'--config=stdlib_lm:{"data_parallel" if alone else "decoupled"}',
      *(f'--config.{name}={value}' for name, value in settings.items()),
    ]


def scaled_mbit(mbit: float) -> float:
  """The rate with which a payload of the small model takes as many inner steps.

  >>> round(scaled_mbit(10), 3)
  1.358
  """
  payloads = (VALUES / PERIOD) / (programs.VALUES / cells.PERIOD)
  return mbit * payloads * cells.FLOOR_S / FLOOR_S


def fitting(mbit: float, value_bytes: float) -> dict[str, int]:
  """Settings with which the payloads of a link fit, as `diloco plan` would have them: fewer in the
  same time, and as much overlap as one takes.

  >>> fitting(10, 1.03)
  {'period': 20, 'ahead': 4, 'overlap': 6}
  """
  payload_s = value_bytes * programs.VALUES / cells.PERIOD * 8 / (mbit * 1e6)
  takes = payload_s / cells.FLOOR_S
  ahead = math.ceil(takes)
  return {'period': PERIOD * math.ceil(SPARE * takes), 'ahead': ahead, 'overlap': ahead + 2}


def steps_in_time(row: Row, steps: int) -> int:
  """How many steps a method makes while others make `steps`, by the rate of its cell; at least one
  exchange.

  >>> steps_in_time({'computes': 0.132, 'period': 24}, 480)
  60
  """
  period = min(PERIOD, row['period'])
  return max(1, int(row['computes'] * steps / period)) * period


def plan(short: bool) -> list[Cell]:
  """The runs with equal tokens; those with equal time follow from rows (`plan_time`)."""
  steps = SHORT_STEPS if short else STEPS
  found = [Cell(method=cells.INT8, mbit=0, steps=steps)]
  if short:
    return [*found, Cell(method=list(LONGER)[-1], mbit=cells.THINNEST, steps=steps)]
  for mbit in (cells.THINNEST, 2):
    found += [Cell(method=name, mbit=mbit, steps=steps) for name in (cells.INT4, *LONGER)]
  return [*found, Cell(method=ALONE, mbit=0, steps=steps)]


def plan_time(rows: Sequence[Row]) -> list[Cell]:
  """The runs with equal time on the thinnest link, of the methods that have been measured there."""
  return [
    Cell(method=row['method'], mbit=row['mbit'], steps=steps_in_time(row, STEPS), kind=TIME)
    for row in rows
    if row['mbit'] == cells.THINNEST and row['method'] in (cells.INT4, cells.LOCK_STEP, ALL_TOKENS)
  ]


def measured(cell: Cell, links: shaped.Links) -> Row:
  """Runs a cell; its row. Raises as measure.measure."""
  began_s = time.monotonic()
  with tempfile.TemporaryDirectory(prefix='diloco-') as name:
    folder = pathlib.Path(name)
    workdir = folder / 'run'
    alone = cell.method in (ALONE, ALL_TOKENS)
    wall_s = _alone(cell, workdir) if alone else _together(cell, links, folder, workdir)
    loss = evaluate(workdir)
    merged = None if alone else _merged(workdir)
  return {
    'key': cell.key,
    'small': cell.name,
    **dataclasses.asdict(cell),
    'link_mbit': scaled_mbit(cell.mbit),
    'loss': loss,
    'merged': merged,
    'wall_s': wall_s,
    'seconds': time.monotonic() - began_s,
    'load': os.getloadavg()[0],
  }


def _alone(cell: Cell, workdir: pathlib.Path) -> float:
  words = ['-m', 'diloco_jax', 'train', *cell.flags(), '--syncer=none', f'--workdir={workdir}']
  began_s = time.monotonic()
  done = subprocess.run(
    [sys.executable, *words],
    cwd=measure.ROOT,
    env=os.environ | measure.ENVIRONMENT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    encoding='utf-8',
  )
  if done.returncode:
    raise RuntimeError(f'{cell.name}: it ended with {done.returncode}\n{done.stdout[-1500:]}')
  return time.monotonic() - began_s


def _together(
  cell: Cell, links: shaped.Links, folder: pathlib.Path, workdir: pathlib.Path
) -> float:
  """Trains under a syncer; the seconds from the shaping of the links to the end of the last
  learner's process."""
  if cell.mbit:
    links.shape(scaled_mbit(cell.mbit))
    links.check(scaled_mbit(cell.mbit))
  links.shape(0)
  measure.certificates(folder, links.learners)
  address = f'{links.address(shaped.SYNCER)}:{shaped.PORT}'
  started: dict[str, subprocess.Popen] = {}

  def start(node: str, words: Sequence[str]) -> None:
    with open(folder / f'{node}.log', 'wb') as log:
      started[node] = links.start(
        node,
        [sys.executable, '-m', *words, *cell.flags(), f'--tls={folder}/certs/{node}'],
        cwd=measure.ROOT,
        env=os.environ | measure.ENVIRONMENT | {'PYTHONPATH': str(measure.ROOT)},
        stdout=log,
        stderr=subprocess.STDOUT,
      )

  try:
    start(shaped.SYNCER, ['diloco_jax', 'syncer', f'--workdir={workdir}', f'--listen={address}'])
    for name in links.learners:
      where = [f'--workdir={folder}/{name}', f'--learner={name}', f'--syncer={address}']
      start(name, [FLOOR, *where, f'--floor_s={FLOOR_S}'])
    _all_train(cell, workdir, started)
    links.shape(scaled_mbit(cell.mbit))
    began_s = time.monotonic()
    for name, one in sorted(started.items()):  # the syncer ends last
      if code := one.wait(END_S + 2 * cell.steps * FLOOR_S):
        raise RuntimeError(f'{cell.name}: {name} ended with {code}')
    return time.monotonic() - began_s
  except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
    for path in sorted(folder.glob('*.log')):
      error.add_note(f'--- {path.stem}\n{path.read_text("utf-8", "replace")[-1500:]}')
    raise
  finally:
    links.shape(0)
    for one in started.values():
      one.kill()
      one.wait()


def _merged(workdir: pathlib.Path) -> float:
  """The share of the tokens that was merged."""
  (ledger,) = [fact for fact in _facts(workdir) if fact['name'] == 'ledger'][-1:]
  return ledger['merged'] / (ledger['fragments'] * ledger['trained'])


def _facts(workdir: pathlib.Path) -> list[Row]:
  """The syncer's facts so far; a line that is half written does not count."""
  records = workdir / 'records' / 'syncer.jsonl'
  lines = records.read_text('utf-8').split('\n')[:-1] if records.exists() else []
  return [json.loads(line) for line in lines]


def _all_train(cell: Cell, workdir: pathlib.Path, started: dict[str, subprocess.Popen]) -> None:
  """Waits until every learner has told the syncer of a step."""
  deadline_s = time.monotonic() + READY_S
  while time.monotonic() < deadline_s:
    facts = _facts(workdir)
    told = {fact['learner'] for fact in facts if fact['name'] == 'progress' and fact['steps']}
    if len(told) == len(started) - 1:
      return
    if ended := [name for name, one in started.items() if one.poll() is not None]:
      raise RuntimeError(f'{cell.name}: {ended[0]} ended')
    time.sleep(0.1)
  raise TimeoutError(f'{cell.name}: it does not train')


def evaluate(workdir: pathlib.Path) -> float:
  """Held-out loss of the model of a run, nats per byte."""
  config = load.read(workdir)
  island = island_lib.Island(
    task=build.assemble(config).task,
    optimizer=config.optimizer,
    mesh=config.mesh,
    total_steps=config.train.steps,
    devices=jax.local_devices()[:1],
  )
  island.params = jax.device_put(load_params.load_params(workdir), island.shardings.params)
  return island.evaluate()
