"""Who may import whom, read from the syntax trees."""

import ast
import functools
import graphlib
import pathlib
import sys
from collections.abc import Iterable

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / 'diloco_jax'

# Which rooms a room may import. `protocol` and `verification` are made of rooms of their own.
_ALLOWED = {
  'protocol': '',
  'protocol/syncer': 'protocol',
  'protocol/learner': 'protocol',
  'protocol/tape': 'protocol protocol/syncer protocol/learner',
  'numerics': '',
  'storage': 'protocol protocol/tape numerics',
  'train': 'numerics storage',
  'config': 'protocol protocol/tape numerics storage train',
  'node': 'protocol',
  'configs': 'train config',
  'certs': 'protocol',
  'transport': 'protocol node certs',
  'report': 'protocol storage train config node',
  'learner': (
    'protocol protocol/learner protocol/tape numerics storage train config node transport report'
  ),
  'syncer': (
    'protocol protocol/syncer protocol/tape numerics storage train config node certs transport '
    'report'
  ),
  'process': 'protocol storage train config node configs certs transport report learner syncer',
  'launch': (
    'protocol protocol/syncer storage train config certs transport report learner syncer process'
  ),
  'api': 'protocol storage train config node certs transport report learner syncer process',
  'verification': '',
  'verification/checks': 'protocol protocol/syncer protocol/learner protocol/tape verification',
  'verification/faults': (
    'protocol protocol/tape storage config report process launch api verification '
    'verification/checks verification/replay'
  ),
  'verification/sim': (
    'protocol protocol/syncer protocol/learner protocol/tape storage verification '
    'verification/checks'
  ),
  # The simulated world, and the work of real processes that it carries out.
  'verification/virtual': (
    'protocol protocol/tape numerics train config learner syncer verification verification/sim'
  ),
  # Makes the machines of a tape again, and the arrays of a log.
  'verification/replay': 'protocol protocol/tape storage config syncer api',
}
ALLOWED = {room: set(others.split()) for room, others in _ALLOWED.items()}
# The commands may import every room.
ALLOWED['verification/commands'] = set(ALLOWED)
ALLOWED['commands'] = {room for room in ALLOWED if not room.startswith('verification')}

# What each may import of others'. Rooms that are not named: anything.
FOREIGN = {
  'protocol': set(),
  'protocol/syncer': set(),
  'protocol/learner': set(),
  'protocol/tape': set(),
  'numerics': {'jax', 'numpy', 'optax'},
  'node': set(),
  'certs': {'cryptography'},
  'transport': {'google', 'grpc', 'isal', 'numpy'},
  'verification/checks': set(),
  'verification/sim': set(),
  'verification/virtual': {'absl', 'jax', 'numpy'},
}
GENERATED = ('_pb2.py', '_pb2_grpc.py')


def sources(folder: pathlib.Path) -> list[pathlib.Path]:
  return sorted(path for path in folder.rglob('*.py'))


def module_name(path: pathlib.Path) -> str:
  parts = path.relative_to(ROOT).with_suffix('').parts
  return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


MODULES = {module_name(path): path for path in sources(PACKAGE)}


@functools.cache
def imports(path: pathlib.Path) -> set[str]:
  """Modules that a file imports, wherever in it; `from package import module` gives the module."""
  return imported(ast.walk(ast.parse(path.read_text(encoding='utf-8'))))


def imported(nodes: Iterable[ast.AST]) -> set[str]:
  modules = set()
  for node in nodes:
    if isinstance(node, ast.Import):
      modules |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, 'relative import, write the whole name'
      for alias in node.names:
        full = f'{node.module}.{alias.name}'
        modules.add(full if full in MODULES else node.module)
  return modules


def room(path: pathlib.Path) -> str:
  """'protocol/syncer' of diloco_jax/protocol/syncer/pace.py."""
  parts = path.relative_to(PACKAGE).parts[:-1]
  return '/'.join(parts[: 2 if parts[0] in ('protocol', 'verification') else 1])


ROOMS = {name: room(path) for name, path in MODULES.items() if path.parent != PACKAGE}


def test_every_room_has_its_rule():
  assert set(ROOMS.values()) == ALLOWED.keys()


@pytest.mark.parametrize('here', ALLOWED)
def test_directions(here: str):
  for name, path in MODULES.items():
    if ROOMS.get(name) == here:
      wrong = {ROOMS[other] for other in imports(path) if other in ROOMS} - ALLOWED[here] - {here}
      assert not wrong, f'{path.relative_to(ROOT)} imports {wrong}, allowed: {ALLOWED[here]}'


@pytest.mark.parametrize('here', FOREIGN)
def test_foreign_libraries(here: str):
  for name, path in MODULES.items():
    if ROOMS.get(name) != here or path.name.endswith(GENERATED):
      continue
    roots = {name.split('.')[0] for name in imports(path)}
    wrong = roots - FOREIGN[here] - {'diloco_jax'} - set(sys.stdlib_module_names)
    assert not wrong, f'{path.relative_to(ROOT)} imports {wrong}'


