"""The sections of a config that are views of the protocol's table, in the units that users write.

Type checkers cannot see what `make_dataclass` makes: they read protocol_sections.pyi, which
scripts/config_stub.py writes.
"""

import dataclasses
from typing import Annotated, Any

from diloco_jax.protocol import config as config_lib

OptionalInt = Annotated[int | None, 'an integer, or none']
"""A field that an override can set and clear (`=2`, `=none`); launch/cli.py parses it."""


def settings(section: str) -> dict[str, config_lib.Setting]:
  """The rows of the table that a section holds, by the names of its fields."""
  rows = {}
  for setting in config_lib.TABLE.values():
    where, _, name = setting.name.partition('.')
    if where == section:
      rows[name] = setting
  return rows


def _section(section: str) -> type:
  fields = [
    (name, _type(setting), setting.written(setting.default))
    for name, setting in settings(section).items()
  ]
  return dataclasses.make_dataclass(f'_{section}', fields, kw_only=True, slots=True)


def _type(setting: config_lib.Setting) -> Any:
  if setting.choices:
    return str
  return OptionalInt if setting.default is None else int if setting.unit == 1 else float


Sync = _section('sync')
Train = _section('train')
