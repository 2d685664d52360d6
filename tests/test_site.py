"""The documentation site builds without a warning, and names what exists."""

import html
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import diloco_jax
from diloco_jax.config import fields
from diloco_jax.verification.checks import checkers as checkers_lib
from tests.launch.lib import command_line
from tests.report import browsers

pytestmark = pytest.mark.timeout(900)  # 15 s on a quiet machine
ROOT = pathlib.Path(__file__).resolve().parents[1]
REPO = 'https://repo.example/diloco_jax'
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').rglob('*.md'))]
COMMAND = re.compile(r'(?:^ *|`)diloco ([a-z]\w*)((?:[^`\n#\\]|\\\n)*)', re.M)
FLAG = re.compile(r'--(?:no(?=chaos))?([a-z][\w.\[\]]*)')


@pytest.fixture(scope='module', name='site')
def _site(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp('site')
  built = subprocess.run(
    [sys.executable, '-m', 'sphinx', '-qW', '--keep-going', 'docs', folder],
    cwd=ROOT,
    env={**os.environ, 'READTHEDOCS_GIT_CLONE_URL': f'{REPO}.git'},
    capture_output=True,
    text=True,
  )
  assert built.returncode == 0, built.stderr
  return folder


def text_of(page: pathlib.Path) -> str:
  return html.unescape(re.sub('<[^>]+>', '', page.read_text(encoding='utf-8')))


@pytest.fixture(scope='module', name='flags')
def _flags(site: pathlib.Path) -> dict[str, set[str]]:
  """The flags of each command, as the site shows them."""
  parts = re.split(r'\ndiloco (\w+)#', text_of(site / 'reference' / 'commands.html'))
  pages = dict(zip(parts[1::2], parts[2::2]))
  return {name: set(re.findall(r'--(?:\[no\])?(\w+)', help)) for name, help in pages.items()}


@pytest.mark.long
def test_the_pages_name_commands_flags_and_fields_that_exist(flags):
  known = {field.name for field in fields.walk()}
  wrong, checked = [], 0
  for page in PAGES:
    for name, words in COMMAND.findall(page.read_text()):
      if name == 'completion':  # as `help`, no module of its own
        continue
      for flag in FLAG.findall(words) or ['']:
        checked += 1
        flag, _, field = flag.partition('.')
        right = name in flags and flag in {'', 'help', 'helpfull', *flags[name]}
        if not right or field and re.sub(r'\[\d\]', '[0]', field) not in known:
          wrong.append(f'{page.relative_to(ROOT)}: diloco {name} --{flag} {field}')
  assert checked > 100 and not wrong, wrong


def test_a_plan_prints_what_its_page_shows():
  page = ' '.join((ROOT / 'docs' / 'howto' / 'choose.md').read_text().replace('\\\n', '').split())
  (words,) = re.findall(r'diloco (plan --config=own_loop.*?) own_loop', page)
  done = command_line.diloco(*words.split())
  table, error = (' '.join(text.split()) for text in (done.stdout, done.stderr))
  assert table and table in page and error.startswith('error: ') and error in page


def test_what_documents_and_notebooks_import_exists():
  notebooks = sorted((ROOT / 'experiments' / 'notebooks').glob('*.ipynb'))
  cells = [
    ''.join(cell['source']) for path in notebooks for cell in json.loads(path.read_text())['cells']
  ]
  lines = {
    line.strip()
    for text in [*(page.read_text() for page in PAGES), *cells]
    for line in re.findall(
      r'^ *(?:import [\w.]*\w(?: as \w+)?|from [\w.]+ import [\w, ]+)$', text, re.M
    )
  }
  own = ('my_', 'loop', 'lora')  # files that the page writes before
  for line in sorted(lines):
    if not line.split()[1].startswith(own):
      exec(line, {})
  assert len(lines) > 20


@pytest.mark.long
def test_the_reference_has_every_public_name_and_every_field(site):
  api, config = (text_of(site / 'reference' / f'{page}.html') for page in ('api', 'config'))
  assert all(f'diloco_jax.{name}' in api for name in diloco_jax.__all__)
  assert all(field.name in config for field in fields.walk())


@pytest.mark.long
def test_the_page_of_the_simulator_has_every_invariant_with_its_sentence(site):
  page = ' '.join(text_of(site / 'simulator.html').split())
  assert all(
    f'{invariant.id} {invariant.sentence}' in page for invariant in checkers_lib.INVARIANTS
  )


@pytest.mark.long
def test_links_to_files_of_the_repo_lead_there(site):
  links = re.findall(rf'href="{REPO}/blob/main/([^"]+)"', (site / 'wire_format.html').read_text())
  assert 'diloco_jax/transport/link.py' in links
  assert all((ROOT / link).is_file() for link in links)


@pytest.mark.full
def test_a_browser_shows_the_site_without_errors(site):
  with browsers.started() as browser:
    for name in (
      'index',
      'protocol',
      'architecture',
      'reference/config',
      'notebooks/kill_a_learner',
      'operating',
    ):
      said: list[str] = []
      file = (site / f'{name}.html').as_uri()
      shown = browsers.opened(browser, file, said, viewport=browsers.PHONE)
      assert browsers.width(shown) <= 390 and not said, (name, said)
      broken = 'some => some.filter(one => one.complete && !one.naturalWidth).map(one => one.src)'
      assert shown.eval_on_selector_all('img', broken) == []
      assert shown.locator('.mermaid').count() == 0
      shown.set_viewport_size(browsers.DESK)
      wide = (
        'some => some.filter(one => one.scrollWidth > one.clientWidth).map(one => one.innerText)'
      )
      assert shown.eval_on_selector_all('pre', wide) == [], 'code of 100 columns fits'
      shown.close()
