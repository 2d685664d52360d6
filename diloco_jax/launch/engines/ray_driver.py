"""Runs one program on a Ray cluster: RAY_PYTHON -I ray_driver.py FOLDER/ray.json NAME.

The supervisor of the engine `ray` (ray.py) starts it instead of the program itself: it writes what
the program writes, copies its records to FOLDER/records, passes SIGTERM on and ends with its
exit code. It runs in Ray's own environment and needs the standard library and Ray alone.

The program is a placement group with a bundle for each of its hosts. In each bundle is an actor,
`Host`, which runs one process. The hosts of a learner begin and end together. When a machine is
lost, or a host fails, this driver ends, and Ray the actors that are left; then the supervisor
starts the program again, wherever there is room: Ray restarts nothing by itself. A process whose
machine Ray has lost sight of may go on; that is harmless, since the syncer lets no two incarnations
of a learner contribute. Learners find the syncer by FOLDER/address, which its driver writes. They
ask Ray for machines once the syncer has one: where there are too few, the syncer is not what waits.
"""

import collections
import contextlib
import fcntl
import json
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

SYNCER = 'syncer'
PLACED = 'placed'  # in FOLDER: Ray has a machine for the syncer
LOST = 1  # the exit code of a host whose machine is lost
POLL_S = 0.25
PATIENCE_S = 20.0  # until it says that the program waits for machines
SILENCE_S = 60.0  # a machine that does not answer for so long is lost
LAST_WORDS_S, TOGETHER_S = 2.0, 30.0  # for the other hosts of a learner: after a failure, a success
_NOT_THEIRS = 'RAY_', 'OMP_NUM_THREADS', 'PYTHONPATH', 'VIRTUAL_ENV'  # of Ray's own environment


class Host:
  """One process of a program. As an actor it is on the machine where Ray has placed it."""

  def __init__(self, name: str, run: dict):
    workdir = os.path.expanduser(os.path.expandvars(run['workdir']))
    self._name, self._run, self._workdir = name, run, pathlib.Path(workdir).absolute()
    self._workdir.mkdir(mode=0o700, parents=True, exist_ok=True)
    self._address = self._workdir / ('syncer/address' if name == SYNCER else 'address')
    self._address.unlink(missing_ok=True)  # of an earlier process
    self._records = self._workdir / 'records' / f'{name}.jsonl'
    self._read = self._records.stat().st_size if self._records.exists() else 0
    self._process: subprocess.Popen | None = None
    self._raylet, self._ending = os.getppid(), False
    self._lines: list[str] = []

  def address(self) -> tuple[str, int]:
    """Returns the IP address of this machine, and a port that is free on it."""
    import ray

    with socket.socket() as probe:
      probe.bind((ray.util.get_node_ip_address(), 0))
      return probe.getsockname()

  def work(self, program: dict, words: dict[str, str], secrets: dict[str, bytes]) -> int:
    """Runs the process to its end; returns its exit code. `words` are to replace in its command."""
    for name, data in secrets.items():
      write(self._workdir / 'certs' / program['name'] / name, data, self._name)
    argv = program['argv']
    for word, value in {**words, 'workdir': str(self._workdir)}.items():
      argv = [part.replace(f'{{{word}}}', value) for part in argv]
    # An earlier process of the program may be dying; it holds the lock as long as it lives.
    lock = os.open(self._workdir / f'{self._name}.lock', os.O_WRONLY | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    self._take_priority()
    ours = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_THEIRS)}
    self._process = subprocess.Popen(
      [sys.executable, '-I', '-S', '-c', self._run['tether'], str(os.getpid()), 'all', *argv],
      env={**ours, **program['environment']},
      cwd=self._run['cwd'] if os.path.isdir(self._run['cwd']) else None,
      pass_fds=[lock],
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
    if self._ending:
      self.end()
    reader = threading.Thread(target=self._relay, daemon=True)
    reader.start()
    while self._process.poll() is None:
      time.sleep(POLL_S / 5)
      if os.getppid() != self._raylet:  # it has died, and the program starts on another machine
        os._exit(1)  # the kernel ends the process with the thread that has started it, this one
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._process.pid, signal.SIGKILL)  # what it has started must not outlive it
    reader.join(1.0)
    os.close(lock)
    return self._process.returncode

  def exchange(self, address: str) -> tuple[list[str], bytes, str]:
    """Writes the address of the syncer. Returns the new lines of the process, its new records, and,
    if it is the syncer, the address that it has written."""
    now = self._address.read_text('utf-8') if self._address.exists() else ''
    if self._name != SYNCER and address not in ('', now):
      write(self._address, address.encode(), self._name)
    records = b''
    if self._records.exists():
      with open(self._records, 'rb') as file:
        file.seek(self._read)
        records = file.read()
      records = records[: records.rfind(b'\n') + 1]
      self._read += len(records)
    count = len(self._lines)
    lines, self._lines[:count] = self._lines[:count], []
    return lines, records, now

  def end(self) -> None:
    """Asks the process to end in order."""
    self._ending = True
    if self._process:
      self._process.terminate()

  def _relay(self) -> None:
    with self._process.stdout as lines:
      for line in lines:
        text = line.decode(errors='replace').rstrip()
        print(text, flush=True)  # for `ray logs`
        self._lines.append(text)

  def _take_priority(self) -> None:
    """Takes back the niceness of Ray's workers, with which other programs would starve this one."""
    try:
      os.setpriority(os.PRIO_PROCESS, 0, 0)
    except PermissionError:
      self._lines.append('warning: low priority; set RAY_worker_niceness=0 before `ray start`')


