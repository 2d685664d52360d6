"""docs/reliability.md names tests that exist."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / 'docs/reliability.md').read_text()


def test_every_row_is_there():
  rows = re.findall(r'^\| (\d+b?) \|', PAGE, re.MULTILINE)
  assert rows == [*map(str, range(1, 26)), '25b', '26', '27']


def test_every_test_that_is_named_exists():
  named = re.findall(r'`([\w/]+\.py)::(\w+)`', PAGE)
  assert len(named) > 40
  for file, name in named:
    paths = [*(ROOT / 'tests').rglob(file.removeprefix('tests/'))]
    assert any(re.search(rf'^def {name}\(', path.read_text(), re.MULTILINE) for path in paths), name


def test_every_scenario_that_is_named_exists():
  named = re.findall(r'`(tests/scenarios/[\w/]+\.txt)`', PAGE)
  assert named and all((ROOT / name).is_file() for name in named)
