"""A published model is fine-tuned by three learners, wholly and by LoRA, and published again."""

import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from diloco_jax.report import folder as folder_lib
from diloco_jax.report import records
from diloco_jax.storage import arrays
from diloco_jax.train import decoder, published
from experiments.examples import lora_decoder, pretrained

ROOT = pathlib.Path(__file__).resolve().parents[2]
LLAMA = ROOT / 'tests' / 'train' / 'published' / 'llama'
REFERENCE = ROOT / 'tests' / 'train' / 'published' / 'reference.py'
PACKAGES = 'torch==2.14.1', 'transformers==5.24.0'
LINES = 'def f{0}(x):\n  """Adds {0}."""\n  return x + {0}\n\n\n'
WIDE = {  # so that matrices of rank 8 are at most 3 % of it
  'hidden_size': 512,
  'intermediate_size': 1408,
  'num_hidden_layers': 1,
  'num_attention_heads': 8,
  'num_key_value_heads': 2,
  'head_dim': 64,
}
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
  told = json.loads((LLAMA / 'config.json').read_text('utf-8')) | WIDE
  (folder / 'config.json').write_text(json.dumps(told), 'utf-8')
  config = pretrained.model_config(folder)
  tensors = decoder.export(config, decoder.init_params(config, 0))
  arrays.export(folder / published.FILE, tensors, {'format': 'pt'})
  (folder.parent / 'text').mkdir()
  for number in range(200):
    (folder.parent / 'text' / f'{number}.py').write_text(LINES.format(number) * 20, 'utf-8')
  return folder


@pytest.fixture(scope='module', name='runs')
def _runs(model) -> dict[str, pathlib.Path]:
  """Full and by LoRA, exported to the folder `published` of each."""
  runs = {}
  for name in ('full', 'lora'):
    run = runs[name] = model.parent / name
    settings = SETTINGS | {'data.corpus': str(model.parent / 'text')}
    if name == 'lora':
      settings['task'] = f'{lora_decoder.__file__}:task(rank=8)'
    words = [f'--config.{key}={value}' for key, value in settings.items()]
    diloco('train', f'--config={pretrained.__file__}:{model}', f'--workdir={run}', *words)
    diloco('export', f'--workdir={run}', f'--out={run / "published"}')
  return runs


def test_three_learners_learn_and_what_they_learned_is_in_the_layout_of_the_model(model, runs):
  begun = arrays.mapped(model / published.FILE)
  for name, run in runs.items():
    summary = json.loads((run / 'report' / 'summary.json').read_text('utf-8'))
    rows = list(records.records(run))
    syncs = [row for row in rows if row['name'] == 'synced']
    assert {learner for row in syncs for learner in row['participants']} == {'l0', 'l1', 'l2'}
    losses = [summary, *summary['learners'].values()]
    ends = [one for one in losses if one.get('eval_loss_end')]
    assert ends and all(one['eval_loss_end'] < one['eval_loss_start'] - 0.5 for one in ends)
    assert (run / 'published' / 'config.json').read_text() == (model / 'config.json').read_text()
    found = arrays.mapped(run / 'published' / published.FILE)
    kinds = lambda tensors: {key: (one.dtype, one.shape) for key, one in tensors.items()}
    assert kinds(found) == kinds(begun)
    changed = {key for key, one in found.items() if not np.array_equal(one, begun[key])}
    matrices = {key for key in found if key.endswith('_proj.weight')}
    assert changed == (matrices if name == 'lora' else set(found))


def test_a_run_of_lora_has_at_most_3_percent_of_the_bytes_on_the_wire(runs):
  wires = {name: folder_lib.read(run).run.wire for name, run in runs.items()}
  assert 0 < wires['lora'].bytes_up <= 0.03 * wires['full'].bytes_up
  assert 0 < wires['lora'].bytes_down <= 0.03 * wires['full'].bytes_down


# --- The reference --------------------------------------------------------------------------------


@pytest.fixture(scope='module', name='reference')
def _reference() -> pathlib.Path:
  """The interpreter of an environment with PACKAGES, which is made once: some gigabytes."""
  folder = ROOT / '.cache' / 'reference'
  python, mark = folder / 'bin' / 'python', folder / 'installed'
  if not mark.exists() or mark.read_text() != str(PACKAGES):
    subprocess.run([sys.executable, '-m', 'venv', '--clear', folder], check=True)
    install = [python, '-m', 'pip', 'install', '--quiet', *PACKAGES]
    if subprocess.run(install).returncode:
      pytest.skip(f'no environment with {PACKAGES} can be made here')
    mark.write_text(str(PACKAGES))
  return python


@pytest.mark.full
@pytest.mark.timeout(1_800)
def test_the_reference_reads_what_was_published_and_computes_the_same(reference, runs, tmp_path):
  ids = json.loads((LLAMA / 'golden' / 'ids.json').read_text('utf-8'))['ids']
  ids_BxL = np.asarray(ids[:32], np.int32).reshape(2, 16)
  for name, run in runs.items():
    folder, out = run / 'published', tmp_path / f'{name}.npy'
    command = [reference, REFERENCE, f'--read={folder}', f'--logits={out}']
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    config = pretrained.model_config(folder)
    ours = decoder.apply(config, decoder.start(config, str(folder), 0), ids_BxL)
    np.testing.assert_allclose(ours, np.load(out), atol=1e-4)
