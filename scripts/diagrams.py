"""Draws what the documents say of the code from the code itself.

python scripts/diagrams.py           # rewrites the blocks between the markers
python scripts/diagrams.py --check   # exit 1 if a document would change

docs/protocol.md gets the states, from the tables beside the machines; docs/architecture.md the
rooms of the library, what each holds (the first line of its package) and which imports which.
"""

import ast
import graphlib
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from diloco_jax.protocol.learner import connection
from diloco_jax.protocol.learner import machine as learner_machine
from diloco_jax.protocol.syncer import gather, members

PACKAGE = ROOT / 'diloco_jax'
SHELVES = ('protocol', 'verification')  # rooms that are made of rooms
TABLES = (
  ('A sync (`protocol/syncer/gather.py`, SYNC_STATES)', gather.SYNC_STATES),
  ('A fragment at a learner (`protocol/syncer/members.py`, COPY_STATES)', members.COPY_STATES),
  (
    "A learner's connection (`protocol/learner/connection.py`, CONNECTION_STATES)",
    connection.CONNECTION_STATES,
  ),
  (
    "A learner's training (`protocol/learner/machine.py`, TRAINING_STATES)",
    learner_machine.TRAINING_STATES,
  ),
)


# --- States ---------------------------------------------------------------------------------------


def state_diagram(table: tuple[tuple[str, str, str], ...]) -> str:
  """A mermaid state diagram; states without a way in are initial, without a way out final."""
  sources = [source for source, _, _ in table]
  targets = [target for _, target, _ in table]
  lines = ['```mermaid', 'stateDiagram-v2', f'  [*] --> {table[0][0]}']
  for source, target, why in table:
    label = why.replace(': ', ', ')  # a colon would end the label
    lines.append(f'  {source} --> {target} : {label}')
  for state in dict.fromkeys(targets):
    if state not in sources:
      lines.append(f'  {state} --> [*]')
  return '\n'.join([*lines, '```'])


def states() -> str:
  return '\n\n'.join(f'{title}:\n\n{state_diagram(table)}' for title, table in TABLES)


# --- Rooms ----------------------------------------------------------------------------------------


def room(path: pathlib.Path) -> str:
  """'protocol/syncer' of diloco_jax/protocol/syncer/pace.py."""
  parts = path.relative_to(PACKAGE).parts[:-1]
  return '/'.join(parts[: 2 if parts and parts[0] in SHELVES else 1])


def imports() -> dict[str, set[str]]:
  """Room to the rooms whose modules it imports."""
  modules = {
    '.'.join(path.relative_to(ROOT).with_suffix('').parts): path for path in PACKAGE.rglob('*.py')
  }
  found: dict[str, set[str]] = {}
  for path in modules.values():
    here = found.setdefault(room(path), set())
    for node in ast.walk(ast.parse(path.read_text('utf-8'))):
      if isinstance(node, ast.ImportFrom):
        for alias in node.names:
          module = modules.get(f'{node.module}.{alias.name}') or modules.get(str(node.module))
          if module is not None and room(module) not in (room(path), ''):  # of no room: version.py
            here.add(room(module))
  del found['']
  return found


def without_detours(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
  """Only the arrows that do not follow from others: a -> c is left out where a -> b -> c."""
  reach: dict[str, set[str]] = {}
  for name in graphlib.TopologicalSorter(arrows).static_order():
    direct = arrows.get(name, set())
    reach[name] = direct.union(*(reach[other] for other in direct))
  return {
    name: {one for one in direct if not any(one in reach[other] for other in direct)}
    for name, direct in arrows.items()
  }


def room_diagram() -> str:
  arrows = without_detours(imports())
  lines = ['```mermaid', 'flowchart TD']
  for name in sorted(arrows):
    lines += [f'  {name} --> {other}' for other in sorted(arrows[name])]
  return '\n'.join([*lines, '```'])


def sentence(name: str) -> str:
  """The first line of the docstring of a room's package."""
  text = ast.get_docstring(ast.parse((PACKAGE / name / '__init__.py').read_text('utf-8'))) or ''
  return text.splitlines()[0]


def room_table() -> str:
  names = sorted(set(imports()) | set(SHELVES))
  return '\n'.join(
    ['| package | holds |', '|---|---|', *(f'| `{n}/` | {sentence(n)} |' for n in names)]
  )


# --- Documents ------------------------------------------------------------------------------------

BLOCKS = {
  ROOT / 'docs' / 'protocol.md': {'states': states},
  ROOT / 'docs' / 'architecture.md': {'arrows': room_diagram, 'rooms': room_table},
}


def rewritten(text: str, blocks: dict) -> str:
  """The document with each block as the code now says."""
  for name, draw in blocks.items():
    begin, end = f'<!-- {name}: written by scripts/diagrams.py -->', f'<!-- end of {name} -->'
    before, rest = text.split(begin)
    text = f'{before}{begin}\n\n{draw()}\n\n{end}{rest.split(end)[1]}'
  return text


def main() -> int:
  changed = False
  for document, blocks in BLOCKS.items():
    text = document.read_text('utf-8')
    new = rewritten(text, blocks)
    changed |= new != text
    if '--check' not in sys.argv[1:]:
      document.write_text(new, 'utf-8')
  return int(changed and '--check' in sys.argv[1:])


if __name__ == '__main__':
  sys.exit(main())
