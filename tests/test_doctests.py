"""The examples in the docstrings of the shell."""

import doctest

import pytest

from diloco_jax.accounting import step_times
from diloco_jax.config import run_config
from diloco_jax.launch import accelerators, cli, kill_plan, process_group
from diloco_jax.node import failpoints
from diloco_jax.protocol import facts as protocol_facts
from diloco_jax.report import facts as report_facts
from diloco_jax.report import header, picture, summary
from tests.runs.lib import faulty_learner


@pytest.mark.parametrize(
  'module',
  [
    step_times,
    accelerators,
    kill_plan,
    run_config,
    failpoints,
    faulty_learner,
    protocol_facts,
    report_facts,
    cli,
    header,
    summary,
    process_group,
    picture,
  ],
)
def test_examples(module):
  result = doctest.testmod(module)
  assert result.attempted and not result.failed
