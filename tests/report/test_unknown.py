"""What a folder does not record is said to be unknown, and not taken from another config."""

import json
import math
import os
import pathlib

import pytest

import diloco_jax
from diloco_jax.config import load
from diloco_jax.configs import own_loop
from diloco_jax.launch import cli
from diloco_jax.protocol import facts
from diloco_jax.report import beside, page, serve
from diloco_jax.report import facts as report_facts
from diloco_jax.report import folder as folder_lib
from diloco_jax.report import records as records_lib
from diloco_jax.report import summary as summary_lib

NOT_RECORDED = 'not recorded: there is no config.json'
INVENTED = ('own_loop', 'of 300', 'M=2', f' {math.inf}')


def write(workdir: pathlib.Path, process: str, *reported: object) -> None:
  recorder = records_lib.Recorder(workdir, process, tensorboard=False)
  for fact in reported:
    recorder.report(fact)
  recorder.close()


@pytest.fixture(name='workdir')
def _workdir(tmp_path) -> pathlib.Path:
  """As learners leave it whose syncer refused its flags."""
  for learner in ('l0', 'l1'):
    steps = [
      report_facts.Step(step=n, steps=n, tokens=128 * n, loss=2.0, seconds=0.1) for n in range(1, 5)
    ]
    write(tmp_path / 'run', learner, *steps)
  return tmp_path / 'run'


def texts_of(workdir: pathlib.Path) -> list[str]:
  summary = summary_lib.write(workdir)
  return [summary_lib.text(summary, workdir), (workdir / 'report' / 'report.txt').read_text()]


def test_a_report_without_a_config_invents_none(workdir):
  for text in texts_of(workdir):
    assert NOT_RECORDED in ' '.join(text.split())
    assert not any(word in text for word in INVENTED), text
    assert 'learner l0  4 steps, 512 tokens' in text
  summary = json.loads((workdir / 'report' / 'summary.json').read_text())
  unknown = {'name', 'task', 'store', 'steps', 'goodput'}
  assert all(summary[name] is None for name in unknown) and summary['clock'] == 4
  assert 'own_loop' not in beside.text(beside.read([workdir]))


def test_neither_do_the_page_and_the_metrics(workdir):
  watch = serve.watch_of(workdir)
  shown = watch.state()
  assert shown['about'] == f'config {folder_lib.UNKNOWN}' and shown['name'] == 'run'
  assert shown['progress'] is shown['total_steps'] is shown['seconds_left'] is None
  assert shown['learners']['l0']['step'] == 4
  metrics = serve.metrics(shown)
  assert '\ndiloco_progress ' not in metrics
  assert 'diloco_learner_step{learner="l0"} 4' in metrics
  assert 'length not recorded' in page.text('page.js')


def test_the_page_learns_the_config_once_the_syncer_has_started(workdir, monkeypatch):
  monkeypatch.setattr(serve, '_EVERY_S', 0.0)
  watch = serve.watch_of(workdir)
  assert watch.state()['total_steps'] is None
  config = own_loop.get_config()
  config.train.steps = 40
  load.write(workdir, config)
  shown = watch.state()
  assert (shown['name'], shown['total_steps'], shown['progress']) == ('own_loop', 40, 0.1)
  assert shown['learners']['l0']['step'] == 4


def test_a_run_of_a_notebook_does_not_either(workdir):
  run = diloco_jax.open_run(workdir)
  assert run.config is None and run.summary['steps'] is None
  assert 'length not recorded: l0' in repr(run)
  assert folder_lib.UNKNOWN in run._repr_html_()


@pytest.mark.parametrize('by', ['itself', 'the syncer', 'nobody'])
def test_who_was_done_is_said_by_those_who_know(by: str, workdir):
  """The supervisor only sees exit code 0, which a learner that was stopped has, too."""
  if by == 'itself':
    write(workdir, 'l0', facts.State(state='trained', incarnation=1, clock=4))
  if by == 'the syncer':
    lost = {'learner': 'l0', 'state': 'lost', 'incarnation': 1, 'reason': 'left: done'}
    write(workdir, 'syncer', facts.Member(**lost))
  write(
    workdir,
    'supervisor',
    report_facts.Exit(child='l0', pid=1, code=0),
    report_facts.Process(child='l0', state='done', text=''),
  )
  expected = 'stopped' if by == 'nobody' else 'done'
  assert folder_lib.read(workdir).run.fate('l0') == expected


@pytest.mark.parametrize(
  'command', ['sample', *(pytest.param(c, marks=pytest.mark.full) for c in ('evaluate', 'export'))]
)
def test_who_reads_the_model_says_what_is_missing(command: str, workdir, capfd):
  words = [command, f'--workdir={workdir}'] + ['--out=m.safetensors'] * (command == 'export')
  code = os.waitstatus_to_exitcode(os.system(f'{cli.command(*words)} >/dev/null'))
  error = capfd.readouterr().err
  assert code == 42 and error.count('\n') == 1, error
  assert f'there is no model in {workdir}: its config is not recorded' in error
