"""The examples in the docstrings."""

import doctest
import importlib
import pathlib

import jax
import pytest

import diloco_jax

ROOT = pathlib.Path(diloco_jax.__file__).parents[1]
FILES = [
  path for path in sorted((ROOT / 'diloco_jax').rglob('*.py')) if '>>> ' in path.read_text('utf-8')
]
NAMES = ['.'.join(path.relative_to(ROOT).with_suffix('').parts) for path in FILES]


@pytest.mark.parametrize('name', NAMES)
def test_examples(name):
  with jax.numpy_dtype_promotion('standard'):  # as users have it
    result = doctest.testmod(importlib.import_module(name.removesuffix('.__init__')))
  assert result.attempted and not result.failed


def test_there_are_examples():
  assert len(NAMES) > 40
