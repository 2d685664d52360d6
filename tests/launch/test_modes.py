"""The files of a run are for its user; tests/runs/test_processes.py looks at all of a real run."""

import pathlib
import stat
import subprocess
import sys

import pytest

from diloco_jax.process import run_folder

PROGRAM = """
import pathlib, sys
from diloco_jax.launch import cli
from diloco_jax.process import run_folder
def main(argv):
  folder = pathlib.Path(argv[1])
  run_folder.make_private(folder)
  (folder / 'file').write_text('')
  (folder / 'folder').mkdir()
cli.run_main(main, positional=True)
"""


def mode(path: pathlib.Path) -> int:
  return stat.S_IMODE(path.stat().st_mode)


def test_a_program_writes_for_its_user(tmp_path):
  place = tmp_path / 'run'
  subprocess.run(
    [sys.executable, '-c', PROGRAM, str(place)],
    cwd=pathlib.Path(__file__).parents[2],
    umask=0o022,
    check=True,
  )
  assert (mode(place), mode(place / 'folder'), mode(place / 'file')) == (0o700, 0o700, 0o600)


def test_in_a_notebook_only_the_folder_is_closed(tmp_path):
  """The umask of the user's process stays."""
  run_folder.make_private(tmp_path / 'run')
  (tmp_path / 'other').mkdir()
  assert mode(tmp_path / 'run') == 0o700 and mode(tmp_path / 'other') == 0o755


@pytest.mark.parametrize('bits,warned', [(0o777, True), (0o775, True), (0o755, False)], ids=oct)
def test_a_folder_that_others_can_write_to_is_a_warning(tmp_path, capfd, bits, warned):
  tmp_path.chmod(bits)
  run_folder.make_private(tmp_path)
  said = capfd.readouterr().err
  assert said.count('\n') == warned
  assert ('other users can write to' in said and 'chmod 700' in said) == warned
