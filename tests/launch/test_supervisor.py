"""The supervisor with small real child processes: restarts, refusals, chaos, no process left over.

Children are Python one-liners that write records or misbehave. Tests wait for facts (a file, a
status, a dead process), each with a deadline.
"""

import asyncio
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.process import restarts, run_folder
from diloco_jax.report import records as records_lib
from diloco_jax.report import run_facts
from diloco_jax.storage import files as files_lib
from tests import programs
from tests.report import rows

_DEADLINE_S = 120.0
_ENVIRONMENT = {'PATH': os.environ['PATH'], 'PYTHONUNBUFFERED': '1'}
_FOREVER = 'import threading; threading.Event().wait()'
_DEAF = 'import signal, threading; signal.signal(signal.SIGTERM, signal.SIG_IGN); '
# Ends once DONE exists.
_SYNCER = """
import os, pathlib, sys
while not pathlib.Path(sys.argv[1], "DONE").exists():
  os.sched_yield()
"""


def program(name: str, script: str, *args: str) -> supervisor_lib.LocalProgram:
  command = [sys.executable, '-S', '-c', script, *args]
  return supervisor_lib.LocalProgram(name=name, command=command, environment=_ENVIRONMENT)


def syncer(folder: pathlib.Path, script: str = _SYNCER) -> supervisor_lib.LocalProgram:
  return program('syncer', script, str(folder))


class Run:
  """A supervisor and its output. It runs on the main thread, since it handles signals."""

  def __init__(self, workdir: pathlib.Path, programs, **kwargs):
    self.lines: list[tuple[str, str]] = []
    self.workdir = workdir
    names = [program.name for program in programs if program.name != 'syncer']
    self.view = run_facts.RunFacts(names, 100)
    self._programs, self._kwargs = programs, kwargs
    self._others = set(psutil.Process().children(recursive=True))  # of other tests in this worker
    self.supervisor = None

  def run(self, tick=lambda run: None, deadline_s: float = _DEADLINE_S) -> supervisor_lib.Outcome:
    """Runs to the end; `tick(self)` is called a few times a second."""
    recorder = records_lib.Recorder(self.workdir, 'supervisor', tensorboard=False)

    async def main():
      self.supervisor = supervisor_lib.Supervisor(
        self._programs,
        self.workdir,
        self.view,
        recorder,
        listen=lambda name, line: self.lines.append((name, line)),
        tick=lambda view: tick(self),
        **self._kwargs,
      )
      return await asyncio.wait_for(self.supervisor.run(), deadline_s)

    with contextlib.closing(recorder):
      return asyncio.run(main())

  def said(self, name: str) -> list[str]:
    return [line for who, line in self.lines if who == name]

  def ends(self, name: str) -> list[str]:
    """How each process of a learner has ended, as the report has it."""
    return [process.ended for process in self.view.learners[name].processes]

  def family(self) -> list[int]:
    """The pids of the processes of this run, those that children started included."""
    return [
      child.pid for child in psutil.Process().children(recursive=True) if child not in self._others
    ]


def gone(pid: int) -> bool:
  try:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return True


def test_the_run_ends_with_its_syncer(tmp_path):
  learner = 'import pathlib, sys; print("hello"); pathlib.Path(sys.argv[1], "DONE").touch()'
  run = Run(tmp_path, [syncer(tmp_path), program('l0', learner, str(tmp_path))])
  outcome = run.run()
  assert (outcome.code, outcome.text) == (0, 'done')
  assert run.said('l0') == ['hello']
  assert (tmp_path / 'logs' / 'l0.log').read_text() == 'hello\n'
  assert [(name, status.state) for name, status in sorted(outcome.statuses.items())] == [
    ('l0', 'done'),
    ('syncer', 'done'),
  ]


def test_a_syncer_whose_learners_are_elsewhere_is_kept_until_it_ends(tmp_path):
  script = """
import os, pathlib, sys
if not pathlib.Path(sys.argv[1], "again").exists():
  pathlib.Path(sys.argv[1], "again").touch()
  sys.exit(74)
"""
  outcome = Run(tmp_path, [syncer(tmp_path, script)]).run()
  assert (outcome.code, outcome.text) == (0, 'done')
  assert (outcome.statuses['syncer'].state, outcome.statuses['syncer'].starts) == ('done', 2)


