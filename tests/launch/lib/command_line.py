"""Our own command line: runs a command, or says whether it takes those of a description."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[3]

# Flags are global, so each command is read in a process of its own, forked from one that has
# imported what all need. The command's own `main` is replaced.
_READ = """
import importlib, json, os, sys
from absl import flags
from diloco_jax import __main__
from diloco_jax.launch import cli

def read(argv):
  name = argv[1]
  module = importlib.import_module(__main__.module(name))
  def main(rest):
    config = cli.config() if 'config' in flags.FLAGS else None
    if name == 'learner': module._number_of_hosts()
    if name in ('learner', 'syncer'): cli.access()
    found = {flag.name: flag.value for flag in flags.FLAGS.get_key_flags_for_module(module)}
    found['config'] = config and config.to_dict()
    print(json.dumps(found), flush=True)
  module.main = main
  cli.run_command(module)

for argv in json.load(sys.stdin):
  if not (pid := os.fork()):
    sys.argv = [f'diloco {argv[1]}', *argv[2:]]
    try: read(argv)
    except SystemExit as end: code = end.code or 0
    except BaseException as error: code = repr(error)
    else: code = 0
    if not isinstance(code, int): print(code, file=sys.stderr, flush=True)
    os._exit(code if isinstance(code, int) else 1)
  if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
    sys.exit(f'{argv} ends with {code}')
"""


def diloco(*words: str, **how: Any) -> subprocess.CompletedProcess[str]:
  """Runs a command to its end."""
  return python('-m', 'diloco_jax', *words, **how)


def python(
  *words: object, cwd: pathlib.Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
  """Runs Python to its end."""
  return subprocess.run(
    [sys.executable, *map(str, words)],
    cwd=cwd,
    env={**os.environ, 'PYTHONPATH': str(ROOT), **environment},
    capture_output=True,
    text=True,
    check=False,
  )


def read(
  commands: Sequence[Sequence[str]], packages: pathlib.Path = ROOT, folder: pathlib.Path = ROOT
) -> list[dict[str, Any]]:
  """The flags of each of these commands, which begin with 'diloco', as its program reads them;
  `config` is the whole config. Fails if one is refused. `packages`: where Python finds diloco_jax;
  `folder`: where the programs start."""
  assert all(argv[0] == 'diloco' for argv in commands), commands
  done = subprocess.run(
    [sys.executable, '-c', _READ],
    input=json.dumps([list(argv) for argv in commands]),
    cwd=folder,
    env={**os.environ, 'PYTHONPATH': str(packages)},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  values = [json.loads(line) for line in done.stdout.splitlines()]
  assert len(values) == len(commands), done.stdout
  return values
