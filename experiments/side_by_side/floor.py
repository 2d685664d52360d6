"""A floor under the time from one inner step to the next, and the program of a learner with one.

Processes that share a machine get faster when one of them dies, both their steps and their
exchanges; islands of accelerators do not. A step that sleeps until a fixed time after the one
before takes the same time all along, as long as computing and exchanging take less than the floor.
After a pause that is longer the next step does not sleep: a system loses a floor less by it.
"""

import time

from absl import flags

from diloco_jax.launch import cli
from diloco_jax.learner import work as learner_work
from diloco_jax.process import learner as learner_process
from diloco_jax.train import island as island_lib


def put(island: island_lib.Island, floor_s: float) -> None:
  """From now on a step of the island ends `floor_s` after the one before, or later."""
  finish, ended_s = island.finish, -floor_s

  def finish_later() -> island_lib.StepResult:
    nonlocal ended_s
    result = finish()
    start_s = max(ended_s, time.monotonic() - result.seconds)
    time.sleep(max(0.0, ended_s + floor_s - time.monotonic()))
    ended_s = time.monotonic()
    return result._replace(seconds=ended_s - start_s)

  island.finish = finish_later


class _Work(learner_work.LearnerWork):
  """The work of a learner whose steps have a floor."""

  def __init__(self, assembled, island, *rest):
    put(island, flags.FLAGS.floor_s)
    super().__init__(assembled, island, *rest)


def main(argv: list[str]) -> int:
  del argv
  values = flags.FLAGS
  where = values.workdir, values.learner, values.syncer
  return learner_process.learner(cli.config(), *where, cli.access(), work_class=_Work)


def define_flags() -> None:
  """Those of a program that stands in for `diloco learner`."""
  cli.define_config()
  cli.define_access()
  for name in ('workdir', 'learner', 'syncer'):
    flags.DEFINE_string(name, None, 'as that of `diloco learner`', required=True)
  flags.DEFINE_float('floor_s', 0.0, 'the least time between two inner steps')


if __name__ == '__main__':
  define_flags()
  cli.run_main(main)
