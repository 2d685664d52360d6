"""The settings under which every test runs: eight emulated devices, and no silent conversions.

Strict dtype promotion and no rank promotion turn an accidental float64, a weak type that widened or
an implicit broadcast into an error. Asynchronous dispatch is off because free-running emulated
devices can miss their rendezvous on a small machine. Compiled functions are kept in .cache. Most
tests, and the processes that they start, compile with few optimizations (_FULLY_OPTIMIZED: the
others); with --all everything is compiled as for users.

Which tests run: those of the default lane; with --long also those marked `long`, as in CI; with
--changed those that a change can reach (changed.py); with --all all of them, also those marked
`full`. How much of each: DEFAULT, LONG or FULL. With several workers a file
stays on one of them, as its fixtures do, and all files that start real runs share one worker, so
that one run goes at a time. Its processes get three times the CPU time of another worker. With
--all the hostile run comes first and alone: its attacker needs a core of its own.
"""

import contextlib
import fcntl
import gc
import itertools
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('MPLBACKEND', 'Agg')
os.environ.pop('PYTHONUNBUFFERED', None)  # a test that rests on it would hang where it is not set

import jax
import pytest
from absl import flags

from tests import changed, visits
from tests import seconds as seconds_lib

# In the background of a script a process begins with an ignored SIGINT, and passes it on.
signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # what is imported before the first test lives to the end (pytest_collection_finish)
_CACHE = pathlib.Path(__file__).resolve().parents[1] / '.cache' / 'jax-tests'
for _name, _value in {  # in the environment too, for the processes that tests start
  'jax_compilation_cache_dir': str(_CACHE),
  'jax_persistent_cache_min_compile_time_secs': 0.0,
  'jax_persistent_cache_min_entry_size_bytes': -1,
}.items():
  os.environ[_name.upper()] = str(_value)
  jax.config.update(_name, _value)
jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_cpu_enable_async_dispatch', False)
jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')

flags.FLAGS.mark_as_parsed()  # grain reads absl flags


class Counts(NamedTuple):
  """How many times the tests repeat an experiment."""

  full: bool
  seeds: int
  syncer_kills: int  # at any moment; beside these, one at each failpoint
  learner_kills: int
  site_kills: int
  flips: int  # of bits in checkpoints

  def __str__(self) -> str:
    mutants = 'the seeds searched for each mutant' if self.full else 'each mutant at its known seed'
    return (
      f'{self.seeds:,} seeds, {mutants}, a kill at each failpoint and {self.syncer_kills} others '
      f'of the syncer, {self.learner_kills} of a learner, {self.site_kills} of everything, '
      f'{self.flips} flipped bits'
    )


DEFAULT = Counts(False, seeds=30, syncer_kills=2, learner_kills=1, site_kills=1, flips=10)
LONG = DEFAULT._replace(seeds=100, flips=30)
FULL = Counts(True, seeds=1_000, syncer_kills=20, learner_kills=10, site_kills=3, flips=100)
_REAL_RUNS = (
  'tests/runs/',
  'tests/launch/test_ray.py',
  'tests/launch/test_slurm.py',
  'tests/experiments/test_finetune.py',
  'tests/release/test_upgrade.py',
)
_ALONE = 'tests/runs/test_hostile.py'  # with --all
# Rooms about the bits of the arithmetic.
_FULLY_OPTIMIZED = ('tests/numerics/', 'tests/syncer/')
_ONE_BY_ONE = ('tests/verification/test_mutants.py', 'tests/verification/test_seeds.py')
_LONGEST_FIRST = (
  _ALONE,
  *_REAL_RUNS,
  'tests/api/',
  'tests/verification/test_seeds.py',
  'tests/process/test_restore.py',
  'tests/train/',
  'tests/storage/',
  'tests/verification/',
)


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption('--all', action='store_true', help='everything, at full counts')
  parser.addoption('--long', action='store_true', help='also the tests marked `long`, as in CI')
  parser.addoption(
    '--changed', action='store_true', help='tests that the change since origin/main can reach'
  )


_SELECTION = pytest.StashKey[changed.Selection]()


