"""What the engines of Google Cloud share: flags, what they refuse, the command of a container.

Both start the same image (scripts/Dockerfile) on machines whose disks go with them, but for the
disk of the syncer.
"""

import math

from absl import flags

from diloco_jax.launch import spec as spec_lib

PORT = 7070
_SPARE_S = 10

# A program that SIGTERM has ended in order exits with 0, which a cluster takes for the end of the
# run. So a shell tells the two apart: after SIGTERM it exits with 143, and the program is started
# again. It also makes SIGTERM end a program that has not set its handlers yet: the kernel keeps
# that signal from the first process of a container.
UNTIL_DONE = 'trap "kill -TERM \\$!" TERM; "$0" "$@" & wait $!; code=$?; wait; exit $code'

IMAGE = flags.DEFINE_string(
  'image', '', 'gke, queued: image with the extras tpu, gcs of this package (scripts/Dockerfile).'
)
SPOT = flags.DEFINE_bool('spot', False, 'gke, queued: take spot capacity for TPU slices.')
SERVICE_ACCOUNT = flags.DEFINE_string(
  'service_account', '', 'gke, queued: account of the programs; it may write to train.store.'
)
_WITHOUT_STORE = flags.DEFINE_bool(
  'without_store', False, 'gke, queued: let learners lose their optimizer state with their machine.'
)


def places(request: spec_lib.Request, host: str) -> spec_lib.Places:
  """`host`: the name of the syncer's machine. Raises ValueError: what is missing, what to do."""
  hosts = request.config.mesh.hosts
  if not IMAGE.value:
    raise ValueError('--image is missing: docs/howto/launch.md shows how to build one')
  if not request.tls:
    raise ValueError('--tls is missing: the programs are on several machines (diloco certs --help)')
  if not request.topology and hosts > 1:
    raise ValueError(
      f'mesh.hosts={hosts}: the hosts of a learner find each other on TPUs only; give '
      '--topology, or use --engine=ray'
    )
  return spec_lib.Places(
    workdir=request.workdir or '/diloco',
    syncer=f'{host}:{PORT}',
    listen=f'0.0.0.0:{PORT}',
    tls='/certs',
    meet=['--hosts=auto'],  # jax finds the hosts of a TPU slice
  )


def require_store(described: spec_lib.Spec, request: spec_lib.Request) -> None:
  """Raises ValueError for learners that could not keep checkpoints."""
  learners = [program for program in described.programs if program.role == spec_lib.LEARNER]
  if not learners or request.config.train.store.startswith('gs://'):
    return
  several = any(program.hosts > 1 for program in learners)
  if several or not _WITHOUT_STORE.value:
    raise ValueError(
      'a learner has no folder that outlives its machine, and none that its hosts share: give '
      '--config.train.store=gs://BUCKET/PREFIX; or, with learners of one host, --without_store'
    )


def stop_s(request: spec_lib.Request) -> int:
  """The seconds that a program may take to end in order."""
  return math.ceil(request.config.train.drain_s) + _SPARE_S
