"""The files of the image that scripts/Dockerfile makes, without docker: an interpreter of that file
and of .dockerignore, for what these two use. An instruction that it does not know is an error.
"""

import dataclasses
import os
import pathlib
import re
import shlex
import shutil
import tomllib

from tests.launch.lib import command_line

PACKAGES = pathlib.PurePosixPath('/site-packages')  # where pip installs


@dataclasses.dataclass
class Image:
  """`files`: of the image, beside those of its base, with the file of this machine that each is."""

  files: dict[pathlib.PurePosixPath, pathlib.Path]
  entrypoint: list[str]

  def install(self, folder: pathlib.Path) -> pathlib.Path:
    """Writes the files below a folder; returns the one in which Python finds packages."""
    for path, source in self.files.items():
      target = folder / path.relative_to('/')
      target.parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(source, target)
    return folder / PACKAGES.relative_to('/')


def build(root: pathlib.Path = command_line.ROOT, **arguments: str) -> Image:
  """What `docker build -f scripts/Dockerfile --build-arg NAME=VALUE root` makes."""
  image, given = Image({}, []), dict(arguments)
  text = re.sub(r'^#.*\n', '', (root / 'scripts' / 'Dockerfile').read_text(), flags=re.M)
  for line in text.replace('\\\n', ' ').strip().splitlines():
    verb, _, rest = line.partition(' ')
    if verb == 'ARG':
      given.setdefault(*rest.split('='))
    elif verb == 'COPY':
      source, target = rest.split()
      for file in context(root):
        if source == '.' or file.is_relative_to(source):
          image.files[pathlib.PurePosixPath(target, file.relative_to(source))] = root / file
    elif verb == 'RUN':
      for command in re.sub(r'\$(\w+)', lambda name: given[name[1]], rest).split(' && '):
        _run(shlex.split(command), image)
    elif verb == 'ENTRYPOINT':
      image.entrypoint = re.findall(r'"([^"]+)"', rest)
    else:
      assert verb == 'FROM', line
  return image


def _run(words: list[str], image: Image) -> None:
  if words[:2] == ['rm', '-r']:
    image.files = {
      path: source for path, source in image.files.items() if not path.is_relative_to(words[2])
    }
    return
  assert words[:2] == ['pip', 'install'], words
  constraint = words[words.index('--constraint') + 1]
  assert pathlib.PurePosixPath(constraint) in image.files
  project, extras = re.fullmatch(r'(.+)\[(.+)\]', words[-1]).groups()
  _install(pathlib.PurePosixPath(project), extras.split(','), image)


def _install(project: pathlib.PurePosixPath, extras: list[str], image: Image) -> None:
  """As hatchling and pip do (tests/release/test_wheel.py compares the wheel with the folder)."""
  described = tomllib.loads(image.files[project / 'pyproject.toml'].read_text())
  assert set(extras) <= set(described['project']['optional-dependencies'])
  needed = [described['project']['readme'], *described['project']['license-files']]
  assert all(project / name in image.files for name in needed)
  wheel = described['tool']['hatch']['build']['targets']['wheel']
  places = {**{name: name for name in wheel['packages']}, **wheel['force-include']}
  for path, source in list(image.files.items()):
    for begin, target in places.items():
      if path.is_relative_to(project / begin):
        image.files[PACKAGES / target / path.relative_to(project / begin)] = source


def context(root: pathlib.Path) -> list[pathlib.Path]:
  """The files that docker sends to the build, relative to `root`."""
  lines = (root / '.dockerignore').read_text().splitlines()
  rules = [line.strip() for line in lines if line.strip() and not line.startswith('#')]
  paths = []
  for folder, folders, files in os.walk(root):
    here = pathlib.Path(folder).relative_to(root)
    folders[:] = [name for name in folders if _may_have(here / name, rules)]
    paths += [here / file for file in files if not _ignored(here / file, rules)]
  return sorted(paths)


def _ignored(path: pathlib.Path, rules: list[str]) -> bool:
  """By the last rule that matches the path or a folder above it."""
  ignored = False
  for rule in rules:
    pattern = _pattern(rule.removeprefix('!'))
    if any(pattern.fullmatch(str(place)) for place in (path, *path.parents)):
      ignored = not rule.startswith('!')
  return ignored


def _may_have(folder: pathlib.Path, rules: list[str]) -> bool:
  again = [pathlib.Path(rule[1:]) for rule in rules if rule.startswith('!')]
  return not _ignored(folder, rules) or any(rule.is_relative_to(folder) for rule in again)


def _pattern(rule: str) -> re.Pattern:
  """As filepath.Match of Go, and ** for any number of folders."""
  assert not set(rule) & set('[]\\'), rule
  words = {'**/': '(?:.*/)?', '**': '.*', '*': '[^/]*', '?': '[^/]'}
  parts = re.split(r'(\*\*/|\*\*|\*|\?)', rule.strip('/'))
  return re.compile(''.join(words.get(part) or re.escape(part) for part in parts))
