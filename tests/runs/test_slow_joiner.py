"""A joiner on a slow link gets in, and contributes soon after its bytes can have arrived.

Real gRPC over a proxy that lets so many bytes a second pass. Before, pings and heartbeats waited
behind payloads for longer than their limits, the session broke, and everything was sent again.
"""

import pytest

from tests.runs.lib import slow_joiner

KB = slow_joiner.KB


@pytest.mark.parametrize(
  'rate, scale', [(400 * KB, 5), pytest.param(250 * KB, 1, marks=pytest.mark.full)]
)
def test_a_joiner_on_a_slow_link_contributes(rate, scale):
  """3 MB of fragments (a fifth of it by default) at 1.2 times the rate of the updates."""
  sizes = slow_joiner.sizes(rate, rate / 1.2, 3e6 / scale)
  told = []
  took_s = slow_joiner.contributes_after_s(sizes, 20 + 2 * sizes.need_s, told.append)
  assert took_s < float('inf'), '\n'.join(told)
