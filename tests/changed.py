"""Which test files a change can reach, the nearest first: the lane `./scripts/test.sh --changed`.

A test file reaches what it imports, and what that imports, read from the syntax trees; a file that
is no module (a page, a script, a schema) is reached by the test files that name it. The files are
taken in the order of the number of imports between them and the change, until the seconds that they
took in earlier runs fill the budget; real runs take part only if they have changed themselves.
"""

import ast
import collections
import functools
import pathlib
import subprocess
from collections.abc import Iterable, Mapping
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUDGET_S = 130.0  # of both cores together
UNKNOWN_S = 3.0  # of a file that has not run yet
START_S = 1.0  # of any file, on top: what it imports
ALWAYS = ('tests/test_lint.py', 'tests/test_imports.py')  # read all files, in seconds


class Selection(NamedTuple):
  """What a lane runs: test files, nearest first; `left_out` can be reached, too."""

  changed: list[str]
  files: list[str]
  left_out: list[str]

  def __str__(self) -> str:
    if not self.changed:
      return 'nothing has changed since origin/main'
    rest = f'; {len(self.left_out)} others that it can reach are left out' if self.left_out else ''
    return f'{", ".join(self.changed)}: {len(self.files)} test files, the nearest first{rest}'


def since(base: str = 'origin/main') -> list[str]:
  """The files that differ from the last common commit with `base`, or that git does not know."""

  def git(*words: str) -> list[str]:
    done = subprocess.run(['git', *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()

  (fork,) = git('merge-base', 'HEAD', base)
  others = git('ls-files', '--others', '--exclude-standard')
  return sorted({*git('diff', '--name-only', fork), *others})


def select(
  changed: Iterable[str],
  seconds: Mapping[str, float],
  real: tuple[str, ...] = (),
  budget_s: float = BUDGET_S,
) -> Selection:
  """Args:

  changed: paths from the root of the checkout.
  seconds: that a test file took in an earlier run.
  real: how the paths of real runs begin.
  """
  changed = [path for path in changed if path.startswith(_FOLDERS)]
  far = _distances(changed) | (dict.fromkeys(ALWAYS, 1) if changed else {})
  rooms = {_room(path) for path in changed}
  own = {f'test_{pathlib.PurePath(path).stem}.py' for path in changed}
  far |= {path: 1 for path in far if pathlib.PurePath(path).name in own and _room(path) in rooms}

  def near(path: str) -> tuple:
    return path not in ALWAYS, far[path], _room(path) not in rooms, _cost(path, seconds)

  reached = sorted((path for path in far if _is_test(path)), key=near)
  files, left_out, spent_s = [], [], 0.0
  for path in reached:
    spent_s += _cost(path, seconds)
    fits = far[path] <= 1 or spent_s <= budget_s
    (files if fits and (path in changed or not path.startswith(real)) else left_out).append(path)
    if path in left_out:
      spent_s -= _cost(path, seconds)
  return Selection(changed, files, left_out)


_FOLDERS = ('diloco_jax/', 'experiments/', 'scripts/', 'tests/', 'docs/', 'README.md', 'pyproject')


def _cost(path: str, seconds: Mapping[str, float]) -> float:
  return START_S + seconds.get(path, UNKNOWN_S)


def _room(path: str) -> str:
  """'numerics' of diloco_jax/numerics/merge.py and of tests/numerics/test_merge.py."""
  return path.split('/')[1] if path.count('/') > 1 else ''


def _is_test(path: str) -> bool:
  return pathlib.PurePath(path).name.startswith('test_')


def _distances(changed: list[str]) -> dict[str, int]:
  """The number of imports between each module and the nearest changed file."""
  far = dict.fromkeys(changed, 0)
  for path in changed:
    if not path.endswith('.py'):
      far |= {test: 1 for test in _importers() if _is_test(test) and _names(test, path)}
  todo = collections.deque(far)
  while todo:
    path = todo.popleft()
    for other in _importers().get(path, set()) - far.keys():
      far[other] = far[path] + 1
      todo.append(other)
  return far


@functools.cache
def _importers() -> dict[str, set[str]]:
  """The files that import each file; a test imports the conftest.py of its folder, too."""
  paths = {
    _name(path): str(path.relative_to(ROOT))
    for folder in ('diloco_jax', 'experiments', 'scripts', 'tests')
    for path in (ROOT / folder).rglob('*.py')
  }
  importers: dict[str, set[str]] = {path: set() for path in paths.values()}
  for name, path in paths.items():
    for other in _imports((ROOT / path).read_text('utf-8'), name, paths):
      importers[paths[other]].add(path)
    fixtures = str(pathlib.PurePath(path).with_name('conftest.py'))
    if _is_test(path) and fixtures in importers:
      importers[fixtures].add(path)
  return importers


def _name(path: pathlib.Path) -> str:
  parts = path.relative_to(ROOT).with_suffix('').parts
  return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


def _imports(text: str, name: str, modules: Mapping[str, str]) -> set[str]:
  """Those of our modules that a module imports; `diloco_jax.join` imports the home of `join`."""
  tree, names = ast.parse(text), set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and not node.level:
      for alias in node.names:
        full = f'{node.module}.{alias.name}'
        names.add(full if full in modules else node.module)
  return (names & modules.keys()) - {name}


def _names(test: str, path: str) -> bool:
  return pathlib.PurePath(path).name in (ROOT / test).read_text('utf-8')
