"""docs/reliability.md names every fault and refusal, and tests that exist."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / 'docs/reliability.md').read_text()


def test_every_fault_has_its_number_and_its_evidence():
  numbers = re.findall(r'^(\d+)\. \*\*', PAGE, re.MULTILINE)
  assert numbers == [*map(str, range(1, 30))]
  evidence = re.findall(r'^\| (\d+) \| `?\w', PAGE.split('## Evidence')[1], re.MULTILINE)
  assert evidence == numbers


def test_every_test_that_is_named_exists():
  named = re.findall(r'`(\w+\.py)::(\w+)`', PAGE)
  assert len(named) > 40
  for file, name in named:
    tests = [path.read_text() for path in (ROOT / 'tests').rglob(file)]
    assert any(re.search(rf'^def {name}\(', text, re.MULTILINE) for text in tests), name


def test_every_refusal_is_explained():
  texts = [path.read_text() for path in (ROOT / 'diloco_jax/protocol').rglob('*.py')]
  values = [value for text in texts for value in re.findall(r'code=([^,]*),', text)]
  codes = {code for value in values for code in re.findall(r"'([A-Z_]+)'", value)}
  table = PAGE.split('## Refusals')[1].split('\n## ')[0]
  assert codes == set(re.findall(r'^\| `([A-Z_]+)` \|', table, re.MULTILINE))


def test_every_scenario_that_is_named_exists():
  named = re.findall(r'`(tests/scenarios/[\w/]+\.txt)`', PAGE)
  assert named and all((ROOT / name).is_file() for name in named)
