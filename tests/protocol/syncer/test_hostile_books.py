"""Processes come and go by the thousand: what the syncer keeps of them does not grow, and an outer
step costs what it cost before."""

import json
import time
from typing import Any

import pytest

from diloco_jax.protocol import messages
from diloco_jax.protocol.tape import codec
from tests.protocol import single

IDS, DEATHS = 1_000, 10_000
PAYLOAD_BYTES = 2 * 8_448  # in a record of `tiny`, beside the machine state
ALLOWED = 1.05


def record_bytes(machine: Any) -> int:
  """The size of a record of the log: the payloads of two learners and the machine state."""
  return PAYLOAD_BYTES + len(codec.encode(machine.state()))


class Visitors:
  """Processes that become members, report a step, and go."""

  def __init__(self, machine: Any):
    self._machine, self._session = machine, 100

  def come_and_go(self, learner: str, now_ns: int) -> None:
    self._session += 1
    session, nonce, machine = self._session, self._session, self._machine
    machine.handle(now_ns, single.received(session, single.join(learner, nonce)))
    offers = machine._members.offer(single.join(learner, nonce))
    confirm = messages.Confirm(
      nonce=nonce,
      incarnation=offers,
      clock=0,
      steps=0,
      tokens=0,
      held=(messages.Held(version=0, digest=77),),
      shard=None,
      cursor=0,
    )
    machine.handle(now_ns, single.received(session, confirm))
    machine.handle(now_ns, single.received(session, single.progress(1)))
    machine.handle(now_ns, single.events.Disconnected(session=session, reason='gone'))


@pytest.fixture(name='machine')
def _machine() -> Any:
  return single.two_learners_of(quorum=1, shards=4)


def test_made_up_ids_are_forgotten(machine):
  before = record_bytes(machine)
  visitors = Visitors(machine)
  for number in range(IDS):
    visitors.come_and_go(f'm{number}', 3 + number)
  machine.check()
  assert record_bytes(machine) <= ALLOWED * before
  json.loads(codec.encode(machine.state()))


def test_an_outer_step_after_many_deaths_costs_what_it_cost_before(machine):
  visitors = Visitors(machine)
  for number in range(10):
    visitors.come_and_go('y', 3 + number)
  size, cost_s = record_bytes(machine), seconds(machine)
  for number in range(DEATHS):
    visitors.come_and_go('y', 20 + number)
  machine.check()
  assert record_bytes(machine) <= ALLOWED * size
  assert seconds(machine) <= 3 * cost_s


def seconds(machine: Any) -> float:
  """The least time that the books of an outer step take: the machine state, and the ledger."""
  took = []
  for _ in range(20):
    began = time.thread_time()
    codec.encode(machine.state())
    machine._report_ledger()
    machine._out.take()
    took.append(time.thread_time() - began)
  return min(took)
