"""Swarm testing: every seed draws its own configuration, hardware, network and faults.

Each rate of faults is zero in about a third of the seeds, so that rare combinations occur and a
common fault does not hide another. Every topic has its own random stream (random_streams.py).
"""

import dataclasses
import functools
import random

from diloco_jax.protocol import config as config_lib
from diloco_jax.verification import plans, random_streams
from diloco_jax.verification.sim import engine as engine_lib
from diloco_jax.verification.sim import network as network_lib
from diloco_jax.verification.sim import world as world_lib

MS, SECOND = engine_lib.MS, engine_lib.SECOND


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """The settings of one seed: the numbers of the run, its world, and its faults.

  Attributes:
    config: of the machines.
    up_ns, down_ns, bulk_ns, encode_ns, step_ns: per learner.
    jitter_ns: of every link.
    loss, duplicate: of every link until healing, per mille.
    noise: of every step, per mille.
    fsync_ns: of a record of the syncer's log.
    plan: the faults.
    heal_ns: when all faults end.
    slow_link: of the first learner until a time: additional time of a payload up and down, and that
      time; None: it has no slow link.
    guest_ns: when one additional learner starts, None: never; no fault hits it.
  """

  config: config_lib.ProtocolConfig
  up_ns: list[int]
  down_ns: list[int]
  bulk_ns: list[int]
  encode_ns: list[int]
  step_ns: list[int]
  jitter_ns: int
  loss: int
  duplicate: int
  noise: int
  fsync_ns: int
  plan: list[plans.Fault]
  heal_ns: int
  slow_link: tuple[int, int, int] | None
  guest_ns: int | None


LEASES = (SECOND, SECOND, 2 * SECOND, 4 * SECOND)


def _config(seed: int) -> config_lib.ProtocolConfig:
  stream = functools.partial(random_streams.random_stream, seed)
  draw, screen, adopt = stream('config'), stream('screening'), stream('adopt')
  learners, period = draw.randint(1, 5), draw.randint(1, 6)
  long = draw.randrange(4) == 0
  return config_lib.ProtocolConfig(
    learners=learners,
    period=period,
    fragments=draw.randint(1, period),
    overlap=draw.randint(0, min(3, period - 1)),
    quorum=draw.randint(1, learners),
    max_lag=draw.choice([None, None, draw.randrange(period)]),
    max_staleness=draw.randint(0, 2),
    grace_permille=draw.choice([0, 500, 999]),
    total_steps=draw.randint(50, 80) if long else draw.randint(1, 24),
    start_wait_ns=draw.choice([0, 300 * MS]),
    lease_ns=stream('lease').choice(LEASES),
    save_steps=draw.choice([0, 3]),
    save_syncs=draw.choice([0, 1, 4]),
    norm_factor=screen.choice([0, 10, 10]),
    norm_warmup=screen.choice([1, 1, 2, 8]),
    strikes=screen.choice([0, 1, 2, 3]),
    shards=learners + stream('streams').choice((0, 0, 1, 3)),
    adopt=config_lib.ADOPT.index(adopt.choice(('rebase', 'rebase', 'rebase', 'overwrite'))),
    ahead=adopt.randint(0, min(2, max(1, period - 1))),
    max_misses=adopt.choice((0, 1, 2, 2)),
    local=stream('local').choice((0, 0, 0, 1)),
    patience_ns=stream('patience').choice([300 * MS, 30 * SECOND]),
    keep_every=stream('keeping').choice([0, 0, 7, 20]),
  )


def _rate(draw: random.Random, *values: int) -> int:
  """One of these, or 0 in a third of the cases."""
  return draw.choice(values) if draw.randrange(3) else 0


