"""The texts of the engine gke, and how they are compared with those in `golden`.

REWRITE_GOLDEN=1 python -m pytest tests/launch/test_gke.py
"""

import contextlib
import math
import os
import pathlib
import re
from collections.abc import Iterator, Mapping

from absl.testing import flagsaver

from diloco_jax.config import load
from diloco_jax.launch import engines
from diloco_jax.launch import spec as spec_lib

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / 'golden'
STORE = 'gs://bucket/run'
GIVEN = {'gke': {'image': 'registry/diloco:1'}}  # what an engine cannot do without
# With the number of their hosts, of four chips each.
_V5P = {'v5p:2x2x1': 1, 'v5p:2x2x2': 2, 'v5p:2x2x4': 4, 'v5p:2x4x4': 8, 'v5p:4x4x4': 16}
_V6E = {'v6e:2x2': 1, 'v6e:2x4': 2, 'v6e:4x4': 4, 'v6e:4x8': 8, 'v6e:8x8': 16}
TOPOLOGIES = {**_V5P, **_V6E}


def request(
  learners: int = 2,
  topology: str = 'v6e:4x4',
  store: str = STORE,
  config: str = 'gemma:1b',
  **more,
) -> spec_lib.Request:
  loaded = load.load(config)
  loaded.sync.learners, loaded.train.store = learners, store
  given = [f'--config={config}', f'--config.sync.learners={learners}']
  given += [f'--config.train.store={store}']
  if topology not in ('', spec_lib.CPU):
    chips = math.prod(map(int, topology.partition(':')[2].split('x')))
    loaded.mesh.data, loaded.mesh.fsdp, loaded.mesh.tensor = 1, chips, 1
    given += ['--config.mesh.data=1', f'--config.mesh.fsdp={chips}', '--config.mesh.tensor=1']
  rest = {'tls': 'certs', 'disk_gib': 200, **more}
  return spec_lib.Request(config=loaded, config_flags=given, topology=topology, **rest)


@contextlib.contextmanager
def flags_of(engine: str, **more) -> Iterator[None]:
  with flagsaver.flagsaver(**{**GIVEN[engine], **more}):
    yield


def texts(engine: str, asked: spec_lib.Request, **more) -> dict[str, str]:
  """What `diloco launch --engine=...` writes, whatever the certificates are; `more`: flags of the
  engine. Raises ValueError: what it needs."""
  module = engines.load(engine)
  with flags_of(engine, **more):
    places = module.places(asked)
    described = spec_lib.make(asked, places)
    needs = module.needs(described, asked)
    if missing := [text for text, there in needs.items() if not there]:
      raise ValueError('; '.join(missing))
    return module.render(described, asked, places)


def require_golden(folder: str, found: Mapping[str, str]) -> None:
  """Fails unless the texts are those in the folder, but for the config, which is left out there."""
  where = GOLDEN / folder
  config = re.compile(r"'--config=\{.*?\}'", re.DOTALL)
  found = {name: config.sub('--config=JSON', text) for name, text in found.items()}
  if os.environ.get('REWRITE_GOLDEN'):
    where.mkdir(parents=True, exist_ok=True)
    for path in where.iterdir():
      path.unlink()
    for name, text in found.items():
      (where / name).write_text(text)
  assert {path.name: path.read_text() for path in where.iterdir()} == found
