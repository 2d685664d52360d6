"""What a run shows while it runs: phases, rates, the time that is left."""

import pytest

from diloco_jax.protocol import facts as protocol_facts
from diloco_jax.report import facts, run_facts
from tests.report.test_records import row


def _step(at_s: float, step: int, steps: int) -> dict:
  return row(at_s, facts.Step(step=step, steps=steps, tokens=50 * steps, loss=4.0, seconds=0.5))


def _process(at_s: float, child: str, state: str) -> tuple[str, dict]:
  return 'supervisor', row(at_s, facts.Process(child=child, state=state, text=''))


def test_a_starting_process_tells_its_phase_and_trains_no_token_before_its_first_step():
  run = run_facts.RunFacts(['l0', 'l1'], 100)
  learner = run.learners['l0']
  seen = []
  for start_s in (0, 100):  # the second process of a learner has the rates of the first one
    for at_s, rows in enumerate(
      [
        [_process(start_s, 'l0', 'starting')],
        *(
          [('l0', row(start_s + at_s, facts.Startup(phase=phase, cpu_s=1.0)))]
          for at_s, phase in enumerate(('imported', 'built', 'restored', 'compiled'), 1)
        ),
        [('l0', row(start_s + 5, protocol_facts.State(state='joined', incarnation=1, clock=0)))],
      ]
    ):
      run.take(rows)
      seen.append(learner.phase)
      assert learner.phase_s == start_s + at_s and run.tokens_per_second == 0
    run.take([('l0', _step(start_s + 6, 1 + start_s // 2, 1))])
    assert learner.phase == '' and run.tokens_per_second == 100
    run.take([_process(start_s + 50, 'l0', 'down')])
    assert run.tokens_per_second == 0
  phases = ['importing', 'building', 'restoring', 'compiling', 'joining', 'waiting']
  assert seen == 2 * phases


def test_the_time_left_is_that_of_the_steps_since_a_restart():
  """A step takes 2 s, and the first ones of each process longer; the run was stopped for a day."""
  run = run_facts.RunFacts(['l0', 'l1'], 100)
  for day, first in enumerate((0, 20)):
    start_s = 86_400 * day
    run.take([_process(start_s, name, 'starting') for name in run.learners])
    for count in range(1, 21):
      at_s = start_s + 30 + 2 * count + (count > 3) * 60
      run.take([(name, _step(at_s, first + count, count)) for name in run.learners])
      if count < 8:
        assert run.seconds_left is None
    assert run.seconds_left == pytest.approx(2 * (80 - first))
    run.take([_process(at_s, 'l0', 'down')])
    assert run.seconds_left == pytest.approx(2 * (80 - first))
    run.take([_process(at_s, 'l1', 'down')])
    assert run.seconds_left is None
  assert run.seconds_at(1000.0) == 1000 - run.began_s
