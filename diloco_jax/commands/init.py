"""Writes the folder of a project to begin with: a loop of your own, its config, and how to run it.

    diloco init mine
    cd mine
    ./run.sh         # a syncer and two learners on this machine, the page of the run, a report

The files are README.md, loop.py, config.py, run.sh and .gitignore, none of more than 80 lines.
No file is ever overwritten: if one is there, nothing is written. Exit codes: 0 done, 42 a file is
there, or the folder cannot be written.
"""

import contextlib
import pathlib
import shlex

from diloco_jax.launch import cli
from diloco_jax.process import exits

POSITIONAL = True
_TEMPLATES = cli.EXAMPLES / 'project'
_NAMES = {'gitignore': '.gitignore'}  # the others are called what they are


def main(argv: list[str]) -> None:
  if len(argv) != 2:
    raise exits.NeverRetry('name one folder; for example diloco init mine')
  folder = pathlib.Path(argv[1])
  texts = {
    folder / _NAMES.get(path.name, path.name): path.read_text('utf-8')
    for path in sorted(_TEMPLATES.iterdir())
    if path.is_file()
  }
  for path in texts:
    if path.exists() or path.is_symlink():
      raise exits.NeverRetry(f'{path} is there already. Nothing was written: choose another folder')
  written = []
  try:
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
      with path.open('x', encoding='utf-8') as file:
        written.append(path)
        file.write(text.replace('NAME', folder.resolve().name))
      path.chmod(0o755 if path.suffix == '.sh' else 0o644)
  except OSError as error:
    for path in written:
      with contextlib.suppress(OSError):
        path.unlink()
    raise exits.NeverRetry(f'{folder} cannot be written: {error}. No file of it is left') from None
  print(f'{folder}: {", ".join(path.name for path in texts)}')
  print(f'\n    cd {shlex.quote(str(folder))}\n    ./run.sh')
