"""docs/simulator.md says what the code enforces, and docs/findings.md has the seeds that failed."""

import pathlib

from tests.verification import mutants, test_seeds

DOCS = pathlib.Path(__file__).resolve().parents[2] / 'docs'
PAGE = (DOCS / 'simulator.md').read_text()


def test_the_number_of_mutants_is_right():
  assert f'{len(mutants.MUTANTS)} seeded bugs' in PAGE


def test_seeds_that_failed_are_among_the_findings():
  record = (DOCS / 'findings.md').read_text().split('## Bugs that the simulator found')[1]
  for seed in test_seeds.EVER_FAILED:
    assert str(seed) in record, seed
