"""A joiner on a slow link gets in, and contributes soon after its bytes can have arrived.

Real gRPC over a proxy that lets so many bytes a second pass. Before, pings and heartbeats waited
behind payloads for longer than their limits, the session broke, and everything was sent again.
"""

import pytest

from diloco_jax.protocol import messages
from tests.runs.lib import slow_joiner

KB = slow_joiner.KB
pytestmark = pytest.mark.long


@pytest.mark.parametrize(
  'rate, scale', [(400 * KB, 5), pytest.param(250 * KB, 1, marks=pytest.mark.full)]
)
def test_a_joiner_on_a_slow_link_contributes(rate, scale):
  """3 MB of fragments (a fifth of it by default) at 1.2 times the rate of the updates."""
  sizes = slow_joiner.sizes(rate, rate / 1.2, 3e6 / scale)
  lines = []
  took_s = slow_joiner.contributes_after_s(sizes, 20 + 2 * sizes.need_s, lines.append)
  assert took_s < float('inf'), '\n'.join(lines)


def test_a_model_of_twelve_times_what_may_wait_for_a_learner_is_joined():
  """The syncer sent all fragments at once, the session broke, and so for ever."""
  sizes = slow_joiner.large(rate=40_000 * KB, queues=12)
  assert sizes.fragments * sizes.whole >= 11.9 * sizes.max_queued
  lines = []
  took_s = slow_joiner.contributes_after_s(sizes, 100, lines.append)
  assert took_s < float('inf'), '\n'.join(lines)
  assert sizes.most_wholes <= messages.MAX_WHOLES, '\n'.join(lines)
  assert not any('disconnected' in line for line in lines), '\n'.join(lines)
