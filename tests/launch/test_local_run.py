"""The folder of a run and its programs: refusals, arguments passed on, settings of the user."""

import contextlib
import copy
import os
import pathlib
import re
import subprocess
import threading
from concurrent import futures

import pytest

import diloco_jax
from diloco_jax.config import load
from diloco_jax.configs import stdlib_lm
from diloco_jax.launch import local_run
from diloco_jax.launch import spec as spec_lib
from diloco_jax.process import accelerators, exits, lifecycle, restore, run_folder
from diloco_jax.report import facts as report_facts
from diloco_jax.report import records as records_lib
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import folders
from tests.launch.lib import command_line
from tests.launch.lib.command_line import diloco
from tests.report import rows


@pytest.fixture(name='config')
def _config():
  return stdlib_lm.get_config('tiny')


def test_a_run_without_a_folder_gets_one_with_its_name(config, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  workdir = run_folder.open_workdir(config, None, resume=False)
  assert workdir.parent == tmp_path / 'runs' and workdir.name.startswith('tiny-')


def _open_at_once(
  count: int, config, workdir: pathlib.Path | None
) -> list[pathlib.Path | Exception]:
  together = threading.Barrier(count)

  def open_one(number: int) -> pathlib.Path | Exception:
    own = copy.deepcopy(config)
    own.train.seed = number
    together.wait()
    try:
      return run_folder.open_workdir(own, workdir, resume=False)
    except (ValueError, files_lib.DirectoryError) as error:
      return error

  with futures.ThreadPoolExecutor(count) as pool:
    return list(pool.map(open_one, range(count)))


def test_runs_that_start_in_one_second_have_folders_of_their_own(config, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(folders.time, 'strftime', lambda form: '20260101-120000')
  opened = _open_at_once(8, config, None)
  first = tmp_path / 'runs' / 'tiny-20260101-120000'
  assert sorted(opened) == [first, *(first.with_name(f'{first.name}-{n}') for n in range(2, 9))]
  assert [load.read(workdir).train.seed for workdir in opened] == list(range(8))


def test_one_folder_that_is_given_to_several_runs_belongs_to_one(config, tmp_path):
  opened = _open_at_once(8, config, tmp_path / 'run')
  (winner,) = [number for number, result in enumerate(opened) if isinstance(result, pathlib.Path)]
  assert load.read(tmp_path / 'run').train.seed == winner
  for refusal in opened[:winner] + opened[winner + 1 :]:
    assert re.search('already (used by|holds a run)', str(refusal)), refusal


def test_a_run_continues_from_another_folder(config, tmp_path, monkeypatch):
  """The paths in its config are those of the folder in which it began."""
  (tmp_path / 'texts').mkdir()
  (tmp_path / 'texts' / 'a.txt').write_text('x')
  (tmp_path / 'elsewhere').mkdir()
  monkeypatch.chdir(tmp_path)
  config.data.corpus = 'texts/*.txt'
  workdir = run_folder.open_workdir(config, pathlib.Path('run'), resume=False)
  monkeypatch.chdir(tmp_path / 'elsewhere')
  loaded = load.load('../run')
  assert loaded.data.corpus == str(tmp_path / 'texts' / '*.txt')
  run_folder.open_workdir(loaded, workdir, resume=True)
  loaded.task = 'mlp.py:task(width=64)'
  load.write(tmp_path, loaded)
  assert load.read(tmp_path).task == f'{tmp_path}/elsewhere/mlp.py:task(width=64)'


def test_a_path_without_readable_checkpoints_is_refused(config, tmp_path, monkeypatch):
  """At the start, wherever a program is given a folder."""
  (tmp_path / 'x[1]').mkdir()
  monkeypatch.chdir(tmp_path / 'x[1]')
  match = 'no checkpoint could be read. Nothing was changed. Choose another folder'
  for workdir in (None, tmp_path / 'x[1]' / 'run'):
    with pytest.raises(ValueError, match=match):
      run_folder.open_workdir(config, workdir, resume=False)
  with pytest.raises(ValueError, match=match):
    diloco_jax.load_params('run')
  with pytest.raises(ValueError, match=match):
    restore.restore(config, pathlib.Path('run'), restore.LATEST, print)
  with pytest.raises(ValueError, match=match), contextlib.ExitStack() as cleanup:
    run_folder.or_temporary('run', cleanup)
  with pytest.raises(exits.NeverRetry, match=match):
    lifecycle.open_folder('run', 'syncer')
  assert not list(pathlib.Path().iterdir())


def test_a_folder_with_a_run_is_refused_without_resume(config, tmp_path):
  workdir = run_folder.open_workdir(config, tmp_path / 'run', resume=False)
  with pytest.raises(ValueError, match='already holds a run: continue it .`train --resume`.'):
    run_folder.open_workdir(config, workdir, resume=False)
  (workdir / 'syncer').mkdir()
  (workdir / 'syncer' / 'address').write_text('127.0.0.1:1')
  config.train.log_every += 1  # not part of the agreement
  config.train.steps += 1  # a run may be given more steps
  assert run_folder.open_workdir(config, workdir, resume=True) == workdir
  assert not (workdir / 'syncer' / 'address').exists()


def test_a_folder_with_other_files_is_refused(config, tmp_path):
  (tmp_path / 'notes.txt').touch()
  with pytest.raises(ValueError, match='is not empty: choose another folder'):
    run_folder.open_workdir(config, tmp_path, resume=False)
  assert [path.name for path in tmp_path.iterdir()] == ['notes.txt']


def test_a_run_whose_syncer_is_live_is_not_continued(config, tmp_path):
  """Without its address, learners that lose the syncer could never come back."""
  workdir = run_folder.open_workdir(config, tmp_path / 'run', resume=False)
  before = (workdir / 'config.json').read_bytes()
  config.train.steps += 1
  with contextlib.closing(files_lib.Files(workdir / 'syncer' / 'wal')) as log:
    log.lock()
    (workdir / 'syncer' / 'address').write_text('127.0.0.1:1')
    ended = diloco('train', '--resume', f'--workdir={workdir}')
    assert ended.returncode == exits.NEVER_RETRY
    assert f'already used by syncer pid {os.getpid()}' in ended.stderr
    with pytest.raises(files_lib.DirectoryError, match='already used by syncer'):
      run_folder.open_workdir(config, workdir, resume=True)
  assert (workdir / 'syncer' / 'address').exists()
  assert (workdir / 'config.json').read_bytes() == before
  run_folder.open_workdir(config, workdir, resume=True)  # it has ended


def test_a_run_that_was_refused_before_its_first_step_says_what_to_do_with_its_folder(tmp_path):
  with contextlib.closing(records_lib.Recorder(tmp_path, 'l0', tensorboard=False)) as recorder:
    assert f'{tmp_path} holds nothing of worth: remove it' in local_run._never_began(tmp_path)
    recorder.report(report_facts.Step(step=1, steps=1, tokens=1, loss=1.0, seconds=1.0))
    assert local_run._never_began(tmp_path) == ''


def test_a_run_whose_supervisor_is_live_is_not_continued(config, tmp_path):
  """It would start the syncer again, which may be down at the moment."""
  workdir = run_folder.open_workdir(config, tmp_path / 'run', resume=False)
  address = workdir / 'syncer' / 'address'
  address.parent.mkdir()
  address.touch()
  with run_folder.lock(workdir):
    with pytest.raises(files_lib.DirectoryError, match='already used by train pid'):
      run_folder.open_workdir(config, workdir, resume=True)
  assert address.exists()


def test_a_run_continues_with_or_without_a_syncer_as_it_began(config, tmp_path):
  alone = run_folder.open_workdir(config, tmp_path / 'alone', resume=False, alone=True)
  (alone / 'islands' / 'l0' / 'ckpt' / '50').mkdir(parents=True)
  with pytest.raises(ValueError, match='without a syncer; continue it with --syncer=none'):
    run_folder.open_workdir(config, alone, resume=True)
  assert run_folder.open_workdir(config, alone, resume=True, alone=True) == alone
  run = run_folder.open_workdir(config, tmp_path / 'run', resume=False)
  (run / 'syncer' / 'wal').mkdir(parents=True)
  with pytest.raises(ValueError, match='has a syncer; leave --syncer=none .* out'):
    run_folder.open_workdir(config, run, resume=True, alone=True)


def test_a_run_continues_with_its_own_config_and_a_lower_rate_if_asked_for(config, tmp_path):
  """Else an edited config in a notebook would continue a run that was started with another one."""
  workdir = run_folder.open_workdir(config, tmp_path / 'run', resume=False)
  config.sync.gamma = 0.1
  match = 'sync.gamma is 0.1 here, 0.9 there.*`train --resume` without --config'
  with pytest.raises(ValueError, match=match):
    run_folder.open_workdir(config, workdir, resume=True, changed=['sync.gamma'])
  config.sync.gamma = 0.9
  config.optimizer.learning_rate /= 2
  with pytest.raises(ValueError, match='optimizer.learning_rate is'):
    run_folder.open_workdir(config, workdir, resume=True)
  run_folder.open_workdir(config, workdir, resume=True, changed=['optimizer.learning_rate'])
  assert load.read(workdir).optimizer.learning_rate == config.optimizer.learning_rate


def _make_ended(config, workdir: pathlib.Path, alone: bool = False, left: str = '') -> pathlib.Path:
  """A run that was trained to its last step; `left`: what was not done then."""
  run_folder.open_workdir(config, workdir, resume=False, alone=alone)
  steps, last = config.train.steps, 'l0' if alone else 'syncer'
  closing = (
    [] if left == 'evaluation' else [(last, rows.row(4, report_facts.Eval(step=steps, loss=1.0)))]
  )
  rows.add(
    workdir,
    (last, rows.row(1, report_facts.Eval(step=0, loss=2.0))),
    ('l0', rows.step(2, steps - (left == 'step'), 1)),
    *closing,
    rows.child(5, last, 'down' if left == 'save' else 'done'),
  )
  if not alone and left != 'model':
    (workdir / 'model').mkdir()
  return workdir


@pytest.mark.parametrize(
  'command, alone, words',
  [
    ('train', False, []),
    ('train', True, ['--syncer=none']),
    ('launch', False, ['--config={workdir}']),
  ],
)
def test_a_run_that_has_ended_is_not_started_without_more_steps(
  config, tmp_path, command, alone, words
):
  """Else all starts count in its goodput, and it would be reported once more."""
  workdir = _make_ended(config, tmp_path / 'run', alone)
  files_before = {path: path.stat().st_mtime_ns for path in workdir.rglob('*')}
  words = [word.format(workdir=workdir) for word in words]
  done = diloco(command, '--resume', f'--workdir={workdir}', *words)
  assert (done.returncode, done.stderr) == (0, '')
  line = f'the run in {workdir} has ended at clock {config.train.steps}: nothing was started. Add'
  assert re.fullmatch(rf'{line} steps with --config.train.steps=.*\n', done.stdout)
  assert {path: path.stat().st_mtime_ns for path in workdir.rglob('*')} == files_before


@pytest.mark.parametrize('left', ['step', 'evaluation', 'save', 'model'])
def test_a_run_whose_end_was_interrupted_is_continued(config, tmp_path, left):
  workdir = _make_ended(config, tmp_path / 'run', left=left)
  assert run_folder.open_workdir(config, workdir, resume=True) == workdir


def test_a_run_whose_few_more_steps_were_merged_before_has_ended(config, tmp_path):
  """The last syncs are later than the last step by up to a period."""
  workdir = _make_ended(config, tmp_path / 'run', left='step')
  rows.add(workdir, ('syncer', rows.row(4, rows.synced(config.train.steps + 2, 'l0'))))
  with pytest.raises(run_folder.NothingLeft):
    run_folder.open_workdir(config, workdir, resume=True)


def test_a_run_that_has_ended_goes_on_with_more_steps_or_for_a_new_store(config, tmp_path):
  workdir = _make_ended(config, tmp_path / 'run')
  config.train.store = str(tmp_path / 'store')
  run_folder.open_workdir(config, workdir, resume=True)
  with pytest.raises(run_folder.NothingLeft):
    run_folder.open_workdir(config, workdir, resume=True)
  config.train.steps += 1
  run_folder.open_workdir(config, workdir, resume=True)
  run_folder.open_workdir(config, workdir, resume=True)  # it may have been interrupted


@pytest.mark.parametrize(
  'workdir, resume, corpus, match',
  [
    (None, True, 'stdlib', '--resume needs --workdir'),
    ('nowhere', True, 'stdlib', 'there is no run in'),
    ('run', False, 'texts', 'texts. has no text, only no files: use'),
    ('/proc/run', False, 'stdlib', 'cannot write /proc/run .* choose another folder'),
  ],
)
def test_a_folder_that_cannot_be_is_refused_and_not_made(
  config, tmp_path, workdir, resume, corpus, match
):
  config.data.corpus = corpus if corpus == 'stdlib' else str(tmp_path / corpus)
  with pytest.raises(ValueError, match=match):
    run_folder.open_workdir(config, tmp_path / workdir if workdir else None, resume=resume)
  assert not [*tmp_path.iterdir()]


def test_all_processes_get_the_same_config_and_their_own_id(config, tmp_path):
  flags = ['--config=x.py:tiny', '--config.sync.quorum=2']
  programs = {p.name: p for p in local_run.programs(local_run.describe(config, tmp_path, flags))}
  assert list(programs) == ['syncer', 'l0', 'l1', 'l2']
  for program in programs.values():
    assert set(flags) | {f'--workdir={tmp_path}'} <= set(program.command)
  assert f'--syncer=file:{tmp_path}/syncer/address' in programs['l1'].command
  assert '--learner=l1' in programs['l1'].command
  assert programs['l1'].environment['JAX_NUM_CPU_DEVICES'] == '2'
  assert programs['syncer'].environment['JAX_NUM_CPU_DEVICES'] == '1'


def test_the_hosts_of_a_learner_share_its_devices(config, tmp_path):
  config.mesh.data, config.mesh.fsdp, config.mesh.hosts = 4, 2, 4
  programs = {p.name: p for p in local_run.programs(local_run.describe(config, tmp_path, []))}
  assert [host['JAX_NUM_CPU_DEVICES'] for host in programs['l1'].hosts] == ['2'] * 4
  assert len(programs['syncer'].hosts) == 1
  config.mesh.hosts = 3
  with pytest.raises(ValueError, match='mesh.hosts is 3: 8 devices do not split evenly'):
    config.validate()


def test_the_users_environment_wins():
  theirs = {'JAX_PLATFORMS': 'tpu', 'JAX_COMPILATION_CACHE_DIR': '/c', 'GRPC_VERBOSITY': 'DEBUG'}
  environment = local_run.environment(
    2, {**theirs, 'JAX_NUM_CPU_DEVICES': '7', 'PYTHONPATH': ':/x::/y:'}
  )
  assert theirs.items() <= environment.items()
  assert environment['JAX_NUM_CPU_DEVICES'] == '2'  # the mesh of the config
  assert environment['PYTHONPATH'] == '/x:/y', 'an empty part would be the folder of the start'


_ENDED = """
import os, pathlib, sys
from diloco_jax.config import load
from diloco_jax.launch import local_run, supervisor
from diloco_jax.process import run_folder
from diloco_jax.report import summary

if sys.argv[2] == 'a fault':
  summary.summarize = lambda found: found['no such field']
config = load.load('stdlib_lm:tiny')
workdir = run_folder.open_workdir(config, pathlib.Path(sys.argv[1]), resume=False)
ended = supervisor.Outcome(code=0, text='done', statuses={}, interrupted=False)

def carry_out():
  if sys.argv[2] == 'a full disk':
    os.dup2(os.open('/dev/full', os.O_WRONLY), 1)
  return ended

sys.exit(local_run.run(config, workdir, carry_out, ['train']))
"""


@pytest.mark.parametrize('why', ['a fault', 'a full disk'])
def test_a_run_that_ended_well_is_well_whatever_its_report_is(why, tmp_path):
  """The disk of the output is full at the end, or the report itself has a fault."""
  done = command_line.python('-c', _ENDED, tmp_path / 'run', why)
  assert done.returncode == 0, done.stderr
  later = re.fullmatch(r'error: the summary is missing .* Later: (.*)\n', done.stderr)
  watch = re.search('^watch it: (.*)$', done.stdout, re.M)
  run = str(tmp_path / 'run')
  shown = min(run, os.path.relpath(run, command_line.ROOT), key=len)
  assert f'report {tmp_path}/run' in later[1] and f'status --workdir={shown}' in watch[1]
  pasted = (later if why == 'a fault' else watch)[1]
  subprocess.run(['bash', '-c', f'{pasted} --help'], check=True, capture_output=True)


def test_learners_share_the_accelerators(config, tmp_path, monkeypatch):
  monkeypatch.delenv('JAX_PLATFORMS')
  devices = lambda pattern: [f'/dev/nvidia{n}' for n in range(8)] if 'nvidia' in pattern else []
  monkeypatch.setattr(accelerators.glob, 'glob', devices)
  monkeypatch.setattr(accelerators.importlib.util, 'find_spec', lambda name: 'jax has it')
  monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
  for listed, shares in (
    (None, ['0,1', '2,3', '4,5']),
    ('7,6,5,4,3,2', ['7,6', '5,4', '3,2']),  # of Slurm, say
    ('GPU-a,GPU-b,GPU-c,MIG-d,MIG-e,MIG-f,MIG-g', ['GPU-a,GPU-b', 'GPU-c,MIG-d', 'MIG-e,MIG-f']),
  ):
    if listed:
      monkeypatch.setenv('CUDA_VISIBLE_DEVICES', listed)
    _, *learners = local_run.programs(local_run.describe(config, tmp_path, []))
    assert [learner.environment['CUDA_VISIBLE_DEVICES'] for learner in learners] == shares
    assert not any('JAX_PLATFORMS' in learner.environment for learner in learners)
  for listed in ('0,1', '0,1,2,3,4,8', '-1', ''):  # too few, one that is not there, none
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', listed)
    _, *learners = local_run.programs(local_run.describe(config, tmp_path, []))
    assert {learner.environment['JAX_PLATFORMS'] for learner in learners} == {'cpu'}


def test_a_syncer_alone_takes_no_accelerators_and_says_nothing_of_them(config, monkeypatch, capsys):
  monkeypatch.delenv('JAX_PLATFORMS')
  tpu = accelerators.Accelerators('tpu', ('0', '1', '2', '3'))
  monkeypatch.setattr(accelerators, 'find', lambda: tpu)
  asked = spec_lib.Request(config=config, config_flags=[], only=['syncer'])
  described = spec_lib.make(asked, local_run.choose(pathlib.Path('/run')))
  assert [program.name for program in local_run.programs(described)] == ['syncer']
  assert capsys.readouterr().out == ''


def test_with_too_few_accelerators_learners_use_emulated_devices(capsys, monkeypatch):
  monkeypatch.delenv('JAX_PLATFORMS')
  accelerator = accelerators.Accelerators('cuda', ('0',))
  environments = local_run.learner_environments(2, 1, accelerator)
  assert [environment['JAX_PLATFORMS'] for environment in environments] == ['cpu', 'cpu']
  assert 'use emulated CPU devices' in capsys.readouterr().out
  monkeypatch.setenv('JAX_PLATFORMS', 'cuda')
  assert local_run.learner_environments(2, 1, accelerator)[0]['JAX_PLATFORMS'] == 'cuda'


def test_the_cache_of_an_installed_package_is_the_users(monkeypatch):
  assert folders.compiled() == folders.CHECKOUT / '.cache' / 'jax'
  monkeypatch.setattr(folders, 'CHECKOUT', None)
  assert folders.compiled({'XDG_CACHE_HOME': '/c'}) == pathlib.Path('/c/diloco_jax/jax')
  assert folders.compiled({}) == pathlib.Path.home() / '.cache' / 'diloco_jax' / 'jax'
