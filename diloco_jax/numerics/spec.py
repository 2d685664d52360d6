"""Specs: the names of merge rules and optimizers in a config, with or without arguments.

  'rda'    'rda(floor=0.02)'    'nesterov(learning_rate=0.7, momentum=0.9)'
  'package.module:rule(a=1)'    '/folder/file.py:rule'

The name is a key of a registry, a dict of factories beside the code, or behind a colon that of a
function of a module or a file of the user's own. The arguments are keywords with literal values. A
spec is short and never evaluated. A wrong spec raises a ValueError with the valid choices.
"""

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

_MAX_CHARS = 1_000
_SHOWN_CHARS = 100
# The name of a folder may have '(' in it, and an argument ':', so neither is where one is cut.
OWN = re.compile(r'(?P<where>[\w.]+|.+?\.py):(?P<call>\w+\s*(\(.*)?)', re.DOTALL)


def parse(text: str) -> tuple[str, dict[str, Any]]:
  """A spec's name and arguments.

  >>> parse('rda(floor=0.02)')
  ('rda', {'floor': 0.02})
  """
  if len(text) > _MAX_CHARS:
    raise ValueError(
      f"'{text[:_SHOWN_CHARS]}...' has {len(text)} characters, at most {_MAX_CHARS} are read: "
      "write a name, or a name with keyword arguments, such as 'rda(floor=0.02)'"
    )
  try:
    call = ast.parse(text.strip(), mode='eval').body
    keywords: list[ast.keyword] = []
    if isinstance(call, ast.Call) and not call.args:
      call, keywords = call.func, call.keywords
    if isinstance(call, ast.Name) and all(keyword.arg for keyword in keywords):
      return call.id, {keyword.arg: ast.literal_eval(keyword.value) for keyword in keywords}
  except (SyntaxError, ValueError):  # not an expression, or an argument that is not a literal
    pass
  except (RecursionError, MemoryError):  # too many levels
    pass
  raise ValueError(
    f"{text!r} is neither a name nor a name with keyword arguments, such as 'rda(floor=0.02)'"
  )


def make(text: str, registry: Mapping[str, Callable[..., Any]], use: Callable[[Any], Any]) -> Any:
  """The result of the registry's factory of that name with these arguments.

  Raises:
    ValueError: an unknown name, a module that cannot be imported, wrong arguments, or `use` fails
      on the result.

  >>> make('root(of=16)', {'root': lambda of: of**0.5}, use=int)
  4.0
  """
  own = OWN.fullmatch(text)
  try:
    registry = vars(_module(own['where'])) if own else registry
  except Exception as error:  # whatever the module raises
    hint = '; PYTHONPATH=. finds those of this folder' * isinstance(error, ModuleNotFoundError)
    raise ValueError(f'{text!r}: {type(error).__name__}: {error}{hint}') from error
  name, arguments = parse(own['call'] if own else text)
  if name not in registry and own:
    raise ValueError(f'{own["where"]} has no {name!r}')
  if name not in registry:
    raise ValueError(f'{name!r} is unknown; use one of: {", ".join(sorted(registry))}')
  try:
    result = registry[name](**arguments)
    use(result)
  except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
    what, signature = (str(error) or 'wrong').splitlines()[0], inspect.signature(registry[name])
    raise ValueError(f'{text!r}: {what}; it is {name}{signature}') from None
  return result


def _module(where: str) -> Any:
  """A module by its name, or a file."""
  if not where.endswith('.py'):
    return importlib.import_module(where)
  module_spec = importlib.util.spec_from_file_location(f'diloco_own_{abs(hash(where))}', where)
  module = importlib.util.module_from_spec(module_spec)
  sys.modules[module_spec.name] = module  # dataclasses look up the module of a class by its name
  module_spec.loader.exec_module(module)
  return module
