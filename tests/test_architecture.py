"""docs/architecture.md agrees with the code: it is drawn from it, and every name in it exists.
Every file that another text of the repository names exists, too."""

import ast
import collections
import importlib.util
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / 'docs' / 'architecture.md').read_text()
SPEC = importlib.util.spec_from_file_location('diagrams', ROOT / 'scripts' / 'diagrams.py')
diagrams = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(diagrams)


@pytest.mark.parametrize('document', diagrams.BLOCKS, ids=lambda path: path.name)
def test_a_document_is_drawn_from_the_code(document: pathlib.Path):
  text = document.read_text(encoding='utf-8')
  new = diagrams.rewrite(text, diagrams.BLOCKS[document])
  assert new == text, 'run: python scripts/diagrams.py'


@pytest.mark.parametrize('name', diagrams.PICTURES)
def test_a_picture_is_drawn_from_the_code(name: str):
  file = ROOT / 'docs' / 'pictures' / f'{name}.svg'
  assert file.read_text('utf-8') == diagrams.PICTURES[name](), 'run: python scripts/diagrams.py'


def way() -> list[tuple[str, list[str]]]:
  """(file, functions) for every stop of a fragment."""
  section = PAGE.split('## The path of a fragment')[1].split('\n## ')[0]
  rows = [row.split('|')[2] for row in section.splitlines() if row.startswith('|')]
  stops = []
  for cell in rows:
    for file, names in re.findall(r'`([\w/]+\.py)`((?: `\w+`,?)*)', cell):
      stops.append((file, re.findall(r'\w+', names)))
  return stops


def test_every_file_that_is_named_exists():
  texts = [*ROOT.glob('*.md'), *(ROOT / 'docs').rglob('*.md')]
  texts.remove(ROOT / 'docs/studies/results.md')  # its programs are in an older commit
  for room in ('diloco_jax', 'experiments', 'scripts', 'tests'):
    texts += (ROOT / room).rglob('*.py')
  path = re.compile(r'(?<![\w./%[-])\w+(?:/\w+)+\.py\b(?!::)')  # no text of a link, no test
  named = {(text, name) for text in texts for name in path.findall(text.read_text('utf-8'))}
  assert len(named) > 300
  roots = ROOT, ROOT / 'diloco_jax'
  lost = [pair for pair in named if not any((root / pair[1]).is_file() for root in roots)]
  assert not lost


def test_what_to_read_is_as_long_as_it_says():
  section = PAGE.split('## What to read')[1].split('\n## ')[0]
  counted = [clause for clause in section.split(';') if re.search(r'\([\d,]+( lines)?\)', clause)]
  assert len(counted) == 4
  for clause in counted:
    files = re.findall(r'`([\w/]+\.py)`', clause)
    lines = sum(len((ROOT / 'diloco_jax' / file).read_text().splitlines()) for file in files)
    (said,) = re.findall(r'\(([\d,]+)', clause)
    assert abs(int(said.replace(',', '')) - lines) < 100, (clause, lines)


def test_the_way_of_a_fragment_names_functions_that_exist():
  for file, names in way():
    text = (ROOT / 'diloco_jax' / file).read_text()
    for name in names:
      assert re.search(rf'\bdef {name}\(|\b{name} =', text), (file, name)


def test_the_way_of_a_fragment_is_short():
  assert len({file for file, _ in way()}) <= 32


@pytest.mark.parametrize('top', ['diloco_jax', 'docs', 'experiments', 'scripts', 'tests'])
def test_no_folder_and_no_file_grows_too_large(top: str):
  files = [
    path
    for path in (ROOT / top).rglob('*')
    if path.is_file() and '__pycache__' not in path.parts and not path.name.startswith('.')
  ]
  folders = collections.Counter(path.parent for path in files)
  assert {
    str(folder) for folder, count in folders.items() if count > (17 if top == 'diloco_jax' else 19)
  } == set()
  if top == 'diloco_jax':
    sizes = {path: size(path) for path in files}
    assert {path.name for path, count in sizes.items() if count > 400} == set()


def size(path: pathlib.Path) -> int:
  """The statements of a module, in which `a, b = x, y` are two, so that no line is saved by it; of
  another file its lines."""
  text = path.read_text('utf-8')
  if path.suffix != '.py':
    return len(text.splitlines())
  statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
  tuples = [
    len(node.targets[0].elts) - 1
    for node in statements
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
  ]
  return len(statements) + sum(tuples)
