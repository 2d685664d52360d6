"""What the engines of Google Cloud share: flags, what they refuse, the command of a container.

Both start the same image (scripts/Dockerfile) on machines whose disks go with them, but for the
disk of the syncer.
"""

import json
import math
import re

from absl import flags

from diloco_jax.launch import cli
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
METRICS_PORT = flags.DEFINE_integer(
  'metrics_port', None, 'gke, queued: where every program serves /metrics.', 1, 65535
)
_WITHOUT_STORE = flags.DEFINE_bool(
  'without_store', False, 'gke, queued: let learners lose their optimizer state with their machine.'
)


def places(request: spec_lib.Request, host: str) -> spec_lib.Places:
  """`host`: the name of the syncer's machine."""
  config, port = json.dumps(request.config.to_dict()), METRICS_PORT.value
  return spec_lib.Places(
    workdir=request.workdir or '/diloco',
    syncer=f'{host}:{PORT}',
    listen=f'0.0.0.0:{PORT}',
    tls='/certs',
    meet=['--hosts=auto'],  # jax finds the hosts of a TPU slice
    flags=[f'--config={config}', *cli.file_flags(), *([f'--metrics_port={port}'] if port else ())],
  )


def needs(
  described: spec_lib.Spec,
  request: spec_lib.Request,
  cpus: str = ' (for learners on CPUs: --topology=cpu)',
) -> dict[str, object]:
  """`cpus`: what a learner may have in place of a slice, in words; '': nothing."""
  config, tokenizer = request.config, request.config.data.tokenizer
  train = any(one.role == spec_lib.LEARNER for one in described.programs)
  alone = all(one.hosts == 1 for one in described.programs)
  sliced = request.tpus or (cpus and request.topology)
  stored = config.train.store.startswith('gs://') or (alone and _WITHOUT_STORE.value)
  paths = {  # those of this machine are not in an image; an absolute one may be of the image
    'task': config.task if '.py:' in config.task else '',
    'data.corpus': config.data.corpus,
    'data.tokenizer': '' if '(' in tokenizer else tokenizer,
    'train.init_from': config.train.init_from,
  }
  return {
    '--image: docs/howto/launch.md shows how to build one': IMAGE.value,
    '--tls: the programs are on several machines (diloco certs --help)': request.tls,
    f'--topology, the TPU slice of each learner, as v6e:4x4{cpus}': sliced or not train,
    'a slice, as the hosts of a learner find each other on TPUs only (or --engine=ray)': alone
    or request.tpus,
    '--config.train.store=gs://BUCKET/PREFIX, as a learner has no folder that outlives its machine '
    'or that its hosts share (--without_store, if learners have one host)': stored or not train,
    f'another --metrics_port than {PORT}, which is that of the syncer': METRICS_PORT.value != PORT,
    **{
      f'--config.{name}=/..., the path of {path} in the image': re.match('/|.*://|(stdlib)?$', path)
      for name, path in paths.items()
    },
  }


def stop_s(request: spec_lib.Request) -> int:
  """The seconds that a program may take to end in order."""
  return math.ceil(request.config.train.drain_s) + _SPARE_S
