"""A learner of a run, as a process; with --syncer=none it trains alone.

    python -m experiments.learner --config=experiments/configs/stdlib_lm.py:cpu \
      --workdir=runs/by_hand --learner_id=l0 --syncer=127.0.0.1:7070

    # The data-parallel baseline: the same jitted step, all the tokens, nobody to talk to.
    python -m experiments.learner --config=experiments/configs/stdlib_lm.py:data_parallel \
      --workdir=runs/data_parallel --learner_id=l0 --syncer=none

Start it again with the same --workdir and it goes on from its checkpoint. Exit codes: 0 done, 42
never retry, anything else retry.
"""

from absl import flags

from diloco_jax.launch import program

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.', required=True)
_LEARNER_ID = flags.DEFINE_string(
  'learner_id',
  None,
  'Its name in the run, like l0.',
  required=True,
)
_SYNCER = flags.DEFINE_string(
  'syncer',
  None,
  "HOST:PORT of the syncer, file:PATH of a file that holds it, or 'none'.",
  required=True,
)
program.define_config()


def main(argv: list[str]) -> int:
  del argv
  config = program.config()
  from diloco_jax.launch import entrypoints  # after the config is known to be good: imports jax

  return entrypoints.learner(config, _WORKDIR.value, _LEARNER_ID.value, _SYNCER.value)


if __name__ == '__main__':
  program.run_main(main)