def pytest_configure(config: pytest.Config) -> None:
  """Tests, and the processes that they start, compile more than they run. XLA's fusion emitters
  compile small programs in twice the time; from jax 0.12 on XLA refuses the flag."""
  if not config.getoption('--all'):
    os.environ['JAX_DISABLE_MOST_OPTIMIZATIONS'] = '1'
    if jax.__version_info__ < (0, 12):
      os.environ.setdefault('XLA_FLAGS', '--xla_cpu_use_fusion_emitters=false')
  jax.devices()  # reads XLA_FLAGS; from here on no run in this process changes their number
  if hasattr(config, 'workerinput'):
    os.setsid()
  if config.getoption('--changed'):
    given = getattr(config, 'workerinput', {}).get('selection')
    config.stash[_SELECTION] = (
      changed.Selection(*given)
      if given
      else changed.select(changed.since(), seconds_lib.kept(), _REAL_RUNS)
    )
  config.pluginmanager.register(seconds_lib.Seconds(_REAL_RUNS))
  config.pluginmanager.register(visits.Visits(must=_is_whole(config)))


def _is_whole(config: pytest.Config) -> bool:
  """Whether this is all of the lane of CI, or more."""
  option = config.getoption
  part = option('keyword') or option('markexpr') or option('collectonly') or option('changed')
  everything = config.args == config.getini('testpaths') and not part
  return everything and (option('--long') or option('--all'))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
  """The workers run what the process that starts them has selected."""
  if node.config.getoption('--changed'):
    node.workerinput['selection'] = tuple(node.config.stash[_SELECTION])


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
  if not config.getoption('--changed') or not collection_path.is_file():
    return None
  path = str(collection_path.relative_to(changed.ROOT))
  return path not in config.stash[_SELECTION].files or None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
  """On two cores, as the real runs wait for half of their time. At full counts a third worker would
  keep the searches from their deadlines."""
  return 2 if config.getoption('--all') else 3


def _counts(config: pytest.Config) -> Counts:
  if config.getoption('--all'):
    return FULL
  return LONG if config.getoption('--long') else DEFAULT


def pytest_report_header(config: pytest.Config) -> str:
  if config.getoption('--all'):
    return f'everything: {FULL}'
  if config.getoption('--changed'):
    return str(config.stash[_SELECTION])
  rest = 'with' if config.getoption('--long') else 'without'
  return f'default suite, {rest} the tests marked `long`: {_counts(config)}. With --all: {FULL}'


def _left_out(item: pytest.Item) -> bool:
  """Whether the lane of this run does not have this test."""
  option = item.config.getoption
  if item.get_closest_marker('full'):
    return not option('--all')
  if option('--long') or option('--all') or not item.get_closest_marker('long'):
    return False
  return not option('--changed') or item.location[0] not in item.config.stash[_SELECTION].changed


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
  left_out = [item for item in items if _left_out(item)]
  config.hook.pytest_deselected(items=left_out)
  items[:] = sorted((item for item in items if item not in left_out), key=_place)


