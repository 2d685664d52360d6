"""The wheel holds the package with its configs, its examples and its command, and nothing else."""

import configparser
import email
import pathlib
import subprocess
import sys
import zipfile

import pytest

from diloco_jax import __main__

ROOT = pathlib.Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / 'experiments' / 'examples').glob('*.py'))
PROJECT = [path for path in (EXAMPLES[0].parent / 'project').iterdir() if path.is_file()]


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
  examples = {f'diloco_jax/examples/{path.name}' for path in EXAMPLES}
  project = {f'diloco_jax/examples/project/{path.name}' for path in PROJECT}
  assert files == here | examples | project and examples and project
  assert 'diloco_jax/configs/stdlib_lm.py' in files


def test_it_installs_the_command(wheel):
  (name,) = [name for name in wheel.namelist() if name.endswith('entry_points.txt')]
  points = configparser.ConfigParser()
  points.read_string(wheel.read(name).decode())
  assert dict(points['console_scripts']) == {'diloco': 'diloco_jax.__main__:main'}
  assert callable(__main__.main)


def test_the_installed_command_prints_the_examples(wheel, tmp_path):
  wheel.extractall(tmp_path)
  say = lambda *words: subprocess.run(
    [sys.executable, '-m', 'diloco_jax', 'example', *words],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    check=False,
  )
  names = [line.split()[0] for line in say().stdout.splitlines()]
  assert names == [path.stem for path in EXAMPLES]
  printed = say('loop_optax').stdout
  assert 'diloco_jax.join' in printed and '\n    python loop_optax.py --learner=l0 ' in printed
  wrong = say('loop_optx')
  assert (wrong.returncode, wrong.stdout) == (42, '') and 'loop_optax' in wrong.stderr


def test_the_description_is_one_that_an_index_accepts(wheel):
  (name,) = [name for name in wheel.namelist() if name.endswith('METADATA')]
  found = email.message_from_bytes(wheel.read(name))
  extras = set(found.get_all('Provides-Extra'))
  assert extras >= {'data', 'docs', 'notebook', 'profile', 'test', 'tpu', 'wandb'}
  assert found['Description-Content-Type'] == 'text/markdown'
  assert 'Typing :: Typed' in found.get_all('Classifier')
