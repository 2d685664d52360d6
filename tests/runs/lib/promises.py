"""The promises that every run of real processes keeps, whatever the test does to it."""

from diloco_jax.verification.checks import judge_tapes
from diloco_jax.verification.faults import chaos_report
from diloco_jax.verification.replay import tape_files
from tests.runs.lib import conductor


def check(run: conductor.Run) -> judge_tapes.Verdict:
  """Every invariant holds on the tapes, every tape replays, the ledger adds up."""
  verdict = run.verdict()
  assert verdict.broken is None and not verdict.unread, verdict.text()
  lives = run.tapes()
  assert lives
  for life in lives:
    assert tape_files.replay(life).identical, life.name
  ledger = run.of('syncer', 'ledger')[-1]
  assert chaos_report.balance(ledger) == 0 and ledger['merged'] > 0
  assert ledger['repaired'] == 0, 'a digest differed'
  return verdict