def test_a_run_under_nohup_outlives_its_terminal(tmp_path):
  learner = 'import os, pathlib, sys\nwhile not pathlib.Path(sys.argv[1], "DONE").exists(): pass'
  run = Run(tmp_path, [program('l0', learner, str(tmp_path))])

  def tick(run):
    os.kill(os.getpid(), signal.SIGHUP)
    (tmp_path / 'DONE').touch()

  before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
  try:
    assert run.run(tick).text == 'done'
  finally:
    signal.signal(signal.SIGHUP, before)


def test_a_run_has_one_supervisor(tmp_path):
  with run_folder.lock(tmp_path):
    with pytest.raises(files_lib.DirectoryError, match='already used by train pid'):
      Run(tmp_path, [program('l0', '')]).run()
  assert Run(tmp_path, [program('l0', '')]).run().code == 0


def test_a_learner_that_always_fails_is_not_restarted_for_ever(tmp_path, monkeypatch):
  monkeypatch.setattr(restarts, '_BACKOFF_S', (0.01, 0.01))
  outcome = Run(tmp_path, [program('l0', 'print("begins"); raise SystemExit(3)')]).run()
  assert (outcome.code, outcome.statuses['l0'].state) == (1, 'failed')
  assert outcome.statuses['l0'].starts == restarts.MAX_SHORT_PROCESSES
  assert (tmp_path / 'logs' / 'l0.log').read_text() == 'begins\n' * restarts.MAX_SHORT_PROCESSES


def test_a_life_is_as_long_as_its_process(tmp_path, monkeypatch):
  monkeypatch.setattr(restarts, '_BACKOFF_S', (0.01, 0.01))
  monkeypatch.setattr(restarts, 'SHORT_S', 1e-6)
  script = f"""
import pathlib, sys
lives = pathlib.Path(sys.argv[1], "lives")
with lives.open("a") as file: file.write("x")
sys.exit(42 if len(lives.read_text()) > {restarts.MAX_SHORT_PROCESSES} else 3)
"""
  outcome = Run(tmp_path, [program('l0', script, str(tmp_path))]).run()
  assert outcome.statuses['l0'].state == 'refused'


MANY, SHORT = restarts.MAX_SHORT_PROCESSES, restarts.SHORT_S - 1


@pytest.mark.parametrize(
  'lives, state',
  [
    ([SHORT, 3600.0] * MANY + [3600.0] * MANY + [SHORT] * (MANY - 2), 'refused'),
    ([None] * 2 * MANY + [SHORT] * (MANY - 1), 'refused'),  # a plan has killed it
    ([SHORT] * MANY, 'failed'),
  ],
)
def test_only_short_lives_in_a_row_are_a_failure(tmp_path, lives, state):
  """A learner that dies once an hour is started again for ever."""

  class Lives(supervisor_lib.Supervisor):
    async def _run_process(self, program):
      if lives and lives[0] is None:
        self._pauses['l0'] = 0.0
      return (1, 'a fault', lives.pop(0) or 0.0) if lives else (42, 'the end', 0.0)

    async def _pause(self, name, seconds):
      pass

  learner = program('l0', '')
  recorder = records_lib.Recorder(tmp_path, 'supervisor', tensorboard=False)

  async def main():
    view = run_facts.RunFacts(['l0'], 100)
    shown = {'listen': lambda *line: None, 'tick': lambda view: None}
    kept = Lives([program('syncer', ''), learner], tmp_path, view, recorder, **shown)
    await kept._keep(learner)
    return kept.statuses['l0'].state

  with contextlib.closing(recorder):
    assert asyncio.run(main()) == state
  assert not lives


def test_a_learner_whose_restart_fails_is_started_again(tmp_path):
  """Its log cannot be opened for a while, as on a full disk or without descriptors."""
  log = tmp_path / 'logs' / 'l0.log'
  script = (
    'import os, pathlib, sys\n'
    'log, lives = map(pathlib.Path, sys.argv[1:])\n'
    'again = lives.exists()\n'
    'with open(lives, "a") as file: file.write("x")\n'
    'if again: sys.exit(0)\n'
    'log.unlink(); log.mkdir(); sys.exit(3)'
  )
  run = Run(tmp_path, [program('l0', script, str(log), str(tmp_path / 'lives'))])

  def tick(run):
    if log.is_dir() and 'could not be started' in ' '.join(run.said('local')):
      log.rmdir()

  outcome = run.run(tick)
  assert (outcome.code, outcome.statuses['l0'].starts) == (0, 2)
  assert (tmp_path / 'lives').read_text() == 'xx'
  assert 'l0: could not be started: [Errno 21]' in ' '.join(run.said('local'))


