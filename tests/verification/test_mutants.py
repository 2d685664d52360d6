"""Every seeded bug is caught by an invariant that is made for it, within 1,000 seeds.

By default each mutant runs the one seed that is remembered for it (mutant_seeds.py); with --all the
seeds are searched from 0 on. A mutant whose first violation is another one is not caught.
"""

import pytest

from diloco_jax.verification.checks import checkers as checkers_lib
from tests.verification import mutant_seeds, mutants


@pytest.mark.parametrize(
  'name', [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in mutants.MUTANTS]
)
def test_a_mutant_is_caught_by_its_checker(name, counts):
  seeds = mutant_seeds.SEARCHED if counts.full else [mutant_seeds.remembered()[name]]
  caught = mutant_seeds.catch(name, seeds)
  assert caught.right, (
    f'expected {mutants.MUTANTS[name].caught_by}, {caught.invariant}: {caught.detail}\n'
    f'if a change moved the seeds, search them again: {mutant_seeds.COMMAND}'
  )


def test_every_mutant_has_a_seed():
  assert mutant_seeds.remembered().keys() == mutants.MUTANTS.keys(), mutant_seeds.COMMAND


def test_every_invariant_has_a_mutant():
  named = {name for mutant in mutants.MUTANTS.values() for name in mutant.caught_by}
  assert named == {invariant.id for invariant in checkers_lib.INVARIANTS} | {'crash', 'claim'}
