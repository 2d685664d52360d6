"""Every command of the tutorials runs as it is written, from an empty folder.

The first line of a block may be a comment: the file that it is, or the machine that it runs on.
"""

import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / 'docs' / 'tutorials').glob('*.md'))
DEADLINE_S = 600  # of a block
STAYS = re.compile(r'^(diloco (syncer|learner)|python my_loop)', re.M)  # until the run is over
SHIMS = {
  'diloco': f'exec {sys.executable} -m diloco_jax "$@"',
  'python': f'exec {sys.executable} "$@"',
  'scp': 'cp -rp "$2" "../${3%%:*}/${3#*:}"',  # machines are folders beside each other
}


class Block(NamedTuple):
  language: str
  text: str

  @property
  def place(self) -> str:
    """The machine that the first line names."""
    named = re.match(r'# on (?:the )?(\w+)', self.text)
    return named[1] if named else 'here'


@pytest.fixture(name='environment')
def _environment(tmp_path: pathlib.Path) -> dict[str, str]:
  (tmp_path / 'bin').mkdir()
  for name, line in SHIMS.items():
    file = tmp_path / 'bin' / name
    file.write_text(f'#!/bin/sh\n{line}\n')
    file.chmod(0o755)
  path = f'{tmp_path / "bin"}:{os.environ["PATH"]}'
  return {**os.environ, 'PATH': path, 'PYTHONPATH': str(ROOT)}


@pytest.mark.full
@pytest.mark.timeout(3 * DEADLINE_S)
@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_works(page: pathlib.Path, tmp_path, environment):
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{free.getsockname()[1]}'
  text = re.sub(r'(alpha|0\.0\.0\.0):7070', address, page.read_text(encoding='utf-8'))
  blocks = [
    Block(*match) for match in re.findall(r'^```(python|bash)\n(.*?)^```', text, re.M | re.S)
  ]
  for place in {block.place for block in blocks} | {'here'}:
    (tmp_path / place).mkdir()
  with contextlib.ExitStack() as cleanup:
    staying = []
    for block in blocks:
      if block.language == 'python':
        name = block.text.partition('\n')[0].removeprefix('# ')
        (tmp_path / 'here' / name).write_text(block.text)
      elif STAYS.search(block.text):
        staying.append(cleanup.enter_context(starting(block, tmp_path, environment)))
      else:
        while staying:  # what follows reads the whole run
          require_success(staying.pop())
        require_success(cleanup.enter_context(starting(block, tmp_path, environment)))


@contextlib.contextmanager
def starting(block: Block, machines: pathlib.Path, environment: dict) -> Iterator[subprocess.Popen]:
  with tempfile.TemporaryFile('w+', encoding='utf-8') as output:
    process = subprocess.Popen(
      ['bash', '-euo', 'pipefail', '-c', block.text],
      cwd=machines / block.place,
      env=environment,
      stdout=output,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
    try:
      yield process
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      output.seek(0)
      print(block.text, output.read(), sep='\n')  # pytest shows it if the test fails


def require_success(process: subprocess.Popen) -> None:
  assert process.wait(DEADLINE_S) == 0, process.args[-1]
