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


def _payloads(assembled, *scales: float) -> list[bytes]:
  """Encoded normal values of each scale."""
  size, draw = assembled.layout.size(0), np.random.default_rng(0)
  encode = jax.jit(assembled.codec_up.encode)
  rows = [draw.normal(scale=scale, size=size).astype(np.float32) for scale in scales]
  return [bytes(encode(row)[0]) for row in rows]


def _participants(*steps: int, **more) -> list[actions.Participant]:
  return [
    actions.Participant(
      learner=f'l{m}', incarnation=1, payload_id=m, tokens=16 * count, steps=count, **more
    )
    for m, count in enumerate(steps)
  ]


def test_a_refused_payload_changes_no_bit_of_the_merge(assembled):
  """As if the learner had been absent."""
  payloads = _payloads(assembled, *[1e-2] * 4)
  for m, exponent in ((1, 255), (3, 150)):  # of the first eight blocks; 255: NaN
    payloads[m] = bytes([exponent] * 8) + payloads[m][8:]
  honest = 1e-2 * math.sqrt(assembled.layout.size(0)) * screening_lib.UNIT
  limit = 10 * honest
  participants = _participants(4, 4, 4, 4, limit=int(limit))
  theta, without = global_model.Theta(assembled), global_model.Theta(assembled)
  screened = theta.screen(
    participants, np.stack([theta.lengths(0, payload) for payload in payloads])
  )
  assert screened.refused == ('l1', 'l3')
  assert screened.norms[1] == screening_lib.NOT_FINITE and screened.norms[3] > 1000 * limit
  assert all(math.isclose(screened.norms[m], honest, rel_tol=0.1) for m in (0, 2))
  merged = theta.merge(0, participants, payloads, ('l1', 'l3'))
  assert merged.digest == without.merge(0, participants[:3], payloads[:3], ('l1',)).digest
  all_refused = theta.merge(0, participants, payloads, ('l0', 'l1', 'l2', 'l3'))
  assert all_refused.failed == global_model.ALL_REJECTED
  assert all_refused.digest == theta.digest(0)


def test_a_learner_that_claims_all_steps_moves_the_model_at_most_twice_as_far(assembled):
  """Its payload is as long as the limit allows one of so many steps, and junk."""
  payloads = _payloads(assembled, 1, 1, 1, 16)
  participants = _participants(4, 4, 4, 4000)
  honest, lied = (
    global_model.Theta(assembled).merge(0, participants[:n], payloads[:n], ()).norm for n in (3, 4)
  )
  assert 0 < lied < 2 * honest


@pytest.mark.parametrize('steps, counts_in_full', [((1, 1, 1, 3), True), ((3, 3, 3, 3), False)])
def test_a_payload_is_compared_with_those_of_about_as_many_steps(
  steps, counts_in_full, assembled, monkeypatch
):
  """At the start of a run late payloads of one step meet one of a whole period."""
  payloads, participants = _payloads(assembled, 1, 1, 1, 12), _participants(*steps)
  norm = lambda: global_model.Theta(assembled).merge(0, participants, payloads, ()).norm
  limited = norm()
  monkeypatch.setattr(merge, 'LONGEST', 1e9)
  assert (limited == norm()) == counts_in_full
