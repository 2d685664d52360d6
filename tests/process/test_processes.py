"""What no retry would help is refused before anything is begun."""

import contextlib
import os
import signal
import sys
from concurrent import futures

import jax
import numpy as np
import pytest

import diloco_jax
from diloco_jax.config import load, run_config
from diloco_jax.configs import own_loop, stdlib_lm
from diloco_jax.launch import cli
from diloco_jax.process import dial, exits, lifecycle, own_model, restore, run_folder
from diloco_jax.process import learner as learner_process
from diloco_jax.process import syncer as syncer_process
from diloco_jax.protocol import actions, messages
from diloco_jax.report import records as records_lib
from diloco_jax.storage import arrays, states
from diloco_jax.storage import files as files_lib
from diloco_jax.syncer import global_model
from diloco_jax.transport import addresses, link
from tests.certs import mint
from tests.launch.lib import command_line


@pytest.mark.parametrize(
  'learner, address, said',
  [
    ('L0!', 'none', "--learner='L0!'"),
    ('syncer', 'none', 'syncer and supervisor are taken'),  # records would be in one file
    ('supervisor', 'none', 'syncer and supervisor are taken'),
    ('l0', 'localhost', "'localhost' is not unix:PATH, nor HOST:PORT"),
  ],
)
def test_a_wrong_id_or_address_is_refused(learner, address, said, tmp_path):
  with pytest.raises(exits.NeverRetry, match=said):
    learner_process.learner(stdlib_lm.get_config('tiny'), str(tmp_path / 'run'), learner, address)
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('nohup', [False, True])
def test_a_closed_terminal_ends_a_process_in_order_but_not_under_nohup(nohup):
  asked = []
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
  try:
    with lifecycle.ending_on_signals(asked.append, 60, ''):
      signal.raise_signal(signal.SIGHUP)
  finally:
    signal.signal(signal.SIGHUP, before)
  assert asked == ([] if nohup else ['stopped by SIGHUP'])


def _without_haste(config: run_config.Config) -> run_config.Config:
  """A node that ends late, on a busy machine, ends the process: here that of the tests."""
  config.train.drain_s = 1_800.0
  return config


def test_a_syncer_that_was_started_by_hand_writes_the_config_once(tmp_path, monkeypatch):
  """So load_params, sample and restore know the run without --config."""

  def stop_once_it_listens(syncer, address):
    write(syncer, address)
    signal.raise_signal(signal.SIGTERM)

  jax.devices()  # before the syncer asks for one
  write = syncer_process.Syncer._write_address
  monkeypatch.setattr(syncer_process.Syncer, '_write_address', stop_once_it_listens)
  config = _without_haste(stdlib_lm.get_config('tiny'))
  config.sync.fragments = config.sync.period = 1
  config.sync.overlap = config.train.eval_every = 0
  for steps in (50, 60):
    config.train.steps = steps
    assert syncer_process.main(config, str(tmp_path), '', addresses.LOCAL) == 0
    assert load.read(tmp_path).train.steps == 50
  assert diloco_jax.load_params(tmp_path)['embedding'].shape == (256, 32)
  restore.restore(load.read(tmp_path), tmp_path, restore.LATEST, print)


def test_an_ended_run_says_so_where_its_address_was(tmp_path, capfd):
  """A learner that comes later, or was cut off, ends instead of dialing for ever."""
  jax.devices()  # before the syncer asks for one
  config = _without_haste(own_loop.get_config())
  config.sync.learners = config.sync.fragments = config.sync.period = 1
  config.sync.overlap, config.train.steps = 0, 3
  where = f'file:{tmp_path}/{run_folder.ADDRESS}'

  def loop(learner: str) -> int:
    joins = {'learner': learner, 'syncer': where, 'total_steps': 3, 'sync': config.sync}
    with diloco_jax.join({'w': jax.numpy.ones((8, 8))}, wait_s=60.0, **joins) as peer:
      return sum(peer.sync(peer.params, tokens=1) is not None for _ in peer.steps())

  with futures.ThreadPoolExecutor(1) as pool:
    steps = pool.submit(loop, 'l0')
    assert syncer_process.main(config, str(tmp_path), '', addresses.LOCAL) == 0
    assert steps.result() == 3
  assert (tmp_path / run_folder.ADDRESS).read_text().strip() == addresses.ended(3)
  assert loop('l1') == 0
  said = capfd.readouterr().out
  assert f'[l1] waits for a syncer at {where}, at most 60 s' in said
  assert ' the run has ended: there are no steps left. ' in said
  assert syncer_process.main(config, str(tmp_path), '', addresses.LOCAL) == 0
  assert (tmp_path / run_folder.ADDRESS).read_text().strip() == addresses.ended(3)


