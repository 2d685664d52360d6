"""The examples in the docstrings run and print what they say."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize('name', ['codecs', 'contrib.aged', 'digest', 'fragments', 'merge', 'spec'])
def test_docstring_examples(name):
  result = doctest.testmod(importlib.import_module(f'diloco_jax.numerics.{name}'))
  assert result.attempted > 0 and result.failed == 0
