"""ruff check and ruff format find nothing; all text that is read and written is UTF-8."""

import ast
import itertools
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SOURCES = itertools.chain.from_iterable(
  (ROOT / folder).rglob('*.py') for folder in ('diloco_jax', 'experiments', 'scripts')
)
PAGES = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *(ROOT / 'docs').rglob('*.md')]
TEXT = {'read_text': 0, 'write_text': 1}  # the position of the encoding
OPEN = ('open', 'os.fdopen', 'io.TextIOWrapper')


@pytest.mark.parametrize('command', [['check'], ['format', '--check']], ids=' '.join)
def test_ruff_finds_nothing(command):
  done = subprocess.run(
    [sys.executable, '-m', 'ruff', *command, '.'], cwd=ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stdout + done.stderr


def test_no_line_of_prose_is_longer_than_100_columns():
  """Tables, code and what cannot be broken may be."""
  for page in PAGES:
    prose = re.sub(
      r'^ *```.*?^ *```|^ *\|.*?$|^    .*?$', '', page.read_text('utf-8'), flags=re.M | re.S
    )
    long = [line for line in prose.splitlines() if ' ' in line.strip()[:100] and len(line) > 100]
    assert not long, (page.name, long)


def test_no_cell_of_a_table_has_more_than_160_characters():
  long = [
    f'{page.name}: {cell.strip()}'
    for page in PAGES
    for line in page.read_text('utf-8').splitlines()
    if line.lstrip().startswith('|')
    for cell in re.split(r'(?<!\\)\|', line)
    if len(cell.strip()) > 160
  ]
  assert not long


def test_all_text_has_an_encoding():
  """ruff's PLW1514 does not see the calls on a path whose type it does not know."""
  assert not [
    f'{path.relative_to(ROOT)}:{line}' for path in SOURCES for line in unencoded(path.read_bytes())
  ]


WITHOUT = """\
path.read_text()
path.write_text(text)
path.open("a")
open(path)
open(path, "w")
os.fdopen(3, "w")
subprocess.run(words, text=True)
"""
WITH = """\
path.read_text("utf-8")
path.write_text(text, encoding="utf-8")
open(path, mode="rb")
gzip.open(path, "xb")
os.open(path, flags)
subprocess.run(words, encoding="utf-8")
"""


def test_calls_without_an_encoding_are_found_and_those_of_bytes_or_with_one_pass():
  assert [*unencoded(WITHOUT.encode())] == [*range(1, 8)]
  assert not [*unencoded(WITH.encode())]


def unencoded(source: bytes) -> Iterator[int]:
  """The lines of a source that read or write text in the encoding of the locale."""
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Call) and 'encoding' not in {keyword.arg for keyword in node.keywords}:
      if _is_text(node):
        yield node.lineno


def _is_text(call: ast.Call) -> bool:
  name = ast.unparse(call.func)
  attribute = name.rpartition('.')[2]
  if attribute in TEXT:
    return len(call.args) <= TEXT[attribute]
  if name.startswith('subprocess.'):
    return bool({'text', 'universal_newlines'} & {keyword.arg for keyword in call.keywords})
  named = [keyword.value for keyword in call.keywords if keyword.arg == 'mode']
  if name in OPEN:
    return 'b' not in _constant(*named, *call.args[1:2])
  return attribute == 'open' and _constant(*named, *call.args[:1]) in ('r', 'w', 'a', 'x')


def _constant(*values: ast.expr) -> str:
  """The first value, if it is a string in the source, else ''."""
  value = values[0].value if values and isinstance(values[0], ast.Constant) else ''
  return value if isinstance(value, str) else ''