def test_a_learner_that_has_waited_for_a_syncer_for_too_long_ends_with_one_line_and_75(
  tmp_path, capfd, monkeypatch
):
  monkeypatch.setattr(os, 'umask', lambda mask: None)  # that of this process stays
  records = records_lib.Recorder(tmp_path, 'l0')
  waited = actions.Exit(code=75, text='No syncer has answered.')
  assert cli._call(lambda argv: lifecycle.finish(waited, records), []) == 75
  assert capfd.readouterr().err == 'error: No syncer has answered.\n'
  (*_, end) = records_lib.records(tmp_path)
  assert (end['name'], end['code']) == ('exit', 75), 'there may be no supervisor that records it'


def test_of_several_hosts_an_unknown_error_is_recorded_with_the_code_of_the_exit(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(jax.distributed, 'is_initialized', lambda: True)
  monkeypatch.setattr(os, '_exit', sys.exit)
  records = records_lib.Recorder(tmp_path, 'l0')
  with (
    pytest.raises(SystemExit) as ended,
    learner_process.crashing_at_once(),
    lifecycle.recording_end(records),
  ):
    raise jax.errors.JaxRuntimeError('a device failed')
  (*_, end) = records_lib.records(tmp_path)
  assert end['code'] == ended.value.code == 75


@pytest.mark.parametrize('moment', ['load', 'complete', 'theta'])
def test_a_syncer_that_is_asked_to_stop_before_it_listens_ends(tmp_path, monkeypatch, moment):
  module, name = {
    'load': (arrays, 'load'),
    'complete': (own_model, 'complete'),
    'theta': (global_model, 'Theta'),
  }[moment]
  inner = getattr(module, name)

  def stopped_meanwhile(*args):
    monkeypatch.setattr(module, name, inner)
    signal.raise_signal(signal.SIGTERM)
    return inner(*args)

  jax.devices()  # before the syncer asks for one
  states.save(tmp_path / 'init', 'init', {'w': np.ones((8, 8), np.float32)}, {})
  config = _without_haste(own_loop.get_config())
  config.sync.fragments = 1
  monkeypatch.setattr(module, name, stopped_meanwhile)
  started = lambda *args: pytest.fail('the syncer was started')
  monkeypatch.setattr(syncer_process.Syncer, 'run', started)
  where = config, str(tmp_path / 'run'), '', addresses.LOCAL, str(tmp_path / 'init')
  assert syncer_process.main(*where) == 0


_LEARNER = """
import sys
from diloco_jax.configs import stdlib_lm
from diloco_jax.launch import cli
from diloco_jax.process import learner as learner_process
cli.run_main(lambda argv: learner_process.learner(
  stdlib_lm.get_config('tiny'), argv[1], 'l0', 'none'), positional=True)
"""
_SYNCER = """
import sys
from diloco_jax.configs import stdlib_lm
from diloco_jax.launch import cli
from diloco_jax.process import syncer as syncer_process
from diloco_jax.transport import addresses
cli.run_main(lambda argv: syncer_process.main(
  stdlib_lm.get_config('tiny'), argv[1], '', addresses.LOCAL), positional=True)
"""


def test_a_learner_whose_folder_another_process_has_is_refused(tmp_path):
  with contextlib.closing(files_lib.Files(tmp_path / 'islands' / 'l0' / 'ckpt')) as folder:
    folder.lock('learner')
    ended = command_line.python('-c', _LEARNER, tmp_path, JAX_NUM_CPU_DEVICES='2')
  assert ended.returncode == exits.NEVER_RETRY
  assert f'l0/ckpt is already used by learner pid {os.getpid()}' in ended.stderr


@pytest.mark.parametrize('node', ['syncer', pytest.param('islands/l0', marks=pytest.mark.full)])
def test_a_checkpoint_that_cannot_be_read_is_one_line_and_may_be_retried(tmp_path, node):
  record = tmp_path / node / 'ckpt' / '1' / states.MANIFEST
  record.parent.mkdir(parents=True)
  record.write_text('{')
  script = _SYNCER if node == 'syncer' else _LEARNER
  ended = command_line.python('-c', script, tmp_path, JAX_NUM_CPU_DEVICES='2')
  assert ended.returncode == exits.DISK_FAILED
  (line,) = [line for line in ended.stderr.splitlines() if line.startswith('error:')]
  assert f'none of the checkpoints [1] under {tmp_path / node}/ckpt can be read' in line
  assert 'Traceback' not in ended.stderr and record.exists()


_NOT_FINITE = """
import numpy as np
from diloco_jax.config import run_config
from diloco_jax.train import task as task_lib

def task(config):
  return task_lib.Task(
    init=lambda seed: {'w': np.ones((32, 8), np.float32), 'gain': np.float32([0, -np.inf])},
    loss=lambda params, batch, sharding: (batch @ params['w']).mean(),
    batches=lambda shard: [np.ones((2, 32), np.float32)] * 100,
    tokens_per_batch=2,
  )

def get_config():
  config = run_config.Config(name='not_finite', task=f'{__file__}:task')
  config.sync.learners = config.sync.fragments = config.sync.quorum = 1
  return config
"""


@pytest.mark.parametrize('command', [['syncer'], ['train', '--controller=single']], ids=len)
def test_initial_values_that_are_not_finite_are_refused_with_their_name(tmp_path, command):
  file = tmp_path / 'not_finite.py'
  file.write_text(_NOT_FINITE)
  words = [*command, f'--config={file}', f'--workdir={tmp_path / "run"}']
  ended = command_line.diloco(*words)
  assert ended.returncode == exits.NEVER_RETRY, ended.stderr
  (line,) = [line for line in ended.stderr.splitlines() if line.startswith('error:')]
  assert line.startswith('error: gain has initial values that are not finite')
  assert 'correct the initial parameters' in line and 'Traceback' not in ended.stderr


def test_what_may_wait_for_one_learner_follows_the_fragments_of_a_large_model():
  names = [f'layers/{number}' for number in range(48)]
  shapes = dict.fromkeys(names, jax.ShapeDtypeStruct((1 << 12, 1 << 18), np.float32))
  model = own_model.ModelDescription(shapes, dict.fromkeys(names, 'body'), values=dict)
  assembled = own_model.complete(model, own_loop.get_config())
  assert assembled.parameters > 5e10
  limits = dial.limits(assembled)
  whole, delta = max(assembled.publish_bytes), max(assembled.payload_bytes)
  deltas = messages.MAX_VERSIONS_IN_FLIGHT * delta
  assert link.Limits.max_queued_bytes < messages.MAX_WHOLES * whole + deltas
  assert limits.max_queued_bytes == messages.MAX_WHOLES * whole + deltas


def test_the_certificate_of_another_learner_is_seen_before_any_dial(tmp_path):
  mint.owner(tmp_path / 'certs')
  access = addresses.Access(tls=tmp_path / 'certs' / 'l0')
  match = 'is that of l0, and this learner is l1: give each learner the folder of its own id'
  with pytest.raises(exits.NeverRetry, match=match):
    learner_process.learner(
      stdlib_lm.get_config('tiny'), str(tmp_path / 'run'), 'l1', '127.0.0.1:1', access
    )
  assert not (tmp_path / 'run').exists()
  params = {'w': np.ones((4, 4), np.float32)}
  with pytest.raises(ValueError, match=match):
    with diloco_jax.join(
      params, learner='l1', syncer='127.0.0.1:1', total_steps=5, tls=access.tls, wait_s=0.0
    ):
      pass
  dial.require_own_certificate(access, 'l0')


@pytest.mark.parametrize(
  'setting, remedy',
  [
    ({'JAX_PLATFORMS': 'cuda'}, 'unset JAX_PLATFORMS=cuda'),
    ({'JAX_PLATFORMS': 'cpu', 'JAX_DISABLE_JIT': '1'}, 'unset JAX_DISABLE_JIT'),
  ],
)
def test_a_learner_says_what_is_wrong_with_jax_and_is_not_started_again(setting, remedy, tmp_path):
  words = ['--config=stdlib_lm:tiny', f'--workdir={tmp_path}/run', '--learner=l0']
  done = command_line.diloco('learner', *words, '--syncer=none', **setting)
  errors = [line for line in done.stderr.splitlines() if line.startswith('error: ')]
  assert done.returncode == 42 and remedy in errors[0] and 'Traceback' not in done.stderr
  assert not (tmp_path / 'run').exists()
