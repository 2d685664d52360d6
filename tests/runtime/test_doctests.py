"""The examples in the docstrings of the shell."""

import doctest

import pytest

from diloco_jax.runtime import chaos
from diloco_jax.runtime import config
from diloco_jax.runtime import failpoints
from diloco_jax.runtime import launch
from diloco_jax.runtime import live
from diloco_jax.runtime import report
from diloco_jax.runtime import supervisor
from diloco_jax.runtime import timeline


@pytest.mark.parametrize('module', [
  chaos, config, failpoints, launch, live, report, supervisor, timeline,
])
def test_examples(module):
  result = doctest.testmod(module)
  assert result.attempted and not result.failed
