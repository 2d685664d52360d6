"""Prints an example, a file to begin with: a loop of your own or a model of your own.

    diloco example                           # their names
    diloco example loop_optax > my_loop.py   # then: python my_loop.py
    diloco example text_plain > my_model.py  # then: diloco train --config=my_model.py

Exit codes: 0 done, 42 there is no such example.
"""

import ast

from diloco_jax.launch import cli
from diloco_jax.process import exits

POSITIONAL = True


def main(argv: list[str]) -> None:
  examples = {path.stem: path.read_text('utf-8') for path in sorted(cli.EXAMPLES.glob('*.py'))}
  match argv[1:]:
    case []:
      for name, text in examples.items():
        first_line = (ast.get_docstring(ast.parse(text)) or '').partition('\n')[0]
        print(f'{name:20}{first_line}')
    case [name] if name in examples:
      # The file is not in a checkout now.
      print(examples[name].replace('experiments/examples/', ''), end='')
    case words:
      raise exits.NeverRetry(f'there is no example {" ".join(words)!r}: use {", ".join(examples)}')
