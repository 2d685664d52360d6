"""Draws the states of the protocol into docs/protocol.md, from the tables beside the code.

python scripts/protocol_diagram.py           # rewrites the block between the markers
python scripts/protocol_diagram.py --check   # exit 1 if it would change
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from diloco_jax.protocol.learner import connection
from diloco_jax.protocol.learner import machine as learner_machine
from diloco_jax.protocol.syncer import gather

DOCUMENT = ROOT / 'docs' / 'protocol.md'
BEGIN = '<!-- states: written by scripts/protocol_diagram.py -->'
END = '<!-- end of states -->'
TABLES = (
  ('A sync (`protocol/syncer/gather.py`, SYNC_STATES)', gather.SYNC_STATES),
  (
    "A learner's connection (`protocol/learner/connection.py`, CONNECTION_STATES)",
    connection.CONNECTION_STATES,
  ),
  (
    "A learner's training (`protocol/learner/machine.py`, TRAINING_STATES)",
    learner_machine.TRAINING_STATES,
  ),
)


def diagram(table: tuple[tuple[str, str, str], ...]) -> str:
  """A mermaid state diagram; states without a way in are initial, without a way out final."""
  sources = [source for source, _, _ in table]
  targets = [target for _, target, _ in table]
  first = table[0][0]
  lines = ['```mermaid', 'stateDiagram-v2', f'  [*] --> {first}']
  for source, target, why in table:
    label = why.replace(': ', ', ')  # a colon would end the label
    lines.append(f'  {source} --> {target} : {label}')
  for state in dict.fromkeys(targets):
    if state not in sources:
      lines.append(f'  {state} --> [*]')
  return '\n'.join([*lines, '```'])


def block() -> str:
  parts = [f'{title}:\n\n{diagram(table)}' for title, table in TABLES]
  return '\n\n'.join([BEGIN, *parts, END])


def rewritten(text: str) -> str:
  """The document with the block as the tables now say."""
  before, rest = text.split(BEGIN)
  return before + block() + rest.split(END)[1]


def main() -> int:
  text = DOCUMENT.read_text()
  new = rewritten(text)
  if '--check' in sys.argv[1:]:
    return int(new != text)
  DOCUMENT.write_text(new)
  return 0


if __name__ == '__main__':
  sys.exit(main())
