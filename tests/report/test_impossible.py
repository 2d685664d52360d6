"""A figure that cannot be is found, wherever it comes from."""

import pytest

from diloco_jax.config import load
from diloco_jax.configs import stdlib_lm
from diloco_jax.report import facts as report_facts
from tests.report import impossible
from tests.report.rows import add_of, ledger, member, row


def step(at_s: float, steps: int, seconds: float, data_s: float = 0.0) -> dict:
  fact = report_facts.Step(
    step=steps, steps=steps, tokens=50 * steps, loss=4.0, seconds=seconds, data_s=data_s
  )
  return row(at_s, fact) | {'t_ns': int(at_s * 1e9)}


STEPS = [(10 + n, n, 1.0) for n in range(1, 20)]


@pytest.mark.parametrize(
  ('steps', 'merged', 'what'),
  [
    (STEPS, 900, ''),
    ([(12, 2, 1e-4) if n == 2 else (at_s, n, s) for at_s, n, s in STEPS], 900, 'a step of 0.0001'),
    ([(at_s, n, 2.0) for at_s, n, _ in STEPS], 900, 'steps of 38.000 s'),
    ([(*values, 1.5) for values in STEPS], 900, 'a batch was awaited'),
    (STEPS, 1_900, 'merged'),
    ([(10 + n, n, 1.0) for n in range(1, 31)], 900, 'l0 is at clock 30 of 24'),
    ([(10 + n, n, 1.0) for n in range(1, 31)], 900, 'a loss at clock 30 of 24'),
  ],
)
def test_it_is_found(steps, merged, what, tmp_path):
  load.write(tmp_path, stdlib_lm.get_config('tiny'))
  books = ledger(950, {'l0': {'tokens': 950, 'merged': merged}}, merged=merged)
  held_out = report_facts.Eval(step=steps[-1][1], loss=4.0)
  add_of(tmp_path, 'syncer', row(10.0, member('l0', 'joined')), row(40.0, books), row(40, held_out))
  add_of(tmp_path, 'l0', *[step(*values) for values in steps])
  sentences = impossible.figures(tmp_path)
  assert any(what in sentence for sentence in sentences) if what else not sentences, sentences
