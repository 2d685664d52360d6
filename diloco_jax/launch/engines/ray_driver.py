"""Runs programs on a Ray cluster: RAY_PYTHON -I ray_driver.py RUN.json, as the engine `ray` does.

It needs nothing but the standard library and Ray, and runs in Ray's own environment.

A program is a placement group with a bundle for each of its hosts. In each bundle is an actor,
`Host`, which runs one process. Ray restarts nothing: the driver starts a program again after every
end but those that RUN.json names, and after the loss of a machine, wherever there is room. The
hosts of a learner begin and end together. Ray may take a machine for lost whose processes still
run; that is harmless, since the syncer lets no two incarnations of a learner contribute.

The driver tells the learners where the syncer listens, and copies the lines of each process to its
own output and to LOGS/NAME.log. A signal ends the programs in order, a second one at once. When the
driver dies, Ray ends the actors; when an actor dies, the kernel ends its process.
"""

import json
import math
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

SYNCER = 'syncer'
FINISH_S = 30.0  # for the other programs, once the run is over
LAST_WORDS_S, TOGETHER_S = 2.0, 30.0  # for the other hosts of a learner: after a failure, a success
SHORT_LIFE_S = 20.0
BACKOFF_S = 1.0, 30.0
PATIENCE_S = 20.0  # until the driver says that a program waits for machines
ONE_SIGNAL_S = 0.5  # a terminal that closes sends several
POLL_S = 0.25
SILENCE_S = 60.0  # a machine that does not answer for so long is lost
# What Ray has set for its own worker, or the user for Ray's environment.
_NOT_THEIRS = 'RAY_', 'OMP_NUM_THREADS', 'PYTHONPATH', 'VIRTUAL_ENV'


