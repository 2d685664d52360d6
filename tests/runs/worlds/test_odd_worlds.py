"""A run, its report, its page and an own loop in worlds that have been somebody's: text that is not
UTF-8, a user without home and name, and a folder of the start full of files that have the names of
Python's modules."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
STEPS = 20
OWN_STEPS = 300  # of the loop
PYTHON = pathlib.Path(sys.executable)
CACHE = ROOT / '.cache' / 'jax'
DEADLINE_S = 600  # of a program; each takes less than a minute on a quiet machine

pytestmark = [pytest.mark.long, pytest.mark.timeout(1_800)]
NO_HOME = """
import pwd

def getpwuid(number):
  raise KeyError(number)

pwd.getpwuid = getpwuid
"""


class World:
  """Where programs run. `diloco` and `python` return what they have printed, which is UTF-8."""

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self.short = tempfile.mkdtemp(prefix='w')  # for the path of a socket
    self.cwd = folder / 'größe'
    self.cwd.mkdir()
    self.before: list[str] = []
    self.started: list[subprocess.Popen] = []
    self.environment = {'PATH': os.environ['PATH'], 'HOME': str(folder)}
    self.package = folder / 'installed'  # without the checkout beside it
    shutil.copytree(ROOT / 'diloco_jax', self.package / 'diloco_jax')
    self.loop = shutil.copy(ROOT / 'experiments' / 'examples' / 'loop_optax.py', folder)

  def start(self, *words: str | os.PathLike, **more: str) -> subprocess.Popen:
    process = subprocess.Popen(
      [*self.before, PYTHON, *words],
      cwd=self.cwd,
      env={**self.environment, **more},
      encoding='utf-8',
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
    )
    self.started.append(process)
    return process

  def start_diloco(self, *words: str) -> subprocess.Popen:
    return self.start('-P', self.package / 'diloco_jax' / '__main__.py', *words)

  def diloco(self, *words: str) -> str:
    return self.output(self.start_diloco(*words))

  def output(self, process: subprocess.Popen) -> str:
    try:
      text, _ = process.communicate(timeout=DEADLINE_S)
    finally:
      process.kill()
    assert process.returncode == 0, text
    return text


@pytest.fixture(name='world')
def _world(tmp_path, request):
  world = World(tmp_path)
  world.environment['JAX_COMPILATION_CACHE_DIR'] = str(CACHE)
  request.param(world)
  yield world
  for process in world.started:
    process.kill()
    process.wait()
  shutil.rmtree(world.short)


def latin_1(world: World) -> None:
  """Where the system can make the locale; else LANG names one that it does not have."""
  with contextlib.suppress(OSError):
    place = str(world.folder / 'de_DE.ISO-8859-1')
    subprocess.run(['localedef', '-i', 'de_DE', '-f', 'ISO-8859-1', place], capture_output=True)
  world.environment |= {'LANG': 'de_DE.ISO-8859-1', 'LOCPATH': str(world.folder)}


def no_home(world: World) -> None:
  """A user id that nobody has; where user namespaces are forbidden, passwd answers so."""
  world.environment = {'PATH': os.environ['PATH'], 'TMPDIR': world.short}
  unshare = ['unshare', '--user', '--map-user=54321']
  with contextlib.suppress(OSError):
    if not subprocess.run([*unshare, 'true'], capture_output=True).returncode:
      world.before = unshare
  user = 54321 if world.before else os.getuid()
  cache = pathlib.Path(world.short, f'diloco_jax-{user}', 'diloco_jax')
  cache.mkdir(parents=True)
  (cache / 'jax').symlink_to(CACHE)
  if not world.before:
    (world.folder / 'stub').mkdir()
    (world.folder / 'stub' / 'sitecustomize.py').write_text(NO_HOME, 'utf-8')
    world.environment['PYTHONPATH'] = str(world.folder / 'stub')


def all_at_once(world: World) -> None:
  """But for Latin 1, which is instead of ASCII."""
  no_home(world)
  world.environment |= {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONIOENCODING': 'ascii'}
  for name in sys.stdlib_module_names:
    (world.cwd / f'{name}.py').write_text('raise RuntimeError(__file__)\n', 'utf-8')


@pytest.mark.parametrize(
  'world', [all_at_once, pytest.param(latin_1, marks=pytest.mark.full)], indirect=True
)
def test_a_run_its_report_and_its_page(world):
  """`diloco train` begins in a folder, and writes into one, whose names are not ASCII."""
  words = '--config=stdlib_lm:tiny', f'--config.train.steps={STEPS}', '--workdir=läuft'
  words += '--config.sync.learners=2', '--config.train.eval_every=0'
  text = world.diloco('train', *words)
  assert 'error' not in text and 'Traceback' not in text, text
  assert 'report       läuft/report: report.txt, summary.json, index.html, timeline.png' in text
  workdir = world.cwd / 'läuft'
  assert 'tokens trained' in (workdir / 'report' / 'report.txt').read_text('utf-8')
  assert '<!doctype html>' in (workdir / 'report' / 'index.html').read_text('utf-8')

  out = world.diloco('report', 'läuft', '--out=nochmal')
  assert 'tokens' in out and 'Matplotlib' not in out
  assert len(list((world.cwd / 'nochmal').iterdir())) == 4

  page = world.start_diloco('status', '--workdir=läuft')
  try:
    url = page.stdout.readline().strip()
    state = {'behind': True}
    while state['behind']:  # it reads for half a second at a time
      with urllib.request.urlopen(f'{url}run.json', timeout=DEADLINE_S) as answer:
        state = json.load(answer)
    assert state['progress'] == 1.0
  finally:
    page.kill()
    page.communicate()


@pytest.mark.full
@pytest.mark.parametrize('world', [all_at_once, latin_1], indirect=True)
def test_an_own_loop(world):
  """Its script is elsewhere: what lies beside a script is imported first, by Python's own rule."""
  steps = f'--config.train.steps={OWN_STEPS}'
  syncer = world.start_diloco('syncer', '--config=own_loop', steps, '--workdir=läuft')
  path = filter(None, [str(world.package), world.environment.get('PYTHONPATH')])
  words = '--learner=l0', '--syncer=file:läuft/syncer/address'
  loop = world.start(world.loop, *words, PYTHONPATH=os.pathsep.join(path))
  text, _ = loop.communicate(timeout=DEADLINE_S)
  assert loop.returncode == 0 and 'waits for a syncer' in text, text
  assert re.search(r'\d+ steps, the mean loss', text), text
  world.output(syncer)