def pytest_collection_finish() -> None:
  """No garbage collection looks through what the imports have made."""
  gc.freeze()
  gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log) -> object:
  """The tests of a group share a worker, so that its fixtures are made once."""
  from xdist.scheduler import LoadScopeScheduling

  class Groups(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
      if nodeid.startswith(_REAL_RUNS) and not _is_alone(config, nodeid):
        return 'real runs'
      return nodeid if nodeid.startswith(_ONE_BY_ONE) else nodeid.split('::')[0]

  return Groups(config, log)


def _is_alone(config: pytest.Config, nodeid: str) -> bool:
  return nodeid.startswith(_ALONE) and config.getoption('--all')


_BUCKETS = itertools.count()
_made_alone: set[str] = set()  # files whose run this worker has made


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> object:
  """While a run is made that has to be alone, the other workers wait before their next test. The
  first test of its file makes it; the others only read what it has left."""
  with contextlib.ExitStack() as held:
    if item.config.getoption('--all'):
      file = item.nodeid.split('::')[0]
      alone = _is_alone(item.config, file) and file not in _made_alone
      _made_alone.add(file)
      with _locked('turn', fcntl.LOCK_EX):  # or those that share could go on for ever
        held.enter_context(_locked('alone', fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
    return (yield)


@contextlib.contextmanager
def _locked(name: str, how: int) -> Iterator[None]:
  """Holds a lock among the workers of this checkout."""
  _CACHE.parent.mkdir(exist_ok=True)
  with open(_CACHE.parent / f'{name}.lock', 'w', encoding='utf-8') as file:
    fcntl.flock(file, how)
    yield


def _place(item: pytest.Item) -> int:
  """The sort key of a test: the longest files come first."""
  file = item.location[0]
  places = (n for n, start in enumerate(_LONGEST_FIRST) if file.startswith(start))
  return next(places, len(_LONGEST_FIRST))


@pytest.fixture(scope='session')
def counts(request: pytest.FixtureRequest) -> Counts:
  return _counts(request.config)


@pytest.fixture(scope='session')
def reference() -> pathlib.Path:
  """The interpreter of an environment for tests/storage/hugging_face/reference.py, which is made
  once: some gigabytes. For files that start real runs, which share a worker."""
  packages = 'torch==2.14.1', 'transformers==5.24.0'
  folder = _CACHE.with_name('reference')
  python, mark = folder / 'bin' / 'python', folder / 'installed'
  if not mark.exists() or mark.read_text() != str(packages):
    subprocess.run([sys.executable, '-m', 'venv', '--clear', folder], check=True)
    subprocess.run([python, '-m', 'pip', 'install', '--quiet', *packages], check=True)
    mark.write_text(str(packages))
  return python


@pytest.fixture(scope='session')
def _fake_gcs() -> Iterator[object]:
  from tests.storage import fake_gcs

  with fake_gcs.serving() as fake:
    yield fake
  assert not fake.broken, '\n'.join(fake.broken)


@pytest.fixture
def bucket(_fake_gcs, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
  """An empty bucket (fake_gcs.Bucket) of a fake object store, for this process and all that it
  starts: gs://NAME is there."""
  from tests.storage import fake_gcs

  name, door = f'bucket-{next(_BUCKETS)}', _fake_gcs.door()
  _fake_gcs.add_bucket(name)
  for variable, value in door.environment.items():
    monkeypatch.setenv(variable, value)
  fake_gcs.forget_in_this_process()
  yield fake_gcs.Bucket(name, _fake_gcs, door)
  door.close()


# Rooms whose records are not invented.
_REAL = ('api', 'commands', 'launch', 'learner', 'process', 'runs', 'syncer')


@pytest.fixture(autouse=True)
def _no_impossible_figure(request: pytest.FixtureRequest) -> Iterator[None]:
  """What a test has run told no figure that cannot be (tests/report/impossible.py)."""
  room = request.path.relative_to(pathlib.Path(__file__).parent).parts[0]
  checks = room in _REAL and 'tmp_path' in request.fixturenames
  folder = request.getfixturevalue('tmp_path') if checks else None
  yield
  if folder is not None:
    from tests.report import impossible

    for run in impossible.runs(folder):
      with contextlib.suppress(ValueError):  # a test may have spoiled the folder
        assert not (wrong := impossible.figures(run)), (run, wrong)


@pytest.fixture(scope='module', autouse=True)
def _give_way(request: pytest.FixtureRequest) -> None:
  """In a lane of many real runs a worker of several lets the real run of another go first. Linux
  shares the CPUs between the sessions first, by the nice values of their autogroups; each process
  of a run leads a session. In the default lane no worker gives way: beside four other busy
  processes the lane would have a sixth of the CPUs."""
  many = request.config.getoption('--long') or request.config.getoption('--all')
  if many and hasattr(request.config, 'workerinput'):
    real = request.node.nodeid.startswith(_REAL_RUNS)
    with contextlib.suppress(OSError):  # a kernel without autogroups
      pathlib.Path('/proc/self/autogroup').write_text('0' if real else '5', encoding='utf-8')


@pytest.fixture(scope='module', autouse=True)
def _compile(request: pytest.FixtureRequest, counts: Counts) -> None:
  """How the functions of this file are compiled."""
  quickly = not counts.full and not request.node.nodeid.startswith(_FULLY_OPTIMIZED)
  if quickly != jax.config.values['jax_disable_most_optimizations']:
    jax.config.update('jax_disable_most_optimizations', quickly)
    jax.clear_caches()
