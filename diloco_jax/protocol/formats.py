"""The formats of what outlives a process or leaves it, each with a number, and how another one is
refused.

A release raises a number if the release before could misread what it writes. Whoever opens a file
or answers a peer compares the number first: another one is refused in one sentence, before anything
is changed. No release converts one. In a JSON object the number is `format`, and `program` is the
release that wrote it. docs/reference/files.md has the place of each number.
"""

from typing import Any

from diloco_jax import version
from diloco_jax.protocol import printable

NUMBERS = {
  'protocol': 2,
  'frame': 4,
  'model header': 1,
  'log': 4,
  'state': 3,
  'config': 4,
  'lineage': 2,
  'claim': 3,
  'tape': 3,
  'records': 1,
  'allowlist': 1,
  'track': 2,
}
_NUMBER, _PROGRAM, _SHOWN = 'format', 'program', 60


class OtherFormat(ValueError):
  """Another release has written it; nothing was changed."""


def refusal(name: str, written: object, subject: object, program: object = '') -> str:
  """Why this release does not read something of a format, for people; '' if it does.

  Args:
    name: of the format.
    written: the number in it; None: it has none.
    subject: of the sentence: the file or the peer.
    program: the release that wrote it, if it has that.
  """
  number = NUMBERS[name]
  if type(written) is int and written == number:
    return ''
  what = f'no number of its {name} format' if written is None else f'{name} format {written!r}'
  newer = type(written) is int and written > number
  reader = 'a newer diloco_jax' if newer else 'an older diloco_jax'
  if type(program) is str and program:
    other = 'another checkout of ' if program == version.__version__ else ''
    reader = f'{other}diloco_jax {program}'
  return (
    f'{subject} has {printable.printable(what, _SHOWN)}, diloco_jax {version.__version__} reads '
    f'{number}. Nothing was changed or lost. Use the release that reads it: '
    f'{printable.printable(reader, _SHOWN)}'
  )


def stamp(name: str) -> dict[str, Any]:
  """The first fields of a JSON object of a format."""
  return {_NUMBER: NUMBERS[name], _PROGRAM: version.__version__}


def require(name: str, values: dict[str, Any], subject: object) -> dict[str, Any]:
  """The other fields of a JSON object. Raises OtherFormat."""
  if other := refusal(name, values.get(_NUMBER), subject, values.get(_PROGRAM)):
    raise OtherFormat(other)
  return {field: value for field, value in values.items() if field not in (_NUMBER, _PROGRAM)}
