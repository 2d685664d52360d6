"""What benchmarks of this folder share: medians with their spread, and where they were taken."""

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
from collections.abc import Sequence
from typing import Any

PACKAGES = ('jax', 'jaxlib', 'numpy', 'optax', 'grpcio')


def spread(values: Sequence[float]) -> dict[str, float]:
  """Median, least and greatest of repeated measurements."""
  return {'median': statistics.median(values), 'least': min(values), 'greatest': max(values)}


def text(figure: dict[str, float]) -> str:
  """A spread for people, three digits each."""
  return f'{figure["median"]:.3g} ({figure["least"]:.3g} to {figure["greatest"]:.3g})'


def parser(doc: str) -> argparse.ArgumentParser:
  """With the flags that every benchmark has."""
  flags = argparse.ArgumentParser(
    description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  flags.add_argument('--quick', action='store_true', help='small sizes and few rounds')
  flags.add_argument('--json', default='', help='a file for the figures')
  return flags


def flags(doc: str) -> argparse.Namespace:
  return parser(doc).parse_args()


def machine() -> dict[str, Any]:
  """The machine, its load, and the versions that matter."""
  lines = pathlib.Path('/proc/cpuinfo').read_text('utf-8').splitlines()
  model = next((line.split(': ')[1] for line in lines if line.startswith('model name')), '')
  commit = subprocess.run(
    ['git', 'rev-parse', '--short', 'HEAD'],
    cwd=pathlib.Path(__file__).parent,
    capture_output=True,
    encoding='utf-8',
  )
  return {
    'cpu': model,
    'cores': os.cpu_count(),
    'load': os.getloadavg()[0],
    'python': platform.python_version(),
    'commit': commit.stdout.strip(),
    **{name: importlib.metadata.version(name) for name in PACKAGES},
  }


def write(path: str, figures: dict[str, Any]) -> None:
  """Writes the figures as JSON; no path: nowhere."""
  if path:
    pathlib.Path(path).write_text(
      json.dumps({'machine': machine(), **figures}, indent=1) + '\n', 'utf-8'
    )
