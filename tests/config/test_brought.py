"""Whoever reads again what a user has brought to a run compares it with what the run began with."""

import json
import os
import pathlib
import re
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest

from diloco_jax.api import load_params
from diloco_jax.config import brought, build, load
from diloco_jax.numerics import fragments
from diloco_jax.protocol import agreement as agreement_lib
from diloco_jax.storage import hugging_face, states
from diloco_jax.train import corpus_files
from diloco_jax.train import tokenizer as tokenizer_lib
from experiments.examples import lora_decoder, pretrained
from tests.launch.lib.command_line import diloco

ROOT = pathlib.Path(__file__).resolve().parents[2]
GEMMA = ROOT / 'tests' / 'storage' / 'hugging_face' / 'gemma'


@pytest.fixture(name='run')
def _run(tmp_path, monkeypatch) -> pathlib.Path:
  """The folder of a run that fine-tunes a Gemma by LoRA; all that it reads is beside it."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  corpus_files.say_once.cache_clear()
  (tmp_path / 'text').mkdir()
  for number in range(200):
    (tmp_path / 'text' / f'{number}.txt').write_text(f'{number} is a number of many words ' * 60)
  shutil.copytree(GEMMA, tmp_path / 'gemma')
  shutil.copy(lora_decoder.__file__, tmp_path / 'lora.py')
  config = pretrained.get_config(str(tmp_path / 'gemma'))
  config.task, config.data.corpus = f'{tmp_path}/lora.py:task(rank=2)', str(tmp_path / 'text')
  config.data.seq_len = config.data.eval_batch_size = 16
  config.data.eval_batches, config.sync.fragments = 1, 2
  load.write(tmp_path / 'run', config)
  brought.begin(tmp_path / 'run', _assembled(tmp_path / 'run').things)
  return tmp_path / 'run'


def _assembled(run: pathlib.Path) -> build.Assembly:
  return build.assemble(load.read(run))


def _flip(path: pathlib.Path) -> None:
  """Changes its last letter, and keeps its size and its time of change."""
  status, data = path.stat(), path.read_bytes()
  at = max(at for at in range(len(data)) if chr(data[at]).isalnum())
  path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
  os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


CHANGED = {
  'data': 'text/7.txt',
  'initial model': 'gemma/model.safetensors',
  'tokenizer': 'run/tokenizer_config.json',
  'task': 'lora.py',
}


@pytest.mark.parametrize('name', CHANGED)
def test_what_has_changed_is_refused_or_said_with_its_file_and_time(name, run, capfd, tmp_path):
  before = _assembled(run)
  brought.require(load.brought(run), before.things, before.things)
  assert load.brought(run).keys() == {*CHANGED, 'library'} and not capfd.readouterr().err
  _flip(path := tmp_path / CHANGED[name])
  after = build.assemble(load.read(run), data=False)
  text = f'the {name} is not what the run has begun with: '
  text += f'{path} changed last, 20..-'
  try:
    brought.begin(run, after.things)
    refused = ''
  except ValueError as error:
    refused = str(error)
  said = capfd.readouterr().err
  assert bool(refused) == (name != 'task')
  assert re.search(text, refused or said)
  brought.require(load.brought(run), after.things, after.things, says=CHANGED)
  assert f'the {name} is not what' in capfd.readouterr().err or name == 'task', 'once'
  if name in ('data', 'initial model'):
    refusal = agreement_lib.refusal(_assembled(run).agreement, before.agreement)
    assert f': 1 difference: {name} is ' in refusal, 'a learner elsewhere is refused, too'
  if name == 'initial model':  # its frozen parameters are in what is read
    with pytest.raises(ValueError, match='the initial model is not what'):
      load_params.assemble(run)
  else:
    load_params.assemble(run)


def test_an_initial_model_that_is_exchanged_while_a_process_runs_is_refused(run, tmp_path):
  """As behind a link that moves: version 0 and frozen parameters are read after the comparison."""
  before = _assembled(run), build.assemble(load.read(run), data=False)
  for assembled in before:
    brought.require(load.brought(run), assembled.things, [brought.MODEL])
  _flip(tmp_path / 'gemma' / 'model.safetensors')
  for assembled in before:
    with pytest.raises(ValueError, match='the initial model has changed since .* changed last'):
      assembled.frozen()


def test_another_library_is_said(run, monkeypatch, capfd):
  monkeypatch.setattr(tokenizer_lib.importlib.metadata, 'version', lambda package: '99')
  brought.require(load.brought(run), _assembled(run).things, brought.TEXT_THINGS)
  assert (
    'the library is not what the run has begun with: tokenizers 99 now' in capfd.readouterr().err
  )


def test_what_a_run_began_with_stays_when_it_goes_on_also_on_another_disk(run, tmp_path):
  known, things = load.brought(run), _assembled(run).things
  load.write(run, load.read(run))  # as `train --resume` does
  assert load.brought(run) == known
  shutil.copytree(run, tmp_path / 'store')
  _flip(tmp_path / 'gemma' / 'model.safetensors')
  load.write(tmp_path / 'new', load.read(run))
  with pytest.raises(ValueError, match='the initial model is not what the run has begun with'):
    brought.begin(tmp_path / 'new', things, str(tmp_path / 'store'))


def test_an_export_is_rounded_once_and_copies_what_is_known(run, tmp_path):
  """LoRA on a base of bfloat16; the adapters are smaller than a step of it."""
  for name in ('adapter_config.json', 'quantize_config.json', 'notes.txt'):
    (tmp_path / 'gemma' / name).write_text('{}')
  assembled = build.assemble(load.read(run), data=False)
  params, rng = assembled.init(), np.random.default_rng(0)
  draw = lambda leaf: (0.01 * rng.standard_normal(leaf.shape)).astype(leaf.dtype)
  params['lora'] = jax.tree.map(draw, params['lora'])
  label = assembled.task.label
  sent = fragments.keep(params, lambda path: label(path) != 'frozen')
  states.save(run / 'model', 'model', sent, {})
  done = diloco('export', f'--workdir={run}', f'--out={tmp_path / "out"}')
  assert done.returncode == 0, done.stderr
  assert {path.name for path in (tmp_path / 'out').iterdir()} == {
    path.name for path in GEMMA.iterdir() if path.is_file()
  }
  tensor = hugging_face._tensors(tmp_path / 'out', bool)['model.layers.0.self_attn.o_proj.weight']
  base, pair = (params[name]['layers'][0]['out'] for name in ('base', 'lora'))
  whole = base.astype(np.float32) + (pair['a'] @ pair['b']).reshape(base.shape)
  once = whole.reshape(-1, base.shape[-1]).T.astype(ml_dtypes.bfloat16)
  np.testing.assert_array_equal(tensor.map(), once)
  assert (once != np.asarray(base).reshape(once.T.shape).T).any()
  _flip(tmp_path / 'gemma' / 'config.json')
  done = diloco('export', f'--workdir={run}', f'--out={tmp_path / "other"}')
  assert done.returncode == 42 and 'config.json changed last' in done.stderr
  assert json.loads((tmp_path / 'out' / 'config.json').read_text())['model_type'] == 'gemma'


@pytest.mark.parametrize('damaged', [5, 'x', ['a'], None])
def test_a_config_whose_record_is_damaged_has_none(damaged, tmp_path):
  (tmp_path / load.FILE).write_text(json.dumps({'brought': damaged}))
  assert load.brought(tmp_path) == {}
