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
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from diloco_jax.launch import local_run
from scripts import networks

NODES = {'syncer': '10.77.0.1', 'l0': '10.77.0.2', 'l1': '10.77.0.3'}
DEADLINE_S = 300
FLAGS = (
  '--config=stdlib_lm:tiny',
  '--config.train.steps=1000000',
  '--config.sync.learners=2',
  '--config.sync.lease_s=4',
)


def main() -> int:
  code = networks.inside(__file__)
  if code is not None:
    return code
  with tempfile.TemporaryDirectory(prefix='diloco-') as folder:
    return demonstrate(pathlib.Path(folder))


def demonstrate(folder: pathlib.Path) -> int:
  certs = [sys.executable, '-m', 'diloco_jax', 'certs', f'--tls={folder}/certs']
  for words in (['init', '--name=demo'], ['issue', 'l0', 'l1']):
    subprocess.run([*certs, *words], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
  networks.bridge()
  with contextlib.ExitStack() as stack:
    enter = {node: stack.enter_context(networks.network(node, ip)) for node, ip in NODES.items()}
    address = f'{NODES["syncer"]}:7070'
    started = {
      node: stack.enter_context(
        process(
          folder,
          node,
          enter[node],
          f'--listen={address}' if node == 'syncer' else f'--learner={node} --syncer={address}',
        )
      )
      for node in NODES
    }

    def wait(what: str, holds: Callable[[list[dict]], bool]) -> list[dict]:
      deadline_s = time.monotonic() + DEADLINE_S
      while not holds(found := facts(folder / 'syncer')):
        dead = [node for node, one in started.items() if one.poll() is not None]
        if dead or time.monotonic() > deadline_s:
          for node in NODES:
            print(f'--- {node}', (folder / f'{node}.log').read_text('utf-8')[-3000:], sep='\n')
          raise SystemExit(f'failed: {what}; ended: {", ".join(dead) or "none"}')
        time.sleep(0.2)
      return found

    wait('both learners are merged', lambda found: {'l0', 'l1'} <= merged(found))
    cable('l1', 'down')
    wait('the syncer loses l1', lambda found: states(found, 'l1')[-1] == 'lost')
    before = len(facts(folder / 'syncer'))
    wait('l0 goes on alone', lambda found: merged(found[before:]) == {'l0'})
    cable('l1', 'up')
    before = len(facts(folder / 'syncer'))
    found = wait('l1 is merged again', lambda found: 'l1' in merged(found[before:]))
    for node in ('l0', 'l1', 'syncer'):
      started[node].send_signal(signal.SIGTERM)
    codes = {node: one.wait(DEADLINE_S) for node, one in started.items()}
    if any(codes.values()):
      raise SystemExit(f'failed: exit codes {codes}')
    steps = sum(fact['name'] == 'synced' for fact in found)
    print(
      f'ok: {steps} outer steps over mutual TLS in three network namespaces; l1 was '
      f'{", ".join(states(found, "l1"))}'
    )
  return 0


@contextlib.contextmanager
def process(
  folder: pathlib.Path, node: str, enter: Sequence[str], words: str
) -> Iterator[subprocess.Popen]:
  """A node in its namespace; killed at the end if it has not ended."""
  command = 'syncer' if node == 'syncer' else 'learner'
  with open(folder / f'{node}.log', 'wb') as log:
    started = subprocess.Popen(
      [
        *(*enter, sys.executable, '-m', 'diloco_jax', command),
        *(*FLAGS, *words.split(), f'--tls={folder}/certs/{node}', f'--workdir={folder}/{node}'),
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


def cable(node: str, state: str) -> None:
  networks.run('ip', 'link', 'set', node, state)


def facts(workdir: pathlib.Path) -> list[dict]:
  """The facts of the syncer so far; a line that is half written does not count."""
  try:
    lines = (workdir / 'records' / 'syncer.jsonl').read_text('utf-8').split('\n')[:-1]
  except FileNotFoundError:
    return []
  return [json.loads(line) for line in lines]


def merged(found: list[dict]) -> set[str]:
  return {one for fact in found if fact['name'] == 'synced' for one in fact['participants']}


def states(found: list[dict], learner: str) -> list[str]:
  return [
    fact['state']
    for fact in found
    if fact['name'] == 'member' and fact['learner'] == learner and fact['state'] != 'offered'
  ]


if __name__ == '__main__':
  os.environ.setdefault('PYTHONUNBUFFERED', '1')
  sys.exit(main())
