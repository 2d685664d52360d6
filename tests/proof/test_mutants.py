"""Every seeded bug is caught by an invariant that is made for it, within 1,000 seeds.

The machines' own check() is off: what must catch a mutant is a checker, which sees records only.
"""

import contextlib
import multiprocessing
from collections.abc import Iterator
from unittest import mock

from diloco_jax.proof.checks import checkers
from diloco_jax.proof.sim import seeds
from diloco_jax.protocol.learner import machine as learner_machine
from diloco_jax.protocol.syncer import machine as syncer_machine
from tests.proof import mutants

SEEDS = 1_000
PROCESSES = 2


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
  """Machines that do not look at themselves."""
  with (
    mock.patch.object(learner_machine.LearnerMachine, 'check', lambda self: None),
    mock.patch.object(syncer_machine.SyncerMachine, 'check', lambda self: None),
  ):
    yield


def catch(name: str) -> tuple[str, int, str, str]:
  """Runs a mutant until it is caught: its name, in how many seeds, by what, and what was seen."""
  with unchecked(), mutants.MUTANTS[name].applied():
    for seed in range(SEEDS):
      violation = seeds.run_seed(seed).violation
      if violation is not None:
        return name, seed + 1, violation.invariant, f'{violation.sentence} {violation.detail}'
  return name, SEEDS, 'nothing', 'it survives: a checker is missing'


def test_every_mutant_is_caught_by_its_checker():
  with multiprocessing.get_context('spawn').Pool(PROCESSES) as pool:
    caught = list(pool.imap_unordered(catch, mutants.MUTANTS))
  wrong = []
  for name, count, invariant, detail in sorted(caught):
    print(f'{name:34} {count:4} seeds, by {invariant}')
    if invariant not in mutants.MUTANTS[name].caught_by:
      wrong.append(f'{name}: expected {mutants.MUTANTS[name].caught_by}, {invariant}: {detail}')
  assert not wrong, '\n'.join(wrong)
  assert len(caught) >= 15


def test_a_mutant_lasts_only_as_long_as_its_block():
  for mutant in mutants.MUTANTS.values():
    before = [getattr(owner, name) for owner, name, _ in mutant.replace]
    with mutant.applied():
      assert all(
        getattr(owner, name) is not one for (owner, name, _), one in zip(mutant.replace, before)
      ), mutant.name
    assert before == [getattr(owner, name) for owner, name, _ in mutant.replace]


def test_mutants_name_invariants_that_exist():
  ids = {one.id for one in checkers.INVARIANTS}
  for mutant in mutants.MUTANTS.values():
    assert set(mutant.caught_by) <= ids, mutant
