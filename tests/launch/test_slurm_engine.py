"""The engine `slurm` without Slurm: the golden script, and what it does with commands in the place
of Slurm's that write their calls down. tests/launch/test_slurm.py has a real cluster."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from diloco_jax.config import load
from diloco_jax.launch import cli
from diloco_jax.launch import spec as spec_lib
from diloco_jax.launch.engines import slurm
from diloco_jax.process import exits, run_folder
from diloco_jax.transport import addresses
from tests.launch.lib import command_line, rendered

NEVER = exits.NEVER_RETRY
LIMIT_S = 60
GIVEN = {'sbatch': '--account=me', 'sbatch_learners': "--gres=gpu:8 --comment='two words'"}
NUMBERS = {'SLURM_JOB_ID': '14', 'SLURM_ARRAY_JOB_ID': '14', 'SLURM_ARRAY_TASK_ID': '2'}
RUNS = 'JobState=RUNNING Reason=None Restarts=0'
COMMANDS = r"""#!/bin/sh
printf '%s\n' "${0##*/}" "$@" '' >>"$CALLS"
case "${0##*/} $1" in
'sbatch '*) [ "$ACCEPTED" != no-"$(eval echo \${$#})" ] && echo 12 ;;
'scontrol show') echo "JobId=14 $STATE  NodeAddr=10.0.0.7 NodeHostName=n7" ;;
esac
"""


def request(workdir: str = '/shared/x', learners: int = 3, **more) -> spec_lib.Request:
  config = load.load('stdlib_lm:tiny')
  config.sync.learners = learners
  rest = {'tls': '/shared/certs', **more}
  return spec_lib.Request(config=config, config_flags=[], workdir=workdir, **rest)


def script(asked: spec_lib.Request, **given: str) -> str:
  [text] = rendered.render(slurm, asked, **{**GIVEN, **given}).values()
  return text


@pytest.fixture(name='cluster')
def _cluster(tmp_path, monkeypatch):
  """A folder with Slurm's commands, and their calls so far."""
  for name in ('sbatch', 'scancel', 'scontrol'):
    (tmp_path / name).write_text(COMMANDS)
    (tmp_path / name).chmod(0o755)
  monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
  monkeypatch.setenv('CALLS', str(tmp_path / 'calls'))
  for name, value in {'STATE': RUNS, 'SLURMD_NODENAME': 'n7', **NUMBERS}.items():
    monkeypatch.setenv(name, value)

  def calls() -> list[list[str]]:
    return [word.splitlines() for word in (tmp_path / 'calls').read_text().split('\n\n')[:-1]]

  return calls


def run(text: str, folder: pathlib.Path, *role: str) -> subprocess.CompletedProcess[str]:
  (folder / 'run.sh').write_text(text)
  (folder / 'x' / 'logs').mkdir(parents=True, exist_ok=True)
  command = ['bash', folder / 'run.sh', *role]
  return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)


@contextlib.contextmanager
def starting(text: str, folder: pathlib.Path, *role: str):
  """The same while it runs."""
  (folder / 'run.sh').write_text(text)
  (folder / 'x' / 'logs').mkdir(parents=True)
  command = ['bash', folder / 'run.sh', *role]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
    yield started


def program(monkeypatch, code: str) -> None:
  """Puts a text of Python in the place of our programs."""
  monkeypatch.setattr(cli, 'PROGRAM', (sys.executable, '-S', '-c', code))


def test_the_script_of_a_run(monkeypatch):
  monkeypatch.setattr(cli, 'PROGRAM', ('/env/bin/python', '-m', 'diloco_jax'))
  monkeypatch.chdir('/')
  asked = request(name='Run 1')
  rendered.require_golden({'run-1.sh': script(asked, sbatch_syncer='--time=7-0')}, 'slurm')


def test_shellcheck_has_no_warning(tmp_path):
  (tmp_path / 'whole.sh').write_text(script(request(workdir="/it's mine/100%")))
  (tmp_path / 'part.sh').write_text(script(request(only=['l1'], syncer='HOST:7070')))
  rendered.require_no_warning(*tmp_path.glob('*.sh'))


