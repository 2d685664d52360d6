"""How well the simulator predicts the bench on shaped links, cell by cell.

    python -m experiments.predicted_cells cells.json    # of experiments/bandwidth_bench.py

The settings, the rate and the steps of a cell go in, and costs that were measured before: encoding,
adoption and what the exchange adds to a step with one core for each learner, an outer step with its
commit (docs/performance.md), and the spread of the steps (in a trial of the same loops, with other
programs beside them). Prints measured and predicted shares and bytes.

A link that is not shaped, or has a burst of 64 KiB, passes so much with one header; its interface
counts fewer headers.
"""

import dataclasses
import json
import pathlib
import statistics
import sys
from typing import Any

from diloco_jax.config import run_config
from diloco_jax.verification.sim import network
from diloco_jax.verification.virtual import conditions, links

VALUES = 24 << 20
ENCODE_S = ADOPT_S = 1.3e-3 / (1 << 20)  # for each value
EXCHANGE_S = 8.3e-3
OUTER_STEP_S = 30e-3 / (4 << 20)  # for each value, of four learners
SPREAD = 0.08  # of the steps
WHOLE = 1.0034  # bytes that such an interface counts for each byte of a payload
BURST_S = 0.002  # of a shaped link (experiments/links/shaped.py)
SEEDS = 4
MBIT = 125e3


@dataclasses.dataclass(frozen=True)
class Shares:
  """Of a cell: shares, and bytes of a learner's interface in an inner step."""

  computes: float
  merged: float
  on_time: float
  bytes_up: float
  bytes_down: float


def predict(cell: dict[str, Any], seed: int) -> Shares:
  """One run of a cell in virtual time."""
  sync, floor_s = run_config.SyncConfig(**cell['sync']), cell['floor_s']
  steps, warm_up = round(cell['steps']), cell['period']
  settings = run_config.Config(name='cell', task=run_config.OWN_LOOP, sync=sync)
  settings.train.steps, settings.train.checkpoint_every_steps = warm_up + steps + 1, 0
  settings.sync.checkpoint_every_syncs = 0
  config = settings.protocol()
  values = VALUES // config.fragments
  hardware = conditions.Hardware(
    step_s=floor_s,
    gaussian=SPREAD,
    encode=ENCODE_S * values / floor_s,
    adopt=ADOPT_S * values / floor_s,
    merge=OUTER_STEP_S * values / floor_s,
    exchange=EXCHANGE_S / floor_s,
  )
  lines = (conditions.Line(cell['mbit'] * MBIT or 1e12, cell['mbit'] * MBIT or 1e12),)
  found = links.predict(
    config,
    links.sizes([values] * config.fragments, sync.codec_up, sync.codec_down),
    hardware,
    conditions.Network(lines=lines),
    warm_up,
    seed,
  )
  mean = lambda of: statistics.fmean(of.values())
  cut = 0 < cell['mbit'] * MBIT * BURST_S < 1 << 16
  counted = 1.0 if cut else WHOLE / (network.wire_bytes(10**9) / 1e9)
  counted /= steps + (config.overlap > 0)  # in lock step the exchange after the last one counts
  return Shares(
    mean(found.computing),
    mean(found.merged),
    mean(found.on_time),
    mean(found.up_bytes) * counted,
    mean(found.down_bytes) * counted,
  )


def main() -> None:
  cells = json.loads(pathlib.Path(sys.argv[1]).read_text('utf-8'))['cells']
  print(f'{"":34}{"computes":>15}{"merged":>15}{"on time":>15}{"MB up":>14}{"MB down":>14}')
  for cell in cells:
    if 'sync' not in cell:
      continue  # no run of this project's machines, or one of the small model
    runs = [predict(cell, seed) for seed in range(SEEDS)]
    row = f'{cell["method"]}, {cell["mbit"]:g}'.ljust(34)
    for field in dataclasses.fields(Shares):
      predicted = statistics.fmean(getattr(run, field.name) for run in runs)
      if field.name.startswith('bytes'):
        row += f'{cell[field.name] / 1e6:>8.3f}{predicted / 1e6:>6.3f}'
      else:
        row += f'{cell[field.name]:>8.1%}{predicted:>7.1%}'
    print(row, flush=True)


if __name__ == '__main__':
  main()
