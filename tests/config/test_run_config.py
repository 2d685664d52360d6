"""Configs: wrong settings are refused in one line, overrides apply, JSON restores a config."""

import dataclasses
import json
import pathlib
import subprocess

import numpy as np
import pytest

from diloco_jax.config import load, run_config
from diloco_jax.configs import stdlib_lm
from diloco_jax.process import exits
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.tape import codec
from tests.launch.lib import command_line

_ROOT = pathlib.Path(__file__).parents[2]
_PROGRAM = """
import json, sys
from diloco_jax.launch import cli
cli.define_config()
def main(argv):
  config = cli.config()
  print(json.dumps([config.flat(), cli.config_flags_of_this_process(), 'jax' in sys.modules]))
cli.run_main(main, default_config='stdlib_lm:cpu')
"""


def launch(*flags: str) -> subprocess.CompletedProcess:
  """A program that defines --config, run with these flags from the root of the repo."""
  return command_line.python('-c', _PROGRAM, *flags)


@pytest.mark.parametrize('variant', stdlib_lm.VARIANTS)
def test_every_variant_is_valid_and_survives_json(variant):
  config = stdlib_lm.get_config(variant)
  config.validate()
  assert config.name == variant
  assert run_config.Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize('path', sorted((_ROOT / 'experiments').glob('configs/*.py')), ids=str)
def test_every_config_of_an_experiment_is_valid(path):
  load.load(str(path)).validate()


@pytest.mark.parametrize('field', [f for f, row in config_lib.TABLE.items() if '.' in row.name])
def test_every_setting_has_a_doc_bounds_that_hold_and_a_place_in_the_config(field):
  setting, default = config_lib.TABLE[field], config_lib.ProtocolConfig()
  assert setting.doc and field in config_lib.ProtocolConfig.__doc__
  assert getattr(default, field) == setting.default
  text = codec.encode(dataclasses.replace(default, **{field: setting.default}))
  assert codec.decode(config_lib.ProtocolConfig, json.loads(text)) == default
  config = stdlib_lm.get_config('decoupled')
  config.validate()
  low, high = setting.bounds(config.protocol())
  section, name = setting.name.split('.')
  for value in (low - 1, high + 1):
    setattr(getattr(config, section), name, setting.written(value))
    with pytest.raises(ValueError) as caught:
      config.protocol()
    wrong = '; use one of: ' if setting.choices else ', it must be '
    assert str(caught.value).startswith(f'{setting.name} is {setting.written(value)}{wrong}')
    assert '\n' not in str(caught.value)


def test_the_modes_are_settings_of_one_machine():
  """Paper section 8 and its predecessors differ in K, P, tau and max_lag."""
  modes = {name: stdlib_lm.get_config(name).sync for name in ('decoupled', 'streaming', 'diloco')}
  assert [(s.quorum, s.max_lag) for s in modes.values()] == [(1, None), (4, 3), (4, 0)]
  assert (modes['diloco'].fragments, modes['diloco'].overlap) == (1, 0)


def test_data_parallel_sees_the_tokens_of_all_learners():
  together, baseline = stdlib_lm.get_config('decoupled'), stdlib_lm.get_config('data_parallel')
  assert baseline.data.batch_size == together.data.batch_size * together.sync.learners
  assert baseline.train.steps == together.train.steps


def test_variants_share_nothing():
  stdlib_lm.get_config('cpu').sync.quorum = 3
  assert stdlib_lm.get_config('cpu').sync.quorum == 1


def test_a_run_of_too_many_fragments_is_refused():
  config = stdlib_lm.get_config('cpu')
  config.sync.fragments = config.sync.period = 10**6
  with pytest.raises(ValueError, match='sync.fragments is 1000000, it must be between 1 and 10000'):
    config.validate()
  config.sync.fragments = config.sync.period = 10**9
  with pytest.raises(ValueError, match='sync.period is .* between 1 and 1000000'):
    config.validate()


@pytest.mark.parametrize(
  'name, value, words',
  [
    ('sync.quorum', 5, 'sync.quorum is 5, it must be between 1 and 4'),
    ('sync.quorum', 1.5, 'sync.quorum is 1.5, a float; it must be int'),
    (
      'sync.learners',
      17,
      'data.shards is 16, it must be between 17 and 1000000: every learner reads',
    ),
    ('sync.gamma', float('nan'), 'sync.gamma is nan'),
    ('sync.lease_s', 0.01, 'sync.lease_s is 0.01, it must be between 0.02 and 7200.0: usual'),
    (
      'sync.norm_factor',
      -1,
      'sync.norm_factor is -1, it must be between 0 and 1000000: the syncer refuses',
    ),
    ('train.log_every', 0, 'train.log_every is 0'),
    *(
      ('train.store', store, f'train.store is {store!r}; use gs://BUCKET/PREFIX or a folder')
      for store in (
        's3://b/x',
        'gs:/b/x',
        'gs://b',
        'gs://b/',
        'gs:///x',
        'gs://b/x/',
        'gs://b/../x',
      )
    ),
    ('train.store_log', True, 'train.store_log is true without a store: set train.store, too'),
    ('train.steps', 1e3, 'train.steps is 1000.0, a float; it must be int'),
    ('train.seed', np.int64(1), 'a int64; it must be int'),
    ('sync.quorum', True, 'sync.quorum is True, a bool; it must be int'),
    ('sync.max_lag', '2', "sync.max_lag is '2', a str; it must be int or none"),
    ('data.batch_size', 7, 'batch_size 7 does not split 2 ways'),
    ('model.num_kv_heads', 3, 'num_kv_heads'),
    ('model.num_layers', 10**15, 'num_layers is 1000000000000000: at most 10000'),
    ('model.vocab_size', 10**15, 'parameters or more: at most 1000000000000; lower its sizes'),
    ('sync.learners', 10**9, 'sync.learners is 1000000000, it must be between 1 and 10000'),
  ],
)
def test_a_wrong_setting_is_refused_with_both_values(name, value, words):
  config = stdlib_lm.get_config('cpu')
  part, field = name.split('.')
  setattr(getattr(config, part), field, value)
  with pytest.raises(ValueError) as caught:
    config.validate()
  assert words in str(caught.value)
  assert '\n' not in str(caught.value)


