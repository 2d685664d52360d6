"""One seed: a run of the production machines with faults, then without, then judged.

In the first phase the faults of the setting happen, and safety must hold. Then all faults end, as a
good operator would end them, and the run must reach its end. The checkers judge what tapes hold;
the claims of arrays.py and of this file judge what only the simulated world knows.
"""

import dataclasses
import traceback
from collections.abc import Sequence
from typing import Any

from diloco_jax.protocol.tape import observers
from diloco_jax.verification.checks import checkers as checkers_lib
from diloco_jax.verification.sim import arrays, random_settings
from diloco_jax.verification.sim import engine as engine_lib
from diloco_jax.verification.sim import faults as faults_lib
from diloco_jax.verification.sim import processes as sim_processes
from diloco_jax.verification.sim import world as world_lib

CALM_NS = 1_200 * engine_lib.SECOND  # far longer than any healed run
GOODBYE_NS = 30 * engine_lib.SECOND
LONGEST_STEP_NS = 400 * engine_lib.SECOND


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
  """The broken sentence, its invariant's id (or 'claim', 'check', 'crash' or 'circle'), and the
  values that contradict it."""

  invariant: str
  sentence: str
  detail: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
  """The result of a seed. `events` is the number of turns of the machines in `virtual_ns`, `faults`
  the kinds of the faults that found their target."""

  seed: int
  events: int
  virtual_ns: int
  faults: tuple[str, ...]
  violation: Violation | None


def run_seed(
  seed: int, watchers: Sequence[observers.Observer] = (), note: Any = lambda now_ns, text: None
) -> Outcome:
  """Runs one seed; a violation ends it and is in the outcome.

  Args:
    seed: determines the whole run.
    watchers: observers that see every turn before the checkers do.
    note: called with each fault and phase: (time in ns, text).
  """
  setting, count = random_settings.draw(seed), observers.Count()
  checkers = checkers_lib.Checkers(setting.config)
  world = world_lib.World(setting.config, seed, (count, *watchers, checkers))
  nemesis = faults_lib.Nemesis(world, setting.plan, note)
  violation = None
  try:
    _run(world, setting, nemesis, checkers, note)
  except checkers_lib.Violation as broken:
    violation = Violation(
      invariant=broken.invariant, sentence=broken.sentence, detail=str(broken.detail)
    )
  except engine_lib.Circle as circle:
    violation = Violation(invariant='circle', sentence='Time advances.', detail=str(circle))
  except sim_processes.MachineCrash as crash:
    violation = Violation(
      invariant='crash', sentence='No machine raises.', detail=f'{crash}\n{_traceback()}'
    )
  except AssertionError as broken:
    violation = Violation(
      invariant='check', sentence="A machine's own check holds.", detail=f'{broken}\n{_traceback()}'
    )
  except Exception as bug:
    bug.add_note(f'This is a bug of the simulator, in: diloco simulate --seed={seed} --story')
    raise
  return Outcome(
    seed=seed,
    events=count.events,
    virtual_ns=world.now_ns,
    faults=tuple(fault.kind for fault in nemesis.done),
    violation=violation,
  )


def _traceback() -> str:
  return ''.join(traceback.format_exc(limit=-3))


def _run(
  world: world_lib.World,
  setting: random_settings.Setting,
  nemesis: faults_lib.Nemesis,
  checkers: checkers_lib.Checkers,
  note: Any,
) -> None:
  random_settings.furnish(world, setting)
  for which in range(setting.config.learners):
    world.start(f'l{which}')
  if setting.guest_ns is not None:
    world.engine.at(setting.guest_ns, lambda: world.start('guest'))
  world.run(setting.heal_ns)
  note(world.now_ns, 'all faults are healed')
  nemesis.heal()
  checkers.healed(world.now_ns)
  _finish(world, nemesis)
  checkers.finished(world.now_ns)
  _check_ledger(world)


def _finish(world: world_lib.World, nemesis: faults_lib.Nemesis) -> None:
  """Runs until every process has ended; stops the processes that outlive the syncer."""
  nemesis.supervise()
  world.run(world.now_ns + CALM_NS, done=lambda: world.finished)
  arrays.require(world.finished, 'A healed run ends.', world.stuck())
  world.run(world.now_ns + GOODBYE_NS, done=lambda: not world.learners)
  for process in list(world.learners.values()):
    process.stop('the run is over')
  world.run(world.now_ns + LONGEST_STEP_NS, done=lambda: not world.learners)
  arrays.require(not world.learners, 'A learner that is asked to stop ends.', world.stuck())


def _check_ledger(world: world_lib.World) -> None:
  """Compares the last ledger with what the world saw (fragment-tokens); the rest is I7's."""
  ledger, theta = world.ledger(), world.syncer.theta
  arrays.require(
    world.flipped or not ledger.repaired,
    'No adopted value differs unless a bit was flipped.',
    ledger,
  )
  arrays.require(theta.finite, 'The global state is finite.')
  arrays.require(
    ledger.merged == sum(theta.merged.values()),
    'The ledger counts exactly the merged tokens as merged.',
    ledger,
    theta.merged,
  )
  for name, row in ledger.learners.items():
    arrays.require(
      row['merged'] == theta.merged.get(name, 0),
      'The ledger counts exactly the merged tokens as merged.',
      name,
      row,
      theta.merged,
    )
