"""Two releases of this package, as folders that programs start from.

The one before is that of the newest tag, if its formats have today's numbers; without one, today's
code is the first release. The one after is today's code under a later version.
"""

import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile

from diloco_jax.protocol import formats

ROOT = pathlib.Path(__file__).resolve().parents[2]
_VERSION = pathlib.Path('diloco_jax', 'version.py')


def before(folder: pathlib.Path) -> pathlib.Path:
  """The release of the newest tag before this commit; without one with today's numbers, today's."""
  tag = _git('describe', '--tags', '--abbrev=0', '--match=v*').decode().strip()
  if tag and numbers(tagged := _of_tag(tag, folder / tag)) == formats.NUMBERS:
    return tagged
  return _today(folder / 'first')


def after(folder: pathlib.Path) -> pathlib.Path:
  """Today's code, under a later version."""
  home = _today(folder / 'after')
  (home / _VERSION).write_text(f"__version__ = '{later()}'\n", 'utf-8')
  return home


def later() -> str:
  from diloco_jax import version

  major, minor, patch = map(int, version.__version__.split('.')[:3])
  return f'{major}.{minor}.{patch + 1}.dev0'


def version_of(home: pathlib.Path) -> str:
  return re.findall(r"__version__ = '(.*)'", (home / _VERSION).read_text('utf-8'))[0]


def numbers(home: pathlib.Path) -> dict[str, int]:
  imports = 'import json; from diloco_jax.protocol import formats'
  process = subprocess.run(
    [sys.executable, '-P', '-c', f'{imports}; print(json.dumps(formats.NUMBERS))'],
    env={**os.environ, 'PYTHONPATH': str(home)},
    capture_output=True,
    check=False,
  )
  return json.loads(process.stdout) if not process.returncode else {}


def command(home: pathlib.Path, *words: str) -> list[str]:
  """A command of `diloco`, of one of the releases."""
  return [sys.executable, '-P', '-X', 'utf8', str(home / 'diloco_jax' / '__main__.py'), *words]


def _today(home: pathlib.Path) -> pathlib.Path:
  ignored = shutil.ignore_patterns('__pycache__')
  shutil.copytree(ROOT / 'diloco_jax', home / 'diloco_jax', ignore=ignored)
  return home


def _of_tag(tag: str, home: pathlib.Path) -> pathlib.Path:
  with tarfile.open(fileobj=io.BytesIO(_git('archive', tag, 'diloco_jax'))) as packed:
    unpack(packed, home)
  return home


def unpack(packed: tarfile.TarFile, folder: pathlib.Path) -> None:
  """The first releases of Python 3.11 have no filters, later ones of Python want one."""
  packed.extraction_filter = getattr(tarfile, 'data_filter', None)
  packed.extractall(folder)


def _git(*words: str) -> bytes:
  """What git prints; b'' where there is none, or no such tag."""
  try:
    return subprocess.run(['git', *words], cwd=ROOT, capture_output=True, check=True).stdout
  except (OSError, subprocess.CalledProcessError):
    return b''
