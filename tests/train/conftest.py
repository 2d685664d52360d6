"""The smallest island with every part: two layers, grouped heads, a gated block."""

import pathlib

import jax
import pytest

from diloco_jax.train import config as train_config
from diloco_jax.train import data as data_lib
from diloco_jax.train import island as island_lib
from tests.train import small_task


@pytest.fixture(name='model')
def _model() -> train_config.ModelConfig:
  return train_config.ModelConfig(
    num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, hidden_dim=32
  )


@pytest.fixture(name='data')
def _data() -> train_config.DataConfig:
  return train_config.DataConfig(
    seq_len=16, batch_size=4, shards=4, eval_batches=2, eval_batch_size=4
  )


@pytest.fixture(name='optimizer')
def _optimizer() -> train_config.OptimizerConfig:
  return train_config.OptimizerConfig(learning_rate=1e-2, warmup_steps=2)


@pytest.fixture(scope='session', name='text')
def _text(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  root = tmp_path_factory.mktemp('corpus')
  write_corpus(root)
  return root


@pytest.fixture(scope='session', name='corpus')
def _corpus(text: pathlib.Path) -> data_lib.Corpus:
  return data_lib.load_corpus(str(text))


def write_corpus(root: pathlib.Path, num_files: int = 200) -> None:
  for i in range(num_files):
    (root / f'{i:03d}.txt').write_text(f'file {i}: the quick brown fox, {i * i} times.\n' * 5)


@pytest.fixture(name='make_island')
def _make_island(optimizer, data):
  """Builds islands of a task, of the small one by default; closes them at the end."""
  built = []

  def make(task=None, fsdp: int = 1, first_device: int = 0, **settings) -> island_lib.Island:
    built.append(
      island_lib.Island(
        task=task or small_task.of_data(data),
        optimizer=optimizer,
        mesh=train_config.MeshConfig(fsdp=fsdp),
        total_steps=100,
        devices=jax.devices()[first_device : first_device + fsdp],
        **settings,
      )
    )
    return built[-1]

  yield make
  for island in built:
    island.close()
