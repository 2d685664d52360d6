"""Loads the config that a command or a notebook names; writes and reads config.json of a run."""

import contextlib
import glob
import importlib.util
import json
import os
import pathlib
import re
import sys
import traceback
import types

from absl import flags

from diloco_jax.config import run_config
from diloco_jax.protocol import formats
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import json_files
from diloco_jax.train import tokenizer as tokenizer_lib

FILE = 'config.json'  # in a run's folder: the config that started or continued the run
WRITTEN = FILE, 'tokenizer.', tokenizer_lib.CONFIG  # how the names of what `write` writes begin
_SHIPPED = pathlib.Path(__file__).resolve().parents[1] / 'configs'
STDLIB = 'stdlib'  # a corpus that is no path
_MODULE = 'diloco_config'  # the name of a config file's module


def load(name: str) -> run_config.Config:
  """Returns the config of this name, not yet validated.

  Args:
    name: `FILE.py` or `FILE.py:VARIANT`, a file with a function get_config; `NAME:VARIANT`, such a
      file of the package's folder `configs`; the folder of a run, for the config of that run; or a
      whole config as JSON.

  Raises:
    ValueError: there is no such config, or its file has an error; the text names file and line.
  """
  if name.startswith('{'):
    return run_config.Config.from_dict(json.loads(name))
  if (pathlib.Path(name) / FILE).is_file():
    return read(pathlib.Path(name))
  file, *variant = name.split(':', 1)
  path = _SHIPPED / f'{file}.py' if file.isidentifier() else pathlib.Path(file)
  if path.suffix != '.py' or files_lib.kind(path):
    shipped = ', '.join(sorted(path.stem for path in _SHIPPED.glob('[!_]*.py')))
    raise ValueError(
      f'there is no config {file!r} (seen from {pathlib.Path.cwd()}: it is '
      f'{files_lib.kind(file) or "no *.py"}); name a FILE.py, which every process reads, the '
      f'folder of a run, or a config of the package: {shipped}'
    )
  try:
    config = module(path).get_config(*variant)
  except Exception as error:
    raise ValueError(f'{_where(path, error)}: {type(error).__name__}: {error}') from error
  if not isinstance(config, run_config.Config):
    raise ValueError(
      f'{path}: get_config returned {type(config).__name__}, it must return a run_config.Config'
    )
  return config


def list_shipped() -> list[str]:
  """NAME:VARIANT of each config of the package."""
  names = []
  for path in sorted(_SHIPPED.glob('[!_]*.py')):
    variants = getattr(module(path), 'VARIANTS', ('',))
    names += [f'{path.stem}:{variant}'.rstrip(':') for variant in variants]
  return names


# Settings that may name a file.
_MAY_NAME_FILES = 'task', 'sync.merge', 'sync.embedding_merge', 'sync.outer', 'optimizer.name'


def write(workdir: pathlib.Path, config: run_config.Config) -> None:
  """Writes the config of the run in a folder, with absolute paths of the task, rules of the user's
  own, the corpus, the initial arrays and the store, so that the run can be continued from any
  folder, and its tokenizer: it belongs to the model, so it stays with it; what the run has begun
  with stays, too. Raises OSError, and ValueError for another tokenizer."""
  values = config.to_dict()
  for setting in _MAY_NAME_FILES:
    section, _, name = setting.rpartition('.')
    at = values[section] if section else values
    file, dot_py, call = at[name].partition('.py:')
    at[name] = os.path.abspath(file) + dot_py + call if dot_py else file
  corpus = config.data.corpus
  if run_config.NODE in corpus or (corpus != STDLIB and glob.glob(corpus, recursive=True)):
    values['data']['corpus'] = os.path.abspath(corpus)
  if config.train.init_from:
    values['train']['init_from'] = os.path.abspath(config.train.init_from)
  if config.train.store and '://' not in config.train.store:
    values['train']['store'] = os.path.abspath(config.train.store)
  if config.data.tokenizer:
    file = tokenizer_lib.file(config.data.tokenizer, corpus, config.data.field)
    kept = values['data']['tokenizer'] = f'tokenizer{file.suffix}'
    content, end = file.read_bytes(), tokenizer_lib.find_end(file)
    if not (workdir / kept).is_file():
      if end:
        json_files.write(workdir / tokenizer_lib.CONFIG, {'eos_token': end})
      json_files.replace(workdir / kept, content)
    elif (workdir / kept).read_bytes() != content or tokenizer_lib.find_end(workdir / kept) != end:
      raise ValueError(f'{file} is not the tokenizer of the run in {workdir}: {workdir / kept}')
  values['brought'] = brought(workdir)
  json_files.write(workdir / FILE, formats.stamp('config') | values)


def brought(place: json_files.Place) -> dict[str, str]:
  """The fingerprints of what the run in a folder or a store has begun with (brought.py), if its
  config is readable. Raises OSError."""
  with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
    return dict(json_files.read(place / FILE).get('brought', {}))
  return {}


def read(workdir: pathlib.Path) -> run_config.Config:
  """Reads the config of the run in a folder. Raises ValueError, OSError."""
  path = workdir / FILE
  try:
    values = formats.require('config', json_files.read(path), path)
    values.pop('brought', None)
    config = run_config.Config.from_dict(values)
  except formats.OtherFormat:
    raise
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error
  if config.data.tokenizer:
    config.data.tokenizer = str(workdir / config.data.tokenizer)
  return config


def module(path: pathlib.Path) -> types.ModuleType:
  """Runs a file as a module. Raises whatever the file raises, and OSError; ValueError if it is no
  regular file, or defines a flag of the program's own."""
  files_lib.require_file(path)
  folder = str(path.resolve().parent)
  if folder not in sys.path:
    sys.path.append(folder)  # a config file may import files beside it, as a script does
  spec = importlib.util.spec_from_file_location(_MODULE, path)
  assert spec and spec.loader  # a path has both
  module = importlib.util.module_from_spec(spec)
  sys.modules[_MODULE] = module  # dataclasses look up the module of a class by its name
  try:
    # Without its bytecode, which may be of a file that was written in the same second.
    exec(compile(path.read_bytes(), path, 'exec', dont_inherit=True), module.__dict__)
  except flags.DuplicateFlagError as error:
    name = re.findall("'(.*?)'", str(error))[0]
    raise ValueError(
      f'{path} defines the flag --{name}, which the program has, too: give it another name, or '
      "define it under `if __name__ == '__main__':`"
    ) from error
  return module


def _where(path: pathlib.Path, error: Exception) -> str:
  """The file, and its last line that led to the error."""
  frames = traceback.extract_tb(error.__traceback__)
  is_here = lambda name: pathlib.Path(name or '').resolve() == path.resolve()
  lines = [frame.lineno for frame in frames if is_here(frame.filename)]
  if isinstance(error, SyntaxError) and is_here(error.filename):
    lines.append(error.lineno)
  return f'{path}:{lines[-1]}' if lines else f'{path}'
