"""What `--help` prints of a command, in 80 columns, and what a shell completes after its name."""

import re
import textwrap
import types
from collections.abc import Iterator

from absl import flags

from diloco_jax.config import fields, load
from diloco_jax.report import folder as folder_lib

COLUMNS = 80
_ENGINE_FLAG = re.compile('(gke|ray|slurm): ')  # flags that `--help` leaves out
_FIELDS = 'Fields of the config, --config.NAME=VALUE (type, default):'


def text(module: types.ModuleType, full: bool) -> str:
  """The docstring of a command's module and its flags; with `full` all fields of the config."""
  parts = [_prose(part) for part in (module.__doc__ or '').strip().split('\n\n')]
  own = sorted(flags.FLAGS.get_key_flags_for_module(module), key=lambda flag: flag.name)
  if shown := [_flag_text(flag) for flag in own if full or not _ENGINE_FLAG.match(flag.help)]:
    parts.append('\n'.join(['Flags:', *shown]))
  if 'config' in flags.FLAGS:
    name = module.__name__.rpartition('.')[2]
    more = 'More flags' if len(shown) < len(own) else 'The fields of the config'
    parts.append(f'{more}: diloco {name} --helpfull')
    if full:
      parts[-1] = '\n'.join([_FIELDS, '', *(field.text(COLUMNS) for field in fields.walk())])
  return '\n\n'.join(parts)


def _prose(part: str) -> str:
  lines = re.sub(r' \\\n\s+', ' ', part).splitlines()
  if not any(line.startswith(' ') for line in lines):
    return textwrap.fill(part, COLUMNS, break_on_hyphens=False)
  return '\n'.join(shorter for line in lines for shorter in _narrow(line))


def _narrow(line: str) -> Iterator[str]:
  """Splits a line of a shell: its comment goes above it, a long command is continued."""
  command, mark, comment = line.partition('  # ')
  if len(line) <= COLUMNS:
    yield line
  elif line.startswith('    # '):
    yield from textwrap.wrap(line, COLUMNS, subsequent_indent='    # ')
  elif mark:
    yield from (f'    # {comment.strip()}', *_narrow(command.rstrip()))
  else:
    how = {'break_long_words': False, 'break_on_hyphens': False}
    yield from ' \\\n'.join(
      textwrap.wrap(line, COLUMNS - 2, subsequent_indent='      ', **how)
    ).splitlines()


def _flag_text(flag: flags.Flag) -> str:
  values = getattr(flag.parser, 'enum_values', None)
  kind = '|'.join(values) if values else flag.flag_type().removeprefix('multi ').upper()
  kind = 'STRING,...' if isinstance(flag.parser, flags.ListParser) else kind
  default = '' if flag.default in (None, '', False, [], '{}') else f' (default: {flag.default})'
  about = re.sub(r'^<.*?>: |;\s+repeat this option.*', '', flag.help)
  name = f'[no]{flag.name}' if flag.boolean else f'{flag.name}={kind}'
  head = f'--{name}: {about}{default}'
  return textwrap.fill(
    head, COLUMNS, initial_indent='  ', subsequent_indent='      ', break_on_hyphens=False
  )


def words(module: types.ModuleType) -> list[str]:
  """Flags, the configs of the package, and the runs below this folder."""
  own = {flag.name: flag for flag in flags.FLAGS.get_key_flags_for_module(module)}
  runs = folder_lib.runs()
  words = [f'--{name}' + '=' * (not flag.boolean) for name, flag in own.items()]
  words += [f'--config={name}' for name in load.list_shipped()] if 'config' in own else []
  words += [f'--workdir={run}' for run in runs] if 'workdir' in own else []
  return sorted(words) + (runs if getattr(module, 'POSITIONAL', False) else [])
