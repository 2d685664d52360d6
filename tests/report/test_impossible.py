"""A figure that cannot be is found, wherever it comes from."""

import pytest

from diloco_jax.config import load
from diloco_jax.configs import stdlib_lm
from diloco_jax.protocol import facts
from diloco_jax.report import facts as report_facts
from tests.report import impossible
from tests.report.rows import add, member, row

ZERO = dict.fromkeys(('unsettled', 'cancelled', 'repaired', 'skipped'), 0)


def step(at_s: float, steps: int, seconds: float, data_s: float = 0.0) -> dict:
  fact = report_facts.Step(
    step=steps, steps=steps, tokens=50 * steps, loss=4.0, seconds=seconds, data_s=data_s
  )
  return row(at_s, fact) | {'t_ns': int(at_s * 1e9)}


def ledger(trained: int, merged: int) -> dict:
  told = {'l0': {'tokens': trained, 'merged': merged}}
  return row(
    40.0,
    facts.Ledger(
      **ZERO, fragments=1, trained=trained, merged=merged, discarded={}, learners=told, synced=1,
      sync=1,
    ),
  )  # fmt: skip


@pytest.mark.parametrize(
  ('steps', 'merged', 'what'),
  [
    ([(10 + n, n, 1.0) for n in range(1, 20)], 900, ''),
    ([(10 + n, n, 1.0 if n != 2 else 1e-4) for n in range(1, 20)], 900, 'a step of 0.0001'),
    ([(10 + n, n, 2.0) for n in range(1, 20)], 900, 'steps of 38.000 s'),
    ([(10 + n, n, 1.0, 1.5) for n in range(1, 20)], 900, 'a batch was awaited'),
    ([(10 + n, n, 1.0) for n in range(1, 20)], 1_900, 'merged'),
  ],
)
def test_it_is_found(steps, merged, what, tmp_path):
  load.write(tmp_path, stdlib_lm.get_config('tiny'))
  add(tmp_path, ('syncer', row(10.0, member('l0', 'joined'))), ('syncer', ledger(950, merged)))
  add(tmp_path, *[('l0', step(*one)) for one in steps])
  found = impossible.figures(tmp_path)
  assert any(what in one for one in found) if what else not found, found
