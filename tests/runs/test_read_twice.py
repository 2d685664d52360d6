"""Everything that a run reads a second time x what may be there instead x every reader.

A run with a store, a corpus, a tokenizer and an initial model has ended. A cell exchanges one thing
of it and calls one reader. The outcome is what the reader says of a whole run, or a line names the
thing; an older state only with a line. What none of the tables has, a new file, setting, command
or function, fails the first test.
"""

import dataclasses
import hashlib
import os
import pathlib
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import diloco_jax
from diloco_jax import __main__
from diloco_jax.config import brought, build, load
from diloco_jax.configs import stdlib_lm
from diloco_jax.learner import moments as moments_lib
from diloco_jax.process import exits, restore
from diloco_jax.protocol import agreement as agreement_lib
from diloco_jax.report import folder as folder_lib
from diloco_jax.report import summary as summary_lib
from diloco_jax.storage import arrays, folders, outer_log, states
from diloco_jax.storage import claim as claim_lib
from diloco_jax.storage import lineage as lineage_lib
from diloco_jax.train import corpus_files
from diloco_jax.verification.replay import tape_files
from tests.launch.lib.command_line import diloco
from tests.syncer import test_durability as durability
from tests.syncer import test_stored

_soon = test_stored._soon
Say = Callable[[str], None]


def _digest(tree: Any) -> str:
  leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
  return hashlib.sha256(b''.join(leaves)).hexdigest()


# --- Readers --------------------------------------------------------------------------------------
# Of a site, the folder with all that a run has: each returns what it has read.


def _assembled(site: pathlib.Path) -> build.Assembly:
  return build.assemble(load.read(site / 'run'))


def _syncer(site: pathlib.Path, disk: str, say: Say) -> str:
  """Theta of the next syncer, on the disk of the run or on a new one."""
  assembled, workdir, store = _assembled(site), site / disk, str(site / 'store')
  brought.begin(workdir, assembled.things, store)
  life = None
  try:
    life = test_stored.Life(assembled, workdir, store, store_log=True)
    for line in durability.drain_lines(life):
      say(line)
    return _digest(life.theta.arrays())
  finally:
    if life:
      life.kill()


def _take_over(site: pathlib.Path, say: Say) -> str:
  load.write(site / 'new', load.read(site / 'run'))
  shutil.rmtree(site / 'run' / 'syncer')
  return _syncer(site, 'new', say)


def _restore(site: pathlib.Path, say: Say) -> str:
  restore.restore(load.read(site / 'run'), site / 'run', 'latest', say)
  return _syncer(site, 'run', say)


def _learner(site: pathlib.Path, say: Say, learner: str) -> Any:
  """The moments with which a learner begins, and whether the syncer lets it join."""
  assembled, run = _assembled(site), lineage_lib.read(site / 'run').run
  claimed, _ = claim_lib.read(claim_lib.store_lib.Store(str(site / 'store')))
  if refused := agreement_lib.refusal(assembled.agreement, claimed.agreement):
    raise ValueError(refused)
  whole = site.with_name('whole') / 'store' / folders.ISLANDS / 'l0' / folders.CHECKPOINTS
  like = states.load_on_host(max(whole.iterdir(), key=_number))[1]['opt_state']
  moments = moments_lib.find(site / 'store', learner, like, say, run=run)
  if moments and moments.protocol.get('run', run) != run:  # protocol/learner/connection.py
    raise ValueError(f'a checkpoint of run {moments.protocol["run"]}, not {run}')
  return moments and (moments.learner, moments.step, _digest(moments.moments))


def _all_moments(site: pathlib.Path) -> list[Any]:
  """Of every checkpoint of every learner."""
  return [
    (path.parts[-3], int(path.name), _digest(states.load_on_host(path)[1]['opt_state']))
    for path in (site / 'store' / folders.ISLANDS).glob('*/ckpt/[0-9]*')
  ]


def _replay(site: pathlib.Path, say: Say) -> Any:
  replays = {life.name: tape_files.replay(life) for life in tape_files.find(site / 'run')}
  texts = {name: replay.text() for name, replay in replays.items()}
  for name, text in texts.items():
    if not replays[name].identical or 'no exit' in text:
      raise ValueError(f'the tape {name}: {text}')
  return texts


def _train(site: pathlib.Path, say: Say) -> bool:
  """Whether the ids of a new run are those of the text that is there."""
  ids = []
  for cache in ('cache', 'empty'):
    os.environ['XDG_CACHE_HOME'] = str(site / cache)
    ids.append(build.make_task(_config(site)).data_digest())
  return ids[0] == ids[1]


