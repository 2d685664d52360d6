"""The seed that catches each mutant, kept in mutant_seeds.json so that one seed per mutant is run.

    python -m tests.verification.mutant_seeds          searches where a remembered seed catches no
    more

A seed that still catches its mutant is kept, so an interrupted search continues where it stopped.
The machines' own check() is off: what must catch a mutant is a checker, which sees records only.
"""

import concurrent.futures
import contextlib
import json
import multiprocessing
import pathlib
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from unittest import mock

from diloco_jax.protocol.learner import machine as learner_machine
from diloco_jax.protocol.syncer import machine as syncer_machine
from diloco_jax.verification.sim import seeds as seeds_lib
from tests.verification import mutants

PATH = pathlib.Path(__file__).with_suffix('.json')
COMMAND = 'python -m tests.verification.mutant_seeds'
SEARCHED = range(1_000)
PROCESSES = 2


class Catch(NamedTuple):
  """The first violation among the seeds that were run with a mutant; `seed` is None without one."""

  mutant: str
  seed: int | None
  invariant: str = 'nothing'
  detail: str = 'no seed breaks an invariant: a checker is missing'

  @property
  def right(self) -> bool:
    return self.invariant in mutants.MUTANTS[self.mutant].caught_by


@contextlib.contextmanager
def _unchecked() -> Iterator[None]:
  """Machines that do not look at themselves."""
  with (
    mock.patch.object(learner_machine.LearnerMachine, 'check', lambda self: None),
    mock.patch.object(syncer_machine.SyncerMachine, 'check', lambda self: None),
  ):
    yield


def catch(name: str, seeds: Iterable[int]) -> Catch:
  """Runs a mutant until a seed catches it."""
  with _unchecked(), mutants.MUTANTS[name].applied():
    for seed in seeds:
      violation = seeds_lib.run_seed(seed).violation
      if violation is not None:
        return Catch(name, seed, violation.invariant, f'{violation.sentence} {violation.detail}')
  return Catch(name, None)


def remembered() -> dict[str, int]:
  return json.loads(PATH.read_text()) if PATH.exists() else {}


def _search(name: str, seed: int | None) -> Catch:
  """Tries the remembered seed before all others."""
  if seed is not None and (caught := catch(name, [seed])).right:
    return caught
  return catch(name, SEARCHED)


def main() -> int:
  known = {name: seed for name, seed in remembered().items() if name in mutants.MUTANTS}
  wrong = 0
  with concurrent.futures.ProcessPoolExecutor(
    PROCESSES, multiprocessing.get_context('spawn')
  ) as pool:
    searches = [pool.submit(_search, name, known.get(name)) for name in mutants.MUTANTS]
    for search in concurrent.futures.as_completed(searches):
      caught = search.result()
      print(
        f'{caught.mutant:34} seed {caught.seed}, by {caught.invariant}: {caught.detail}', flush=True
      )
      known.pop(caught.mutant, None)
      if caught.right:
        known[caught.mutant] = caught.seed
      wrong += not caught.right
      PATH.write_text(json.dumps(dict(sorted(known.items())), indent=1) + '\n')
  return int(wrong > 0)


if __name__ == '__main__':
  sys.exit(main())
