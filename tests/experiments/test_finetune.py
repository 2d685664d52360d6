"""A model from a Hugging Face folder, fine-tuned by three learners, is in such a folder again."""

import json
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable

import jax
import numpy as np
import pytest

from diloco_jax.report import folder as folder_lib
from diloco_jax.report import records as records_lib
from diloco_jax.storage import arrays, hugging_face
from diloco_jax.train import decoder
from experiments.examples import lora_decoder, pretrained

ROOT = pathlib.Path(__file__).resolve().parents[2]
LLAMA = ROOT / 'tests' / 'storage' / 'hugging_face' / 'llama'
REFERENCE = ROOT / 'tests' / 'storage' / 'hugging_face' / 'reference.py'
pytestmark = pytest.mark.full  # tests/learner/test_never_sent.py has what is on the wire
LINES = 'def f{0}(x):\n  """Adds {0}."""\n  return x + {0}\n\n\n'
WIDE = {  # so that matrices of rank 8 are at most 3 % of it
  'hidden_size': 512,
  'intermediate_size': 1408,
  'num_hidden_layers': 1,
  'num_attention_heads': 8,
  'num_key_value_heads': 2,
  'head_dim': 64,
}
TASKS = {'lora': f'{lora_decoder.__file__}:task(rank=8)', 'full': 'decoder'}
SETTINGS = {
  'data.seq_len': 32,
  'data.batch_size': 2,
  'data.eval_batches': 1,
  'sync.quorum': 3,  # so that all learners take part in every outer step of both runs
  'sync.fragments': 4,
  'sync.period': 4,
  'optimizer.warmup_steps': 4,
  'optimizer.learning_rate': 3e-3,
  'train.steps': 20,
}


def diloco(*words: str) -> None:
  done = subprocess.run(
    [sys.executable, '-m', 'diloco_jax', *words], capture_output=True, text=True, timeout=300
  )
  assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope='module', name='model')
def _model(tmp_path_factory) -> pathlib.Path:
  """A folder with a wider Llama, and text beside it."""
  folder = tmp_path_factory.mktemp('finetune') / 'model'
  folder.mkdir()
  for name in ('tokenizer.json', 'tokenizer_config.json'):
    shutil.copy(LLAMA / name, folder)
  settings = json.loads((LLAMA / 'config.json').read_text('utf-8')) | WIDE
  (folder / 'config.json').write_text(json.dumps(settings), 'utf-8')
  config = pretrained.model_config(folder)
  tensors = decoder.export(config, jax.tree.map(np.asarray, decoder.initial_params(config, 0)))
  arrays.export(folder / hugging_face.FILE, tensors, {'format': 'pt'})
  (folder.parent / 'text').mkdir()
  for number in range(200):
    (folder.parent / 'text' / f'{number}.py').write_text(LINES.format(number) * 20, 'utf-8')
  return folder


@pytest.fixture(scope='module', name='run')
def _run(model) -> Callable[[str], pathlib.Path]:
  """The run of a name, full or by LoRA, exported to its folder `out`."""
  runs: dict[str, pathlib.Path] = {}

  def run(name: str) -> pathlib.Path:
    if name not in runs:
      settings = SETTINGS | {'data.corpus': str(model.parent / 'text'), 'task': TASKS[name]}
      words = [f'--config.{key}={value}' for key, value in settings.items()]
      other = model.parent / name
      diloco('train', f'--config={pretrained.__file__}:{model}', f'--workdir={other}', *words)
      diloco('export', f'--workdir={other}', f'--out={other / "out"}')
      runs[name] = other
    return runs[name]

  return run


@pytest.mark.parametrize('name', TASKS)
def test_three_learners_learn_and_the_export_is_in_the_layout_of_the_model(model, run, name):
  folder = run(name)
  summary = json.loads((folder / 'report' / 'summary.json').read_text('utf-8'))
  assert {learner for row in _synced(folder) for learner in row['participants']} == {
    'l0',
    'l1',
    'l2',
  }
  judged = [summary] if name == 'full' else summary['learners'].values()
  assert all(row['eval_loss_end'] < row['eval_loss_start'] - 0.5 for row in judged)

  config = (folder / 'out' / 'config.json').read_bytes()
  assert config == (model / 'config.json').read_bytes()
  files = (place / hugging_face.FILE for place in (model, folder / 'out'))
  begun, ended = (
    {key: tensor.map() for key, tensor in arrays.tensors_in(file).items()} for file in files
  )
  kinds = lambda tensors: {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()}
  assert kinds(ended) == kinds(begun)
  changed = {key for key, tensor in ended.items() if not np.array_equal(tensor, begun[key])}
  matrices = {key for key in ended if key.endswith('_proj.weight')}
  assert changed == (matrices if name == 'lora' else set(ended))


def test_lora_has_at_most_3_percent_of_the_bytes_of_a_full_run_on_the_wire(run):
  lora, full = (folder_lib.read(run(name)).run.wire for name in TASKS)
  assert 0 < lora.bytes_up <= 0.03 * full.bytes_up
  assert 0 < lora.bytes_down <= 0.03 * full.bytes_down


def _synced(folder: pathlib.Path) -> list[dict]:
  return [row for row in records_lib.records(folder) if row['name'] == 'synced']


@pytest.mark.full
@pytest.mark.timeout(1_800)
def test_the_reference_reads_the_export_and_computes_the_same(reference, run, tmp_path):
  ids = json.loads((LLAMA / 'golden' / 'ids.json').read_text('utf-8'))['ids']
  ids_BxL = np.asarray(ids[:32], np.int32).reshape(2, 16)
  for name in TASKS:
    folder, out = run(name) / 'out', tmp_path / f'{name}.npy'
    command = [reference, REFERENCE, f'--read={folder}', f'--logits={out}']
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    config = pretrained.model_config(folder)
    ours = decoder.apply(config, decoder.start(config, str(folder), 0), ids_BxL)
    np.testing.assert_allclose(ours, np.load(out), atol=1e-4)