class Driver:
  """Runs one program. `ray`: the module, initialized."""

  def __init__(self, ray: Any, folder: pathlib.Path, run: dict, name: str):
    self._ray, self._folder, self._run = ray, folder, run
    self._name, self._program = name, run['programs'][name]
    self._count = self._program['hosts']
    self._stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: self._stop.set())

  def carry_out(self) -> int:
    """Runs the processes of the program; returns its exit code."""
    placed = self._folder / PLACED
    if self._name == SYNCER:
      placed.unlink(missing_ok=True)
    while SYNCER in self._run['programs'] and self._name != SYNCER and not placed.exists():
      if self._stop.wait(POLL_S):
        return 128 + signal.SIGTERM
    hosts = self._make_hosts()
    machines = self._find_machines(hosts)
    if not machines:
      return 128 + signal.SIGTERM
    if self._name == SYNCER:
      placed.touch()
    say(f'starts on {", ".join(ip for ip, _ in machines)}')
    meet = {'hosts': f'{self._count}', 'coordinator': '{}:{}'.format(*machines[0])}
    files = map(pathlib.Path, self._program['secrets'])
    secrets = {file.name: file.read_bytes() for file in files}
    works = [
      actor.work.remote(
        self._program, {**meet, 'host': f'{host}', 'ip': machines[host][0]}, secrets
      )
      for host, actor in enumerate(hosts)
    ]
    return verdict(self._follow(hosts, works), self._run['never_retry'])

  def _make_hosts(self) -> list:
    util, bundle = self._ray.util, dict(self._program['resources'])
    group = util.placement_group([dict(bundle)] * self._count, strategy='STRICT_SPREAD')
    needs = {'num_cpus': bundle.pop('CPU', 0), 'num_gpus': bundle.pop('GPU', 0)}
    actor = self._ray.remote(**needs, resources=bundle, max_concurrency=4)(Host)
    within = util.scheduling_strategies.PlacementGroupSchedulingStrategy
    return [
      actor.options(scheduling_strategy=within(group, placement_group_bundle_index=host)).remote(
        self._host_name(host), self._run
      )
      for host in range(self._count)
    ]

  def _find_machines(self, hosts: list) -> list[tuple[str, int]]:
    """Waits until Ray has found a machine for each host; [] if the program is to end before."""
    addresses, began_s, said = [host.address.remote() for host in hosts], time.monotonic(), False
    while not self._stop.is_set():
      _, missing = self._ray.wait(addresses, num_returns=self._count, timeout=POLL_S)
      if not missing:
        return self._ray.get(addresses)
      if not said and time.monotonic() > began_s + PATIENCE_S:
        said = True
        say(self._describe_wait())
    return []

  def _describe_wait(self) -> str:
    """What the program waits for, and what to do."""
    resources, needed = self._ray.cluster_resources(), collections.Counter()
    for program in self._run['programs'].values():
      needed.update({kind: program['hosts'] * n for kind, n in program['resources'].items()})
    has = {kind: resources.get(kind, 0) for kind in needed}
    return (
      f'waits for {self._count} x {self._program["resources"]}: the programs of the run take '
      f'{dict(needed)}, the cluster has {has}. Add machines, or let programs take less with '
      '--ray_resources'
    )

  def _follow(self, hosts: list, works: list) -> list[tuple[int, int]]:
    """Copies what the processes write until all have ended; returns which host ended and its exit
    code, in order. Once one has ended, the others have a while."""
    ends, deadline_s, asked = [], math.inf, False
    while len(ends) < self._count:
      self._ray.wait(works, num_returns=self._count, timeout=POLL_S)
      if self._stop.is_set() and not asked:
        asked = True
        for host in hosts:
          host.end.remote()
      for host in set(range(self._count)) - dict(ends).keys():
        ended, _ = self._ray.wait([works[host]], timeout=0)
        try:
          self._exchange(host, hosts[host])
          if ended:
            ends.append((host, self._ray.get(works[host])))
        except self._ray.exceptions.RayError as error:
          if deadline_s == math.inf or time.monotonic() < deadline_s:
            say(f'the machine of {self._host_name(host)} is lost: {describe(error)}')
          ends.append((host, LOST))
      if ends and deadline_s == math.inf:
        deadline_s = time.monotonic() + (LAST_WORDS_S if ends[0][1] else TOGETHER_S)
      if time.monotonic() > deadline_s:
        for host in hosts:
          self._ray.kill(host)
    return ends

  def _exchange(self, host: int, actor: Any) -> None:
    file = self._folder / 'address'
    address = file.read_text('utf-8') if file.exists() else ''
    lines, records, now = self._ray.get(actor.exchange.remote(address), timeout=SILENCE_S)
    for line in lines:
      say(line if not host or line.startswith('error: ') else f'[{self._host_name(host)}] {line}')
    if records:
      with open(self._folder / 'records' / f'{self._host_name(host)}.jsonl', 'ab') as file:
        file.write(records)
    if self._name == SYNCER and now not in ('', address):
      write(self._folder / 'address', now.encode(), SYNCER)

  def _host_name(self, host: int) -> str:
    return f'{self._name}.{host}' if host else self._name


