"""Random failures of the requests of a syncer to its store, and deaths: no outer step that a
learner can have seen is lost, and no half copy or record counts."""

import pathlib
import random

import pytest

from diloco_jax.storage import claim as claim_lib
from diloco_jax.storage import states
from diloco_jax.storage import store as store_lib
from diloco_jax.syncer import stored
from tests.storage import fake_gcs
from tests.syncer import test_durability as durability
from tests.syncer import test_stored

DISKS = 3  # of which any may be the next
assembled, expected = durability._assembled, durability._expected


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
  monkeypatch.setattr(claim_lib, 'EXPIRED_S', 0.0)
  monkeypatch.setattr(claim_lib, 'RENEW_S', 0.5)
  monkeypatch.setattr(claim_lib, 'LOOK_S', 0.1)
  monkeypatch.setattr(stored, '_RETRY_S', 0.05)
  monkeypatch.setattr(fake_gcs, 'SLOW_S', 0.1)


class Story:
  """Processes that follow each other on drawn disks of one run, while requests fail."""

  def __init__(self, expected, site: test_stored.Site, draw: random.Random, log: bool):
    self.expected, self.site, self.draw, self.log = expected, site, draw, log
    self.safe = 0  # the newest outer step that must not be lost

  def life(self) -> None:
    try:
      life = self.site.live(f'disk{self.draw.randrange(DISKS)}', store_log=self.log)
    except (store_lib.StoreError, states.StateError):
      return  # it is started again
    except claim_lib.Denied as error:  # another disk has all of the run
      assert not self.log and not self.safe and 'has no whole copy' in str(error)
      return
    at = life.log.position['log']
    assert at >= self.safe, f'outer steps {at + 1} to {self.safe} are lost'
    assert test_stored.bits(life.theta) == self.expected[at], f'outer step {at} is another'
    for sync in range(at + 1, min(at + self.draw.randint(0, 3), durability.SYNCS) + 1):
      life.merge(sync)
      if self.log:
        self.safe = sync
      if self.draw.random() < 0.5:
        assert not life.save(sync).error
        if self.draw.random() < 0.5:
          life.copied()
          self.safe = sync
    if self.draw.random() < 0.2:
      life.end()
      self.safe = max(self.safe, life.log.position['log'] if self.log else 0)
    else:
      life.kill()


def _play(assembled, expected, bucket, folder: pathlib.Path, seed: int, log: bool, failures: int):
  """Runs follow each other until so many requests have failed."""
  draw = random.Random(seed)
  faults = bucket.door.faults = fake_gcs.Faults(seed, rate=0.25, most=failures)
  run = 0
  while faults.injected.total() < failures:
    run += 1
    site = test_stored.Site(assembled, folder / str(run), f'{bucket.url}/run{run}')
    story = Story(expected, site, draw, log)
    try:
      while story.safe < durability.SYNCS and faults.injected.total() < failures:
        story.life()
      story.life()
    finally:
      site.kill()


@pytest.mark.parametrize(
  ('seed', 'log', 'failures'),
  [
    (1, True, 30),
    *(pytest.param(seed, seed % 2 == 0, 100, marks=pytest.mark.full) for seed in range(2, 10)),
  ],
)
def test_failures_of_requests_lose_no_outer_step(
  assembled, expected, bucket, tmp_path, seed, log, failures
):
  _play(assembled, expected, bucket, tmp_path, seed, log, failures)
  assert bucket.door.faults.injected.keys() == set(fake_gcs.KINDS)
