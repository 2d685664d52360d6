"""Specs: how a config names a merge rule or an outer optimizer, with arguments where it has any.

  'rda'    'rda(floor=0.02)'    'nesterov(learning_rate=0.7, momentum=0.9)'

A name stands in a registry, a dict of factories beside the code; its arguments are keywords with
literal values. Nothing is evaluated. What is wrong is a ValueError that says what would be right.
"""

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any


def parse(text: str) -> tuple[str, dict[str, Any]]:
  """A spec's name and arguments.

  >>> parse('rda(floor=0.02)')
  ('rda', {'floor': 0.02})
  """
  try:
    call = ast.parse(text.strip(), mode='eval').body
    keywords: list[ast.keyword] = []
    if isinstance(call, ast.Call) and not call.args:
      call, keywords = call.func, call.keywords
    if isinstance(call, ast.Name) and all(one.arg for one in keywords):
      return call.id, {one.arg: ast.literal_eval(one.value) for one in keywords}
  except (SyntaxError, ValueError):  # no expression, or an argument that is no literal
    pass
  raise ValueError(
    f"{text!r} is neither a name nor a name with keyword arguments, such as 'rda(floor=0.02)'"
  )


def make(text: str, registry: Mapping[str, Callable[..., Any]], use: Callable[[Any], Any]) -> Any:
  """What the registry's entry of that name makes of the arguments.

  Raises:
    ValueError: no such name, other arguments, or `use` cannot use what was made of them.

  >>> make('root(of=16)', {'root': lambda of: of**0.5}, use=int)
  4.0
  """
  name, arguments = parse(text)
  if name not in registry:
    raise ValueError(f'{name!r} is unknown; use one of: {", ".join(sorted(registry))}')
  try:
    made = registry[name](**arguments)
    use(made)
  except (TypeError, ValueError) as error:
    what, signature = str(error).splitlines()[0], inspect.signature(registry[name])
    raise ValueError(f'{text!r}: {what}; it is {name}{signature}') from None
  return made