def test_exit_42_of_a_learner_ends_only_that_learner(tmp_path):
  refused = 'import sys; print("error: another model", file=sys.stderr); sys.exit(42)'
  started = [syncer(tmp_path), program('l0', refused), program('l1', _FOREVER)]

  def tick(run: Run) -> None:
    if run.supervisor.statuses['l0'].state == 'refused':
      (tmp_path / 'DONE').touch()

  outcome = Run(tmp_path, started, finish_s=0.1).run(tick)
  assert outcome.statuses['l0'] == supervisor_lib.Status(
    state='refused', starts=1, last_error='another model'
  )
  assert outcome.statuses['syncer'].state == 'done'


def test_exit_74_of_the_syncer_is_retried_and_exit_42_ends_the_run(tmp_path):
  """First the disk fails, which a restart may fix; then the log is damaged."""
  script = (
    'import pathlib, sys\n'
    'failed = pathlib.Path(sys.argv[1], "FAILED")\n'
    'again = failed.exists(); failed.touch()\n'
    'print("error: damaged log" if again else "error: disk failed", file=sys.stderr)\n'
    'sys.exit(42 if again else 74)'
  )
  run = Run(tmp_path, [syncer(tmp_path, script), program('l0', _FOREVER)])
  outcome = run.run()
  assert (outcome.code, outcome.text) == (42, 'damaged log')
  assert outcome.statuses['syncer'] == supervisor_lib.Status(
    state='refused', starts=2, last_error='damaged log'
  )
  assert 'syncer: ended with exit code 74; restart in' in ' '.join(run.said('local'))


def _reports_step(step: int) -> str:
  """The beginning of a learner's script: it reports one of the 100 steps."""
  return (
    'import json, pathlib, sys, threading\n'
    'out = pathlib.Path(sys.argv[1], "records"); out.mkdir(exist_ok=True)\n'
    'again = (out / "l0.jsonl").exists()\n'
    f'fact = {{"name": "step", "step": {step}, "steps": 1, "tokens": 8, "loss": 1.0,'
    ' "seconds": 0.1, "data_s": 0, "saving_s": 0, "waited_s": 0, "time": 0, "t_ns": 0}\n'
    'with open(out / "l0.jsonl", "a") as f: f.write(json.dumps(fact) + "\\n")\n'
  )


@pytest.mark.parametrize('step, code', [(100, 0), (50, 1)])
def test_the_syncer_of_a_complete_run_has_the_time_that_it_needs(tmp_path, step, code):
  """It writes the model. Learners that end before the last step were stopped from outside."""
  started = [syncer(tmp_path), program('l0', _reports_step(step), str(tmp_path))]
  run = Run(tmp_path, started, finish_s=0.1)
  done_s = []

  def tick(run: Run) -> None:
    if run.supervisor.statuses['l0'].state == 'done':
      done_s.append(time.monotonic())
      if done_s[-1] > done_s[0] + 10 * 0.1:
        (tmp_path / 'DONE').touch()

  assert run.run(tick).code == code


def test_a_run_whose_few_more_steps_were_merged_before_has_ended(tmp_path):
  """The last syncs are later than the last step by up to a period."""
  before = [('l0', rows.step(0, 90, 1)), ('syncer', rows.row(0, rows.synced(104, 'l0')))]
  rows.add(tmp_path, *before)
  assert Run(tmp_path, [program(name, '') for name in ('syncer', 'l0')]).run().code == 0


def test_an_interrupt_ends_a_syncer_that_has_all_the_time(tmp_path):
  started = [program('syncer', _FOREVER), program('l0', _reports_step(100), str(tmp_path))]
  run = Run(tmp_path, started, finish_s=0.1)

  def tick(run: Run) -> None:
    if run.supervisor.statuses['l0'].state == 'done' and not run.supervisor._interrupts.count:
      os.kill(os.getpid(), signal.SIGINT)

  assert run.run(tick).code == 130


def test_the_chaos_plan_kills_and_restarts(tmp_path):
  learner = _reports_step(50) + 'again or threading.Event().wait()'
  kills = [supervisor_lib.Kill(victim='l0', at_fraction=0.5, down_s=0.2)]
  run = Run(tmp_path, [program('l0', learner, str(tmp_path))], kills=kills)
  outcome = run.run()
  assert outcome.statuses['l0'] == supervisor_lib.Status(state='done', starts=2)
  facts = [fact for name, fact in records_lib.TailAll(tmp_path).read() if name == 'supervisor']
  exits = [fact['code'] for fact in facts if fact['name'] == 'exit']
  assert exits == [-signal.SIGKILL, 0] and run.ends('l0').count('killed') == 1


