"""The smallest island with every part: two layers, grouped heads, a gated block."""

import pathlib

import jax
import pytest

from diloco_jax.train import config as config_lib
from diloco_jax.train import data as data_lib
from diloco_jax.train import island as island_lib


@pytest.fixture(name='model')
def _model() -> config_lib.ModelConfig:
  return config_lib.ModelConfig(
    num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, hidden_dim=32
  )


@pytest.fixture(name='data')
def _data() -> config_lib.DataConfig:
  return config_lib.DataConfig(
    seq_len=16, batch_size=4, shards=4, eval_batches=2, eval_batch_size=4
  )


@pytest.fixture(name='optimizer')
def _optimizer() -> config_lib.OptimizerConfig:
  return config_lib.OptimizerConfig(learning_rate=1e-2, warmup_steps=2)


@pytest.fixture(scope='session', name='corpus')
def _corpus(tmp_path_factory: pytest.TempPathFactory) -> data_lib.Corpus:
  root = tmp_path_factory.mktemp('corpus')
  write_corpus(root)
  return data_lib.load_corpus(str(root))


def write_corpus(root: pathlib.Path, num_files: int = 200) -> None:
  for i in range(num_files):
    (root / f'{i:03d}.txt').write_text(f'file {i}: the quick brown fox, {i * i} times.\n' * 5)


@pytest.fixture(name='make_island')
def _make_island(model, optimizer, data, corpus):
  """Builds islands on the first devices; closes them at the end."""
  built = []

  def make(
    mesh: config_lib.MeshConfig | None = None, first_device: int = 0, **kwargs
  ) -> island_lib.Island:
    mesh = mesh or config_lib.MeshConfig()
    devices = jax.devices()[first_device : first_device + mesh.num_devices]
    model.num_layers = 1  # a second layer tests nothing more and takes time to compile
    settings = {
      'model': model,
      'optimizer': optimizer,
      'data': data,
      'mesh': mesh,
      'total_steps': 100,
      'devices': devices,
      'corpus': corpus,
    }
    built.append(island_lib.Island(**settings | kwargs))
    return built[-1]

  yield make
  for island in built:
    island.close()
