"""A trained model of text: sample, evaluate, export, and begin with it."""

import dataclasses
import json
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors

import diloco_jax
from diloco_jax.config import build, load
from diloco_jax.configs import stdlib_lm
from diloco_jax.storage import arrays, states
from diloco_jax.storage import store as store_lib
from diloco_jax.train import tokenizer as tokenizer_lib
from tests.launch.lib.command_line import diloco

LINES = 'def f{0}(x):\n  """Adds {0}."""\n  return x + {0}\n\n\n'


@pytest.fixture(name='config')
def _config(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  (tmp_path / 'text').mkdir()
  for number in range(200):
    (tmp_path / 'text' / f'{number}.py').write_text(LINES.format(number) * 20)
  config = stdlib_lm.get_config('bpe')
  config.data.corpus, config.data.tokenizer = str(tmp_path / 'text'), 'bpe(size=300)'
  config.model.vocab_size, config.data.eval_batches, config.data.eval_batch_size = 384, 2, 8
  config.sync.learners, config.train.steps = 2, 40
  return config


def _same(tree, other) -> None:
  assert jax.tree.structure(tree) == jax.tree.structure(other)
  jax.tree.map(np.testing.assert_array_equal, tree, other)


@pytest.mark.parametrize('dtype', [pytest.param('float32', marks=pytest.mark.long), 'bfloat16'])
def test_an_exported_model_has_the_same_bits_and_another_run_begins_with_it(
  config, tmp_path, dtype
):
  config.model.param_dtype = dtype
  load.write(tmp_path / 'run', config)
  params = jax.tree.map(np.asarray, build.assemble(config).init())
  states.save(tmp_path / 'run' / 'model', 'model', params, {})
  out = tmp_path / 'm.safetensors'
  if dtype == 'float32':
    done = diloco('export', f'--workdir={tmp_path / "run"}', f'--out={out}')
    assert (done.returncode, done.stdout) == (0, f'{out}: {out.stat().st_size:,} bytes\n'), (
      done.stderr
    )
    with safetensors.safe_open(out, 'np') as file:
      assert json.loads(file.metadata()['config']) == load.read(tmp_path / 'run').to_dict()
    _scores_are_printed(tmp_path / 'run')
  else:
    arrays.export(out, params, {})
  named = safetensors.load_file(out)
  np.testing.assert_array_equal(named['layers/1/query'], params['layers'][1]['query'])
  assert named.keys() == arrays.by_name(params).keys()

  config.train.seed = 7
  for path in (out, tmp_path / 'run' / 'model'):
    config.train.init_from = str(path)
    assembled = build.assemble(config)
    _same(assembled.init(), params)
    _same(assembled.task.init(0), params)
  without = dataclasses.replace(config.train, init_from='')
  assert build.assemble(dataclasses.replace(config, train=without)).agreement != assembled.agreement


def _scores_are_printed(run: pathlib.Path) -> None:
  done = diloco('evaluate', f'--workdir={run}', '--suite', '--batches=4')
  assert (done.returncode, done.stderr) == (0, '')
  table = [line.split() for line in done.stdout.splitlines()[1:]]
  kinds = ['next_token', 'continuation', 'brackets', 'indentation', 'mean']
  assert [row[0] for row in table] == kinds and table[0][-1] == '32'  # 4 batches of 8 windows
  percents = [float(row[1]) for row in table]
  assert percents[-1] == pytest.approx(np.mean(percents[:-1]), abs=0.011)
  assert all(0 <= float(row[2]) <= 50 for row in table)


def test_arrays_of_another_model_are_refused_by_name(config, tmp_path):
  params = build.make_task(config).init(0)
  config.train.init_from = str(tmp_path / 'm.safetensors')
  cases = {
    'final_norm is absent, in the model of this run (48,)': lambda p: p.pop('final_norm'),
    'more is (1,), in the model of this run absent': lambda p: p.update(more=np.zeros(1)),
    'embedding is (9, 48), in': lambda p: p.update(embedding=np.zeros((9, 48))),
  }
  for text, change in cases.items():
    changed = dict(params)
    change(changed)
    arrays.export(tmp_path / 'm.safetensors', changed, {})
    with pytest.raises(ValueError, match=re.escape(text)):
      build.assemble(config)
  config.train.init_from = str(tmp_path / 'nothing')
  with pytest.raises(ValueError, match='cannot read .*nothing'):
    build.assemble(config)


def test_a_run_keeps_its_tokenizer(config, tmp_path):
  """Also where the text is another one, or the folder is elsewhere."""
  load.write(tmp_path / 'run', config)
  tokenizer = tokenizer_lib.load(config.data.tokenizer, config.data.corpus)
  moved = (tmp_path / 'run').rename(tmp_path / 'moved')
  (tmp_path / 'text' / 'more.py').write_text('something else, entirely. ' * 100)
  moved_config = load.read(moved)
  assert moved_config.data.tokenizer == str(moved / 'tokenizer.json')
  kept = tokenizer_lib.load(moved_config.data.tokenizer, moved_config.data.corpus)
  assert kept.encode([LINES]) == tokenizer.encode([LINES])
  load.write(moved, moved_config)
  with pytest.raises(ValueError, match='is not the tokenizer of the run in .*moved'):
    load.write(moved, config)


@pytest.mark.full
def test_a_trained_model_is_read_from_the_store_alone(config, tmp_path, bucket, counts):
  """By default by one command; they all read it in the same way (load_params.local)."""
  config.sync.learners = config.sync.quorum = config.mesh.data = config.sync.overlap = 1
  config.sync.fragments = config.sync.period = 2
  config.train.steps, config.optimizer.warmup_steps = 4, 1
  config.train.store = str(tmp_path / 'store')
  ended = diloco_jax.run(config, tmp_path / 'run')
  assert [exit_.code for exit_ in ended.exits.values()] == [0, 0]
  params, copy = diloco_jax.load_params(tmp_path / 'run'), store_lib.Store(f'{bucket.url}/x')
  shutil.rmtree(tmp_path / 'run')
  store, url = config.train.store, f'{bucket.url}/x'
  _same(diloco_jax.load_params(store), params)
  with pytest.raises(ValueError, match='there is no run in gs://'):
    diloco_jax.load_params(url)
  for path in pathlib.Path(store).rglob('*'):
    if path.is_file():
      copy.put_file(path.relative_to(store).as_posix(), path)
  _same(diloco_jax.load_params(url), params)
  out = tmp_path / 'm.safetensors'
  done = diloco('export', f'--workdir={url}', f'--out={out}')
  assert done.returncode == 0, done.stderr
  _same(safetensors.load_file(out), dict(sorted(arrays.by_name(params).items())))
  if not counts.full:
    return
  for place in (store, url):
    done = diloco('sample', f'--workdir={place}', '--prompt=def ', '--tokens=9')
    assert done.returncode == 0 and done.stdout.startswith('def '), done.stderr
  done = diloco('evaluate', f'--workdir={url}')
  assert done.returncode == 0 and done.stdout.startswith('held-out loss '), done.stderr
