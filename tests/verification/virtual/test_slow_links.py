"""One of four learners has a slow link: what is used of its work, and what it costs the others.

The protocol alone, in virtual time, with payloads of real sizes: M = 4, P = H = 12, tau = 3, 600
steps. A payload of the last learner takes 1.5 to 8 steps. The whole table, in about a minute:

    python -m pytest tests/verification/virtual/test_slow_links.py --all -s
"""

import functools

import pytest

from diloco_jax.protocol import actions, facts
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.syncer import links as links_lib
from diloco_jax.protocol.tape import observers
from diloco_jax.verification.sim import world as world_lib
from diloco_jax.verification.virtual import conditions, links

FRAGMENTS, STEP_S, STEPS = 12, 0.25, 600
SLOW = 'l3'
TAKES = (1.5, 2.0, 4.0, 8.0)  # steps of a payload of int8
HARDWARE = conditions.Hardware(step_s=STEP_S, lognormal=0.2, encode=0.005, adopt=0.005, merge=0.02)


def protocol(**settings) -> config_lib.ProtocolConfig:
  values = {'total_steps': STEPS, 'save_steps': 0, 'max_step_tokens': links.TOKENS}
  return config_lib.ProtocolConfig(**(values | settings))


def model(slow: str):
  return links.sizes([1 << 22] * FRAGMENTS, 'int8', 'int8', slow)


def network(up: float, down: float) -> conditions.Network:
  """`up`, `down`: the steps that a payload takes on the link of the last learner."""
  size = model('').payload_bytes[0] * 1.05  # with headers
  line = conditions.Line(up=size / (up * STEP_S), down=size / (down * STEP_S))
  return conditions.Network(latency=0.001, lines=(conditions.Line(),) * 3 + (line,))


def run(up: float, down: float = 0.02, slow: str = 'int4', **settings) -> links.Prediction:
  return links.predict(protocol(**settings), model(slow), HARDWARE, network(up, down), seed=1)


def show(name: str, got: links.Prediction) -> None:
  others = min(share for learner, share in got.merged.items() if learner != SLOW)
  up, down = (sum(bytes_.values()) / 1e6 for bytes_ in (got.up_bytes, got.down_bytes))
  print(f'\n{name}: {SLOW} {got.merged[SLOW]:.3f}, others {others:.3f}, {up:.0f} + {down:.0f} MB')


def today(monkeypatch) -> None:
  """Nothing is asked of a link."""
  monkeypatch.setattr(links_lib.Links, '_judge', lambda self, member: None)


def test_a_smaller_codec_comes_before_a_longer_period():
  got = run(1.5)
  show('1.5 steps up', got)
  assert min(got.merged.values()) > 0.995


@pytest.mark.full
@pytest.mark.parametrize('down', [False, True])
@pytest.mark.parametrize('takes', TAKES)
def test_a_slow_link_costs_the_others_nothing(takes, down, monkeypatch):
  ways = takes, takes if down else 0.02
  got = {'default': run(*ways), 'int8': run(*ways, slow='')}
  today(monkeypatch)
  before = run(*ways, slow='')
  for name, result in (got | {'nothing adapts': before}).items():
    show(f'{takes} steps up{" and down" if down else ""}, {name}', result)
  for result in got.values():
    assert min(share for name, share in result.merged.items() if name != SLOW) >= 0.995
    assert sum(result.up_bytes.values()) <= sum(before.up_bytes.values())
    assert sum(result.down_bytes.values()) <= 1.01 * sum(before.down_bytes.values())
  if not down:
    assert min(result.merged[SLOW] for result in got.values()) >= 0.95


class Asked(observers.Observer):
  """What the syncer has asked of the slow learner, with times in steps."""

  def __init__(self):
    self.facts: list[tuple[float, facts.Link]] = []

  def saw(self, process, now_ns, event, out):
    for action in out:
      if isinstance(action, actions.Report) and isinstance(action.fact, facts.Link):
        self.facts.append((now_ns / HARDWARE.ns(1), action.fact))


@pytest.mark.parametrize(
  'takes, period, fragments',
  [(4.0, 12, 12)]
  + [
    pytest.param(*case, marks=pytest.mark.full)
    for case in ((8.0, 12, 12), (16.0, 12, 12), (8.0, 12, 4), (4.0, 4, 4))
  ],
)
def test_a_link_that_recovers_is_used_again_within_three_periods(takes, period, fragments):
  recovers, asked = 300, Asked()
  sizes = links.sizes([1 << 22] * fragments, 'int8', 'int8', '')
  config = protocol(period=period, fragments=fragments, total_steps=recovers + 8 * period)
  world = world_lib.World(config, 1, (asked,), sizes)
  names = [f'l{m}' for m in range(4)]
  slow = network(takes * period / fragments, 0.02)
  conditions.furnish(world, names, HARDWARE, slow, links.TOKENS)
  for name in names:
    world.start(name)
  world.run(HARDWARE.ns(recovers))
  assert asked.facts[-1][1].periods > 1
  good = functools.partial(setattr, world.link(SLOW).pipes['up'], '_bytes_per_s')
  good(10**12)
  world.run(HARDWARE.ns(100 * recovers), done=lambda: world.finished)
  at, fact = asked.facts[-1]
  assert fact.periods == 1
  assert at <= recovers + 3 * period, asked.facts[-5:]
