"""What a chaos run looked like, folded from made-up records."""

import dataclasses

from diloco_jax.protocol import facts
from diloco_jax.report import run_facts
from diloco_jax.report import steps as steps_lib
from diloco_jax.verification.faults import chaos_report

LEDGER = facts.Ledger(
  fragments=2,
  trained=50,
  merged=60,
  discarded={'late': 30, 'overwritten': 10},
  unsettled=0,
  learners={},
  synced=1,
  cancelled=0,
  repaired=0,
  skipped=0,
  sync=1,
)


def run_of(ledger: facts.Ledger = LEDGER, steps_s=(11.0, 12.0, 15.0), merged_s=(13.0,)):
  """A run whose learners have joined after 1 s and 2 s."""
  run = run_facts.RunFacts(['l0', 'l1'], total_steps=100)
  run.learners['l0'].joined, run.learners['l1'].joined = [(1.0, 1), (9.0, 2)], [(2.0, 1)]
  run.learners['l0'].steps = [
    steps_lib.Step(at_s, tokens=0, step=0, loss=0.0, seconds=0.0) for at_s in steps_s
  ]
  run.merges_s, run.ledger = list(merged_s), ledger
  return run


def freeze(recovered_s: float | None = 21.0):
  return chaos_report.FaultRun(
    kind='freeze', node='l1', began_s=10.0, ended_s=20.0, recovered_s=recovered_s
  )


def test_the_clock_of_a_plan_starts_when_the_last_learner_has_joined():
  run = run_of()
  assert chaos_report.began_s(run) == 2.0
  run.learners['l1'].joined = []
  assert chaos_report.began_s(run) is None


def test_a_good_run_has_no_complaints_and_its_text_says_what_was_done():
  text = chaos_report.text(run_of(), [freeze()])
  assert chaos_report.complaints(run_of(), [freeze()]) == []
  assert 'freeze l1' in text and '1 merges' in text and 'l0 3' in text
  assert 'l1 was merged again at 19.0' in text
  assert '60 merged + 40 discarded (late 30, overwritten 10) + 0 unsettled' in text
  assert 'DOES NOT ADD UP' not in text


def test_whoever_stands_still_is_complained_of():
  run = run_of(dataclasses.replace(LEDGER, merged=61), steps_s=(1.0, 30.0), merged_s=())
  complaints = chaos_report.complaints(run, [freeze(recovered_s=None)])
  assert complaints == [
    'no outer step during the freeze of l1',
    'l0 took no step during the freeze of l1',
    'after the freeze of l1 it was not merged again',
    'the ledger does not add up, or has unsettled tokens',
  ]
  assert '-1 fragment-tokens' in chaos_report.text(run, [freeze()])


def test_a_fault_that_found_nobody_is_no_complaint():
  nobody = freeze(recovered_s=None)
  nobody.has_victim = False
  assert chaos_report.complaints(run_of(), [nobody]) == []
  assert 'found no process' in chaos_report.text(run_of(), [nobody])
