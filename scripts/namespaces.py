"""A run over mutual TLS in three network namespaces, as if on three machines.

    python scripts/namespaces.py          # about a minute; needs unshare, nsenter, ip; no root

A syncer and two learners, each with a network and a folder of its own, train the tiny config over
mutual TLS. Then learner l1 is cut off: its cable is pulled. The others go on, the syncer loses l1
after its lease, and once the cable is back, l1 is merged again. Prints one line and exits with 0,
also where namespaces are not allowed.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from diloco_jax.launch import local_run

NODES = {'syncer': '10.77.0.1', 'l0': '10.77.0.2', 'l1': '10.77.0.3'}
ADDRESS = f'{NODES["syncer"]}:7070'
DEADLINE_S = 300
INSIDE = '--inside'
UNSHARE = ('unshare', '--map-root-user', '--net', '--uts')
FLAGS = (
  '--config=stdlib_lm:tiny',
  '--config.train.steps=1000000',
  '--config.sync.learners=2',
  '--config.sync.lease_s=4',
)


def main() -> int:
  """Starts this script again in namespaces in which it is root, where they are allowed."""
  if INSIDE in sys.argv:
    with tempfile.TemporaryDirectory(prefix='diloco-') as folder:
      return demonstrate(pathlib.Path(folder))
  if why := why_not_allowed():
    print(f'skipped: network namespaces are not allowed here ({why})')
    return 0
  with subprocess.Popen([*UNSHARE, sys.executable, __file__, INSIDE]) as child:
    while True:
      try:
        return child.wait()
      except KeyboardInterrupt:  # the script has it, too, and ends
        continue


def why_not_allowed() -> str:
  """'' if there can be namespaces."""
  for tool in ('unshare', 'nsenter', 'ip'):
    if shutil.which(tool) is None:
      return f'{tool} is missing'
  trial = subprocess.run([*UNSHARE, 'unshare', '--net', '--uts', 'true'], capture_output=True)
  return trial.stderr.decode().strip() if trial.returncode else ''


def demonstrate(folder: pathlib.Path) -> int:
  certs = [sys.executable, '-m', 'diloco_jax', 'certs', f'--tls={folder}/certs']
  for words in (['init', '--name=demo'], ['issue', 'l0', 'l1']):
    subprocess.run([*certs, *words], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
  for words in (('add', 'bridge', 'type', 'bridge'), ('set', 'bridge', 'up')):  # of all nodes
    run('ip', 'link', *words)
  with contextlib.ExitStack() as stack:
    enter = {node: stack.enter_context(network(node, ip)) for node, ip in NODES.items()}
    started = {node: stack.enter_context(process(folder, node, enter[node])) for node in NODES}

    def wait(what: str, holds: Callable[[list[dict]], bool]) -> list[dict]:
      deadline_s = time.monotonic() + DEADLINE_S
      while not holds(records := facts(folder / 'syncer')):
        dead = [node for node, program in started.items() if program.poll() is not None]
        if dead or time.monotonic() > deadline_s:
          for node in NODES:
            print(f'--- {node}', (folder / f'{node}.log').read_text('utf-8')[-3000:], sep='\n')
          raise SystemExit(f'failed: {what}; ended: {", ".join(dead) or "none"}')
        time.sleep(0.2)
      return records

    wait('both learners are merged', lambda records: {'l0', 'l1'} <= merged(records))
    run('ip', 'link', 'set', 'l1', 'down')
    wait('the syncer loses l1', lambda records: states(records, 'l1')[-1] == 'lost')
    before = len(facts(folder / 'syncer'))
    wait('l0 goes on alone', lambda records: merged(records[before:]) == {'l0'})
    run('ip', 'link', 'set', 'l1', 'up')
    before = len(facts(folder / 'syncer'))
    records = wait('l1 is merged again', lambda records: 'l1' in merged(records[before:]))
    for node in ('l0', 'l1', 'syncer'):
      started[node].send_signal(signal.SIGTERM)
    codes = {node: program.wait(DEADLINE_S) for node, program in started.items()}
    if any(codes.values()):
      raise SystemExit(f'failed: exit codes {codes}')
    steps = sum(fact['name'] == 'synced' for fact in records)
    print(
      f'ok: {steps} outer steps over mutual TLS in three network namespaces; l1 was '
      f'{", ".join(states(records, "l1"))}'
    )
  return 0


@contextlib.contextmanager
def network(node: str, ip: str) -> Iterator[Sequence[str]]:
  """A namespace whose device `cable` has an address and is connected to the bridge by the device
  `node`; the words that run a command in it."""
  holder = subprocess.Popen(
    ['unshare', '--net', '--uts', 'sh', '-c', 'echo; exec sleep infinity'], stdout=subprocess.PIPE
  )
  try:
    holder.stdout.readline()  # the namespace is there
    enter = ('nsenter', f'--target={holder.pid}', '--net', '--uts')
    other_end = ('peer', 'name', 'cable', 'netns', str(holder.pid))
    run('ip', 'link', 'add', node, 'type', 'veth', *other_end)
    run('ip', 'link', 'set', node, 'master', 'bridge', 'up')
    for words in (
      ('addr', 'add', f'{ip}/24', 'dev', 'cable'),
      ('link', 'set', 'cable', 'up'),
      ('link', 'set', 'lo', 'up'),
    ):
      run(*enter, 'ip', *words)
    yield enter
  finally:
    holder.kill()
    holder.wait()
    holder.stdout.close()


@contextlib.contextmanager
def process(folder: pathlib.Path, node: str, enter: Sequence[str]) -> Iterator[subprocess.Popen]:
  """A node in its namespace; killed at the end if it has not ended."""
  words = ['learner', f'--learner={node}', f'--syncer={ADDRESS}']
  if node == 'syncer':
    words = ['syncer', f'--listen={ADDRESS}']
  with open(folder / f'{node}.log', 'wb') as log:
    started = subprocess.Popen(
      [
        *(*enter, sys.executable, '-m', 'diloco_jax', *words, *FLAGS),
        *(f'--tls={folder}/certs/{node}', f'--workdir={folder}/{node}'),
      ],
      cwd=ROOT,
      env=local_run.environment(2) | {'JAX_PLATFORMS': 'cpu'},
      stdout=log,
      stderr=subprocess.STDOUT,
    )
  try:
    yield started
  finally:
    started.kill()
    started.wait()


def run(*words: str) -> None:
  subprocess.run(words, check=True)


def facts(workdir: pathlib.Path) -> list[dict]:
  """The facts of the syncer so far; a line that is half written does not count."""
  try:
    lines = (workdir / 'records' / 'syncer.jsonl').read_text('utf-8').split('\n')[:-1]
  except FileNotFoundError:
    return []
  return [json.loads(line) for line in lines]


def merged(records: list[dict]) -> set[str]:
  return {
    learner for fact in records if fact['name'] == 'synced' for learner in fact['participants']
  }


def states(records: list[dict], learner: str) -> list[str]:
  return [
    fact['state']
    for fact in records
    if fact['name'] == 'member' and fact['learner'] == learner and fact['state'] != 'offered'
  ]


if __name__ == '__main__':
  os.environ.setdefault('PYTHONUNBUFFERED', '1')
  sys.exit(main())