@pytest.mark.parametrize('banned', ['time', 'socket', 'threading', 'asyncio', 'os'])
def test_the_protocol_has_no_clock_no_socket_no_thread(banned: str):
  """Deterministic machines without sockets, clocks, threads or arrays."""
  for path in sources(PACKAGE / 'protocol'):
    assert banned not in imports(path), path


def test_nothing_in_production_imports_verification():
  for here, allowed in ALLOWED.items():
    assert here.startswith('verification') or not any(
      other.startswith('verification') for other in allowed
    ), here


def test_nothing_imports_experiments_or_tests():
  """Scripts neither, but that the fuzzer and the soak share their cases with tests."""
  for path in [*sources(PACKAGE), *sources(ROOT / 'scripts')]:
    roots = {name.split('.')[0] for name in imports(path)}
    assert 'experiments' not in roots, path
    assert 'tests' not in roots or PACKAGE not in path.parents, path


def test_only_the_entry_point_names_the_commands():
  for name, path in MODULES.items():
    commands = {other for other in imports(path) if '.commands.' in other}
    assert not commands, name


def test_only_listen_listen_and_dial():
  """Every other file would have to repeat the rules for addresses and certificates."""
  words = ('insecure_channel', 'secure_channel', 'add_insecure_port', 'add_secure_port')
  openers = {name for name, path in MODULES.items() if any(w in path.read_text() for w in words)}
  assert openers == {'diloco_jax.transport.listen', 'diloco_jax.transport.credentials'}


def test_followers_know_no_machine():
  """So that nothing that they do can change a run: what serves them has no event to post."""
  imported_names = imports(MODULES['diloco_jax.syncer.followers'])
  machine = ('diloco_jax.protocol.events', 'diloco_jax.protocol.syncer', 'diloco_jax.node')
  assert not [name for name in imported_names if name.startswith(machine)]


def test_no_cycles():
  graph = {
    name: {other for other in imports(path) if other in MODULES and other != name}
    for name, path in MODULES.items()
  }
  list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_only_the_loop_feeds_a_machine():
  """One loop serves every node, and its twin in the simulated world."""
  callers = set()
  for name, path in MODULES.items():
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == 'handle':
          callers.add(name)
  twins = {f'diloco_jax.verification.{twin}' for twin in ('replay.machines', 'sim.processes')}
  assert callers == {'diloco_jax.node.loop', *twins}, callers


# What a process of each kind loads as it starts: the modules that it imports first, and the rooms
# and libraries that these reach. What a function imports when it is called is not counted.
_PAGE = 'certs config numerics process protocol protocol/tape report storage train transport'
_NODE = f'{_PAGE} node protocol/learner'
_LIBRARIES = 'absl etils google grpc isal jax numpy optax tensorstore'
REACH = {
  "a user's loop": ('api.peer', f'{_NODE} api configs learner', _LIBRARIES),
  'learner': (
    '__main__ launch.cli commands.learner process.learner',
    f'{_NODE} commands launch learner',
    _LIBRARIES,
  ),
  'syncer': (
    '__main__ launch.cli commands.syncer process.syncer',
    f'{_NODE} commands configs launch protocol/syncer syncer',
    _LIBRARIES,
  ),
  'status': ('__main__ launch.cli commands.status', f'{_PAGE} commands launch', 'absl etils'),
  'report': ('__main__ launch.cli commands.report', f'{_PAGE} commands launch', 'absl etils'),
}


@functools.cache
def first_imports(path: pathlib.Path) -> set[str]:
  """Modules that a file imports when it is loaded: outside functions, and not for types alone."""
  tree = ast.parse(path.read_text(encoding='utf-8'))
  later = [
    inner
    for node in ast.walk(tree)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    or (isinstance(node, ast.If) and ast.unparse(node.test) == 'TYPE_CHECKING')
    for inner in ast.walk(node)
  ]
  return imported(set(ast.walk(tree)) - set(later))


@pytest.mark.parametrize('kind', REACH)
def test_a_process_loads_only_what_it_needs(kind: str):
  starts, rooms, libraries = REACH[kind]
  reached, todo = set(), [f'diloco_jax.{name}' for name in starts.split()]
  while todo:
    name = todo.pop()
    if name not in reached:
      reached.add(name)
      todo += first_imports(MODULES[name]) if name in MODULES else ()
  assert {ROOMS[name] for name in reached & ROOMS.keys()} == set(rooms.split()), kind
  foreign = {name.split('.')[0] for name in reached} - sys.stdlib_module_names
  assert foreign == {'diloco_jax', *libraries.split()}, kind
  assert 'diloco_jax.train.decoder' not in reached, kind
