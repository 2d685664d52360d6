"""The environment alone kills no process."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from diloco_jax.node import failpoints

CODE = """
import sys
from diloco_jax.node import failpoints
if sys.argv[1:]:
  failpoints.allow()
failpoints.reached('wal.before_append')
failpoints.reached('save.after')
"""


@pytest.mark.parametrize('allowed', [False, True])
def test_a_place_kills_only_where_the_flag_allows_it(allowed):
  done = subprocess.run(
    [sys.executable, '-c', CODE, *['allow'] * allowed],
    cwd=pathlib.Path(__file__).parents[2],
    env={**os.environ, failpoints.VARIABLE: 'save.after:kill'},
    check=False,
  )
  assert done.returncode == (-signal.SIGKILL if allowed else 0)
