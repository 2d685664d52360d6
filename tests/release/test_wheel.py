"""The archives of a release: the wheel holds the package with its configs, its examples and its
command, and nothing else; the source archive holds what git has; and a registry can show both."""

import configparser
import email
import email.message
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import markdown_it
import pytest
import yaml

import diloco_jax
from diloco_jax import __main__
from tests.release import releases

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / 'experiments' / 'examples').glob('*.py'))
INIT = [path for path in (EXAMPLES[0].parent / 'project').iterdir() if path.is_file()]
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text('utf-8'))['project']
WORKFLOWS = ROOT / '.github' / 'workflows'
STEPS = {
  step.get('name'): step.get('run')
  for step in yaml.safe_load((WORKFLOWS / 'release.yml').read_text('utf-8'))['jobs']['build'][
    'steps'
  ]
}


def _build(kind: str, source: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
  """An archive, as `python -m build` makes it of that source."""
  command = [sys.executable, '-m', 'hatchling', 'build', '-t', kind, '-d', str(folder)]
  subprocess.run(command, cwd=source, check=True, capture_output=True)
  (path,) = folder.iterdir()
  return path


@pytest.fixture(scope='module', name='source')
def _source(tmp_path_factory) -> pathlib.Path:
  """The source archive, unpacked."""
  path = _build('sdist', ROOT, tmp_path_factory.mktemp('sdist'))
  assert path.name == f'diloco_jax-{diloco_jax.__version__}.tar.gz'
  folder = tmp_path_factory.mktemp('source')
  with tarfile.open(path) as packed:
    releases.unpack(packed, folder)
  return folder / path.name.removesuffix('.tar.gz')


@pytest.fixture(scope='module', name='wheel')
def _wheel(source, tmp_path_factory) -> zipfile.ZipFile:
  """The wheel, built from the source archive."""
  path = _build('wheel', source, tmp_path_factory.mktemp('wheel'))
  assert path.name == f'diloco_jax-{diloco_jax.__version__}-py3-none-any.whl'
  with zipfile.ZipFile(path) as wheel:
    yield wheel


@pytest.fixture(scope='module', name='description')
def _description(wheel) -> email.message.Message:
  (name,) = [name for name in wheel.namelist() if name.endswith('.dist-info/METADATA')]
  return email.message_from_bytes(wheel.read(name))


def test_the_source_archive_holds_what_git_has(source):
  command = ['git', 'ls-files', '--cached', '--others', '--exclude-standard', '-z']
  listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
  names = [name for name in listed.split('\0') if name and not name.startswith('.')]
  here = {name for name in names if (ROOT / name).is_file()}  # no links to folders
  held = {str(path.relative_to(source)) for path in source.rglob('*') if path.is_file()}
  assert held - {'.gitignore', 'PKG-INFO'} == here


def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel):
  files = {name for name in wheel.namelist() if '.dist-info/' not in name}
  here = {
    str(path.relative_to(ROOT))
    for path in (ROOT / 'diloco_jax').rglob('*')
    if path.is_file() and '__pycache__' not in path.parts
  }
  examples = {f'diloco_jax/examples/{path.name}' for path in EXAMPLES}
  project = {f'diloco_jax/examples/project/{path.name}' for path in INIT}
  assert files == here | examples | project and examples and project
  assert {'diloco_jax/configs/stdlib_lm.py', 'diloco_jax/py.typed'} <= files


def test_it_installs_the_command(wheel):
  (name,) = [name for name in wheel.namelist() if name.endswith('entry_points.txt')]
  points = configparser.ConfigParser()
  points.read_string(wheel.read(name).decode())
  assert dict(points['console_scripts']) == {'diloco': 'diloco_jax.__main__:main'}
  assert callable(__main__.main)


def test_the_installed_command_prints_the_examples(wheel, tmp_path):
  wheel.extractall(tmp_path)
  say = lambda *words: subprocess.run(
    [sys.executable, '-m', 'diloco_jax', 'example', *words],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    check=False,
  )
  names = [line.split()[0] for line in say().stdout.splitlines()]
  assert names == [path.stem for path in EXAMPLES]
  printed = say('loop_optax').stdout
  assert 'diloco_jax.join' in printed and '\n    python loop_optax.py --learner=l0 ' in printed
  wrong = say('loop_optx')
  assert (wrong.returncode, wrong.stdout) == (42, '') and 'loop_optax' in wrong.stderr


