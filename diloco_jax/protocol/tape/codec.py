"""The codec of tapes: dataclasses to JSON and back, one for all of them, from their type hints.

A dataclass is an object of its fields in their order, its class in `kind`; a tuple is a list. Equal
values have equal text: dicts keep their order, nothing is escaped in two ways, there are no floats
that are no numbers.

Reading is strict. A kind that the hint does not allow, a field too many or too few, an int where a
bool is due: each is a `TapeError` that names the field and both values, never a guess. The config
of a run (config/run_config.py) is written and read with it, too.
"""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable
from typing import Any

SHOWN_CHARS = 240  # characters of a value in an error text


class TapeError(Exception):
  """A tape cannot be read or written: the text names the field and both values."""


def encode(value: Any) -> str:
  """Canonical JSON of dataclasses and JSON values. Raises TapeError for anything else."""
  try:
    return _JSON.encode(value)
  except (TypeError, ValueError) as error:  # a key that is not a string; NaN and Inf
    raise TapeError(f'{short(value)} cannot be put on a tape: {error}') from None


def decode(hint: Any, data: Any, path: str = '') -> Any:
  """The value of type `hint` that JSON `data` encodes. Raises TapeError; never guesses."""
  return _decoder(hint)(data, path or 'value')


def _fields_of(value: Any) -> dict[str, Any]:
  """The fields of a dataclass. Raises TapeError for any other object that JSON cannot hold."""
  cls = type(value)
  return {'kind': cls.__name__} | {name: getattr(value, name) for name in _names(cls)}


@functools.cache
def _names(cls: type) -> tuple[str, ...]:
  if not dataclasses.is_dataclass(cls):
    raise TapeError(f'a {cls.__name__} cannot be put on a tape, only dataclasses and JSON values')
  return tuple(field.name for field in dataclasses.fields(cls))


_JSON = json.JSONEncoder(separators=(',', ':'), allow_nan=False, default=_fields_of)

_Decoder = Callable[[Any, str], Any]
_PLAIN = (int, float, bool, str, types.NoneType)


@functools.cache
def _decoder(hint: Any) -> _Decoder:
  """The reader of a type, built once from its hint."""
  origin, arguments = typing.get_origin(hint), typing.get_args(hint)
  if hint is Any:
    return lambda data, path: data
  if hint in _PLAIN:
    return functools.partial(_read_plain, hint)
  if dataclasses.is_dataclass(hint):
    return functools.partial(_read_one_of, {hint.__name__: _fields_decoder(hint)})
  if origin in (typing.Union, types.UnionType):
    return _union_decoder(arguments)
  if origin is list:
    return functools.partial(_read_list, _decoder(arguments[0]))
  if origin is tuple:
    repeated = len(arguments) == 2 and arguments[1] is ...
    decoders = None if repeated else [_decoder(argument) for argument in arguments]
    return functools.partial(_read_tuple, decoders, _decoder(arguments[0]))
  if origin is dict and arguments == (str, Any):
    return functools.partial(_read_plain, dict)
  raise TypeError(f'no way to read {hint} from a tape')


def _union_decoder(choices: tuple[Any, ...]) -> _Decoder:
  """The reader of one of several dataclasses, or of one type or None."""
  if all(dataclasses.is_dataclass(choice) for choice in choices):
    by_kind = {choice.__name__: _fields_decoder(choice) for choice in choices}
    if len(by_kind) < len(choices):
      raise TypeError(f'two classes of one name in {choices}')
    return functools.partial(_read_one_of, by_kind)
  some = [choice for choice in choices if choice is not types.NoneType]
  if len(some) != 1 or len(some) == len(choices):
    raise TypeError(f'no way to tell {choices} apart on a tape')
  inner = _decoder(some[0])
  return lambda data, path: None if data is None else inner(data, path)


def _fields_decoder(cls: type) -> _Decoder:
  hints = typing.get_type_hints(cls)
  if 'kind' in hints:
    raise TypeError(f'{cls} has a field named kind, which names the class on a tape')
  return functools.partial(_read_fields, cls, {name: _decoder(hints[name]) for name in _names(cls)})


def _read_plain(kind: type, data: Any, path: str) -> Any:
  if kind is float and type(data) is int:  # 3.0 may be written as 3
    return float(data)
  if type(data) is not kind:  # a bool is not an int here
    raise TapeError(f'{path} is {short(data)}, it must be of type {kind.__name__}')
  return data


def _read_list(every: _Decoder, data: Any, path: str) -> list:
  if type(data) is not list:
    raise TapeError(f'{path} is {short(data)}, it must be a list')
  return [every(item, f'{path}[{index}]') for index, item in enumerate(data)]


def _read_tuple(each: list[_Decoder] | None, every: _Decoder, data: Any, path: str) -> tuple:
  if type(data) is not list:
    raise TapeError(f'{path} is {short(data)}, it must be a list')
  if each is None:
    return tuple([every(item, path) for item in data])
  if len(each) != len(data):
    raise TapeError(f'{path} has {len(data)} items, it must have {len(each)}')
  return tuple([read(item, path) for read, item in zip(each, data)])


def _read_one_of(by_kind: dict[str, _Decoder], data: Any, path: str) -> Any:
  if type(data) is not dict:
    raise TapeError(f'{path} is {short(data)}, it must be one of {", ".join(by_kind)}')
  kind = data.get('kind')
  read = by_kind.get(kind) if type(kind) is str else None
  if read is None:
    raise TapeError(f'the kind of {path} is {short(kind)}, it must be one of {", ".join(by_kind)}')
  return read(data, f'{path}.{kind}')


def _read_fields(cls: type, decoders: dict[str, _Decoder], data: dict, path: str) -> Any:
  given = data.keys() - {'kind'}
  if given != decoders.keys():
    missing, unknown = sorted(decoders.keys() - given), sorted(given - decoders.keys())
    raise TapeError(
      f'{path}: missing {", ".join(missing) or "-"}, unknown {", ".join(unknown) or "-"}; another '
      'version of this program wrote it'
    )
  values = {name: read(data[name], f'{path}.{name}') for name, read in decoders.items()}
  try:
    return cls(**values)
  except ValueError as error:  # from a config's own checks
    raise TapeError(f'{path}: {error}') from None


def short(value: Any) -> str:
  """The text of a value for an error, cut if it is long."""
  text = value if isinstance(value, str) and value.startswith('{') else repr(value)
  return text if len(text) <= SHOWN_CHARS else f'{text[:SHOWN_CHARS]}...'
