"""docs/simulator.md says what the code enforces."""

import pathlib

from tests.verification import mutants

DOCS = pathlib.Path(__file__).resolve().parents[2] / 'docs'
PAGE = (DOCS / 'simulator.md').read_text()


def test_the_number_of_mutants_is_right():
  assert f'{len(mutants.MUTANTS)} seeded bugs' in PAGE
