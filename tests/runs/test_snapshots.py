"""Real processes, all killed, then restored from a run snapshot with other learners and meshes.

One run serves all tests: `tiny` with three learners of two devices takes run snapshots; all
processes are killed at once; a bit of the newest snapshot flips; `diloco restore --to=latest`
brings it back to the snapshot before, with two learners of one device, and `diloco train --resume`
continues until the test requests another one.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from diloco_jax.launch import local_run
from diloco_jax.report import records
from diloco_jax.storage import manifests
from tests.runs.lib import slow_data

DEADLINE_S = 280
COMMON = (
  '--config=stdlib_lm:tiny',
  '--chaos=off',
  slow_data.FLAG,
  '--config.train.steps=1000000',
  '--config.train.log_every=1000',
  '--config.train.eval_every=0',
  '--config.train.checkpoint_every_steps=1000',
  '--config.sync.checkpoint_every_syncs=3',
)
ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass
class Story:
  """The manifests before the kill, the damaged one, and the output and facts after the restore."""

  workdir: pathlib.Path
  before: dict[int, manifests.Manifest]
  damaged: int
  said: str
  code: int
  facts: list[tuple[str, dict]]  # of the second half, in the order of time

  @property
  def taken(self) -> manifests.Manifest:
    """The manifest from which the run continued."""
    return self.before[sorted(self.before)[-2]]

  def of(self, process: str, name: str) -> list[dict]:
    return [fact for who, fact in self.facts if (who, fact['name']) == (process, name)]


@contextlib.contextmanager
def running(
  command: str, workdir: pathlib.Path, output: pathlib.Path, *flags: str
) -> Iterator[subprocess.Popen]:
  environment = local_run.environment(1)
  with open(output, 'ab') as file:
    process = subprocess.Popen(
      [sys.executable, '-m', 'diloco_jax', command, *flags, f'--workdir={workdir}'],
      cwd=ROOT,
      env=environment,
      stdout=file,
      stderr=subprocess.STDOUT,
    )
    try:
      yield process
    finally:
      if process.poll() is None:
        process.kill()
      process.wait()


def until(condition: Callable[[], object], output: pathlib.Path) -> None:
  end_s = time.monotonic() + DEADLINE_S
  while not condition():
    assert time.monotonic() < end_s, output.read_text()
    time.sleep(0.05)


def family(process: subprocess.Popen) -> list[psutil.Process]:
  root = psutil.Process(process.pid)
  return [root, *root.children(recursive=True)]


@pytest.fixture(scope='module', name='story')
def _story(tmp_path_factory) -> Story:
  folder = tmp_path_factory.mktemp('snapshots')
  workdir, first, second = folder / 'run', folder / 'first.txt', folder / 'second.txt'
  flags = (*COMMON, '--config.sync.snapshot_every_syncs=4')
  with running('train', workdir, first, *flags) as process:
    until(lambda: len(manifests.numbers(workdir)) >= 2, first)
    members = family(process)
    for one in members:
      with contextlib.suppress(psutil.NoSuchProcess):
        one.kill()
    process.wait()
    psutil.wait_procs(members, timeout=DEADLINE_S)
  tail = records.TailAll(workdir)
  tail.read()
  before = {number: manifests.read(workdir, number) for number in manifests.numbers(workdir)}
  damaged = max(before)
  pinned = str(before[damaged].checkpoint)
  record = manifests.syncer_folder(workdir) / manifests.CHECKPOINTS / pinned / 'record/data.json'
  data = bytearray(record.read_bytes())
  data[len(data) // 2] ^= 1
  record.write_bytes(data)
  flags = ('--to=latest', '--config.sync.learners=2', '--config.mesh.data=1')
  with running('restore', workdir, second, *flags) as process:
    assert process.wait(DEADLINE_S) == 0, second.read_text()
  with running('train', workdir, second, '--resume') as process:
    facts = []

    def under_way() -> bool:
      facts.extend(tail.read())
      done = {(who, fact['name']) for who, fact in facts}
      return done >= {('l0', 'step'), ('l1', 'step'), ('syncer', 'outer')}

    until(lambda: process.poll() is not None or under_way(), second)
    kept = manifests.numbers(workdir)
    holder = json.loads((workdir / 'syncer' / 'wal' / 'lock').read_text())
    os.kill(holder['pid'], signal.SIGUSR1)
    until(lambda: process.poll() is not None or manifests.numbers(workdir) != kept, second)
    assert process.poll() is None, second.read_text()
    process.send_signal(signal.SIGTERM)
    code = process.wait(DEADLINE_S)
  return Story(workdir, before, damaged, second.read_text(), code, [*facts, *tail.read()])


def test_the_first_half_took_whole_snapshots(story):
  assert len(story.before) >= 2
  for manifest in story.before.values():
    assert set(manifest.learners) | set(dict(manifest.missing)) <= {'l0', 'l1', 'l2'}
    assert manifest.step >= 4 and not manifest.unverified


def test_restore_skips_a_damaged_snapshot_with_one_line(story):
  pinned = story.before[story.damaged].checkpoint
  lines = [line for line in story.said.splitlines() if 'damaged or partial' in line]
  assert len(lines) == 1 and re.match(
    rf'snapshot {story.damaged} is damaged or partial and is skipped.*syncer/ckpt/{pinned} ',
    lines[0],
  ), story.said
  aside = story.workdir / 'aside-1'
  assert (aside / 'snapshots' / f'{story.damaged}.json').exists()
  assert (aside / 'syncer' / 'ckpt' / str(pinned)).is_dir()


def test_the_syncer_continues_from_its_part(story):
  (recovered,) = story.of('syncer', 'recovered')
  assert (recovered['sync'], recovered['replayed']) == (story.taken.step, 0)
  assert sum(recovered['versions']) == recovered['log']  # no outer step was refused
  later = {}
  for outer in story.of('syncer', 'outer'):
    later.setdefault(outer['fragment'], []).append(outer['version'])
  assert later
  for fragment, found in later.items():
    first = recovered['versions'][fragment] + 1
    assert found == list(range(first, first + len(found)))


def test_learners_continue_from_their_parts_on_another_mesh(story):
  for learner in ('l0', 'l1'):
    part = story.taken.learners.get(learner)
    if part is None:
      assert f'{learner} starts from the fragments of the syncer' in story.said
    else:
      assert f'{learner} continues from its checkpoint at clock {part.checkpoint}' in story.said
    assert story.of(learner, 'step'), story.said
  assert story.taken.learners, 'the snapshot has no learner'


def test_a_learner_without_a_place_has_left(story):
  assert 'l2 is not in this config' in story.said
  assert not story.of('l2', 'step')


def test_a_snapshot_is_taken_when_asked_and_the_run_ends_in_order(story):
  assert story.code == 130, story.said
  assert not story.of('supervisor', 'refused')
  newest = manifests.read(story.workdir, max(manifests.numbers(story.workdir)))
  assert newest.snapshot > story.taken.snapshot
  assert set(newest.learners) | set(dict(newest.missing)) <= {'l0', 'l1'}
  ledger = story.of('syncer', 'ledger')[-1]
  discarded = sum(ledger['discarded'].values())
  assert ledger['trained'] * ledger['fragments'] == (
    ledger['merged'] + discarded + ledger['unsettled']
  )
  row = ledger['learners'].get('l2')  # closed: none of its tokens is unsettled
  assert row is None or row['tokens'] * ledger['fragments'] == row['merged'] + row['discarded']
  assert json.loads((story.workdir / 'config.json').read_text())['sync']['learners'] == 2
