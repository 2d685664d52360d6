"""Who may import whom, read from the syntax trees."""

import ast
import graphlib
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / 'diloco_jax'

# What each package may import of ours. Nothing but experiments and tests imports `sim`.
ALLOWED = {
  'protocol': set(),
  'numerics': set(),
  'node': {'protocol'},
  'wire': {'protocol'},
  'sim': {'protocol', 'node'},
  'train': {'numerics'},
  'runtime': {'protocol', 'numerics', 'node', 'wire', 'train'},
}
# What each may import of others'. None: anything.
FOREIGN = {
  'protocol': set(),
  'numerics': {'jax', 'numpy', 'optax'},
  'node': set(),
  'wire': {'google', 'grpc', 'numpy'},
}
GENERATED = ('_pb2.py', '_pb2_grpc.py')


def sources(folder: pathlib.Path) -> list[pathlib.Path]:
  return sorted(path for path in folder.rglob('*.py'))


def module_name(path: pathlib.Path) -> str:
  parts = path.relative_to(ROOT).with_suffix('').parts
  return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


MODULES = {module_name(path): path for path in sources(PACKAGE)}


def imports(path: pathlib.Path) -> set[str]:
  """Modules that a file imports, wherever in it; `from package import module` gives the module."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}: relative import, write the whole name'
      for alias in node.names:
        full = f'{node.module}.{alias.name}'
        found.add(full if full in MODULES else node.module)
  return found


def packages(path: pathlib.Path) -> set[str]:
  """Our packages that a file imports."""
  ours = {name for name in imports(path) if name.split('.')[0] == 'diloco_jax'}
  return {name.split('.')[1] for name in ours if '.' in name}


def test_every_package_has_its_rule():
  present = {path.parent.name for path in PACKAGE.glob('*/__init__.py')}
  assert present <= ALLOWED.keys(), present - ALLOWED.keys()


@pytest.mark.parametrize('package', ALLOWED)
def test_directions(package: str):
  for path in sources(PACKAGE / package):
    wrong = packages(path) - ALLOWED[package] - {package}
    assert not wrong, f'{path.relative_to(ROOT)} imports {wrong}, allowed: {ALLOWED[package]}'


@pytest.mark.parametrize('package', FOREIGN)
def test_foreign_libraries(package: str):
  for path in sources(PACKAGE / package):
    if path.name.endswith(GENERATED):
      continue
    roots = {name.split('.')[0] for name in imports(path)}
    wrong = roots - FOREIGN[package] - {'diloco_jax'} - set(sys.stdlib_module_names)
    assert not wrong, f'{path.relative_to(ROOT)} imports {wrong}'


@pytest.mark.parametrize('banned', ['time', 'socket', 'threading', 'asyncio', 'os'])
def test_the_protocol_has_no_clock_no_socket_no_thread(banned: str):
  """Deterministic machines without sockets, clocks, threads or arrays."""
  for path in sources(PACKAGE / 'protocol'):
    assert banned not in imports(path), path


def test_nothing_imports_experiments_or_tests():
  for path in sources(PACKAGE):
    roots = {name.split('.')[0] for name in imports(path)}
    assert not roots & {'experiments', 'tests'}, path


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
  replays = {'diloco_jax.protocol.tape', 'diloco_jax.sim.checkers'}
  assert callers == {'diloco_jax.node.loop', 'diloco_jax.sim.processes'} | replays, callers
