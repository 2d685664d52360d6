"""The payload of a faulty host is refused, and the others are merged as if it had been absent."""

import math

import jax
import numpy as np
import pytest

from diloco_jax.config import build
from diloco_jax.configs import stdlib_lm
from diloco_jax.numerics import merge
from diloco_jax.protocol import actions
from diloco_jax.protocol.syncer import screening as screening_lib
from diloco_jax.syncer import global_model


@pytest.fixture(scope='module', name='assembled')
def _assembled() -> build.Assembly:
  config = stdlib_lm.get_config('tiny')
  config.sync.fragments, config.sync.period, config.sync.overlap = 1, 3, 2
  config.validate()
  return build.assemble(config)


def test_a_refused_payload_changes_no_bit_of_the_merge(assembled):
  """As if the learner had been absent."""
  size = assembled.layout.size(0)

  def encoded(seed):
    values = np.random.default_rng(seed).normal(scale=1e-2, size=size).astype(np.float32)
    return bytes(jax.jit(assembled.codec_up.encode)(values)[0])

  def spoiled(scale: int, data: bytes) -> bytes:
    """With this exponent of its first eight blocks (numerics/codecs.py)."""
    return bytes([scale] * 8) + data[8:]

  payloads = [
    encoded(0),
    spoiled(255, encoded(1)),  # NaN
    encoded(2),
    spoiled(150, encoded(3)),
  ]
  limit = 10 * 10**-2 * math.sqrt(size) * screening_lib.UNIT
  participants = [
    actions.Participant(
      learner=f'l{m}', incarnation=1, payload_id=m, tokens=64, steps=4, limit=int(limit)
    )
    for m in range(4)
  ]
  theta, without = global_model.Theta(assembled), global_model.Theta(assembled)
  screened = theta.screen(
    participants, np.stack([theta.lengths(0, payload) for payload in payloads])
  )
  assert screened.refused == ('l1', 'l3')
  assert screened.norms[1] == screening_lib.NOT_FINITE and screened.norms[3] > 1000 * limit
  honest = 1e-2 * math.sqrt(size) * screening_lib.UNIT
  assert all(math.isclose(screened.norms[m], honest, rel_tol=0.1) for m in (0, 2))
  merged = theta.merge(0, participants, payloads, ('l1', 'l3'))
  assert merged.digest == without.merge(0, participants[:3], payloads[:3], ('l1',)).digest
  all_refused = theta.merge(0, participants, payloads, ('l0', 'l1', 'l2', 'l3'))
  assert all_refused.failed == global_model.ALL_REJECTED
  assert all_refused.digest == theta.digest(0)


def test_a_learner_that_claims_all_steps_moves_the_model_at_most_twice_as_far(assembled):
  """Its payload is as long as the limit allows one of so many steps, and junk."""
  size = assembled.layout.size(0)
  draw = np.random.default_rng(0)
  rows = [draw.normal(scale=scale, size=size).astype(np.float32) for scale in (1, 1, 1, 16)]
  payloads = [bytes(jax.jit(assembled.codec_up.encode)(row)[0]) for row in rows]
  participants = [
    actions.Participant(
      learner=f'l{m}', incarnation=1, payload_id=m, tokens=64 * claims, steps=4 * claims
    )
    for m, claims in enumerate((1, 1, 1, 1000))
  ]
  honest, lied = (
    global_model.Theta(assembled).merge(0, participants[:n], payloads[:n], ()).norm for n in (3, 4)
  )
  assert 0 < lied < 2 * honest


@pytest.mark.parametrize('steps, counts_in_full', [((1, 1, 1, 3), True), ((3, 3, 3, 3), False)])
def test_a_payload_is_compared_with_those_of_about_as_many_steps(
  steps, counts_in_full, assembled, monkeypatch
):
  """At the start of a run late payloads of one step meet one of a whole period."""
  size, draw = assembled.layout.size(0), np.random.default_rng(0)
  rows = [draw.normal(scale=scale, size=size).astype(np.float32) for scale in (1, 1, 1, 12)]
  payloads = [bytes(jax.jit(assembled.codec_up.encode)(row)[0]) for row in rows]
  participants = [
    actions.Participant(
      learner=f'l{m}', incarnation=1, payload_id=m, tokens=64 * count, steps=count
    )
    for m, count in enumerate(steps)
  ]
  merged = lambda: global_model.Theta(assembled).merge(0, participants, payloads, ()).norm
  found = merged()
  monkeypatch.setattr(merge, 'LONGEST', 1e9)
  assert (found == merged()) == counts_in_full
