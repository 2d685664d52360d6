"""Syncers that are killed and lose their disk: the run continues from its store.

Real processes, as in test_syncer_kills.py. SIGKILL ends each process of the syncer, at a failpoint
or at any moment, and then WORKDIR/syncer is removed, as with the machine. The next process is one
on another disk, so it waits until the claim is EXPIRED_S old.
"""

import functools
import pathlib
import shutil
import signal
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diloco_jax
from diloco_jax.configs import own_loop
from diloco_jax.report import records as records_lib
from diloco_jax.storage import claim as claim_lib
from diloco_jax.storage import store as store_lib
from tests import programs
from tests.runs import test_syncer_kills as kills
from tests.runs.lib import conductor, failpoints, promises

DEADLINE_S = 1500
pytestmark = [pytest.mark.full, pytest.mark.timeout(1600)]
PLACES = (
  'store.in_copy',  # of the first checkpoint: the store has nothing else than records
  'wal.after_append',
  'store.after_put',
  'wal.after_commit',
  'store.after_copy',
  'compact.after',
  kills.ANY,
)


class Conductor(kills.Conductor):
  """Removes the syncer's folder before each of its processes but the first."""

  def __init__(
    self,
    workdir: pathlib.Path,
    recorder: records_lib.Recorder,
    plan: tuple[str, ...],
    overrides: dict[str, Any],
  ):
    self._removed = 0
    overrides = {**overrides, 'train.store': f'{workdir}-store'}
    super().__init__(workdir, recorder, plan, 0, 0, overrides=overrides)

  def _place_of_next_life(self) -> str:
    lived = self.supervisor.statuses['syncer'].starts
    if lived > self._removed:
      self._removed = lived
      shutil.rmtree(self.workdir / 'syncer')
    return super()._place_of_next_life()

  async def carry_out(self) -> None:
    await self._kill_the_syncer()
    self.supervisor.retire()


def play(workdir: pathlib.Path, plan: tuple[str, ...], **overrides: Any) -> kills.Run:
  make = functools.partial(Conductor, plan=plan, overrides=overrides)
  conducted, left = conductor.play(workdir, make, DEADLINE_S)
  return kills.Run(**vars(left), conducted=conducted)


@pytest.fixture(scope='module', name='logged')
def _logged(tmp_path_factory) -> kills.Run:
  return play(tmp_path_factory.mktemp('logged'), PLACES, **{'train.store_log': True})


def test_every_process_ends_as_planned(logged):
  assert set(PLACES) >= {name for name in failpoints.NAMES if name.startswith('store.')}
  assert logged.outcome.code == 0, '\n'.join(logged.said)
  assert len(logged.deaths('syncer')) == len(PLACES)


def test_no_version_that_a_learner_has_adopted_is_lost(logged):
  assert logged.lost_versions() == [0] * len(PLACES)
  assert any(fact['version'] > 0 for fact in logged.of('l0', 'adopted'))
  assert not [line for line in logged.said if 'gone:' in line]


def test_a_version_has_the_same_bits_in_every_process(logged):
  kills.test_a_version_has_the_same_bits_in_every_process(logged)


def test_the_run_keeps_every_promise(logged):
  promises.check(logged)


def test_without_the_log_the_run_continues_behind_the_last_copy(tmp_path):
  run = play(tmp_path, (kills.ANY, 'store.in_copy', kills.ANY))
  assert run.outcome.code == 0, '\n'.join(run.said)
  said = [line for line in run.said if 'gone:' in line]
  assert said and all('only the disk of' in line for line in said), run.said
  store = store_lib.Store(f'{tmp_path}-store')
  content, _ = claim_lib.read(store)
  assert content.released and content.log > 0


# --- Two syncers ----------------------------------------------------------------------------------


@pytest.fixture(name='start')
def _start(bucket, tmp_path):
  """Starts `diloco syncer` of the same run on another disk; the key is its disk."""
  store = f'--config.train.store={bucket.url}/run'
  with programs.starting() as start:
    yield lambda disk: start(
      *programs.diloco('syncer', '--config=stdlib_lm:tiny', f'--workdir={tmp_path / disk}', store)
    )


def test_a_second_syncer_ends_with_42_and_changes_nothing(bucket, start):
  first = start('a')
  first.wait_for('held-out loss')
  before = {**bucket.objects, f'run/{claim_lib.NAME}': b''}
  second = start('b')
  assert second.end() == 42 and f'the syncer pid {first.process.pid} on ' in second.text, second
  assert {**bucket.objects, f'run/{claim_lib.NAME}': b''} == before
  first.send(signal.SIGTERM)
  assert first.end() == 0, first
  start('b').wait_for('the syncer listens on')  # the claim is released


# --- Loops of a user's own ------------------------------------------------------------------------


def test_a_syncer_of_own_loops_on_another_disk_knows_the_model(tmp_path):
  """With the records in the store, so that it knows every outer step, too."""
  place, workdir, steps = tmp_path / 'store', tmp_path / 'run', 2000
  words = ['--config=own_loop', f'--workdir={workdir}', '--config.sync.learners=1']
  words += [f'--config.train.steps={steps}', f'--config.train.store={place}']
  command = programs.diloco('syncer', *words, '--config.train.store_log=true')
  sync = own_loop.get_config().sync
  sync.learners = 1
  params, address = {name: jnp.ones((8, 8)) for name in 'abcd'}, workdir / 'syncer' / 'address'
  with programs.starting() as start:
    syncer = start(*command)
    with diloco_jax.join(
      params, learner='l0', syncer=f'file:{address}', total_steps=steps, sync=sync
    ) as peer:
      params = peer.params
      killed = False
      for _ in peer.steps():
        params = peer.sync(jax.tree.map(lambda leaf: leaf * 0.99, params), tokens=1)
        if not killed and len([*place.glob('syncer/wal/*.rec')]) > 3:
          killed = True
          syncer.kill()
          shutil.rmtree(workdir / 'syncer')
          syncer = start(*command)
        if not killed or not address.exists():
          time.sleep(0.1)  # so that steps are left for the other one
    assert syncer.end() == 0, syncer
  assert 'waits for the first learner' not in syncer.text and 'gone' not in syncer.text, syncer
  assert 'the syncer continues from' in syncer.text, syncer
  stored = diloco_jax.load_params(place)  # from the store alone
  jax.tree.map(np.testing.assert_array_equal, stored, diloco_jax.load_params(workdir))