def test_the_description_is_one_that_an_index_accepts(wheel, description):
  assert description['Version'] == diloco_jax.__version__
  assert description['License-Expression'] == 'Apache-2.0'
  (licence,) = [name for name in wheel.namelist() if name.endswith('/licenses/LICENSE')]
  assert wheel.read(licence) == (ROOT / 'LICENSE').read_bytes()
  assert set(description.get_all('Provides-Extra')) == PROJECT['optional-dependencies'].keys()
  assert 'Typing :: Typed' in description.get_all('Classifier')


def test_messages_and_pages_name_extras_that_exist(description):
  extras = set(description.get_all('Provides-Extra'))
  pages = [*(ROOT / 'diloco_jax').rglob('*.py'), *(ROOT / 'docs').rglob('*.md'), ROOT / 'README.md']
  named = {
    extra
    for page in pages
    for extras_of_page in re.findall(r'diloco[-_]jax\[([a-z,]+)\]', page.read_text('utf-8'))
    for extra in extras_of_page.split(',')
  }
  assert named and named <= extras


def test_a_registry_renders_the_readme(description):
  """As Markdown with tables, without raw HTML, which it would show as text."""
  assert description['Description-Content-Type'] == 'text/markdown'
  text = description.get_payload()
  assert text == (ROOT / 'README.md').read_text('utf-8')
  tokens = markdown_it.MarkdownIt('commonmark').enable('table').parse(text)
  kinds = [token.type for token in tokens]
  inline = [child.type for token in tokens for child in token.children or ()]
  assert 'html_block' not in kinds and 'html_inline' not in inline
  assert kinds.count('table_open') == 3 and kinds.count('heading_open') > 5
  assert re.match(r'# diloco_jax\n', text)


# --- The workflow ---------------------------------------------------------------------------------


def _step(name: str, folder: pathlib.Path, tag: str) -> int:
  """Runs a step of the workflow in a copy of the checkout, as for a push of the tag."""
  for file in ('README.md', 'pyproject.toml', 'docs/CHANGELOG.md', 'diloco_jax/version.py'):
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / file, folder / file)
  given = {
    'GITHUB_REF_NAME': tag,
    'GITHUB_SERVER_URL': 'https://forge.example',
    'GITHUB_REPOSITORY': 'we/diloco_jax',
  }
  command = ['bash', '-e', '-c', STEPS[name]]
  return subprocess.run(command, cwd=folder, env={**os.environ, **given}, check=False).returncode


def test_only_a_tag_that_is_the_version_is_released(tmp_path):
  step = 'The tag is the version, and the changelog has it'
  assert _step(step, tmp_path, f'v{diloco_jax.__version__}') == 0
  for tag in ('v9.9.9', diloco_jax.__version__, f'v{diloco_jax.__version__}.1'):
    assert _step(step, tmp_path, tag) != 0, tag


def test_every_link_of_the_released_readme_is_whole(tmp_path):
  """A registry has none of the files beside it."""
  assert _step('Links lead to this repository', tmp_path, 'v1.2.3') == 0
  text = (tmp_path / 'README.md').read_text('utf-8')
  links = re.findall(r'\]\(([^)]+)\)', text)
  assert len(links) > 20
  assert not [link for link in links if not re.match('https://|#', link)]
  assert 'https://forge.example/we/diloco_jax/blob/v1.2.3/docs/protocol.md' in links
  urls = tomllib.loads((tmp_path / 'pyproject.toml').read_text('utf-8'))['project']['urls']
  assert urls.keys() == {'Changelog', 'Issues', 'Paper', 'Source'}
  assert urls['Source'] == 'https://forge.example/we/diloco_jax' and 'ADDRESS/' not in text


def test_only_the_jobs_that_publish_get_a_token_and_a_person_agrees():
  """Trusted publishing: no secret is kept, and no host is named."""
  text = (WORKFLOWS / 'release.yml').read_text('utf-8')
  jobs = yaml.safe_load(text)['jobs']
  publishing = {name for name, job in jobs.items() if 'permissions' in job}
  assert publishing == {'trial', 'release'}
  for name in publishing:
    assert jobs[name]['permissions'] == {'id-token': 'write'}
    assert jobs[name]['environment'] == name
  assert (jobs['build']['needs'], jobs['trial']['needs']) == ('test', 'build')
  assert jobs['release']['needs'] == 'trial'
  assert 'secrets.' not in text and '://' not in text
