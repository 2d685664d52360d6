"""A floor under the time of an inner step, and the program of a learner with one.

Processes that share a machine get faster when one of them dies; islands of accelerators do not. A
step that computes less than its floor and sleeps for the rest takes the same time all along.
"""

import time

from absl import flags

from diloco_jax.launch import entrypoints, program
from diloco_jax.learner import work as learner_work
from diloco_jax.train import island as island_lib


def put(island: island_lib.Island, floor_s: float) -> None:
  """From now on a step of the island takes `floor_s` at least, and says so."""
  compute = island.step

  def step(clock: int) -> island_lib.StepResult:
    start_s = time.monotonic()
    result = compute(clock)
    time.sleep(max(0.0, start_s + floor_s - time.monotonic()))
    return result._replace(seconds=time.monotonic() - start_s)

  island.step = step


class _Work(learner_work.LearnerWork):
  """The work of a learner whose steps have a floor."""

  def __init__(self, assembled, island, *rest):
    put(island, flags.FLAGS.floor_s)
    super().__init__(assembled, island, *rest)


def main(argv: list[str]) -> int:
  del argv
  values = flags.FLAGS
  where = values.workdir, values.learner_id, values.syncer
  return entrypoints.learner(program.config(), *where, program.access(), work_class=_Work)


def define_flags() -> None:
  """Those of a program that stands in for `diloco learner`."""
  program.define_config()
  program.define_access()
  program.define_files()
  for name in ('workdir', 'learner_id', 'syncer'):
    flags.DEFINE_string(name, None, 'as that of `diloco learner`', required=True)
  flags.DEFINE_float('floor_s', 0.0, 'the least time of an inner step')


if __name__ == '__main__':
  define_flags()
  program.run_main(main)