def test_our_command_line_takes_the_commands_of_the_jobs(cluster, tmp_path, monkeypatch):
  """In a folder with an odd name, as learner 2 of twelve."""
  program(monkeypatch, 'import sys; print("argv", *sys.argv[1:], sep="\\0")')
  workdir = tmp_path / 'x' / 'it\'s 100% "$HOME" `'
  (workdir / 'logs').mkdir(parents=True)
  text, argv = script(request(workdir=str(workdir), learners=12)), []
  for role in ('syncer', 'learner'):
    said = run(text, tmp_path, role).stdout.splitlines()
    argv.append(['diloco', *said[0].split('\0')[1:]])
  assert said[1:] == [], 'it asks for nothing more'
  syncer, learner = command_line.read(argv)
  assert (syncer['listen'], syncer['tls']) == ('10.0.0.7:0', '/shared/certs/syncer')
  assert (learner['learner'], learner['tls']) == ('l02', '/shared/certs/l02')
  assert learner['syncer'] == f'file:{workdir / run_folder.ADDRESS}'
  for values in (syncer, learner):
    assert values['workdir'] == str(workdir)
    assert values['config'] == request(learners=12).config.to_dict()


def test_it_submits_the_syncer_and_then_the_learners(cluster, tmp_path):
  note = tmp_path / 'x' / run_folder.ADDRESS
  note.parent.mkdir(parents=True)
  note.write_text(f'{addresses.ended(3)}\n')  # learners would read it, and end
  done = run(script(request(workdir=str(tmp_path / 'x'))), tmp_path)
  assert done.stdout == 'job 12: the syncer\njob 12: the learners\n'
  assert not note.exists()
  common = ['sbatch', '--parsable', '--requeue', '--open-mode=append', '--nodes=1', '--ntasks=1']
  common += ['--signal=B:TERM@17', '--account=me']
  logs, end = f'{tmp_path}/x/logs', [f'{tmp_path}/run.sh']
  place = ['--job-name=tiny-12', f'--output={logs}/l%1a.log', '--dependency=after:12']
  given = ['--array=0,1,2', '--gres=gpu:8', '--comment=two words']
  assert cluster() == [
    [*common, '--job-name=tiny-syncer', f'--output={logs}/syncer.log', *end, 'syncer'],
    [*common, *place, *given, *end, 'learner'],
  ]


def test_a_syncer_whose_learners_are_refused_is_cancelled(cluster, tmp_path, monkeypatch):
  monkeypatch.setenv('ACCEPTED', 'no-learner')
  assert run(script(request(workdir=str(tmp_path / 'x'))), tmp_path).returncode
  assert [call[0] for call in cluster()] == ['sbatch', 'sbatch', 'scancel']
  assert cluster()[-1] == ['scancel', '12']


def test_learners_of_a_syncer_that_runs_elsewhere(cluster, tmp_path):
  asked = request(workdir=str(tmp_path / 'x'), syncer='HOST:7070', only=['l0', 'l2'])
  assert run(script(asked), tmp_path).returncode == 0
  [call] = cluster()
  assert '--array=0,2' in call and '--job-name=tiny' in call
  assert not any('dependency' in word for word in call)


AGAIN = ['scontrol', 'requeue', '14_2']  # 14 would be all learners


@pytest.mark.parametrize(
  'role, code, more, last',
  [
    ('learner', 0, {}, []),
    ('learner', NEVER, {}, []),
    ('learner', 75, {}, AGAIN),
    ('learner', 75, {'STATE': RUNS.replace('RUNNING', 'COMPLETING')}, []),  # it is cancelled
    ('learner', 75, {'STATE': RUNS.replace('0', '1')}, []),  # Slurm has started it elsewhere
    ('learner', 1, {'SLURM_RESTART_COUNT': '3', 'STATE': RUNS.replace('0', '3')}, AGAIN),
    ('learner', 1, {'SLURM_RESTART_COUNT': '4', 'STATE': RUNS.replace('0', '4')}, []),  # too often
    ('syncer', 74, {}, ['scontrol', 'requeue', '14']),
    ('syncer', NEVER, {}, ['scancel', '--name=tiny-14']),  # its learners
  ],
)
def test_the_end_of_a_program(cluster, tmp_path, monkeypatch, role, code, more, last):
  for name, value in more.items():
    monkeypatch.setenv(name, value)
  program(monkeypatch, f'raise SystemExit({code})')
  done = run(script(request(workdir=str(tmp_path / 'x'))), tmp_path, role)
  assert done.returncode == code, done.stderr
  calls = cluster() if (tmp_path / 'calls').exists() else []
  others = [call for call in calls if call[0] == 'scancel' or call[1] == 'requeue']
  assert others == ([last] if last else [])


