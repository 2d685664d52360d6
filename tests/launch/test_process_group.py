"""Learners of several hosts under the supervisor, with small real processes as hosts."""

import dataclasses
import os
import signal

import pytest

from diloco_jax.config import load
from diloco_jax.launch import local_run, process_group
from tests.launch import test_supervisor

_HOST = """
import os, pathlib, signal, sys, threading
folder, words = pathlib.Path(sys.argv[1]), dict(word.split("=") for word in sys.argv[2:])
host, again = int(words["--host"]), (folder / words["--host"]).exists()
with open(folder / words["--host"], "a") as file:
  file.write(words["--coordinator"] + "\\n")
def wait_for_others():
  while len(list(folder.glob("[0-9]"))) < int(words["--hosts"]):
    os.sched_yield()
"""


def of_hosts(folder, script: str, hosts: int = 2):
  """The program of a learner."""
  program = test_supervisor.program('l0', _HOST + script, str(folder))
  return dataclasses.replace(program, hosts=[{'HOST': str(host)} for host in range(hosts)])


@pytest.mark.parametrize(
  'hang', ['threading.Event().wait()', 'os.kill(os.getpid(), signal.SIGSTOP)']
)
@pytest.mark.parametrize('victim', [0, 1])
def test_a_host_that_dies_takes_the_others_along_and_all_come_back(
  tmp_path, monkeypatch, victim, hang
):
  assert 0 < process_group.LAST_WORDS_S < 10
  monkeypatch.setattr(process_group, 'LAST_WORDS_S', 0.1)
  script = f"""
assert os.environ["HOST"] == words["--host"]
if not again:
  wait_for_others()
  if host == {victim}: os.kill(os.getpid(), signal.SIGKILL)
  {hang}
"""
  run = test_supervisor.Run(tmp_path / 'run', [of_hosts(tmp_path, script)])
  pids = set()
  outcome = run.run(lambda run: pids.update(run.family()))
  assert (outcome.code, outcome.statuses['l0'].starts) == (0, 2)
  lines = [line for line in run.said('local') if 'killed' in line]
  assert len(lines) == 1 and f'l0: host {victim} killed by SIGKILL; restart in' in lines[0]
  assert all(test_supervisor.gone(pid) for pid in pids)
  places = [(tmp_path / str(host)).read_text().splitlines() for host in (0, 1)]
  assert places[0] == places[1] and len(places[0]) == 2, 'one place to meet at each start'
  assert all(place.startswith('127.0.0.1:') for place in places[0])


@pytest.mark.parametrize(
  'refused, other, last_words_s',
  [
    (1, 'sys.exit(75)', 30),
    (0, 'sys.exit(0)', 30),
    (1, 'signal.sigtimedwait([], 60); sys.exit(3)', 0.1),  # and it is ended
  ],
)
def test_exit_42_of_any_host_is_final_whatever_the_other_does(
  tmp_path, monkeypatch, refused, other, last_words_s
):
  """A led host that is refused makes the lead fail, and either may be gone before the other."""
  monkeypatch.setattr(process_group, 'LAST_WORDS_S', last_words_s)
  script = f"""
wait_for_others()
if host == {refused}:
  while not (folder / "gone").exists(): os.sched_yield()
  print("error: another config", file=sys.stderr)
  sys.exit(42)
(folder / "gone").touch()
{other}
"""
  outcome = test_supervisor.Run(tmp_path / 'run', [of_hosts(tmp_path, script)]).run()
  status = outcome.statuses['l0']
  assert (outcome.code, outcome.text) == (42, 'another config')
  assert (status.state, status.starts) == ('refused', 1)


@pytest.mark.full
def test_a_real_led_host_with_another_config_is_refused_for_all(tmp_path):
  config = tmp_path / 'config.py'
  config.write_text(
    'import os\nfrom diloco_jax.configs import stdlib_lm\n'
    'def get_config(variant):\n'
    '  config = stdlib_lm.get_config("tiny")\n'
    '  config.train.seed = int(os.environ["SEED"])\n'
    '  return config\n'
  )
  loaded = load.load('stdlib_lm:tiny')
  loaded.mesh.hosts = 2
  words = [f'--config={config}:x', '--config.mesh.hosts=2']
  _, learner, *_ = local_run.programs(local_run.describe(loaded, tmp_path / 'run', words))
  hosts = [{**host, 'SEED': str(seed)} for seed, host in enumerate(learner.hosts)]
  run = test_supervisor.Run(tmp_path / 'run', [dataclasses.replace(learner, hosts=hosts)])
  outcome = run.run(deadline_s=300)
  status = outcome.statuses['l0']
  assert (outcome.code, status.state, status.starts) == (42, 'refused', 1), run.lines
  assert 'all hosts of a learner need the same command' in outcome.text


def test_a_host_that_ends_early_with_0_does_not_make_the_others_done(tmp_path, monkeypatch):
  monkeypatch.setattr(process_group, 'TOGETHER_S', 2.0)
  script = 'wait_for_others()\nif host == 0 and not again: threading.Event().wait()'
  run = test_supervisor.Run(tmp_path / 'run', [of_hosts(tmp_path, script, hosts=3)])
  outcome = run.run()
  assert (outcome.code, outcome.statuses['l0'].starts) == (0, 2)


def test_a_host_that_ends_with_0_gives_the_others_time_to_end(tmp_path, monkeypatch):
  monkeypatch.setattr(process_group, 'LAST_WORDS_S', 0.0)
  script = 'wait_for_others()\nif host: signal.sigtimedwait([], 1)'
  outcome = test_supervisor.Run(tmp_path / 'run', [of_hosts(tmp_path, script)]).run()
  assert (outcome.code, outcome.statuses['l0'].starts) == (0, 1)


def test_an_interrupt_asks_all_hosts(tmp_path):
  script = """
signal.signal(signal.SIGTERM, lambda *_: (folder / f"asked-{host}").touch() or sys.exit(0))
print("ready")
threading.Event().wait()
"""
  run = test_supervisor.Run(tmp_path / 'run', [of_hosts(tmp_path, script)])

  def tick(run) -> None:
    if run.said('l0') and run.said('l0.1'):
      os.kill(os.getpid(), signal.SIGINT)

  assert run.run(tick).code == 130
  assert {path.name for path in tmp_path.glob('asked-*')} == {'asked-0', 'asked-1'}
  assert (tmp_path / 'run' / 'logs' / 'l0.1.log').read_text() == 'ready\n'
