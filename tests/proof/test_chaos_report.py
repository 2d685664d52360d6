"""What a chaos run looked like, folded from made-up records."""

import doctest

from diloco_jax.proof.faults import chaos_report

SECOND_NS = chaos_report.SECOND_NS
LEDGER = {
  'name': 'ledger',
  'fragments': 2,
  'trained': 50,
  'merged': 60,
  'discarded': {'late': 30, 'overwritten': 10},
  'unsettled': 0,
}


def facts_of(*rows) -> chaos_report.Facts:
  """Facts from (process, second, name, values)."""
  facts = chaos_report.Facts(['l0', 'l1'])
  for process, second, name, values in rows:
    facts.take(process, {**values, 'name': name, 't_ns': round(second * SECOND_NS)})
  return facts


def joined(name: str, second: float, incarnation: int = 1):
  return (
    'syncer',
    second,
    'member',
    {'learner': name, 'state': 'joined', 'incarnation': incarnation},
  )


def steps(name: str, *seconds: float):
  return [(name, second, 'step', {}) for second in seconds]


def synced(second: float, *participants: str):
  return 'syncer', second, 'synced', {'participants': list(participants)}


def freeze(began_s: int = 10, ended_s: int = 20, recovered_s: int | None = 21):
  return chaos_report.Episode(
    kind='freeze',
    node='l1',
    began_ns=began_s * SECOND_NS,
    ended_ns=ended_s * SECOND_NS,
    recovered_ns=None if recovered_s is None else recovered_s * SECOND_NS,
  )


def good() -> chaos_report.Facts:
  return facts_of(
    joined('l0', 1),
    joined('l1', 2),
    *steps('l0', 11, 12, 15),
    synced(13, 'l0'),
    ('syncer', 22, 'ledger', LEDGER),
  )


def test_the_clock_of_a_plan_starts_when_the_last_learner_has_joined():
  assert facts_of(joined('l0', 1)).began_ns is None
  assert facts_of(joined('l0', 1), joined('l1', 3), joined('l0', 9, 2)).began_ns == 3 * SECOND_NS


def test_a_good_run_has_no_complaints_and_its_text_says_what_was_done():
  text = chaos_report.text(good(), [freeze()], 20 * SECOND_NS)
  assert chaos_report.complaints(good(), [freeze()]) == []
  assert 'freeze l1' in text and '1 merges' in text and 'l0 3' in text
  assert 'l1 took part again at 19.0' in text
  assert 'l0: 3 steps, median 2000 ms apart, longest gap 5000 ms' in text
  assert '60 merged + 40 discarded (late 30, overwritten 10) + 0 not yet settled' in text
  assert 'DO NOT ADD UP' not in text


def test_whoever_stands_still_is_complained_of():
  facts = facts_of(
    joined('l0', 1),
    joined('l1', 2),
    *steps('l0', 1, 30),
    ('syncer', 22, 'ledger', {**LEDGER, 'merged': 61}),
  )
  found = chaos_report.complaints(facts, [freeze(recovered_s=None)])
  assert found == [
    'nothing was merged during the freeze of l1',
    'l0 took no step during the freeze of l1',
    'after the freeze of l1 it never took part again',
    'the books do not add up, or are not closed',
  ]
  assert '-1 fragment-tokens' in chaos_report.text(facts, [freeze()], 20 * SECOND_NS)


def test_standing_still_to_the_end_is_a_gap():
  assert chaos_report.pace([1 * SECOND_NS], 0, 9 * SECOND_NS).longest_s == 8.0


def test_a_fault_that_found_nobody_is_no_complaint():
  nobody = freeze(recovered_s=None)
  nobody.found = False
  assert chaos_report.complaints(good(), [nobody]) == []
  assert 'found no process' in chaos_report.text(good(), [nobody], 20 * SECOND_NS)


def test_examples():
  result = doctest.testmod(chaos_report)
  assert result.attempted and not result.failed
