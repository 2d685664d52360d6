"""A `gcloud` and a `docker` for the scripts of the engine queued; hosts are folders."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping

LIMIT_S = 120

GCLOUD = f"""#!{sys.executable}
import json, os, pathlib, shutil, subprocess, sys
words, root = sys.argv[1:], pathlib.Path(os.environ['ROOT'])
hosts = sorted(root.glob('host*')) if 'tpus' in words else [root / 'host0']
with open(root / 'calls', 'a') as file: print(json.dumps(words), file=file)
verbs = 'describe create delete scp ssh start stop'.split()
verb = next(one for one in words if one in verbs)
state = root / 'state'
if verb == 'describe':
  if not state.exists(): sys.exit('NOT_FOUND')
  now, *later = state.read_text().split()
  if later: state.write_text(' '.join(later))
  print(now)
elif verb == 'create': state.write_text('PROVISIONING ACTIVE')
elif verb == 'delete': state.unlink()
elif verb == 'scp':
  source = pathlib.Path(words[words.index('--recurse') + 1])
  for host in hosts: shutil.copytree(source, host / source.name, dirs_exist_ok=True)
elif verb == 'ssh':
  (command,) = [one.removeprefix('--command=') for one in words if one.startswith('--command=')]
  codes = [subprocess.run(['sh', '-c', command], cwd=host).returncode for host in hosts]
  sys.exit(next((code for code in codes if code), 0))  # as gcloud does
"""
DOCKER = f"""#!{sys.executable}
import json, pathlib, sys
if sys.argv[1] == 'run':
  code, *codes = pathlib.Path('codes').read_text().split()
  pathlib.Path('codes').write_text(' '.join(codes))
  with open('started', 'a') as file: print(json.dumps(sys.argv[2:]), file=file)
  sys.exit(int(code))
"""
SUDO = '#!/bin/sh\n[ "$1" != docker ] || exec "$@"\n'  # files of the machine stay as they are
SLEEP = '#!/bin/sh\n'


class Cloud:
  """A `gcloud` whose hosts are folders; a program there ends with the next of its exit codes."""

  def __init__(self, root: pathlib.Path, codes: list[list[int]], commands: Mapping[str, str] = {}):
    """`commands`: more of them, by their names: the text of each file."""
    self._root, self._bin = root, root / 'bin'
    self._bin.mkdir()
    ours = {'gcloud': GCLOUD, 'docker': DOCKER, 'sudo': SUDO, 'sleep': SLEEP}
    for name, text in {**ours, **commands}.items():
      (self._bin / name).write_text(text)
      (self._bin / name).chmod(0o755)
    self._hosts = [root / f'host{number}' for number in range(len(codes))]
    for host, its in zip(self._hosts, codes):
      host.mkdir()
      (host / 'codes').write_text(' '.join(map(str, its)))

  def run(self, text: str) -> int:
    """The exit code of a script."""
    path = {**os.environ, 'PATH': f'{self._bin}:{os.environ["PATH"]}', 'ROOT': str(self._root)}
    return subprocess.run(
      ['bash', '-c', text], cwd=self._root, env=path, timeout=LIMIT_S
    ).returncode

  def set_state(self, state: str) -> None:
    (self._root / 'state').write_text(state)

  @property
  def state(self) -> str:
    path = self._root / 'state'
    return path.read_text() if path.exists() else ''

  @property
  def verbs(self) -> list[str]:
    """What was asked of queued resources, but for their state."""
    words = [json.loads(line) for line in (self._root / 'calls').read_text().splitlines()]
    return [one[3] for one in words if one[2] == 'queued-resources' and one[3] != 'describe']

  def started(self, host: int) -> list[list[str]]:
    """The arguments of each `docker run`."""
    path = self._hosts[host] / 'started'
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
