"""A run has no input but its seed: every process, hash seed and Python writes the same tape."""

import functools
import pathlib

import pytest

from diloco_jax.verification.sim import seeds as seeds_lib
from diloco_jax.verification.sim import tapes as sim_tapes
from tests import interpreters

ROOT = pathlib.Path(__file__).resolve().parents[2]
SEEDS, SEEDS_OF_ALL = 4, 20  # by default, with --all

RUN = """
import sys
sys.path.insert(0, sys.argv[1])
from diloco_jax.verification.sim import seeds, tapes
for seed in range(int(sys.argv[2])):
  tape = tapes.Tapes()
  outcome = seeds.run_seed(seed, [tape])
  print(seed, outcome.events, tape.hash)
"""


@functools.cache
def here(seeds_run: int = SEEDS) -> list[str]:
  lines = []
  for seed in range(seeds_run):
    tape = sim_tapes.Tapes()
    outcome = seeds_lib.run_seed(seed, [tape])
    lines.append(f'{seed} {outcome.events} {tape.hash}')
  return lines


@pytest.mark.parametrize(
  'version, hash_seed',
  [
    pytest.param(version, hash_seed, marks=[pytest.mark.full] if number and place else [])
    for number, version in enumerate(interpreters.pythons())
    for place, hash_seed in enumerate(interpreters.HASH_SEEDS)
  ],
)
def test_a_seed_has_one_hash(version: str, hash_seed: str, counts):
  seeds_run = SEEDS_OF_ALL if counts.full else SEEDS
  elsewhere = interpreters.run_bare(version, hash_seed, RUN, str(ROOT), str(seeds_run))
  assert elsewhere == here(seeds_run)


def test_another_seed_has_another_hash():
  assert len({line.split()[2] for line in here()}) == SEEDS
