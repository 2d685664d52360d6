"""The fields of a config with their types, defaults and docs, for `--helpfull` and for hints."""

import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

from diloco_jax.config import run_config

_ENTRY = re.compile(r'    (\w+): (.*)')  # of an `Attributes:` section; a longer line continues one


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
  """A field of a config.

  Attributes:
    name: dotted, for example 'sync.quorum'.
    type: for example 'int', 'int or none'.
    default: its default as a flag has it; '' if it has none, or is a section.
    doc: its meaning, from the docstring of its dataclass.
    section: whether it holds fields itself.
  """

  name: str
  type: str
  default: str
  doc: str
  section: bool

  def text(self, columns: int) -> str:
    """The lines of `--helpfull`."""
    head = f'{self.name} ({self.type}{self.default and f", {self.default}"}): {self.doc}'
    return textwrap.fill(head, columns, initial_indent='  ', subsequent_indent='      ')


def walk(kind: type = run_config.Config, prefix: str = '') -> Iterator[Field]:
  """All fields of a config, sections before their fields."""
  hints, docs = typing.get_type_hints(kind), docs_of(kind)
  for field in dataclasses.fields(kind):
    hint, name = hints[field.name], prefix + field.name
    section = isinstance(hint, type) and dataclasses.is_dataclass(hint)
    yield Field(
      name=name,
      type='section' if section else _type(hint),
      default='' if section else _default(field),
      doc=docs.get(field.name, '').rstrip('.'),
      section=section,
    )
    if section:
      yield from walk(hint, f'{name}.')


def docs_of(kind: type) -> dict[str, str]:
  """The entries `name: meaning` of a docstring, by name."""
  docs, name = {}, ''
  for line in inspect.cleandoc(kind.__doc__ or '').splitlines():
    entry = _ENTRY.fullmatch(f'  {line}')
    if entry:
      name, docs[entry[1]] = entry[1], entry[2]
    elif name and line.startswith('    '):
      docs[name] += ' ' + line.strip()
    else:
      name = ''
  return docs


def _type(hint: Any) -> str:
  return 'int or none' if hint == int | None else hint.__name__


def _default(field: dataclasses.Field) -> str:
  if field.default is dataclasses.MISSING:
    return ''
  if isinstance(field.default, bool):
    return str(field.default).lower()
  return 'none' if field.default is None else str(field.default) or "''"
