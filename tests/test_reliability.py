"""docs/reliability.md names every fault, and tests that exist."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / 'docs/reliability.md').read_text()


def test_every_fault_has_a_section_with_its_evidence():
  numbers = re.findall(r'^### (\d+b?)\. ', PAGE, re.MULTILINE)
  assert numbers == [*map(str, range(1, 26)), '25b', '26', '27']
  faults = PAGE[PAGE.index('### 1.') : PAGE.index('## Figures')].split('### ')[1:]
  for fault in faults:
    assert re.search(r'^What happens: .*^Shown by:\n\n\* ', fault, re.MULTILINE | re.DOTALL), fault


def test_every_test_that_is_named_exists():
  named = re.findall(r'`(\w+\.py)::(\w+)`', PAGE)
  assert len(named) > 40
  for file, name in named:
    tests = [path.read_text() for path in (ROOT / 'tests').rglob(file)]
    assert any(re.search(rf'^def {name}\(', text, re.MULTILINE) for text in tests), name


def test_every_scenario_that_is_named_exists():
  named = re.findall(r'`(tests/scenarios/[\w/]+\.txt)`', PAGE)
  assert named and all((ROOT / name).is_file() for name in named)