def _report(site: pathlib.Path, say: Say) -> Any:
  read = folder_lib.read(site / 'run')
  read.run.look(None)
  return summary_lib.summarize(read)['learners']


def _follow(site: pathlib.Path, say: Say) -> Any:
  models = [*diloco_jax.follow(workdir=site / 'store', wait_s=2.0)]
  return models[-1][0], _digest(models[-1][1])


def _command(*words: str) -> Callable[[pathlib.Path, Say], str]:
  def read(site: pathlib.Path, say: Say) -> str:
    where = [word.format(site) for word in words]
    done = diloco(*where, f'--workdir={site / "run"}', environment=dict(os.environ))
    for line in done.stderr.splitlines():
      say(line)
    if done.returncode:
      raise ValueError(f'ended with {done.returncode}')
    out = site / 'out.safetensors'
    return done.stdout + (hashlib.sha256(out.read_bytes()).hexdigest() if out.exists() else '')

  return read


_BROUGHT = r'text/.*|begun.*|cache/.*|run/(config|tokenizer).*'
_OF_STORE = r'store/(config|tokenizer|model|syncer).*'
_MODEL = r'run/(config|tokenizer|model|syncer).*|begun.*'
# With the things that each may read.
READERS: dict[str, tuple[Callable[[pathlib.Path, Say], Any], str]] = {
  'train': (_train, r'text/.*|cache/.*'),
  'train --resume': (lambda site, say: _syncer(site, 'run', say), f'run/syncer/.*|{_BROUGHT}'),
  'syncer, on another disk': (_take_over, f'{_OF_STORE}|{_BROUGHT}'),
  'learner': (lambda site, say: _learner(site, say, 'l0'), f'store/islands/.*|{_BROUGHT}'),
  'join': (lambda site, say: _learner(site, say, 'l9'), f'store/islands/.*|{_BROUGHT}'),
  'restore': (_restore, f'run/syncer/.*|{_BROUGHT}'),
  'replay': (_replay, r'run/tapes/.*'),
  'report': (_report, r'run/config.*'),
  'follow': (_follow, _OF_STORE),
  'load_params': (lambda site, say: _digest(diloco_jax.load_params(site / 'run')), _MODEL),
  'load_params of the store': (
    lambda site, say: _digest(diloco_jax.load_params(site / 'store')),
    f'{_OF_STORE}|begun.*',
  ),
}
OF_PROCESSES = {
  'evaluate': (_command('evaluate', '--batches=1'), f'{_MODEL}|{_BROUGHT}'),
  'sample': (_command('sample', '--prompt=def ', '--tokens=9'), _MODEL),
  'export': (_command('export', '--out={}/out.safetensors'), _MODEL),
}
# What reads by the same program as one of the above, or nothing of a run.
ALIKE = {
  'launch': 'syncer, learner',
  'syncer': 'train --resume',
  'run': 'train --resume',
  'run_syncer': 'train --resume',
  'open_run': 'report',
  'records': 'report',
  'status': 'report',
  'track': 'report; what was sent: tests/commands/test_track.py',
  'chaos': 'train, report, replay',
  **dict.fromkeys(('plan', 'aot', 'init', 'example', 'simulate', 'certs'), ''),
  **dict.fromkeys(('Ended', 'Peer', 'Run', 'SyncConfig', 'Task'), ''),
}

# --- Things ---------------------------------------------------------------------------------------

STATE = r'(run|store)/(syncer/ckpt/N(-H)?|islands/lN/ckpt/N|model)(/.*)?'
# Of each its word in lines. A file of a state has that of its folder.
THINGS = {
  STATE: '',
  r'run/config\.json': 'config|(of|to) the run',
  r'store/config\.json': 'config|is not what the run has begun with',
  r'(run|store)/tokenizer.*\.json': 'tokenizer',
  r'run/syncer/lineage\.json': 'lineage|(of|to) the run',
  r'run/syncer/wal/(H|N)\.rec': 'WAL|record|log',
  r'run/syncer/wal/agreement\.json': 'agreement',
  r'store/syncer/claim': 'claim|(of|to) the run',
  r'run/records/.*\.jsonl': '',  # read again for people alone: lines without a digest
  r'run/tapes/.*': 'tape',
  r'text/N\.py': 'data|corpus|text',
  r'begun\.safetensors': 'initial model|begun',
  r'cache/.*': 'cache',
}
FOR_PEOPLE = r'run/(logs|report|tensorboard)/.*|.*/lock|.*\.lock|run/lock|run/syncer/address'
NO_PATH = {  # settings that are words
  *('name', 'kind', 'optimizer.name', 'data.field', 'data.local', 'model.style', 'model.dtype'),
  *('model.param_dtype', 'model.remat', 'sync.codec_up', 'sync.codec_down', 'sync.merge'),
  *('sync.embedding_merge', 'sync.outer', 'sync.adopt'),
}
OF_SITE = {'data.corpus', 'data.tokenizer', 'train.init_from', 'train.store', 'task'}


