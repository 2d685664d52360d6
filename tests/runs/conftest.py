"""Runs that several files use."""

import pytest

from tests.runs.lib import day as day_lib


@pytest.fixture(scope='session')
def day(tmp_path_factory) -> day_lib.Day:
  return day_lib.play(tmp_path_factory.mktemp('day') / 'run')
