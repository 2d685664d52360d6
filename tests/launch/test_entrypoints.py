"""What no retry would help is refused before anything is begun."""

import contextlib
import os
import subprocess
import sys

import pytest

from diloco_jax.configs import stdlib_lm
from diloco_jax.launch import entrypoints, program
from diloco_jax.storage import files


def test_a_learner_id_that_is_no_name_is_refused(tmp_path):
  with pytest.raises(program.NeverRetry, match="--learner_id='L0!'"):
    entrypoints.learner(stdlib_lm.get_config('tiny'), str(tmp_path / 'run'), 'L0!', 'none')
  assert not (tmp_path / 'run').exists()


def test_an_address_without_a_port_is_refused(tmp_path):
  with pytest.raises(program.NeverRetry, match="'localhost' is not unix:PATH, nor HOST:PORT"):
    entrypoints.learner(stdlib_lm.get_config('tiny'), str(tmp_path / 'run'), 'l0', 'localhost')
  assert not (tmp_path / 'run').exists()


_LEARNER = """
import sys
from diloco_jax.configs import stdlib_lm
from diloco_jax.launch import entrypoints, program
program.run_main(lambda argv: entrypoints.learner(
  stdlib_lm.get_config('tiny'), argv[1], 'l0', 'none'), positional=True)
"""


def test_a_learner_whose_folder_another_process_has_is_refused(tmp_path):
  with contextlib.closing(files.Files(tmp_path / 'islands' / 'l0' / 'ckpt')) as folder:
    folder.lock('learner')
    ended = subprocess.run(
      [sys.executable, '-c', _LEARNER, str(tmp_path)],
      env={**os.environ, 'JAX_NUM_CPU_DEVICES': '2', 'PYTHONPATH': os.getcwd()},
      capture_output=True,
      text=True,
    )
  assert ended.returncode == program.NEVER_RETRY
  assert f'l0/ckpt is already used by learner pid {os.getpid()}' in ended.stderr