def _name(path: str) -> str:
  """A path without its numbers and hashes."""
  return re.sub(r'\d+', 'N', re.sub(r'[0-9a-f]{8,}', 'H', path))


def _number(path: pathlib.Path) -> int:
  match = re.match(r'\d+', path.name)
  return int(match[0]) if match else -1


def _row(path: str) -> str | None:
  return next((row for row in THINGS if re.fullmatch(row, _name(path))), None)


def _files(site: pathlib.Path) -> dict[str, list[str]]:
  """The files of a site by their names without numbers, the newest last."""
  files: dict[str, list[str]] = {}
  paths = [path for path in site.rglob('*') if path.is_file()]
  for path in sorted(paths, key=lambda path: [*map(int, re.findall(r'\d+', str(path)))]):
    relative = path.relative_to(site).as_posix()
    if not re.fullmatch(FOR_PEOPLE, _name(relative)):
      files.setdefault(_name(relative), []).append(relative)
  return files


def _words(path: str) -> str:
  """What a line about a thing must have."""
  row = _row(path)
  if row != STATE:
    return THINGS[row]
  at = pathlib.PurePosixPath(path)
  at = next(up for up in (at, *at.parents) if re.fullmatch(r'(\d+)(-\w+)?|model', up.name))
  return 'model' if at.name == 'model' else f'ckpt/{at.name}|checkpoint|cop(y|ies)|moments'


# --- What is there instead ------------------------------------------------------------------------


