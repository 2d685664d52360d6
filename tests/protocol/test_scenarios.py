"""The scenarios still behave as they read.

After an intended change of behaviour record them again and read the difference as a text diff:

    REWRITE_SCENARIOS=1 python -m pytest tests/protocol/test_scenarios.py
"""

import difflib
import os
import pathlib

import pytest

from tests.protocol import transcript

SCENARIOS = sorted((pathlib.Path(__file__).parents[1] / 'scenarios').rglob('*.txt'))


@pytest.mark.parametrize('path', SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: pathlib.Path):
  expected = path.read_text(encoding='utf-8')
  happened = transcript.Script().rerun(expected)
  if os.environ.get('REWRITE_SCENARIOS'):
    path.write_text(happened, encoding='utf-8')
    return
  diff = difflib.unified_diff(
    expected.splitlines(), happened.splitlines(), 'recorded', 'now', lineterm=''
  )
  assert happened == expected, 'behaviour changed:\n' + '\n'.join(diff)


def test_there_are_scenarios():
  assert len(SCENARIOS) >= 15