def test_a_learner_that_is_ended_with_the_run_before_it_takes_signals_was_not_killed(tmp_path):
  """The syncer refuses the config while the learner begins. A fault sent l1 the same signal."""
  learners = [program(name, _FOREVER) for name in ('l0', 'l1')]
  run = Run(tmp_path, [*learners, syncer(tmp_path, _SYNCER + 'sys.exit(42)')])

  def tick(run: Run) -> None:
    if run.supervisor.statuses['l1'].starts == 2:
      (tmp_path / 'DONE').touch()
    elif 'l1' in run.supervisor._running:
      run.supervisor.bring_down('l1', 0.0, 'a fault', politely=True)

  outcome = run.run(tick)
  assert (outcome.code, outcome.statuses['l0'].state) == (42, 'stopped')
  assert (run.ends('l0'), run.ends('l1')) == (['stopped'], ['killed', 'stopped'])


def test_a_kill_that_is_due_waits_until_its_victim_has_a_process(tmp_path):
  kills = [supervisor_lib.Kill(victim='l0', at_fraction=0.0, down_s=0.0)]

  def tick(run: Run) -> None:
    if run.supervisor.statuses['l0'].starts == 2:
      run.supervisor.retire()

  Run(tmp_path, [program('l0', _FOREVER)], kills=kills).run(tick)
  facts = [fact for name, fact in records_lib.TailAll(tmp_path).read() if name == 'supervisor']
  assert [fact['code'] for fact in facts if fact['name'] == 'exit'][0] == -signal.SIGKILL


@pytest.mark.parametrize('text', ['l9@0.5', 'l0', 'l0@1.5', 'l0@-1', 'l0@0.5+', 'l0@0.5+-1', ''])
def test_a_kill_that_cannot_be_is_refused(text):
  with pytest.raises(ValueError, match='use NAME@FRACTION.SECONDS.* names syncer, l0, l1'):
    supervisor_lib.parse_kills([text], ['syncer', 'l0', 'l1'])


def test_an_interrupt_ends_even_a_child_that_ignores_sigterm(tmp_path):
  """The child ignores SIGTERM; its own child runs in another session."""
  deaf = (
    _DEAF
    + 'import subprocess, sys; subprocess.Popen([sys.executable, "-S", "-c", '
    + repr(_DEAF + 'threading.Event().wait()')
    + '], start_new_session=True); '
    'print("deaf"); threading.Event().wait()'
  )
  run = Run(tmp_path, [program('l0', deaf), program('l1', _FOREVER)], stop_s=0.5)
  pids: list[int] = []

  def tick(run: Run) -> None:
    if run.said('l0') and not pids:
      pids.extend(run.family())
      os.kill(os.getpid(), signal.SIGINT)

  outcome = run.run(tick)
  assert (outcome.code, outcome.interrupted) == (130, True)
  assert len(pids) >= 3
  programs.until(lambda: all(gone(pid) for pid in pids))
  # None was killed by an accident: the report does not count them.
  assert run.ends('l0') == run.ends('l1') == ['stopped']


def test_a_process_that_holds_the_output_of_a_dead_child_does_not_stop_the_run(tmp_path):
  code = (
    'import os, signal, subprocess, sys; '
    f'subprocess.Popen([sys.executable, "-S", "-c", {_FOREVER!r}]); '
    'os.kill(os.getpid(), signal.SIGKILL)'
  )
  run = Run(tmp_path, [program('l0', code), program('l1', _FOREVER)], stop_s=0.5)

  def tick(run: Run) -> None:
    if run.supervisor.statuses['l0'].starts == 2:
      os.kill(os.getpid(), signal.SIGINT)

  assert run.run(tick).code == 130
  assert 'l0: killed by SIGKILL' in ' '.join(run.said('local'))


def test_two_signals_at_once_are_one(tmp_path):
  """A terminal that closes sends SIGHUP twice, and a service manager SIGTERM to every process."""
  polite = (
    'import signal, threading; end = threading.Event(); '
    'signal.signal(signal.SIGTERM, lambda *_: end.set()); print("ready"); end.wait(); '
    'print("saved")'
  )
  run = Run(tmp_path, [program('l0', polite)], stop_s=_DEADLINE_S)
  asked = []

  def tick(run: Run) -> None:
    if run.said('l0') and not asked:
      asked.extend(os.kill(os.getpid(), signal.SIGTERM) for _ in range(2))

  assert run.run(tick).code == 130
  assert run.said('l0') == ['ready', 'saved']


