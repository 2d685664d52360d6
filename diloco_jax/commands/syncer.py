"""Runs the syncer as a process.

    diloco syncer --config=stdlib_lm:cpu \
      --workdir=runs/by_hand --port=7070

    # For training loops of your own (diloco_jax.join); the first of them brings the model.
    diloco syncer --config=own_loop --config.train.steps=300 --workdir=runs/own --port=7070

The syncer listens on 127.0.0.1 and then writes HOST:PORT to WORKDIR/syncer/address; learners may
start earlier with `--syncer=file:WORKDIR/syncer/address`. Started again with the same command after
any end, the syncer continues from its checkpoint and its log in WORKDIR/syncer. Exit codes: 0 done,
42 never retry, 74 the disk failed or is full (retry), anything else retry.
"""

import os

from absl import flags

from diloco_jax.config import run_config
from diloco_jax.launch import program
from diloco_jax.node import failpoints

_FAILPOINTS = flags.DEFINE_bool(
  'allow_failpoints',
  False,
  'For tests: the environment may name a place where this process kills itself.',
  module_name=failpoints.__name__,  # so --help does not list it
)
_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.', required=True)
_HOST = flags.DEFINE_string('host', '127.0.0.1', 'Address to listen on; loopback only.')
_PORT = flags.DEFINE_integer('port', 0, 'Port to listen on; 0: the kernel chooses.')
_STANDBY = flags.DEFINE_bool(
  'standby', False, 'Compile, change no file, and begin after a line on standard input.'
)
_INIT = flags.DEFINE_string(
  'init',
  '',
  'With --config=own_loop: a folder that Orbax wrote, a tree of named arrays: version 0 of the '
  'model. Else the first learner brings it.',
)
program.define_config()
program.define_files()


def main(argv: list[str]) -> int:
  del argv
  config = program.config()
  if _FAILPOINTS.value:
    with program.never_retry(ValueError):
      failpoints.allow()
  os.environ['JAX_PLATFORMS'] = 'cpu'  # also where there are accelerators
  from diloco_jax.launch import entrypoints  # after the config is validated: imports jax

  place = config, _WORKDIR.value, _HOST.value, _PORT.value
  if config.task != run_config.OWN_LOOP:
    if _INIT.value:
      raise program.NeverRetry(
        f'--init={_INIT.value}: the model of this config is that of its task'
      )
    return entrypoints.syncer(*place, _STANDBY.value)
  if _STANDBY.value:
    raise program.NeverRetry(
      '--standby: the syncer of own loops has no model to compile before the first learner joins; '
      'start it without --standby'
    )
  return entrypoints.own_loop_syncer(*place, _INIT.value)