def test_the_store_may_change_from_one_process_to_the_next():
  config = stdlib_lm.get_config('cpu')
  before = config.agreement()
  for config.train.store in ('gs://bucket/runs/x', 'runs/store', '/mnt/store'):
    config.train.store_log = True
    config.validate()
    assert config.agreement() == before


def test_the_agreement_has_what_learners_and_syncer_must_share():
  config = stdlib_lm.get_config('cpu')
  agreement = config.agreement()
  assert agreement['sync.quorum'] == 1
  assert agreement['model.num_layers'] == config.model.num_layers
  config.mesh.data, config.data.corpus, config.train.log_every = 1, '/elsewhere', 7
  config.sync.checkpoint_every_syncs += 1
  assert config.agreement() == agreement
  for section, name, value in (
    (config.sync, 'outer', 'sgd(learning_rate=1.0)'),
    (config.optimizer, 'name', 'muon'),
  ):
    before = getattr(section, name)
    setattr(section, name, value)
    assert config.agreement() != agreement
    setattr(section, name, before)


def test_the_protocol_gets_integers():
  protocol = stdlib_lm.get_config('cpu').protocol()
  assert (protocol.lease_ns, protocol.grace_permille) == (10_000_000_000, 900)


def test_json_of_another_version_is_refused():
  values = stdlib_lm.get_config('cpu').to_dict()
  values['sync']['quorums'] = values['sync'].pop('quorum')
  with pytest.raises(ValueError, match=r'sync.SyncConfig: missing quorum, unknown quorums'):
    run_config.Config.from_dict(values)


def test_learner_ids_sort_as_they_count():
  ids = run_config.learner_ids(11)
  assert (ids[0], ids[-1], sorted(ids)) == ('l00', 'l10', ids)


def test_overrides_arrive_and_can_be_passed_on_without_jax():
  """Set, clear, a switch; and the flags that make the same config elsewhere."""
  streaming = '--config=stdlib_lm:streaming'
  done = launch(
    '--config.sync.quorum=2',
    '--config=ignored.py',
    streaming,
    '--config.sync.max_lag=none',
    '--config.model.scan',
    '--noconfig.model.tied_head',
  )
  assert done.returncode == 0, done.stderr
  flat, flags, jax_imported = json.loads(done.stdout)
  assert (flat['name'], flat['sync.quorum'], flat['sync.max_lag']) == ('streaming', 2, None)
  assert (flat['model.scan'], flat['model.tied_head']) == (True, False)
  assert not jax_imported
  assert json.loads(launch(*flags).stdout)[0] == flat


@pytest.mark.parametrize(
  'flags, words',
  [
    (['--config.sync.quorumm=2'], 'did you mean --config.sync.quorum?'),
    (['--config.sync.quorum=x'], "'x' is no whole number"),
    (['--config.sync.quorum=9'], 'sync.quorum is 9'),
    (['--config=stdlib_lm:gpu'], "there is no variant 'gpu'; use one of: cpu"),
    (['--config=nowhere.py'], "there is no config 'nowhere.py'"),
    (['--config=scripts/setup.sh'], "there is no config 'scripts/setup.sh'"),
    (['--config=nowhere.py', '--config.sync.quorum=1'], "there is no config 'nowhere.py'"),
    (['--unknown=1'], "Unknown command line flag 'unknown'"),
    (['stray'], "unexpected argument 'stray'"),
  ],
)
def test_a_wrong_command_is_one_line_and_42(flags, words):
  done = launch(*flags)
  assert done.returncode == exits.NEVER_RETRY
  assert done.stderr.startswith('error: ') and done.stderr.count('\n') == 1, done.stderr
  assert words in done.stderr


def test_a_flag_file_may_have_the_config_and_its_overrides(tmp_path):
  (tmp_path / 'inner').write_text('--config.sync.quorum=2\n')
  (tmp_path / 'flags').write_text(f'--config=stdlib_lm:tiny\n--flagfile={tmp_path}/inner\n')
  done = launch(f'--flagfile={tmp_path}/flags', '--config.train.steps=9')
  assert done.returncode == 0, done.stderr
  flat, words, _ = json.loads(done.stdout)
  assert (flat['name'], flat['sync.quorum'], flat['train.steps']) == ('tiny', 2, 9)
  assert words[0] == '--config=stdlib_lm:tiny'
  done = launch(f'--flagfile={tmp_path}/nowhere')
  assert done.returncode == exits.NEVER_RETRY and 'nowhere' in done.stderr


def test_a_field_that_is_given_as_a_flag_is_named():
  done = launch('--steps=30')
  assert done.returncode == exits.NEVER_RETRY
  assert "'steps'" in done.stderr and 'In the config: --config.train.steps' in done.stderr