class Host:
  """One process of a program. As an actor it is on the machine where Ray has placed it."""

  def __init__(self, name: str, run: dict):
    workdir = os.path.expanduser(os.path.expandvars(run['workdir']))
    self._name, self._run, self._workdir = name, run, pathlib.Path(workdir).absolute()
    self._workdir.mkdir(mode=0o700, parents=True, exist_ok=True)
    self._address = self._workdir / ('syncer/address' if name == SYNCER else 'address')
    self._address.unlink(missing_ok=True)  # of an earlier process
    self._process: subprocess.Popen | None = None
    self._lines: list[str] = []

  def place(self) -> tuple[str, int]:
    """Returns the IP address of this machine, and a port that is free on it."""
    import ray

    with socket.socket() as probe:
      probe.bind((ray.util.get_node_ip_address(), 0))
      return probe.getsockname()

  def work(self, program: dict, words: dict[str, str], secrets: dict[str, bytes]) -> int:
    """Runs the process to its end; returns its exit code. The kernel kills the process with the
    thread that has started it, so this one stays."""
    for name, data in secrets.items():
      self._write(self._workdir / 'certs' / program['name'] / name, data)
    argv = program['argv']
    for word, value in {**words, 'workdir': str(self._workdir)}.items():
      argv = [part.replace(f'{{{word}}}', value) for part in argv]
    self._take_priority()
    ours = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_THEIRS)}
    self._process = subprocess.Popen(
      [sys.executable, '-I', '-S', '-c', self._run['tether'], str(os.getpid()), 'all', *argv],
      env={**ours, **program['environment']},
      cwd=self._run['cwd'] if os.path.isdir(self._run['cwd']) else None,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
    reader = threading.Thread(target=self._read, daemon=True)
    reader.start()
    code = self._process.wait()
    try:
      os.killpg(self._process.pid, signal.SIGKILL)  # what it has started must not outlive it
    except ProcessLookupError:
      pass
    reader.join(1.0)
    return code if code >= 0 else 128 - code

  def exchange(self, address: str) -> tuple[list[str], str]:
    """Takes the address of the syncer. Returns the new lines of the process, and the address, of a
    syncer the one that it has written."""
    now = self._address.read_text() if self._address.exists() else ''
    if self._name == SYNCER:
      address = now or address
    elif address != now:
      self._write(self._address, address.encode())
    count = len(self._lines)
    lines, self._lines[:count] = self._lines[:count], []
    return lines, address

  def end(self) -> None:
    """Asks the process to end in order."""
    if self._process:
      self._process.terminate()

  def _read(self) -> None:
    for line in self._process.stdout:
      text = line.decode(errors='replace').rstrip()
      print(text, flush=True)  # for `ray logs`
      self._lines.append(text)

  def _take_priority(self) -> None:
    """Takes back the niceness of Ray's workers: other programs of the machine would starve a run."""
    try:
      os.setpriority(os.PRIO_PROCESS, 0, 0)
    except PermissionError:
      self._lines.append(
        f'warning: niceness {os.nice(0)}, so that every other program of this machine goes first: '
        'start Ray there with RAY_worker_niceness=0 in the environment'
      )

  def _write(self, path: pathlib.Path, data: bytes) -> None:
    """Writes a file of this user alone; a reader finds the old one or the new one, whole."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f'{path.name}.{self._name}')
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), 'wb') as file:
      file.write(data)
    partial.replace(path)


class Driver:
  """Keeps the programs of a run going until it is over. `ray`: the module, initialized."""

  def __init__(self, ray: Any, run: dict):
    self._ray, self._run = ray, run
    self._states = {program['name']: 'waiting' for program in run['programs']}
    self._hosts: dict[str, list] = {}  # the actors of each program that is not down
    self._errors: dict[str, str] = {}  # the line in which a program has said why it ends
    self._address = ''  # of the syncer
    self._over = threading.Event()  # no program is started any more
    self._signals: list[float] = []

  def carry_out(self) -> int:
    """Returns the exit code of the run."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
      if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup
        signal.signal(number, self._interrupt)
    keepers = {
      one['name']: threading.Thread(target=self._keep, args=[one], daemon=True)
      for one in self._run['programs']
    }
    for keeper in keepers.values():
      keeper.start()
    left = lambda: {name for name, keeper in keepers.items() if keeper.is_alive()}
    parts = [part for part in (keepers.keys() & {SYNCER}, keepers.keys() - {SYNCER}) if part]
    self._while(lambda: all(left() & part for part in parts), math.inf, signals=0)
    self._over.set()
    if 'done' in self._states.values():  # a syncer without learners writes the model: it has time
      self._while(left, math.inf if left() == {SYNCER} else FINISH_S, signals=0)
    self._each(lambda host: host.end.remote())
    self._while(left, self._run['stop_s'], signals=1)
    self._each(self._ray.kill)
    self._while(left, LAST_WORDS_S, signals=math.inf)
    return outcome(self._states, self._run, bool(self._signals))

  def _keep(self, program: dict) -> None:
    """Runs a program again and again, until it has ended or the run is over."""
    name, failures = program['name'], 0
    for _ in range(program['restarts'] + 1):
      began_s = time.monotonic()
      code, how = self._live(program)
      self._states[name] = self._run['ends'].get(str(code), 'down')
      if self._states[name] != 'down' or self._over.is_set():
        break
      failures = failures + 1 if time.monotonic() < began_s + SHORT_LIFE_S else 1
      pause_s = min(BACKOFF_S[1], BACKOFF_S[0] * 2 ** (failures - 1)) * random.uniform(0.5, 1.0)
      self._say(name, f'down ({how}), restart in {pause_s:.1f} s')
      self._over.wait(pause_s)
    why = self._errors.get(name, '') if self._states[name] == 'never' else ''
    self._say(name, f'{self._states[name]} ({how}) {why}'.rstrip())

  def _live(self, program: dict) -> tuple[int | None, str]:
    """Runs the processes of a program once; returns the exit code and how they ended. The code is
    None if a machine was lost."""
    ray, name, count = self._ray, program['name'], program['hosts']
    bundle = dict(program['resources'])
    group = ray.util.placement_group([bundle] * count, strategy='STRICT_SPREAD')
    needs = {'num_cpus': bundle.pop('CPU', 0), 'num_gpus': bundle.pop('GPU', 0)}
    actor = ray.remote(**needs, resources=bundle, max_concurrency=4)(Host)
    within = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    self._hosts[name] = hosts = [
      actor.options(scheduling_strategy=within(group, placement_group_bundle_index=host)).remote(
        process_name(name, host), self._run
      )
      for host in range(count)
    ]
    try:
      places = self._find_places(program, hosts)
      if self._over.is_set():
        return None, 'not started'
      self._say(name, f'starts on {", ".join(ip for ip, _ in places)}')
      secrets = read_secrets(program['secrets'])
      meet = {'hosts': f'{count}', 'coordinator': '{}:{}'.format(*places[0])}
      works = [
        actor.work.remote(program, {**meet, 'host': f'{host}', 'ip': places[host][0]}, secrets)
        for host, actor in enumerate(hosts)
      ]
      return verdict(self._follow(name, hosts, works), self._run['ends'])
    except ray.exceptions.RayError as error:
      return None, describe(error)
    finally:
      del self._hosts[name]
      ray.util.remove_placement_group(group)

  def _find_places(self, program: dict, hosts: list) -> list[tuple[str, int]]:
    """Waits until Ray has found a machine for each host, or until the run is over."""
    places, began_s, said = [host.place.remote() for host in hosts], time.monotonic(), False
    while not self._over.is_set():
      _, missing = self._ray.wait(places, num_returns=len(places), timeout=POLL_S)
      if not missing:
        return self._ray.get(places)
      if not said and time.monotonic() > began_s + PATIENCE_S:
        said = True
        self._say(program['name'], f'waits for {len(hosts)} machines with {program["resources"]}')
    return []

  def _follow(self, name: str, hosts: list, works: list) -> list[tuple[int, int | None, str]]:
    """Copies the lines of processes until all have ended; returns which host ended, its exit code
    and how, in order. Once one has ended, the others have a while."""
    ends: list[tuple[int, int | None, str]] = []
    deadline_s = math.inf
    while len(ends) < len(hosts):
      self._ray.wait(works, num_returns=len(works), timeout=POLL_S)
      for host in set(range(len(hosts))) - {end[0] for end in ends}:
        try:
          ended, _ = self._ray.wait([works[host]], timeout=0)
          self._exchange(process_name(name, host), hosts[host])
          if ended:
            code = self._ray.get(works[host])
            ends.append((host, code, f'exit {code}'))
        except self._ray.exceptions.RayError as error:
          ends.append((host, None, describe(error)))
      if ends and deadline_s == math.inf:
        deadline_s = time.monotonic() + (TOGETHER_S if ends[0][1] == 0 else LAST_WORDS_S)
      if time.monotonic() > deadline_s:
        for host in hosts:
          self._ray.kill(host)
    return ends

  def _exchange(self, name: str, host: Any) -> None:
    lines, address = self._ray.get(host.exchange.remote(self._address), timeout=SILENCE_S)
    if name == SYNCER:
      self._address = address
    for line in lines:
      if line.startswith('error: '):
        self._errors[name.partition('.')[0]] = line
      self._say(name, line)

  def _say(self, name: str, line: str) -> None:
    print(f'{name} | {line}', flush=True)
    with open(pathlib.Path(self._run['logs'], f'{name}.log'), 'a') as log:
      log.write(f'{line}\n')

  def _each(self, act: Callable[[Any], Any]) -> None:
    for hosts in list(self._hosts.values()):
      for host in hosts:
        act(host)

  def _while(self, condition: Callable[[], Any], seconds: float, signals: float) -> None:
    """Waits while a condition holds, for `seconds`, or until there are more than `signals`."""
    deadline_s = time.monotonic() + seconds
    while condition() and time.monotonic() < deadline_s and len(self._signals) <= signals:
      time.sleep(0.05)

  def _interrupt(self, number: int, frame: Any) -> None:
    del frame
    now_s = time.monotonic()
    if not self._signals or now_s > self._signals[-1] + ONE_SIGNAL_S:
      self._signals.append(now_s)
      print(f'{signal.Signals(number).name}: stopping (again: kill at once)', flush=True)


def process_name(name: str, host: int) -> str:
  return f'{name}.{host}' if host else name


def read_secrets(paths: list[str]) -> dict[str, bytes]:
  """The files of a program, read anew at each start: they may have been renewed."""
  return {os.path.basename(path): pathlib.Path(path).read_bytes() for path in paths}


def describe(error: Exception) -> str:
  """The line of an error of Ray that says what happened: of one in an actor's code, the last."""
  lines = str(error).strip().splitlines() or [type(error).__name__]
  return lines[-1 if 'ray::' in lines[0] else 0]


def verdict(ends: list, meaning: dict[str, str]) -> tuple[int | None, str]:
  """The exit code of a program and how it ended, from the ends of its hosts in order: one that must
  not be started again counts before other failures, and these before a success."""
  worst = 'never', 'retry', 'done'
  host, code, how = min(ends, key=lambda end: worst.index(meaning.get(str(end[1]), 'retry')))
  return code, f'host {host}: {how}' if len(ends) > 1 else how


def outcome(states: dict[str, str], run: dict, interrupted: bool) -> int:
  """The exit code of a run from the states of its programs."""
  learners = [state for name, state in states.items() if name != SYNCER]
  syncer = states.get(SYNCER, 'done')
  if interrupted:
    return run['interrupted']
  if syncer == 'never' or (learners and set(learners) == {'never'}):
    return run['never_retry']
  return 0 if syncer == 'done' and (not learners or 'done' in learners) else 1


def main(path: str) -> int:
  run = json.loads(pathlib.Path(path).read_text())
  os.environ.update(RAY_USAGE_STATS_ENABLED='0', RAY_ENABLE_UV_RUN_RUNTIME_ENV='0')
  try:
    import ray
  except ImportError:
    print(f'error: {sys.executable} has no Ray: pip install ray there', file=sys.stderr)
    return run['never_retry']
  alone = {'include_dashboard': False} if run['address'] == 'local' else {}
  try:
    ray.init(run['address'], log_to_driver=False, logging_level='ERROR', **alone)
  except (ConnectionError, OSError) as error:
    print(f'error: no Ray at {run["address"]}: {describe(error)}', file=sys.stderr)
    return 1
  return Driver(ray, run).carry_out()


if __name__ == '__main__':
  sys.exit(main(sys.argv[1]))
