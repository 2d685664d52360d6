"""The documentation site, with the extra [docs]: python -m sphinx -W docs runs/site

With NOTEBOOKS=force in the environment the notebooks run first, and their pages have what they
show; the package must be installed then.

The pages of docs/reference, and the invariants, are made here from the code; a mark in them says
where. Links to files of the repo that are no page lead to the repo; where its address is not known
they are paths in the text.
"""

import dataclasses
import inspect
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import diloco_jax
from diloco_jax import __main__
from diloco_jax.config import fields
from diloco_jax.report import facts
from diloco_jax.verification.checks import checkers

DOCS = pathlib.Path(__file__).resolve().parent
ROOT = DOCS.parent
URLS = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['urls']
SOURCE = URLS['Source'] if 'ADDRESS' not in URLS['Source'] else ''
REPO = os.environ.get('READTHEDOCS_GIT_CLONE_URL', SOURCE).removesuffix('.git')

project = 'diloco_jax'
author = 'The diloco_jax authors'
copyright = author
release = version = diloco_jax.__version__
extensions = ['myst_nb', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon']
html_theme = 'sphinx_book_theme'
html_title = 'Decoupled DiLoCo in JAX'
html_theme_options = {'navbar_persistent': []}  # it would have a second field for the search
html_context = {'default_mode': 'auto'}
html_favicon = 'pictures/icon.svg'
html_static_path = html_css_files = ['site.css']
exclude_patterns = ['_build']
highlight_language = 'none'
smartquotes = False  # quotes are code here
myst_enable_extensions = ['dollarmath']
myst_heading_anchors = 3
nb_execution_mode = os.environ.get('NOTEBOOKS', 'off')  # force: pages with pictures, in 15 minutes
nb_execution_in_temp = nb_merge_streams = True
nb_execution_timeout = 300
napoleon_custom_sections = [('Of the protocol', 'Attributes')]  # SyncConfig
autodoc_member_order = 'bysource'
autodoc_typehints = 'none'  # the docstrings say what the types cannot


# --- The reference --------------------------------------------------------------------------------


def commands() -> str:
  """Every command with its help; the fields of the config are a page of their own."""
  started = {
    name: subprocess.Popen(
      [sys.executable, '-m', 'diloco_jax', name, '--helpfull'],
      cwd=ROOT,
      stdout=subprocess.PIPE,
      text=True,
    )
    for name in __main__.COMMANDS
  }
  pages = []
  for name, process in started.items():
    text = process.communicate()[0].split('\nFields of the config')[0].strip()
    if process.returncode:
      raise RuntimeError(f'diloco {name} --helpfull ended with {process.returncode}')
    pages.append(f'## diloco {name}\n\n```text\n{text}\n```')
  return '\n\n'.join(pages)


def config() -> str:
  """A table for each section of the config."""
  sections: dict[str, list[str]] = {}
  for field in fields.walk():
    if field.section:
      continue
    name = field.name.rpartition('.')[0]
    default = f'`{field.default}`' if field.default else ''
    cells = (f'`{field.name}`', field.type, default, _cell(field.doc))
    sections.setdefault(name, []).append('| ' + ' | '.join(cells) + ' |')
  head = '| field | type | default | meaning |\n|---|---|---|---|\n'
  return '\n\n'.join(
    f'## {name or "The run"}\n\n{head}' + '\n'.join(rows) for name, rows in sections.items()
  )


def api() -> str:
  """Every public name."""
  lines = []
  for name in diloco_jax.__all__:
    value = getattr(diloco_jax, name)
    kind = 'class' if inspect.isclass(value) else 'function'
    # The docstring of a dataclass has its fields.
    members = '' if kind == 'function' or dataclasses.is_dataclass(value) else '\n   :members:'
    lines += [f'## {name}', '', '```{eval-rst}', f'.. auto{kind}:: diloco_jax.{name}{members}']
    lines += ['```', '']
  return '\n'.join(lines)


def records() -> str:
  """Every fact that the records may hold."""
  rows = []
  for name, (kind, names) in sorted(facts._KINDS.items()):
    order = [field for field in kind.__dataclass_fields__ if field in names]
    listed = ', '.join(f'`{field}`' for field in order)
    rows.append(f'| `{name}` | {listed} | {_cell(inspect.getdoc(kind) or "")} |')
  return '| name | fields | meaning |\n|---|---|---|\n' + '\n'.join(rows)


def curves() -> str:
  """The tags of TensorBoard, as the code writes them."""
  found = set()
  for path in (ROOT / 'diloco_jax').rglob('*.py'):
    found |= set(re.findall(r"'((?:evaluation|learning|perf|sync)/\w+)'", path.read_text()))
  return '\n'.join(f'* `{tag}`' for tag in sorted(found))


def invariants() -> str:
  """Every invariant with its sentence."""
  rows = [f'| {one.id} | {_cell(one.sentence)} |' for one in checkers.INVARIANTS]
  return '| | |\n|---|---|\n' + '\n'.join(rows)


def without_type(app, what: str, name: str, value, options, lines: list[str]) -> None:
  """Napoleon takes the words before the first colon of a property's first line for its type."""
  if what == 'property':
    lines[:0] = ['..', '']  # an empty comment


def _cell(text: str) -> str:
  text = ' '.join(text.split()).replace('<', '&lt;')
  return re.sub(r'[|*]|__', lambda found: ''.join(f'\\{one}' for one in found[0]), text)


GENERATED = {make.__name__: make for make in (commands, config, api, records, curves, invariants)}


ELSEWHERE = 'In the repository this page ends here, the site has the rest: '


def generate(app, docname: str, source: list[str]) -> None:
  """Puts what the code says in the place of each `<!-- generated: NAME -->`."""
  source[0] = source[0].replace(
    'In the repository this page ends here, the site has the rest: ', ''
  )
  source[0] = re.sub(r'<!-- generated: (\w+) -->', lambda m: GENERATED[m[1]](), source[0])


# --- Links ----------------------------------------------------------------------------------------


def to_the_repo(app, docname: str, source: list[str]) -> None:
  """Links to files of the repo that are no page of the site lead to the repo."""

  def link(match: re.Match) -> str:
    file = (DOCS / docname).parent.joinpath(match[2]).resolve()
    if not file.exists() or file.is_relative_to(DOCS):
      return match[0]
    path = file.relative_to(ROOT)
    if path.suffix == '.ipynb':  # docs/notebooks is a link, which myst follows out of the site
      up = '../' * docname.count('/')
      return f'<a href={up}notebooks/{path.stem}.html>{match[1]}</a>'
    return f'[{match[1]}]({REPO}/blob/main/{path})' if REPO else f'{match[1]} (`{path}`)'

  source[0] = re.sub(r'(?<!!)\[([^\]"]*)\]\((?![a-z]+:|#)([^)#\s]+)\)', link, source[0])


def setup(app) -> None:
  app.connect('source-read', generate)
  app.connect('source-read', to_the_repo)
  app.connect('autodoc-process-docstring', without_type, priority=400)  # before napoleon
