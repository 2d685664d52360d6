"""Draws the pictures and tables about the code in the documents from the code itself.

python scripts/diagrams.py           # rewrites the blocks between the markers, and docs/pictures
python scripts/diagrams.py --check   # exit 1 if a document or a picture would change

docs/protocol.md gets the states, from the tables beside the machines; docs/architecture.md the
rooms of the library, which imports which, and what is where (the docstring of each package).
"""

import ast
import functools
import graphlib
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / 'scripts')]

import drawing

from diloco_jax.protocol.learner import connection
from diloco_jax.protocol.learner import machine as learner_machine
from diloco_jax.protocol.syncer import sync as sync_lib

PACKAGE = ROOT / 'diloco_jax'
SHELVES = ('protocol', 'verification')  # rooms that are made of rooms
WHERE = 'Where is ...?'
TABLES = {  # by the name of its picture
  'states_sync': ('A sync (`protocol/syncer/sync.py`, SYNC_STATES)', sync_lib.SYNC_STATES),
  'states_connection': (
    "A learner's connection (`protocol/learner/connection.py`, CONNECTION_STATES)",
    connection.CONNECTION_STATES,
  ),
  'states_training': (
    "A learner's training (`protocol/learner/machine.py`, TRAINING_STATES)",
    learner_machine.TRAINING_STATES,
  ),
}
CONVERSATION = (
  ('', 'join'),
  ('>', 'Join'),
  ('<', 'Offer (or Refused)'),
  ('>', 'Confirm'),
  ('<', 'Joined'),
  ('<', 'Publish, whole, for each due fragment'),
  ('>', 'Adopted for each'),
  ('', 'train and sync'),
  ('>', 'Progress, in every inner step'),
  ('<', 'Pull, when sync t is announced, and again when it has opened'),
  ('>', 'Contribution (or Decline), at the step boundary where it is due'),
  ('<', 'Settled: merged, discarded or cancelled'),
  ('<', 'Publish: the new version as a delta'),
  ('>', 'Adopted, at a step boundary'),
  ('', 'at any time'),
  ('>', 'Heartbeat'),
  ('<', 'Heartbeat'),
  ('', 'the run is over'),
  ('<', 'Finish'),
  ('>', 'Leave'),
)


# --- States ---------------------------------------------------------------------------------------


def states() -> str:
  parts = []
  for name, (title, table) in TABLES.items():
    alt = f'{title.partition(" (")[0]}: its states'
    rows = [f'| {n} | {a} | {b} | {why} |' for n, (a, b, why) in enumerate(table, 1)]
    parts += [f'{title}:', f'![{alt}](pictures/{name}.svg)']
    parts.append('\n'.join(['| | from | to | when |', '|---|---|---|---|', *rows]))
  return '\n\n'.join(parts)


def state_graph(name: str) -> str:
  title, table = TABLES[name]
  return drawing.graph(title.replace('`', ''), [(a, b) for a, b, _ in table], numbered=True)


def parts() -> str:
  """A run of three learners."""
  shapes = []
  for row, (name, words) in enumerate((('l0', ''), ('l1', ''), ('l2', ', killed: it joins again'))):
    y, dashed = 40 + 70 * row, ' stroke-dasharray="5 4"' * bool(words)
    end = f' marker-end="url(#head)"{dashed}'
    fill = '#fff' if words else '#eef3f8'
    shapes.append(drawing.box(130, y, f'learner {name}{words}', 230, fill))
    shapes.append(drawing.arrow(f'M246 {y - 5}L{565} {y - 5 + (1 - row) * 40}', end))
    shapes.append(drawing.arrow(f'M565 {y + 7 + (1 - row) * 40}L{246} {y + 7}', end))
  shapes.append(
    '<rect x="566" y="58" width="184" height="104" rx="5" fill="#f3efe2" stroke="#888"/>'
  )
  lines = 'syncer, on a CPU', 'merges the changes,', 'writes them to its disk'
  shapes += [drawing.text(658, 92 + 22 * row, words) for row, words in enumerate(lines)]
  shapes.append(drawing.text(400, 20, 'up: the change of one fragment, 8-bit'))
  shapes.append(drawing.text(400, 214, 'down: the merged change of the fragment, 8-bit'))
  return drawing.svg('The parts of a run', 770, 224, shapes)


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
  arrows: dict[str, set[str]] = {}
  for path in modules.values():
    here = arrows.setdefault(room(path), set())
    for node in ast.walk(ast.parse(path.read_text('utf-8'))):
      if isinstance(node, ast.ImportFrom):
        for alias in node.names:
          module = modules.get(f'{node.module}.{alias.name}') or modules.get(str(node.module))
          if module is not None and room(module) not in (room(path), ''):  # of no room: version.py
            here.add(room(module))
  del arrows['']
  return arrows


