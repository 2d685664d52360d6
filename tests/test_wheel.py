"""The wheel holds the package with its configs and its command, and nothing else."""

import configparser
import pathlib
import subprocess
import sys
import zipfile

import pytest

from diloco_jax import __main__

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope='module', name='wheel')
def _wheel(tmp_path_factory) -> zipfile.ZipFile:
  folder = tmp_path_factory.mktemp('wheel')
  subprocess.run(
    [
      sys.executable,
      *('-m', 'pip', 'wheel', '--quiet', '--no-deps', '--no-build-isolation', '--no-index'),
      *('--wheel-dir', folder, ROOT),
    ],
    check=True,
  )
  (path,) = folder.glob('*.whl')
  with zipfile.ZipFile(path) as wheel:
    yield wheel


def test_it_holds_every_file_of_the_package_and_no_other(wheel):
  files = {name for name in wheel.namelist() if '.dist-info/' not in name}
  here = {
    str(path.relative_to(ROOT))
    for path in (ROOT / 'diloco_jax').rglob('*')
    if path.is_file() and '__pycache__' not in path.parts
  }
  assert files == here
  assert 'diloco_jax/configs/stdlib_lm.py' in files


def test_it_installs_the_command(wheel):
  (name,) = [name for name in wheel.namelist() if name.endswith('entry_points.txt')]
  points = configparser.ConfigParser()
  points.read_string(wheel.read(name).decode())
  assert dict(points['console_scripts']) == {'diloco': 'diloco_jax.__main__:main'}
  assert callable(__main__.main)