@pytest.mark.parametrize('fails', ['the controller', 'the folder of the start', 'the workdir'])
def test_what_fails_before_the_program_starts_puts_the_job_back(
  cluster, tmp_path, monkeypatch, fails
):
  """A controller that is away is waited for."""
  program(monkeypatch, 'import sys; print(*sys.argv[1:2])')
  text = script(request(workdir=str(tmp_path / 'x')))
  text = text.replace('sleep 10', 'sleep 0.1')
  if fails == 'the controller':
    away = f'n=$(cat {tmp_path}/n); echo $((n + 1)) >{tmp_path}/n; [ "$n" -lt 3 ] && exit 1\n'
    (tmp_path / 'n').write_text('0')
    (tmp_path / 'scontrol').write_text(COMMANDS.replace('\n', '\n' + away, 1))
    done = run(text, tmp_path, 'syncer')
    assert done.returncode == 0 and done.stdout.startswith('syncer'), done.stderr
    return
  (tmp_path / 'gone').mkdir()
  text = text.replace(f'cd {pathlib.Path.cwd()}\n', f'cd {tmp_path}/nowhere\n')
  if fails == 'the workdir':
    text = text.replace(f'workdir={tmp_path}/x\n', f'workdir={tmp_path}/nowhere\n')
  done = run(text, tmp_path, 'learner')
  assert done.returncode and cluster()[-1] == AGAIN, done.stderr
  monkeypatch.setenv('SLURM_RESTART_COUNT', '4')  # this node has no such folder, nor any other
  again = run(text, tmp_path, 'learner')
  assert again.returncode and 'is not started again' in again.stdout


def test_a_loop_of_ones_own_is_a_job_as_any_learner(cluster, tmp_path, monkeypatch):
  """It is told who it is and where; after SIGTERM it is started again, too."""
  code = (
    'import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); '
    'print(*sys.argv[1:], flush=True); signal.pause()'
  )
  (tmp_path / 'my loop.py').write_text(code)
  loop = f"{sys.executable} '{tmp_path}/my loop.py' --learner={{learner}} {{syncer}} {{tls}}"
  asked = spec_lib.Request(
    config=load.load('own_loop'), config_flags=[], workdir=str(tmp_path / 'x'), tls='/certs',
    loop=loop, port=7070,
  )  # fmt: skip
  assert '"--listen=$node:7070"' in script(asked)
  with starting(script(asked), tmp_path, 'learner') as started:
    assert started.stdout.readline() == (
      f'--learner=l2 file:{tmp_path}/x/{run_folder.ADDRESS} /certs/l2\n'
    )
    started.send_signal(signal.SIGTERM)
    assert started.wait(LIMIT_S) == 128 + signal.SIGTERM
  assert cluster()[-1] == AGAIN
  with pytest.raises(ValueError, match='--loop=true is for a config without a task'):
    script(request(loop='true'))


def test_the_syncer_reports_once_it_is_done(cluster, tmp_path, monkeypatch):
  program(monkeypatch, 'import sys; sys.exit(print(*sys.argv[1:3]) if len(sys.argv) < 4 else 0)')
  workdir = tmp_path / 'x'
  done = run(script(request(workdir=str(workdir))), tmp_path, 'syncer')
  assert (done.returncode, done.stdout) == (0, f'report {workdir}\n'), done.stderr


def test_sigterm_ends_a_program_in_order_and_starts_it_again(cluster, tmp_path, monkeypatch):
  """As at the end of the time of the job, and before Slurm takes the node back."""
  program(
    monkeypatch,
    'import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("ends"))); '
    'print("ready", flush=True); signal.pause()',
  )
  with starting(script(request(workdir=str(tmp_path / 'x'))), tmp_path, 'learner') as started:
    assert started.stdout.readline() == 'ready\n'
    started.send_signal(signal.SIGTERM)
    assert started.stdout.readline() == 'ends\n'
    assert started.wait(LIMIT_S) == 128 + signal.SIGTERM
  assert cluster()[-1] == AGAIN


@pytest.mark.parametrize(
  'asked, given, words',
  [
    ({'workdir': ''}, {}, '--workdir=FOLDER, which all nodes share'),
    ({'tls': ''}, {}, '--tls, a folder that all nodes share and diloco certs made'),
    ({}, {'sbatch_learners': ''}, 'GPUs for each learner, as .* --topology=cpu'),
    ({'topology': 'v6e:4x4'}, {}, 'a Slurm cluster has no TPU slices'),
    ({'workdir': '/x/[1]'}, {}, r'/x/\[1\] has \[ \] in its path'),
    ({}, {'sbatch': '--array=0-5 -n 2'}, '--sbatch: leave --array=0-5 -n out, the script itself'),
    ({}, {'sbatch_syncer': "--comment='x"}, "--sbatch_syncer=--comment='x: No closing quotation"),
  ],
)
def test_what_is_missing_or_wrong_is_named(asked, given, words):
  assert script(request(topology='cpu'), sbatch_learners='')
  assert script(request(only=['syncer']), sbatch_learners='')
  with pytest.raises(ValueError, match=words):
    script(request(**asked), **given)
