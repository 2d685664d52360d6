"""Runs the syncer as a process.

    diloco syncer --config=stdlib_lm:cpu \
      --workdir=runs/by_hand --port=7070

The syncer listens on 127.0.0.1 and then writes HOST:PORT to WORKDIR/syncer/address; learners may
start earlier with `--syncer=file:WORKDIR/syncer/address`. Started again with the same command after
any end, the syncer continues from its checkpoint and its log in WORKDIR/syncer. Exit codes: 0 done,
42 never retry, 74 the disk failed or is full (retry), anything else retry.
"""

import os

from absl import flags

from diloco_jax.launch import program

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.', required=True)
_HOST = flags.DEFINE_string('host', '127.0.0.1', 'Address to listen on; loopback only.')
_PORT = flags.DEFINE_integer('port', 0, 'Port to listen on; 0: the kernel chooses.')
_STANDBY = flags.DEFINE_bool(
  'standby', False, 'Compile, change no file, and begin after a line on standard input.'
)
program.define_config()


def main(argv: list[str]) -> int:
  del argv
  config = program.config()
  os.environ['JAX_PLATFORMS'] = 'cpu'  # also where there are accelerators
  from diloco_jax.launch import entrypoints  # after the config is validated: imports jax

  return entrypoints.syncer(config, _WORKDIR.value, _HOST.value, _PORT.value, _STANDBY.value)
