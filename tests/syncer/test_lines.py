"""The lines of the syncer about its learners: the newest one is so in the end."""

import types
from typing import Any

import pytest

from diloco_jax.protocol import facts
from diloco_jax.syncer import node as syncer_node

LEDGER = facts.Ledger(
  fragments=1, trained=0, merged=0, discarded={}, unsettled=0, learners={}, sync=0, synced=0,
  cancelled=0, repaired=0, skipped=0,
)  # fmt: skip


class Lines:
  """The lines of a syncer; time passes in `at`."""

  def __init__(self, monkeypatch: Any):
    self.said, self.now_s = [], 1000.0
    clock = {
      'monotonic': lambda: self.now_s, 'monotonic_ns': lambda: int(self.now_s * 1e9)
    }  # fmt: skip
    monkeypatch.setattr(syncer_node, 'time', types.SimpleNamespace(**clock))
    records = types.SimpleNamespace(say=self.said.append, report=lambda fact: None)
    traffic = types.SimpleNamespace(received_bytes=0, sent_bytes=0)
    config = types.SimpleNamespace(
      sync=types.SimpleNamespace(learners=2), train=types.SimpleNamespace(steps=10)
    )
    assembled = types.SimpleNamespace(config=config, parameters=1)
    self.records = syncer_node.SyncerRecords(records, traffic, assembled, None)

  def at(self, second: float, state: str = '') -> None:
    """Ledgers until this second, then l0 has joined or is lost."""
    while self.now_s < 1000 + second:
      self.now_s += 1
      self.records.report(LEDGER)
    if state:
      fact = facts.Member(learner='l0', state=state, incarnation=1, reason='no heartbeat')
      self.records.report(fact)


@pytest.fixture(name='lines')
def _lines(monkeypatch):
  return Lines(monkeypatch)


@pytest.mark.parametrize('ends', [False, True])
def test_a_learner_that_is_lost_twice_in_a_minute_and_for_good_is_lost_in_the_newest_line(
  lines, ends
):
  for second, state in ((0, 'joined'), (5, 'lost'), (10, 'joined'), (20, 'lost')):
    lines.at(second, state)
  assert lines.said[-1].startswith('l0 joined')
  if ends:
    lines.records.report_owed(ended=True)
  lines.at(200)
  assert lines.said[-1].startswith('l0 is lost: no heartbeat') and len(lines.said) == 4


def test_a_learner_that_comes_and_goes_all_the_time_prints_two_lines_a_minute(lines):
  for second in range(0, 1200, 4):
    lines.at(second, 'joined')
    lines.at(second + 2, 'lost')
  assert 20 <= len(lines.said) <= 44
  lines.at(1300)
  assert lines.said[-1].startswith('l0 is lost')
  count = len(lines.said)
  lines.at(2000)
  assert len(lines.said) == count