DURATIONS = (20 * MS, 200 * MS, SECOND // 2, 2 * SECOND, 4 * SECOND)
AMOUNTS = {
  'preempt': (0, 30 * MS, SECOND),
  'slow': (3, 10, 30),
  'shrink': (2, 5),
  'delay': (30 * MS, 400 * MS, 2 * SECOND),
  'throttle': (200, 2_000, 20_000),
  'nan': tuple(range(6)),
  'huge': (1, 1, 3),
  'poison': (1, 1, 3),
  'flip': tuple(range(6)),
  'fsync_fails': (1, 2),
}
SYNCER_KINDS = (
  'kill',
  'preempt',
  'freeze',
  'partition',
  'reset',
  'delay',
  'nan',
  'disk_full',
  'fsync_fails',
  'rot',
  'corrupt',
)
DURABILITY_KINDS = ('kill', 'nan', 'disk_full', 'fsync_fails', 'rot')  # these need the log


def _plan(seed: int, learners: int, until_ns: int) -> list[plans.Fault]:
  """Faults of each kind, with their own rate and their own random stream."""
  faults = []
  for node in (plans.SYNCER, *(f'l{i}' for i in range(learners))):
    kinds = SYNCER_KINDS if node == plans.SYNCER else plans.KINDS + plans.SIMULATED_KINDS
    for kind in kinds:
      if not _rate(random_streams.random_stream(seed, 'rate', kind), 1):
        continue
      draw = random_streams.random_stream(seed, 'plan', node, kind)
      often = node == plans.SYNCER and kind in DURABILITY_KINDS
      for _ in range(max(0, draw.randrange(-4, 4) if often else draw.randrange(-12, 3))):
        faults.append(
          plans.Fault(
            at_ns=draw.randrange(until_ns),
            kind=kind,
            node=node,
            for_ns=draw.choice(DURATIONS),
            amount=draw.choice(AMOUNTS.get(kind, (0,))),
          )
        )
  return sorted(faults, key=lambda fault: (fault.at_ns, fault.node, fault.kind))


def _with_slow_link(seed: int, setting: Setting) -> Setting:
  """In a quarter of the seeds: the first learner has so many times of what the pace leaves for a
  payload, in a run in which that matters, and whose other links are good."""
  draw = random_streams.random_stream(seed, 'slow link')
  if draw.randrange(4):
    return setting
  old = setting.config
  period = max(2, old.period)
  config = dataclasses.replace(
    old,
    learners=max(2, old.learners),
    quorum=min(old.quorum, max(1, old.learners - 1)),
    shards=old.shards + 1,
    period=period,
    overlap=min(max(1, old.overlap), period - 1),
    max_lag=None,
    adopt=config_lib.ADOPT.index('rebase'),
    total_steps=draw.randint(60, 150),
  )
  step_ns = draw.choice((10 * MS, 50 * MS, 160 * MS))
  slot_ns = period * step_ns // config.fragments
  up_ns, down_ns = (int(draw.choice((0.1, 0.1, 2, 4, 8)) * slot_ns) for _ in range(2))
  until_ns = draw.randrange(config.total_steps) * step_ns
  count = config.learners
  return dataclasses.replace(
    setting,
    config=config,
    up_ns=(setting.up_ns * 2)[:count],
    down_ns=(setting.down_ns * 2)[:count],
    bulk_ns=[0] * count,
    encode_ns=(setting.encode_ns * 2)[:count],
    step_ns=[step_ns] * count,
    slow_link=(up_ns, down_ns, until_ns),
  )


def draw(seed: int) -> Setting:
  """The setting of a seed."""
  config = _config(seed)
  net, hardware = (random_streams.random_stream(seed, of) for of in ('links', 'islands'))
  learners = range(config.learners)
  heal_ns = random_streams.random_stream(seed, 'healing').choice((SECOND, 3 * SECOND, 8 * SECOND))
  setting = Setting(
    config=config,
    up_ns=[net.choice((0, MS, 7 * MS, 40 * MS, 150 * MS)) for _ in learners],
    down_ns=[net.choice((0, MS, 7 * MS, 40 * MS, 150 * MS)) for _ in learners],
    bulk_ns=[net.choice((0, MS, 40 * MS, 150 * MS, 700 * MS)) for _ in learners],
    encode_ns=[hardware.choice((0, MS, 7 * MS, 150 * MS)) for _ in learners],
    step_ns=[hardware.choice((10 * MS, 17 * MS, 50 * MS, 160 * MS, 700 * MS)) for _ in learners],
    jitter_ns=_rate(net, MS, 30 * MS, 300 * MS),
    loss=_rate(net, 5, 50, 200),
    duplicate=_rate(net, 5, 50, 300),
    noise=_rate(hardware, 100, 2_000),
    fsync_ns=random_streams.random_stream(seed, 'fsync').choice((0, 5 * MS, 50 * MS)),
    plan=_plan(seed, config.learners, heal_ns),
    heal_ns=heal_ns,
    slow_link=None,
    guest_ns=random_streams.random_stream(seed, 'guest').choice((None, None, None, heal_ns // 3)),
  )
  return _with_slow_link(seed, setting)


def furnish(world: world_lib.World, setting: Setting) -> None:
  """Gives every host its hardware, and every learner its link."""
  world.fsync_ns = world.syncer.fsync_ns = setting.fsync_ns
  for which in range(setting.config.learners):
    for name in (f'l{which}', f'l{which}*'):
      island, link = world.island(name), world.link(name)
      island.step_ns, island.noise = setting.step_ns[which], setting.noise
      island.encode_ns = island.adopt_ns = setting.encode_ns[which]
      link.up_ns, link.down_ns = setting.up_ns[which], setting.down_ns[which]
      link.bulk_up_ns = link.bulk_down_ns = setting.bulk_ns[which]
      link.jitter_ns = setting.jitter_ns
      link.loss, link.duplicate = setting.loss, setting.duplicate
  if setting.slow_link is not None:
    link = world.link('l0')
    link.bulk_up_ns, link.bulk_down_ns, until_ns = setting.slow_link
    world.engine.at(until_ns, lambda: _recover(link, setting.bulk_ns[0]))


def _recover(link: network_lib.Link, bulk_ns: int) -> None:
  link.bulk_up_ns = link.bulk_down_ns = bulk_ns
