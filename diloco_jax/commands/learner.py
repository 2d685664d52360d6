r"""Runs a learner as a process; with --syncer=none it trains alone.

    diloco learner --config=stdlib_lm:cpu \
      --workdir=runs/by_hand --learner_id=l0 --syncer=file:runs/by_hand/syncer/address

    # On another machine than the syncer: mutual TLS (diloco certs --help).
    diloco learner --config=stdlib_lm:cpu \
      --workdir=runs/by_hand --learner_id=l0 --syncer=HOST:7070 --tls=certs/l0

    # The data-parallel baseline: the same jitted step on all the tokens, without a syncer.
    diloco learner --config=stdlib_lm:data_parallel \
      --workdir=runs/data_parallel --learner_id=l0 --syncer=none

Started again with the same --workdir, the learner continues from its checkpoint. Exit codes: 0
done, or the run has ended; 42 never retry; anything else retry.
"""

from absl import flags

from diloco_jax.launch import cli

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.', required=True)
_LEARNER_ID = flags.DEFINE_string(
  'learner_id',
  None,
  'The id of this learner, for example l0.',
  required=True,
)
_SYNCER = flags.DEFINE_string(
  'syncer',
  None,
  'Where the syncer listens: HOST:PORT, unix:PATH, or file:PATH of a file with one of these; none: '
  'no syncer.',
  required=True,
)
cli.define_access()
cli.define_config()
cli.define_files()


def main(argv: list[str]) -> int:
  del argv
  config = cli.config()
  if _SYNCER.value != 'none':  # the imports and the compilation take a while
    print(f'{_LEARNER_ID.value} starts, then joins the syncer at {_SYNCER.value}', flush=True)
  with cli.importing_jax():  # after the config is validated
    from diloco_jax.launch import nodes

  return nodes.learner(config, _WORKDIR.value, _LEARNER_ID.value, _SYNCER.value, cli.access())
