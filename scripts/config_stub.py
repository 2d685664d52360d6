"""Writes what type checkers and editors cannot see of the config: the settings of the protocol.

python scripts/config_stub.py     # after a change of the table in diloco_jax/protocol/config.py
"""

import pathlib
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from diloco_jax.config import protocol_sections
from diloco_jax.protocol import config as config_lib

PATH = ROOT / 'diloco_jax' / 'config' / 'protocol_sections.pyi'
_HEAD = '''\
"""Written by scripts/config_stub.py from protocol/config.py."""

import dataclasses
from typing import Annotated, Literal

from diloco_jax.protocol import config as protocol_config

OptionalInt = Annotated[int | None, 'an integer, or none']

def settings(section: str) -> dict[str, protocol_config.Setting]: ...
'''


def stub() -> str:
  """The text of the stub: two dataclasses with the type, default and meaning of each field."""
  sections = []
  for name in ('sync', 'train'):
    fields = [_field(*row) for row in protocol_sections.settings(name).items()]
    head = f'\n@dataclasses.dataclass(kw_only=True, slots=True)\nclass {name.title()}:\n'
    sections.append(head + ''.join(fields))
  return _HEAD + ''.join(sections)


def _field(name: str, setting: config_lib.Setting) -> str:
  default = setting.written(setting.default)
  kind = 'OptionalInt' if default is None else type(default).__name__
  if setting.choices:
    kind = f'Literal[{", ".join(map(repr, setting.choices))}]'
  doc = textwrap.fill(f'"""{setting.doc}"""', 98, initial_indent='  ', subsequent_indent='  ')
  return f'  {name}: {kind} = {default!r}\n{doc}\n'


if __name__ == '__main__':
  PATH.write_text(stub(), 'utf-8')