def remove_detours(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
  """Only the arrows that do not follow from others: a -> c is left out where a -> b -> c."""
  reach: dict[str, set[str]] = {}
  for name in graphlib.TopologicalSorter(arrows).static_order():
    direct = arrows.get(name, set())
    reach[name] = direct.union(*(reach[other] for other in direct))
  return {
    name: {target for target in direct if not any(target in reach[other] for other in direct)}
    for name, direct in arrows.items()
  }


def room_diagram() -> str:
  return '![Which package imports which: an arrow leads to what is imported](pictures/rooms.svg)'


def room_graph() -> str:
  arrows = remove_detours(imports())
  pairs = [(name, other) for name in sorted(arrows) for other in sorted(arrows[name])]
  return drawing.graph('Which package imports which', pairs)


def docstring(name: str) -> str:
  """Of a room's package: a sentence, and after "Where is ...?" lines of `question: files`."""
  return ast.get_docstring(ast.parse((PACKAGE / name / '__init__.py').read_text('utf-8'))) or ''


def questions(name: str) -> list[tuple[str, str]]:
  """(question, files) of a room; a row that begins with four spaces continues the one before."""
  _, _, text = docstring(name).partition(WHERE)
  rows = re.sub(r'\n {4}', ' ', text).strip('\n').splitlines()
  return [tuple(row.strip().split(': ', 1)) for row in rows]


def locate(name: str, files: str) -> str:
  """`files` as a document names them; raises if one, or a function of one, does not exist."""
  last = PACKAGE

  def path(match: re.Match) -> str:
    nonlocal last
    last = PACKAGE / name / match[0]
    if not last.exists():
      last = PACKAGE / match[0]
    assert last.exists(), f'{name}/__init__.py names {match[0]}'
    return f'`{last.relative_to(PACKAGE)}{"/" * match[0].endswith("/")}`'

  def function(match: re.Match) -> str:
    assert re.search(rf'\b(def {match[1]}\(|{match[1]}\b.* = )', last.read_text('utf-8')), match[0]
    return match[0]

  return re.sub(
    r'`(\w+)`|\b[\w/]+(\.py|/(?!\w))', lambda m: function(m) if m[1] else path(m), files
  )


def room_table() -> str:
  rows = []
  for name in sorted(set(imports()) | set(SHELVES)):
    rows.append(f'| **{docstring(name).splitlines()[0]}** | **`{name}/`** |')
    rows += [f'| {question} | {locate(name, files)} |' for question, files in questions(name)]
  return '\n'.join(['| question | where |', '|---|---|', *rows])


# --- Documents ------------------------------------------------------------------------------------

BLOCKS = {
  ROOT / 'docs' / 'protocol.md': {'states': states},
  ROOT / 'docs' / 'architecture.md': {'arrows': room_diagram, 'rooms': room_table},
}


def icon() -> str:
  """Three learners and the syncer between them."""
  dots = ((8, 8, '#0072B2'), (24, 8, '#E69F00'), (16, 26, '#009E73'), (16, 14, '#444'))
  circles = [f'<circle cx="{x}" cy="{y}" r="5" fill="{fill}"/>' for x, y, fill in dots]
  return drawing.svg('diloco_jax', 32, 32, circles)


PICTURES = {
  'icon': icon,
  'parts': parts,
  'conversation': lambda: drawing.conversation(
    'A learner and the syncer', 'LearnerMachine', 'SyncerMachine', CONVERSATION
  ),
  'rooms': room_graph,
  **{name: functools.partial(state_graph, name) for name in TABLES},
}


def rewrite(text: str, blocks: dict) -> str:
  """The document with each block made from the code of today."""
  for name, draw in blocks.items():
    begin, end = f'<!-- {name}: written by scripts/diagrams.py -->', f'<!-- end of {name} -->'
    before, rest = text.split(begin)
    text = f'{before}{begin}\n\n{draw()}\n\n{end}{rest.split(end)[1]}'
  return text


def main() -> int:
  changed = False
  news = {path: rewrite(path.read_text('utf-8'), blocks) for path, blocks in BLOCKS.items()}
  news |= {ROOT / f'docs/pictures/{name}.svg': draw() for name, draw in PICTURES.items()}
  for path, new in news.items():
    changed |= not path.exists() or path.read_text('utf-8') != new
    if '--check' not in sys.argv[1:]:
      path.write_text(new, 'utf-8')
  return int(changed and '--check' in sys.argv[1:])


if __name__ == '__main__':
  sys.exit(main())
