"""Real processes: Ctrl-C and resume, refusals."""

import contextlib
import pathlib
import shlex
import signal
import time

import psutil
import pytest

from tests import programs
from tests.runs.lib import conductor, records, slow_data

CONFIG = '--config=stdlib_lm:tiny'


@pytest.fixture(name='start')
def _start():
  with programs.starting() as start:

    def start_command(command: str, *flags: str, paced: bool = False) -> programs.Program:
      learner = ['-m', conductor.PACED, f'--floor_s={conductor.STEP_S}']
      return start(*(learner if paced else programs.diloco(command)), *flags)

    yield start_command


def _refusal(program: programs.Program) -> str:
  """Ends with 42 after exactly one `error:` line and no traceback."""
  assert program.end() == 42, program.lines
  errors = [line for line in program.lines if line.startswith('error: ')]
  assert len(errors) == 1, program.lines
  assert not any('Traceback' in line for line in program.lines)
  return errors[0]


def _of_run(workdir: pathlib.Path) -> list[psutil.Process]:
  """Processes that name this run in their command line."""
  processes = []
  for process in psutil.process_iter():
    with contextlib.suppress(psutil.Error):
      if any(str(workdir) in word for word in process.cmdline()):
        processes.append(process)
  return processes


@pytest.mark.long
def test_ctrl_c_ends_every_process_and_resume_continues(start, tmp_path):
  workdir = tmp_path / 'run'
  flags = (
    CONFIG,
    f'--workdir={workdir}',
    '--config.train.steps=100',
    '--config.sync.learners=2',
    '--config.train.log_every=10',
    '--config.train.eval_every=0',
    '--config.train.checkpoint_every_steps=20',
    slow_data.FLAG,
  )
  first = start('train', *flags)
  first.wait_for('parameters, T = 100 inner steps of')
  first.wait_for('M = 2 learners, quorum K = ')
  first.wait_for('completed step: ')
  stopped = time.monotonic()
  first.send(signal.SIGINT)
  assert first.end() == 130, first.lines
  assert time.monotonic() - stopped < 20  # 10 s is the promise on a machine that is not busy
  assert not _of_run(workdir)

  refused = start('train', *flags)
  assert '--resume' in _refusal(refused)

  (hint,) = [line for line in first.lines if 'continue with: ' in line]
  *_, command, resume, folder = shlex.split(hint.split('continue with: ')[1])
  rate = '--config.optimizer.learning_rate=0.001'
  second = start(command, resume, folder, '--config.train.log_every=5', rate)
  assert second.end() == 0, second.lines
  paths = [workdir, *workdir.rglob('*')]
  shared = {str(path): oct(path.lstat().st_mode) for path in paths if path.lstat().st_mode & 0o077}
  assert len(paths) > 50 and not shared, 'other users can read it'
  assert any('continues from its checkpoint' in line for line in second.lines)
  ledger = records.facts(workdir, 'syncer', 'ledger')[-1]
  discarded = sum(ledger['discarded'].values())
  assert ledger['fragments'] * ledger['trained'] == ledger['merged'] + discarded


@pytest.mark.long
def test_a_running_syncer_refuses_wrong_processes_and_continues(start, tmp_path):
  """Another model, a second process with one id, a port or a folder in use: each is refused, and
  the run continues."""
  run = (
    CONFIG,
    '--config.train.steps=1000000',
    '--config.sync.learners=1',
    '--config.sync.lease_s=3',
    '--config.train.log_every=20',
    '--config.train.eval_every=0',
    '--config.train.checkpoint_every_steps=1000',
  )
  syncer = start('syncer', *run, f'--workdir={tmp_path}/s')
  address = syncer.wait_for('syncer listens on').split()[-1]

  def learner(name: str, folder: str, *more: str, paced: bool = False) -> programs.Program:
    return start(
      'learner',
      *run,
      *more,
      f'--learner={name}',
      f'--workdir={tmp_path}/{folder}',
      f'--syncer={address}',
      paced=paced,
    )

  first = learner('l0', 'first', paced=True)
  first.wait_for('completed step: ')
  twin = learner('l0', 'twin')
  other = learner('l1', 'other', '--config.model.num_layers=1')
  port_in_use = start('syncer', *run, f'--workdir={tmp_path}/t', f'--listen={address}')
  same = start('syncer', *run, f'--workdir={tmp_path}/s')
  assert f'then joins the syncer at {address}' in other.wait_for('l1 starts')
  refusal = _refusal(other)
  assert 'model.num_layers is 1 here, 2 there' in refusal and 'layout' in refusal
  assert f'cannot listen on {address}: another syncer' in _refusal(port_in_use)
  assert f'{tmp_path}/s/syncer/wal is already used by syncer pid' in _refusal(same)
  assert (tmp_path / 's' / 'syncer' / 'address').read_text().strip() == address
  assert 'Learner id "l0" is in use' in _refusal(twin)

  assert first.running and syncer.running
  first.wait_for('completed step')  # and it still trains
  members = records.facts(tmp_path / 's', 'syncer', 'member')
  assert not [fact for fact in members if fact['state'] == 'lost']
  for program in (first, syncer):
    program.send(signal.SIGTERM)
    assert program.end() == 0, program.lines