def test_a_second_interrupt_kills_at_once(tmp_path):
  run = Run(
    tmp_path, [program('l0', _DEAF + 'print("deaf"); threading.Event().wait()')], stop_s=_DEADLINE_S
  )

  def tick(run: Run) -> None:
    if run.said('l0'):
      os.kill(os.getpid(), signal.SIGINT)

  assert run.run(tick).code == 130


def test_children_die_with_a_killed_supervisor(tmp_path):
  """After SIGKILL the supervisor cannot stop them; the kernel does (die_with_parent.py)."""
  deaf = _DEAF + 'print("deaf", flush=True); threading.Event().wait()'
  script = f"""
import asyncio, os, pathlib, sys
from diloco_jax.launch import children
async def main():
  log = pathlib.Path(sys.argv[1], "l0.log")
  child = await children.start("l0", [sys.executable, "-S", "-c", {deaf!r}], os.environ, log,
                               lambda name, line: print(child.pid, flush=True))
  await child.wait()
asyncio.run(main())
"""
  with programs.starting() as start:
    parent = start('-c', script, tmp_path)
    child_pid = int(parent.wait_for(''))
    assert not gone(child_pid)
    os.kill(parent.process.pid, signal.SIGKILL)
    parent.process.wait()
  programs.until(lambda: gone(child_pid))


def test_a_closed_terminal_ends_a_run(tmp_path):
  """The kernel sends SIGHUP, and every later write to the terminal fails."""
  script = f"""
import asyncio, os, pathlib, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
os.login_tty(os.open(sys.argv[2], os.O_RDWR))
from diloco_jax.launch import supervisor
from diloco_jax.report import live, records, run_facts
workdir = pathlib.Path(sys.argv[1])
command = [sys.executable, "-S", "-c", {_FOREVER!r}]
programs = [
  supervisor.LocalProgram(name=name, command=command, environment={{}}) for name in ("syncer", "l0")
]
display = live.Display()
outcome = asyncio.run(supervisor.Supervisor(
  programs, workdir, run_facts.RunFacts(["l0"], 10), records.Recorder(workdir, "supervisor", False),
  listen=display.listen, tick=display.tick).run())
(workdir / "outcome").write_text(outcome.text)
"""
  terminal, theirs = os.openpty()
  supervisor = subprocess.Popen(
    [sys.executable, '-c', script, str(tmp_path), os.ttyname(theirs)],
    env={**os.environ, 'TERM': 'xterm'},
    cwd=pathlib.Path(__file__).parents[2],
  )
  try:
    shown = b''
    while b'l0' not in shown or len(psutil.Process(supervisor.pid).children()) < 2:
      shown += os.read(terminal, 1 << 16)
    os.close(theirs)
    pids = [child.pid for child in psutil.Process(supervisor.pid).children()]
    os.close(terminal)
    assert supervisor.wait(_DEADLINE_S) == 0
  finally:
    supervisor.kill()  # and with it, its children
    supervisor.wait()
  assert all(gone(pid) for pid in pids)
  assert (tmp_path / 'outcome').read_text() == 'interrupted'


def test_an_endless_line_is_cut(tmp_path):
  script = 'import sys; sys.stdout.write("x" * 200_000 + "\\nwithout an end")'
  run = Run(tmp_path, [program('l0', script)])
  run.run()
  *pieces, last = run.said('l0')
  assert sum(map(len, pieces)) == 200_000 and last == 'without an end'
  assert max(map(len, pieces)) <= 2 * (1 << 16)


@pytest.mark.parametrize(
  'states, progress, code',
  [
    ({'syncer': 'done', 'l0': 'done', 'l1': 'refused'}, 1.0, 0),
    ({'syncer': 'done', 'l0': 'done'}, 0.4, 1),
    ({'syncer': 'done', 'l0': 'done'}, 0.99, 1),
    ({'syncer': 'failed', 'l0': 'down'}, 0.4, 1),
    ({'syncer': 'waiting', 'l0': 'refused', 'l1': 'refused'}, 0.0, 42),
    ({'syncer': 'refused', 'l0': 'waiting'}, 0.0, 42),
  ],
)
def test_verdict(states, progress, code):
  of_syncer, *learners = (supervisor_lib.Status(state=state) for state in states.values())
  assert supervisor_lib._verdict(of_syncer, learners, False, progress)[0] == code
