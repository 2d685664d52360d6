r"""Runs a learner as a process; with --syncer=none it trains alone.

    diloco learner --config=stdlib_lm:cpu \
      --workdir=runs/by_hand --learner=l0 --syncer=file:runs/by_hand/syncer/address

    # On another machine than the syncer: mutual TLS (diloco certs --help).
    diloco learner --config=stdlib_lm:cpu --learner=l0 --syncer=HOST:7070 \
      --workdir=runs/by_hand --tls=certs/l0

    # The data-parallel baseline: the same step on all the tokens, no syncer.
    diloco learner --config=stdlib_lm:data_parallel --learner=l0 \
      --workdir=runs/data_parallel --syncer=none

    # Two hosts; on the second one --host=1. On TPU VMs and GKE --hosts=auto is
    # enough on each. All hosts need one folder, or a train.store.
    diloco learner --config=stdlib_lm:cpu --learner=l0 --syncer=HOST:7070 \
      --workdir=/shared/by_hand --tls=certs/l0 \
      --hosts=2 --host=0 --coordinator=HOST0:8476

Started again with the same --workdir, the learner continues from its checkpoint. Exit codes: 0
done, or the run has ended; 42 never retry; anything else retry.
"""

from absl import flags

from diloco_jax.launch import cli
from diloco_jax.process import exits

_WORKDIR = flags.DEFINE_string('workdir', None, 'The folder of the run.', required=True)
_LEARNER = flags.DEFINE_string(
  'learner', None, 'The id of this learner, for example l0.', required=True
)
_SYNCER = flags.DEFINE_string(
  'syncer',
  None,
  'Where the syncer listens: HOST:PORT, unix:PATH, or file:PATH of a file with one of these; with '
  'none the learner trains alone.',
  required=True,
)
_HOSTS = flags.DEFINE_string(
  'hosts', '1', 'The number of hosts of this learner; with auto jax finds them, on TPU VMs and GKE.'
)
_HOST = flags.DEFINE_integer('host', 0, 'The number of this host among them; host 0 leads.')
_COORDINATOR = flags.DEFINE_string(
  'coordinator', '', 'The HOST:PORT of the lead, where the hosts of this learner meet.'
)
cli.define_access()
cli.define_config()
cli.define_metrics()


def main(argv: list[str]) -> int:
  del argv
  config = cli.config()
  hosts = _number_of_hosts()
  if _SYNCER.value != 'none':  # the imports and the compilation take a while
    print(f'{_LEARNER.value} starts, then joins the syncer at {_SYNCER.value}', flush=True)
  with cli.importing_jax():  # after the config is validated
    from diloco_jax.learner import hosts as hosts_lib
    from diloco_jax.process import learner as learner_process

  cluster = None if hosts == 1 else hosts_lib.Cluster(hosts, _HOST.value, _COORDINATOR.value)
  cli.serve_metrics(_LEARNER.value)
  access = cli.access(_LEARNER.value)
  return learner_process.learner(
    config, _WORKDIR.value, _LEARNER.value, _SYNCER.value, access, cluster=cluster
  )


def _number_of_hosts() -> int:
  """0: jax finds it. Raises NeverRetry."""
  text = _HOSTS.value
  if text != '1' and _SYNCER.value == 'none':
    raise exits.NeverRetry('--syncer=none: a learner without a syncer has one host')
  if text == 'auto':
    return 0
  if not text.isdecimal() or int(text) < 1:
    raise exits.NeverRetry(f'--hosts={text}: give the number of hosts, or auto')
  hosts = int(text)
  if not 0 <= _HOST.value < hosts:
    raise exits.NeverRetry(f'--host={_HOST.value}: with --hosts={hosts} it is 0 to {hosts - 1}')
  if hosts > 1 and not _COORDINATOR.value:
    raise exits.NeverRetry(f'--hosts={hosts} needs --coordinator=HOST:PORT of the lead')
  return hosts
