"""The commands of the README work as written."""

import pathlib
import re

import nbformat

from diloco_jax import __main__

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / 'experiments' / 'notebooks' / 'first_run.ipynb'
README = (ROOT / 'README.md').read_text()


def test_the_python_of_the_readme_is_a_cell_of_the_notebook():
  """The notebook runs in tests/runs/test_notebook.py."""
  (cell,) = re.findall(r'```python\n(.*?)\n```', README, re.S)
  assert cell in [one.source for one in nbformat.read(NOTEBOOK, as_version=4).cells]


def test_files_that_the_readme_names_exist():
  for target in re.findall(r'\]\((?!https?:|#)([^)#]+)\)', README):
    assert (ROOT / target).exists(), target
  commands = re.findall(r'^    diloco (\w+)', README, re.M)
  assert commands and set(commands) <= __main__.COMMANDS.keys()


def test_no_placeholder_is_left():
  assert not re.search(r'@[A-Z]+@', README)
