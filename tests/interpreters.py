"""Other Pythons on this machine: the protocol must decide the same on all of them."""

import functools
import os
import pathlib
import shutil
import subprocess
import sys

DEADLINE_S = 120
OLDEST, NEWEST = (3, 11), (3, 15)
HASH_SEEDS = ('0', '1', '4242')


def _candidates() -> list[str]:
  """The running Python first, its siblings (pyenv, uv, setup-python), then those on PATH."""
  beside = pathlib.Path(sys.base_prefix).parent
  siblings = [*beside.glob('*/bin/python3'), *beside.parent.glob('*/*/bin/python3')]
  named = [shutil.which(f'python3.{minor}') for minor in range(OLDEST[1], NEWEST[1] + 1)]
  return [sys.executable, *map(str, sorted(siblings)), *filter(None, named)]


def _environment(**more: str) -> dict[str, str]:
  """The environment without the variables of Python."""
  return {name: value for name, value in os.environ.items() if not name.startswith('PYTHON')} | more


def _version(python: str) -> tuple[int, int] | None:
  """None for a Python that does not start (a shim of a version that is not installed)."""
  try:
    done = subprocess.run(
      [python, '-S', '-c', 'import sys; print(*sys.version_info[:2])'],
      capture_output=True,
      text=True,
      timeout=DEADLINE_S,
      check=True,
      env=_environment(),
    )
    major, minor = done.stdout.split()
  except (OSError, subprocess.SubprocessError, ValueError):
    return None
  return int(major), int(minor)


@functools.cache
def pythons() -> dict[str, str]:
  """One Python of each version from 3.11 on that is found, by version; the running one always."""
  pythons_of: dict[tuple[int, int], str] = {}
  for python in dict.fromkeys(_candidates()):
    version = _version(python)
    if version is not None and version >= OLDEST:
      pythons_of.setdefault(version, python)
  return {f'{major}.{minor}': pythons_of[major, minor] for major, minor in sorted(pythons_of)}


def run_bare(version: str, hash_seed: str, program: str, *arguments: str) -> list[str]:
  """The lines that a program prints on a bare Python (no site-packages, -S)."""
  done = subprocess.run(
    [pythons()[version], '-S', '-B', '-c', program, *arguments],
    capture_output=True,
    text=True,
    timeout=DEADLINE_S,
    env=_environment(PYTHONHASHSEED=hash_seed),
  )
  assert done.returncode == 0, done.stderr
  return done.stdout.splitlines()
