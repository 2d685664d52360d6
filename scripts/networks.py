"""Network namespaces: each node of a run has a network of its own, as if on a machine of its own.

Needs unshare, nsenter and ip, and no root: `inside` starts the script again in namespaces in which
it is root. All nodes are connected to one bridge, which stands for the internet.
"""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

INSIDE = '--inside'


def inside(script: str, *tools: str) -> int | None:
  """Runs a script with the present flags in a network of its own; its exit code. None: this is that
  run. Where namespaces are not allowed, or one of `tools` is missing, prints so; the code is 0."""
  if INSIDE in sys.argv:
    sys.argv.remove(INSIDE)
    return None
  if why := not_allowed(*tools):
    print(f'skipped: network namespaces are not allowed here ({why})')
    return 0
  words = [*_unshare(), sys.executable, script, INSIDE, *sys.argv[1:]]
  with subprocess.Popen(words) as child:
    while True:
      try:
        return child.wait()
      except KeyboardInterrupt:  # the script has it, too, and ends
        continue


def not_allowed(*tools: str) -> str:
  """Why there can be no namespaces; '' if there can."""
  for tool in ('unshare', 'nsenter', 'ip', *tools):
    if shutil.which(tool) is None:
      return f'{tool} is missing'
  tried = subprocess.run([*_unshare(), 'unshare', '--net', '--uts', 'true'], capture_output=True)
  return tried.stderr.decode().strip() if tried.returncode else ''


def _unshare() -> Sequence[str]:
  return 'unshare', '--map-root-user', '--net', '--uts'


def bridge() -> None:
  """Makes the bridge."""
  run('ip', 'link', 'add', 'bridge', 'type', 'bridge')
  run('ip', 'link', 'set', 'bridge', 'up')


@contextlib.contextmanager
def network(node: str, ip: str) -> Iterator[Sequence[str]]:
  """A namespace whose device `cable` has an address and is connected to the bridge by the device
  `node`; the words that run a command in it. The address is also its host name, with which gloo
  finds the device."""
  holder = subprocess.Popen(
    ['unshare', '--net', '--uts', 'sh', '-c', f'hostname {ip}; echo; exec sleep infinity'],
    stdout=subprocess.PIPE,
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


def run(*words: str) -> None:
  subprocess.run(words, check=True)
