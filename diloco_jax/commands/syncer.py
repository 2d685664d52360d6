r"""Runs the syncer as a process.

    diloco syncer --config=stdlib_lm:cpu \
      --workdir=runs/by_hand

    # For training loops of your own (diloco_jax.join); the first of them brings the model.
    diloco syncer --config=own_loop --config.train.steps=300 --workdir=runs/own

    # For learners on other machines: mutual TLS (diloco certs --help).
    diloco syncer --config=stdlib_lm:cpu --workdir=runs/by_hand \
      --listen=0.0.0.0:7070 --tls=certs/syncer

The syncer listens on a Unix socket of this user alone, unless --listen says otherwise, and writes
the address to WORKDIR/syncer/address, and at the end of the run that it has ended; learners may
start earlier with `--syncer=file:WORKDIR/syncer/address`. Without certificates no other machine can
connect. Started again with the same command after any end, the syncer continues from its checkpoint
and its log in WORKDIR/syncer. Exit codes: 0 done, 42 never retry, 74 the disk failed or is full, or
the syncer did not end in time (retry), anything else retry.
"""

import os

from absl import flags

from diloco_jax.config import run_config
from diloco_jax.configs import own_loop
from diloco_jax.launch import cli
from diloco_jax.process import exits

_WORKDIR = flags.DEFINE_string('workdir', None, 'The folder of the run.', required=True)
_LISTEN = flags.DEFINE_string(
  'listen',
  '',
  'Where to listen: HOST:PORT, with --tls (the kernel chooses a port for 0), or unix:PATH. '
  'The default is a Unix socket in the folder of the run.',
)
_INIT = flags.DEFINE_string(
  'init',
  '',
  'With --config=own_loop: the folder of version 0 of the model, a tree of named arrays that '
  'Orbax wrote; learners then join without label=. Without it the first learner brings the model.',
)
_PROCESSES = flags.DEFINE_integer(
  'transport_processes',
  0,
  'The number of processes that serve the sessions, with --listen=HOST:PORT, where this process '
  'alone cannot carry all payloads (`diloco plan` says how many); with 0 it does so itself.',
  lower_bound=0,
  upper_bound=64,
)
cli.define_access()
cli.define_config()
cli.define_metrics()


def main(argv: list[str]) -> int:
  del argv
  config = cli.config()
  os.environ['JAX_PLATFORMS'] = 'cpu'  # also where there are accelerators
  with cli.importing_jax():  # after the config is validated
    from diloco_jax.process import syncer as syncer_process

  cli.serve_metrics('syncer')
  if config.task == run_config.OWN_LOOP:
    usual = own_loop.get_config()
    for part in ('model', 'optimizer'):
      if getattr(config, part) != getattr(usual, part):
        raise exits.NeverRetry(
          f'--config.{part}: a loop of your own has its {part} in its code, so this would do '
          'nothing'
        )
  if config.task != run_config.OWN_LOOP and _INIT.value:
    raise exits.NeverRetry(f'--init={_INIT.value}: the model of this config is that of its task')
  given = config, _WORKDIR.value, _LISTEN.value, cli.access('syncer')
  return syncer_process.main(*given, _INIT.value, _PROCESSES.value)
