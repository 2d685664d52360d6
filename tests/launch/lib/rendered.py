"""The texts of the engine gke, and how texts of an engine are compared with those in `golden`.

REWRITE_GOLDEN=1 python -m pytest tests/launch/test_gke.py tests/launch/test_slurm_engine.py
"""

import math
import os
import pathlib
import re
import subprocess
import sys
import types
from collections.abc import Mapping

from absl.testing import flagsaver

from diloco_jax.config import load
from diloco_jax.launch import spec as spec_lib
from diloco_jax.launch.engines import gke

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / 'golden'
STORE = 'gs://bucket/run'
GIVEN = {'image': 'registry/diloco:1'}  # what the engine cannot do without
# With the number of their hosts, of four chips each.
_V5P = {'v5p:2x2x1': 1, 'v5p:2x2x2': 2, 'v5p:2x2x4': 4, 'v5p:2x4x4': 8, 'v5p:4x4x4': 16}
_V6E = {'v6e:2x2': 1, 'v6e:2x4': 2, 'v6e:4x4': 4, 'v6e:4x8': 8, 'v6e:8x8': 16}
TOPOLOGIES = {**_V5P, **_V6E}


def request(
  learners: int = 2,
  topology: str = 'v6e:4x4',
  store: str = STORE,
  config: str = 'gemma:1b',
  init_from: str = '',
  **more,
) -> spec_lib.Request:
  loaded = load.load(config)
  loaded.sync.learners, loaded.train.store = learners, store
  loaded.train.init_from = init_from
  given = [f'--config={config}', f'--config.sync.learners={learners}']
  given += [f'--config.train.store={store}']
  if topology not in ('', spec_lib.CPU):
    chips = math.prod(map(int, topology.partition(':')[2].split('x')))
    loaded.mesh.data, loaded.mesh.fsdp, loaded.mesh.tensor = 1, chips, 1
    given += ['--config.mesh.data=1', f'--config.mesh.fsdp={chips}', '--config.mesh.tensor=1']
  rest = {'tls': 'certs', 'disk_gib': 200, **more}
  return spec_lib.Request(config=loaded, config_flags=given, topology=topology, **rest)


def render(engine: types.ModuleType, asked: spec_lib.Request, **flags) -> dict[str, str]:
  """What `diloco launch` with an engine writes, whatever the certificates are; `flags`: those of
  the engine. Raises ValueError: what it needs."""
  with flagsaver.flagsaver(**flags):
    known = engine.choose(asked)
    described = spec_lib.make(asked, known)
    needs = engine.needs(described, asked)
    if missing := [text for text, is_met in needs.items() if not is_met]:
      raise ValueError('; '.join(missing))
    return engine.render(described, asked, known)


def texts(asked: spec_lib.Request, **flags) -> dict[str, str]:
  """The same of the engine gke."""
  return render(gke, asked, **{**GIVEN, **flags})


def require_no_warning(*scripts: pathlib.Path) -> None:
  """Fails unless shellcheck has no warning."""
  command = [pathlib.Path(sys.executable).parent / 'shellcheck', *scripts]
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout


def require_golden(texts_by_name: Mapping[str, str], engine: str) -> None:
  """Fails unless the texts of an engine are those in `golden`, but for the config, which is left
  out there."""
  folder = GOLDEN / engine
  config = re.compile(r"'--config=\{.*?\}'", re.DOTALL)
  texts_by_name = {name: config.sub('--config=JSON', text) for name, text in texts_by_name.items()}
  if os.environ.get('REWRITE_GOLDEN'):
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
      path.unlink()
    for name, text in texts_by_name.items():
      (folder / name).write_text(text)
  assert {path.name: path.read_text() for path in folder.iterdir()} == texts_by_name
