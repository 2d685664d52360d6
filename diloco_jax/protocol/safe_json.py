"""Reads JSON that another program wrote: a message of a peer, a file of the run's folder.

`json.loads` trusts its input. A text of 200,000 '[' raises RecursionError, which is no ValueError
and so passes most error handlers; '1e999' and 'NaN' are values that no arithmetic expects; a number
may have any count of digits, and a text any size. `parse` refuses all of these as Unreadable, so
that a caller has one error to handle.
"""

import json
import re
from typing import Any, NoReturn

MAX_BYTES = 64 << 20
MAX_DEPTH = 64
MAX_DIGITS = 100  # of an integer; a norm (protocol/syncer/screening.py) has up to 60
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')
_NOT_A_BRACKET = re.compile(r'[^\[\]{}]+')


class Unreadable(ValueError):
  """The text is no JSON that this package would write; the error names what is wrong with it."""


def parse(
  text: str | bytes,
  max_bytes: int = MAX_BYTES,
  max_depth: int = MAX_DEPTH,
  finite: bool = True,
) -> Any:
  """The value of a JSON text, which is UTF-8 if given as bytes.

  Args:
    text: from anywhere.
    max_bytes: the longest text (of a str: characters) that is read at all.
    max_depth: the most lists and objects that may lie in each other.
    finite: refuse NaN and infinite numbers.

  Raises:
    Unreadable: it is not JSON, too long or too deep; or it has an integer beyond MAX_DIGITS, or a
      half of a surrogate pair, which no output could encode.
  """
  if len(text) > max_bytes:
    raise Unreadable(f'it has {len(text)} bytes, at most {max_bytes} are read')
  try:
    text = text if isinstance(text, str) else bytes(text).decode()
    value = json.loads(
      text,
      parse_constant=_constant if finite else None,
      parse_int=_integer,
      parse_float=_finite if finite else None,
    )
    if '\\u' in text:
      json.dumps(value, ensure_ascii=False).encode()
  except Unreadable:
    raise
  except RecursionError:
    raise _too_deep(max_depth) from None
  except ValueError as error:
    raise Unreadable(f'not JSON: {error}') from None
  if text.count('[') + text.count('{') > max_depth and _is_deeper(text, max_depth):
    raise _too_deep(max_depth)
  return value


def parse_object(text: str | bytes, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
  """The object that a JSON text holds. Raises Unreadable, also for any other value."""
  value = parse(text, max_bytes)
  if type(value) is not dict:
    raise Unreadable(f'it is a {type(value).__name__}, not an object')
  return value


def _is_deeper(text: str, depth: int) -> bool:
  """Whether brackets nest deeper, in a text that is valid JSON: each round takes the innermost
  pairs away."""
  brackets = _NOT_A_BRACKET.sub('', _STRING.sub('', text))
  for _ in range(depth):
    brackets = brackets.replace('[]', '').replace('{}', '')
  return bool(brackets)


def _too_deep(max_depth: int) -> Unreadable:
  return Unreadable(f'its lists and objects lie more than {max_depth} deep in each other')


def _constant(name: str) -> NoReturn:
  raise Unreadable(f'{name} is not a number of JSON')


def _integer(digits: str) -> int:
  if len(digits) > MAX_DIGITS:
    raise Unreadable(f'an integer of {len(digits)} digits, at most {MAX_DIGITS} are read')
  return int(digits)


def _finite(digits: str) -> float:
  value = float(digits)
  if value in (float('inf'), float('-inf')):
    raise Unreadable('a number is beyond the range of floats')
  return value