def say(line: str) -> None:
  print(line, file=sys.__stdout__, flush=True)


def write(path: pathlib.Path, data: bytes, writer: str) -> None:
  """Writes a file of this user alone; a reader finds the old one or the new one, whole."""
  path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
  partial = path.with_name(f'{path.name}.{writer}')
  partial.unlink(missing_ok=True)
  with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), 'wb') as file:
    file.write(data)
  partial.replace(path)


def verdict(ends: list[tuple[int, int]], never_retry: int) -> int:
  """The exit code of a program, from (host, exit code) in the order of their ends: `never_retry` if
  a host ended with it, else the code of the first host that failed."""
  _, code = min(ends, key=lambda end: (end[1] != never_retry, end[1] == 0))
  return code if code >= 0 else 128 - code


def describe(error: Exception) -> str:
  """The line of an error of Ray that says what happened: the last one if it is from an actor."""
  lines = str(error).strip().splitlines() or [type(error).__name__]
  return lines[-1 if 'ray::' in lines[0] else 0][:200]


def main(file: str, name: str) -> int:
  run = json.loads(pathlib.Path(file).read_text('utf-8'))
  os.environ.update(RAY_USAGE_STATS_ENABLED='0', RAY_ENABLE_UV_RUN_RUNTIME_ENV='0')
  try:
    import ray
  except ImportError:
    say(f'error: {sys.executable} has no Ray: {sys.executable} -m pip install ray')
    return run['never_retry']
  try:
    ray.init(run['address'], log_to_driver=False, logging_level='ERROR')
    sys.stdout = open(os.devnull, 'w', encoding='utf-8')  # Ray prints pages when a machine dies
    return Driver(ray, pathlib.Path(file).parent, run, name).carry_out()
  except (ConnectionError, ray.exceptions.RayError) as error:
    say(f'error: the cluster at {run["address"]}: {describe(error)}')
    return LOST


if __name__ == '__main__':
  sys.exit(main(*sys.argv[1:]))
