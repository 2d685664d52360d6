"""Decoders get bytes that a hostile peer might send, with right checksums: they take them, or raise
their own error, and allocate no more than they were granted.

For longer: scripts/fuzz.py MINUTES.
"""

import pathlib
import random

import pytest

from tests.transport import fuzzing

MUTANTS = {'default': 20_000, 'full': 150_000}  # of a fast decoder
MEASURED = 100  # one of so many, because measuring is slow
NAMES = list(fuzzing.targets(pathlib.Path()))


@pytest.fixture(scope='module', name='targets')
def _targets(tmp_path_factory) -> dict[str, fuzzing.Target]:
  return fuzzing.targets(tmp_path_factory.mktemp('fuzz'))


@pytest.mark.parametrize('name', NAMES)
def test_mutated_bytes_are_taken_or_refused(name, targets, counts):
  target = targets[name]
  draw = random.Random(0)
  for data in (*target.examples, *target.remembered()):
    target.run_measured(data)
  mutants = target.mutants(draw)
  for number in range(MUTANTS['full' if counts.full else 'default'] // target.slow):
    data = next(mutants)
    try:
      target.run(data) if number % MEASURED else target.run_measured(data)
    except Exception as error:
      kept = fuzzing.remember(target, data)
      raise AssertionError(f'{type(error).__name__} for the bytes of {kept}: {error}') from error


@pytest.mark.parametrize('name', NAMES)
def test_examples_are_whole(name, targets):
  examples = targets[name].examples
  assert examples and all(map(targets[name].run, examples))


def test_mended_bytes_reach_behind_the_checksums(targets):
  """Else the fuzzing would test nothing but checksums."""
  for target in targets.values():
    mutants, draw = [], random.Random(1)
    for data in target.mutants(draw):
      mutants.append(data)
      if len(mutants) == 300:
        break
    assert any(map(target.run, mutants)), target.name