def _keeping_time(path: pathlib.Path, data: bytes) -> None:
  status = path.stat()
  path.write_bytes(data)
  os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _bit(path: pathlib.Path, other: pathlib.Path, before: pathlib.Path | None) -> None:
  data = bytearray(path.read_bytes())
  if data:
    data[len(data) // 2] ^= 1
  _keeping_time(path, bytes(data))


def _half(path: pathlib.Path, other: pathlib.Path, before: pathlib.Path | None) -> None:
  _keeping_time(path, path.read_bytes()[: path.stat().st_size // 2])


def _gone(path: pathlib.Path, other: pathlib.Path, before: pathlib.Path | None) -> None:
  path.unlink()


def _another(path: pathlib.Path, other: pathlib.Path, before: pathlib.Path | None) -> None:
  """Of another run, or, where it has none, other bytes of the same size; with the same time."""
  data = path.read_bytes()
  _keeping_time(path, other.read_bytes() if other.is_file() else data[1:] + data[:1])


def _older(path: pathlib.Path, other: pathlib.Path, before: pathlib.Path | None) -> None:
  """The one before it under its name."""
  if before:
    _keeping_time(path, before.read_bytes())


def _moved(path: pathlib.Path, other: pathlib.Path, before: pathlib.Path | None) -> None:
  """It and the one before it have exchanged their names."""
  if before:
    newer = path.read_bytes()
    _keeping_time(path, before.read_bytes())
    _keeping_time(before, newer)


SWAPS = {
  'a bit': _bit,
  'half': _half,
  'gone': _gone,
  'another': _another,
  'older': _older,
  'moved': _moved,
}


def _of_folder(swap: str, path: pathlib.Path, other: pathlib.Path, before: pathlib.Path) -> None:
  """The same of a whole state."""
  if swap == 'older' and path.name == folders.MODEL:  # of an earlier end, from a backup
    manifest, tree = states.load_on_host(path)
    record = manifest.record | {outer_log.POSITION: manifest.record[outer_log.POSITION] - 1}
    states.save(path, folders.MODEL, jax.tree.map(np.zeros_like, tree), record)
  elif swap == 'another':
    shutil.rmtree(path)
    shutil.copytree(other, path)
  elif swap == 'older':
    shutil.rmtree(path)
    shutil.copytree(before, path)
  elif swap == 'moved':
    path.rename(path.with_name('aside'))
    before.rename(path)
    path.with_name('aside').rename(before)
  else:  # while it is read
    _WHEN_OPENED[str(path / states.MANIFEST)] = lambda: path.rename(path.with_name('.gone'))


_WHEN_OPENED: dict[str, Callable[[], object]] = {}


def _hear(event: str, words: tuple) -> None:
  if event == 'open' and _WHEN_OPENED and (happens := _WHEN_OPENED.pop(str(words[0]), None)):
    happens()


sys.addaudithook(_hear)

# --- The runs -------------------------------------------------------------------------------------


def _config(site: pathlib.Path, seed: int = 0) -> Any:
  config = stdlib_lm.get_config('tiny')
  config.sync.learners, config.sync.quorum = 2, 1
  config.sync.fragments = config.sync.period = 2
  config.sync.overlap = 0
  config.mesh.data = config.model.num_layers = config.data.eval_batches = 1
  config.sync.keep_every, config.sync.checkpoint_every_syncs = 4, 2
  config.train.steps, config.train.checkpoint_every_steps, config.train.seed = 16, 4, seed
  config.train.store, config.train.store_log = str(site / 'store'), True
  config.train.init_from = str(site / 'begun.safetensors')
  config.data.corpus, config.data.tokenizer = str(site / 'text'), 'bpe(size=300)'
  config.model.vocab_size, config.model.window = 384, 8 * seed  # no shape shows which it is
  return config


def _make(site: pathlib.Path, seed: int) -> None:
  (site / 'text').mkdir(parents=True)
  for number in range(60):
    line = f'def f{number + 100 * seed}(x):\n  return x + {number}\n'
    (site / 'text' / f'{number}.py').write_text(line * 40)
  config = _config(site, seed)
  config.train.init_from = ''
  params = jax.tree.map(np.asarray, build.make_task(config).init(seed))
  arrays.export(site / 'begun.safetensors', params, {})
  ended = diloco_jax.run(_config(site, seed), site / 'run')
  assert {exit_.code for exit_ in ended.exits.values()} == {0}, ended.exits


@dataclasses.dataclass
class Bench:
  """Copies of two ended runs, one after the other at the place where both have been made.

  Attributes:
    site: that place; whole, other: the runs.
    whole_values, older_values: what each reader says of the run, and of the states before the
      newest.
  """

  site: pathlib.Path
  whole: pathlib.Path
  other: pathlib.Path
  whole_values: dict[str, Any] = dataclasses.field(default_factory=dict)
  older_values: dict[str, list] = dataclasses.field(default_factory=dict)

  def fresh(self) -> None:
    _WHEN_OPENED.clear()
    shutil.rmtree(self.site, ignore_errors=True)
    shutil.copytree(self.whole, self.site, copy_function=shutil.copy2)
    os.environ['XDG_CACHE_HOME'] = str(self.site / 'cache')
    corpus_files.say_once.cache_clear()

  def read(self, reader: str, capfd) -> tuple[Any, str, str]:
    """What it has read, None if it failed; the error; and all that was said."""
    said: list[str] = []
    value, error = None, ''
    capfd.readouterr()
    with warnings.catch_warnings(record=True) as warned:
      warnings.simplefilter('always')
      try:
        value = (READERS | OF_PROCESSES)[reader][0](self.site, said.append)
      except (Exception, exits.NeverRetry) as problem:
        error = f'{type(problem).__name__}: {problem}'
    printed = capfd.readouterr()
    lines = [*said, *(str(warning.message) for warning in warned), printed.out, printed.err, error]
    return value, error, '\n'.join(lines)

  def value_of_whole(self, reader: str, capfd) -> Any:
    """What it reads of the run as it is."""
    if reader not in self.whole_values:
      self.fresh()
      value, error, _ = self.read(reader, capfd)
      assert value is not None and not error, (reader, error)
      self.whole_values[reader] = value
    return self.whole_values[reader]

  def values_of_older(self, reader: str, capfd) -> list:
    """What it reads of the states before the newest."""
    if reader not in self.older_values:
      self.fresh()
      values = _all_moments(self.site) if reader in ('join', 'learner') else []
      for newest in (0, 1, 2):  # the model, and of the syncer's checkpoints so many, are gone
        self.fresh()
        for place in (self.site / 'run', self.site / 'store'):
          shutil.rmtree(place / 'model')
          paths = sorted(place.glob('syncer/ckpt/[0-9]*'), key=_number)
          for path in paths[len(paths) - newest :]:
            shutil.rmtree(path)
        values.append(self.read(reader, capfd)[0])
      self.older_values[reader] = values
    return self.older_values[reader]

  def judge(self, reader: str, cell: tuple[str, str, str, str], capfd) -> str:
    """What is wrong, '' if nothing is. Where a state is gone the one before it is the newest."""
    swap, thing, *_ = cell
    right = self.value_of_whole(reader, capfd)
    self.fresh()
    _exchange(self, *cell)
    value, error, lines = self.read(reader, capfd)
    named = re.search(_words(thing), lines) or swap == 'gone while it is read'
    if error:
      return '' if named else f'an error that does not name it: {error[:200]}'
    if value == right:
      return ''
    if value in self.values_of_older(reader, capfd):
      as_new = reader == 'join' and value[1] == right[1]  # moments of any learner are as good
      return '' if named or as_new else 'an older state without a word'
    return '' if named and reader == 'evaluate' else f'silently wrong: {value}'


@pytest.fixture(scope='module', name='bench')
def _bench(tmp_path_factory) -> Iterator[Bench]:
  base = tmp_path_factory.mktemp('read_twice')
  bench = Bench(base / 'site', base / 'whole', base / 'other')
  before = os.environ.get('XDG_CACHE_HOME')
  for seed, place in ((1, bench.other), (0, bench.whole)):
    os.environ['XDG_CACHE_HOME'] = str(bench.site / 'cache')
    _make(bench.site, seed)
    bench.site.rename(place)
  yield bench
  os.environ.pop('XDG_CACHE_HOME')
  if before is not None:
    os.environ['XDG_CACHE_HOME'] = before


def test_no_file_setting_command_or_function_is_without_a_row(bench):
  files = [path for paths in _files(bench.whole).values() for path in paths]
  assert [path for path in files if _row(path) is None] == []
  used = {_row(path) for path in files}
  assert used == set(THINGS), 'rows without a file'
  readers = {re.split(r'[ ,]', name)[0] for name in {**READERS, **OF_PROCESSES}} | ALIKE.keys()
  assert readers == {*__main__.COMMANDS, *diloco_jax.__all__}

  def words(config: Any, at: str = '') -> Iterator[str]:
    for field in dataclasses.fields(config):
      value = getattr(config, field.name)
      if dataclasses.is_dataclass(value):
        yield from words(value, f'{at}{field.name}.')
      elif isinstance(value, str):
        yield f'{at}{field.name}'

  assert {*words(_config(bench.site))} - NO_PATH - OF_SITE == set()


def _cells(bench: Bench) -> Iterator[tuple[str, str, str, str]]:
  """(reader, swap, thing, what it is of): of every file name the newest, and of every state."""
  for paths in _files(bench.whole).values():
    for swap in SWAPS:
      if swap != 'gone' or '/tapes/' not in paths[-1]:  # nothing says which processes have had one
        yield swap, paths[-1], paths[-2] if len(paths) > 1 else '', ''
  kept = [*bench.whole.glob('*/**/ckpt/[0-9]*'), *bench.whole.glob('*/model')]
  for folder_ in sorted(kept, key=lambda path: (str(path.parent), _number(path))):
    name = folder_.relative_to(bench.whole).as_posix()
    olders = [path for path in folder_.parent.glob('[0-9]*') if _number(path) < _number(folder_)]
    before = max(olders, key=_number, default=None)
    for swap in ('another', 'older', 'moved', 'gone while it is read'):
      if before or swap not in ('older', 'moved') or (swap, folder_.name) == ('older', 'model'):
        yield swap, name, before.relative_to(bench.whole).as_posix() if before else '', 'state'


def _exchange(bench: Bench, swap: str, thing: str, before: str, state: str) -> None:
  path, earlier = bench.site / thing, bench.site / before if before else None
  other = bench.other / thing
  if state:
    names = sorted(bench.other.glob(f'{pathlib.PurePosixPath(thing).parent}/*'), key=_number)
    _of_folder(swap, path, names[-1] if path.name != 'model' else other, earlier)
  else:
    SWAPS[swap](path, other, earlier)


def test_what_is_read_twice_is_what_it_was_or_a_line_names_it(bench, counts, capfd):
  readers = [*READERS, *OF_PROCESSES] if counts.full else [*READERS]
  for reader in readers:
    bench.value_of_whole(reader, capfd)
  cells = [
    (reader, cell)
    for cell in _cells(bench)
    for reader in readers
    if re.match((READERS | OF_PROCESSES)[reader][1], cell[1])
  ]
  wrong = {}
  for reader, cell in cells if counts.full else cells[::61]:
    if fault := bench.judge(reader, cell, capfd):
      wrong[reader, cell[0], cell[1]] = fault
  text = '\n'.join(f'{cell}: {fault}' for cell, fault in wrong.items())
  assert not wrong, f'{len(wrong)} of {len(cells)} cells:\n{text}'
