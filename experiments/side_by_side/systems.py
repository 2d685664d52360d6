"""The four systems: the same model, batch, floor and kills under different rules of waiting.

| system | when a process dies |
|---|---|
| Decoupled DiLoCo | the others train on; the syncer merges what arrives (the defaults) |
| lock-step DiLoCo | the others wait at the end of their period until it is back (K = M) |
| restart-all | data-parallel: every process starts again, from the last checkpoint |
| ideal elastic | data-parallel: the others go on at once; at every step all live ones wait |

Restart-all starts again with all M processes, not with M - 1 while one is down: the others start at
once and wait for it, so that all is ready when it comes; with M - 1 they would have to start twice.

Ideal elastic has the waiting of elastic data-parallel training, without its costs: the survivors
keep their processes and their state. Its arithmetic is DiLoCo with H = 1: it averages the changes
of one inner step.
"""

import dataclasses
import socket
from collections.abc import Callable

from diloco_jax.config import run_config
from diloco_jax.configs import stdlib_lm
from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.verification import plans, random_streams

LEARNERS = 4
EVERY_S = 60.0  # each learner is killed once in this time, on average
DOWN_S = 8.0  # from a kill to the start of the next process
FLOOR_S = 0.2  # from one inner step to the next
_SECOND_NS = 1_000_000_000
_PROGRAM, _SYNCER = ['diloco_jax', 'learner'], ['diloco_jax', 'syncer']
_LEARNER = 'experiments.side_by_side.floor'
_DATA_PARALLEL = 'experiments.side_by_side.data_parallel'
_WAITS = 'experiments.side_by_side.elastic'


def _decoupled(sync: run_config.SyncConfig) -> None:
  """The defaults of the package's config."""


def _lock_step(sync: run_config.SyncConfig) -> None:
  sync.quorum, sync.fragments, sync.overlap, sync.max_lag = sync.learners, 1, 0, 0


def _elastic(sync: run_config.SyncConfig) -> None:
  sync.quorum = sync.fragments = sync.period = 1
  sync.overlap = sync.max_lag = 0
  sync.codec_up = sync.codec_down = 'float32'
  sync.merge, sync.outer = 'avg', 'nesterov(learning_rate=1.0, momentum=0.0)'


DECOUPLED, LOCK_STEP = 'Decoupled DiLoCo', 'lock-step DiLoCo'
RESTART_ALL, ELASTIC = 'restart-all', 'ideal elastic'
SYSTEMS: dict[str, Callable[[run_config.SyncConfig], None]] = {
  DECOUPLED: _decoupled,
  LOCK_STEP: _lock_step,
  RESTART_ALL: _decoupled,  # it has no syncer
  ELASTIC: _elastic,
}


def config_of(system: str, seed: int, learners: int = LEARNERS) -> run_config.Config:
  """The config of a run. It has no end of its own, so that the inner rate stays at its peak: a
  system that trains fewer steps in the same time would else end at another rate."""
  config = stdlib_lm.small()
  config.name = system.replace(' ', '-').lower()
  config.data.seed = config.train.seed = seed
  config.sync.learners = learners
  config.sync.checkpoint_every_syncs = 200
  SYSTEMS[system](config.sync)
  config.train.steps = 10**6
  config.train.eval_every, config.train.log_every = 0, 100
  config.train.checkpoint_every_steps = 25
  return config


def kills(seed: int, learners: list[str], seconds: float) -> list[plans.Fault]:
  """Kills at independent times, each learner once in EVERY_S on average and never while it is down.

  >>> [(round(one.at_ns / 1e9), one.node) for one in kills(0, ['l0', 'l1'], 60.0)]
  [(27, 'l1'), (57, 'l0')]
  """
  draw = random_streams.random_stream(seed, 'kills')
  faults: list[plans.Fault] = []
  while len(faults) < round(len(learners) * seconds / EVERY_S):
    at_ns, node = round(draw.uniform(0, seconds) * _SECOND_NS), draw.choice(learners)
    down_ns = round(DOWN_S * _SECOND_NS)
    apart_ns = down_ns + _SECOND_NS  # so that its next process has been started
    if all(fault.node != node or abs(fault.at_ns - at_ns) > apart_ns for fault in faults):
      faults.append(plans.Fault(at_ns=at_ns, kind='kill', node=node, for_ns=down_ns))
  return sorted(faults, key=lambda fault: fault.at_ns)


def program(
  system: str, floor_s: float, local_program: supervisor_lib.LocalProgram
) -> supervisor_lib.LocalProgram | None:
  """The program of a system that runs instead of this one of a run of the package; None: none."""
  python, option, *words = local_program.command
  if words[: len(_SYNCER)] == _SYNCER and system == ELASTIC:
    return dataclasses.replace(
      local_program, command=[python, option, _WAITS, *words[len(_SYNCER) :]]
    )
  if words[: len(_PROGRAM)] != _PROGRAM:
    return None if system == RESTART_ALL else local_program
  module = _DATA_PARALLEL if system == RESTART_ALL else _LEARNER
  command = [python, option, module, *words[len(_PROGRAM) :], f'--floor_s={floor_s}']
  environment = {**local_program.environment, 'JAX_PLATFORMS': 'cpu'}
  return dataclasses.replace(local_program, command=command, environment=environment)


def free_address() -> str:
  """An address of this machine with a port that the kernel has just found free."""
  with socket.socket() as listener:
    listener.bind(('127.0.0.1', 0))
    return f'127.0.0.1:{listener.getsockname()[1]}'
