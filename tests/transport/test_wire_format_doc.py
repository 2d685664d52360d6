"""docs/wire_format.md agrees with the code."""

import pathlib
import re

from diloco_jax.protocol import messages
from diloco_jax.transport import chunks, translate

ROOT = pathlib.Path(__file__).parents[2]
DOC = (ROOT / 'docs' / 'wire_format.md').read_text()


def test_the_table_has_every_message_with_its_direction_and_payload():
  rows = re.findall(r'^\| `([A-Z]\w+)` \| (\w+) \| ([^|]*)\|', DOC, re.M)
  senders = {
    'learner': set(translate.LEARNER_TO_SYNCER.classes),
    'syncer': set(translate.SYNCER_TO_LEARNER.classes),
  }
  senders['both'] = senders['learner'] & senders['syncer']
  assert {name for name, _, _ in rows} == {
    cls.__name__ for cls in senders['learner'] | senders['syncer']
  }
  for name, sender, payload in rows:
    cls = getattr(messages, name)
    assert cls in senders[sender] and (sender == 'both' or cls not in senders['both'])
    assert bool(payload.strip()) == ('payload' in cls.__dataclass_fields__)


def test_the_frame_table_is_the_header():
  rows = re.findall(r'^\| (\d+) \| ?(\d*) \| (\w+) \|', DOC, re.M)
  offset = 0
  for start, size, name in rows:
    assert int(start) == offset, name
    offset += int(size or 0)
  assert offset == chunks.HEADER_BYTES == int(rows[-1][0])
  specification = re.findall(r'^ +(\d+) +(\d*) (\w+)', chunks.__doc__, re.M)
  assert [(s, n) for s, _, n in rows] == [(s, n) for s, _, n in specification]


def test_every_clause_is_in_the_table():
  raised = set()
  for module in (chunks, translate):
    raised |= set(re.findall(r"WireError\(\s*'(\w+)'", pathlib.Path(module.__file__).read_text()))
  table = DOC[DOC.index('| clause |') : DOC.index('Between the streams')]
  cells = [line.split('|')[1] for line in table.splitlines() if line.startswith('| `')]
  assert {c for cell in cells for c in re.findall(r'`(\w+)`', cell)} == raised
