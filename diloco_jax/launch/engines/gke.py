"""The engine of Kubernetes, for clusters of Google Cloud (GKE): it writes manifests and a script
that applies them, and submits nothing.

Each program is a JobSet of one job, whose pods are the hosts of the program: if one of them ends,
all are started again together, except after exit code 42 of any of them. A learner has a JobSet of
its own, as the slices of one JobSet would become one program (MEGASCALE_*).
"""

import json
import re
import shlex
from typing import Any

import yaml
from absl import flags

from diloco_jax.launch import spec as spec_lib
from diloco_jax.process import exits
from diloco_jax.storage import folders

_PORT = 7070

# A program that SIGTERM has ended in order exits with 0, which a cluster takes for the end of the
# run. So a shell tells the two apart: after SIGTERM it exits with 143, and the program is started
# again. It also makes SIGTERM end a program that has not set its handlers yet: the kernel keeps
# that signal from the first process of a container.
UNTIL_DONE = 'trap "kill -TERM \\$!" TERM; "$0" "$@" & wait $!; code=$?; wait; exit $code'

_IMAGE = flags.DEFINE_string(
  'image', '', 'gke: image with the extras tpu, gcs of this package (scripts/Dockerfile).'
)
_SPOT = flags.DEFINE_bool('spot', False, 'gke: take spot capacity for TPU slices.')
_SERVICE_ACCOUNT = flags.DEFINE_string(
  'service_account', '', 'gke: account of the programs; it may write to train.store.'
)
_METRICS_PORT = flags.DEFINE_integer(
  'metrics_port', None, 'gke: where every program serves /metrics.', 1, 65535
)
_WITHOUT_STORE = flags.DEFINE_bool(
  'without_store', False, 'gke: let learners lose their optimizer state with their machine.'
)
_NAMESPACE = flags.DEFINE_string('namespace', 'default', 'gke: namespace of the run.')
_QUEUE = flags.DEFINE_string('kueue_queue', '', 'gke: LocalQueue of Kueue that admits learners.')
_CPUS = flags.DEFINE_integer('syncer_cpus', 8, 'gke: CPUs of the syncer.')
_MEMORY = flags.DEFINE_integer(
  'syncer_memory_gib', 32, 'gke: memory of the syncer; 16 bytes for each parameter of the model.'
)

_NODES = {'v5e': 'tpu-v5-lite-podslice', 'v5p': 'tpu-v5p-slice', 'v6e': 'tpu-v6e-slice'}
_OWNER_READS = 0o400
_UNLIMITED = 10**6


def choose(request: spec_lib.Request) -> spec_lib.Choices:
  config, port = json.dumps(request.config.to_dict()), _METRICS_PORT.value
  return spec_lib.Choices(
    workdir=request.workdir or '/diloco',
    syncer=f'{request.run}-{spec_lib.SYNCER}:{_PORT}',
    listen=f'0.0.0.0:{_PORT}',
    tls='/certs',
    host_flags=['--hosts=auto'],  # jax finds the hosts of a TPU slice
    flags=[f'--config={config}', *([f'--metrics_port={port}'] if port else ())],
  )


def needs(described: spec_lib.Spec, request: spec_lib.Request) -> dict[str, object]:
  config, tokenizer = request.config, request.config.data.tokenizer
  alone = all(program.hosts == 1 for program in described.programs)
  stored = config.train.store.startswith(folders.BUCKET) or (alone and _WITHOUT_STORE.value)
  paths = {  # an image has no file of this machine; an absolute path may be one in the image
    'task': config.task if '.py:' in config.task else '',
    'data.corpus': config.data.corpus,
    'data.tokenizer': '' if '(' in tokenizer else tokenizer,
    'train.init_from': config.train.init_from,
  }
  return {
    '--image: docs/howto/launch.md shows how to build one': _IMAGE.value,
    '--tls: the programs are on several machines (diloco certs --help)': request.tls,
    '--topology, the TPU slice of each learner, as v6e:4x4 (for learners on CPUs: '
    '--topology=cpu)': request.topology or not described.learners,
    'a slice, as the hosts of a learner find each other on TPUs only (or --engine=ray)': alone
    or request.tpus,
    '--config.train.store=gs://BUCKET/PREFIX, as a learner has no folder that outlives its machine '
    'or that its hosts share (--without_store, if learners have one host)': stored
    or not described.learners,
    f'another --metrics_port than {_PORT}, which is that of the syncer': _METRICS_PORT.value
    != _PORT,
    **{
      f'--config.{name}=/..., the path of {path} in the image': re.match('/|.*://|(stdlib)?$', path)
      for name, path in paths.items()
    },
  }


def render(
  described: spec_lib.Spec, request: spec_lib.Request, choices: spec_lib.Choices
) -> dict[str, str]:
  run, texts = described.name, {}
  for program in described.programs:
    pod = _pod(f'{run}-{program.name}', program, choices, request.stop_s)
    texts[f'{run}-{program.name}.yaml'] = yaml.safe_dump_all(
      _documents(run, program, pod), sort_keys=False, explicit_start=True, width=100
    )
  certs, namespace = map(shlex.quote, (request.tls.rstrip('/'), _NAMESPACE.value))
  script = _SCRIPT % {'run': run, 'certs': certs, 'namespace': namespace}
  return {**texts, f'{run}.sh': script}


def _documents(run: str, program: spec_lib.Program, pod: dict[str, Any]) -> list[dict[str, Any]]:
  def labels(**more: str) -> dict[str, str]:
    return {'diloco.run': run, 'diloco.program': program.name, **more}

  def document(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    name = f'{run}-{program.name}'
    metadata = {'name': name, 'namespace': _NAMESPACE.value, 'labels': labels()}
    return {'apiVersion': version, 'kind': kind, 'metadata': metadata, 'spec': spec}

  # The port where the hosts of a learner meet has no authentication.
  port, documents = {'port': _PORT}, []
  ingress: list[dict[str, Any]] = [{'from': [{'podSelector': {'matchLabels': labels()}}]}]
  if program.role == spec_lib.SYNCER:
    ingress = [{'ports': [port]}]
    size = {'requests': {'storage': f'{program.disk_gib}Gi'}}
    disk = {'accessModes': ['ReadWriteOncePod'], 'resources': size}
    documents.append(document('v1', 'PersistentVolumeClaim', disk))
    documents.append(document('v1', 'Service', {'selector': labels(), 'ports': [port]}))
  metadata: dict[str, Any] = {'labels': labels()}
  if metrics := _METRICS_PORT.value:
    ingress.append({'ports': [{'port': metrics}]})
    metadata['annotations'] = {'prometheus.io/scrape': 'true', 'prometheus.io/port': str(metrics)}
  rules = {'policyTypes': ['Ingress'], 'ingress': ingress}
  policy = {'podSelector': {'matchLabels': labels()}, **rules}
  documents.append(document('networking.k8s.io/v1', 'NetworkPolicy', policy))

  job_set = document(
    'jobset.x-k8s.io/v1alpha2', 'JobSet', _job_set(program, {'metadata': metadata, 'spec': pod})
  )
  if program.hosts > 1:  # all pods on the nodes of one slice, and no other pod there
    key = 'alpha.jobset.sigs.k8s.io/exclusive-topology'
    job_set['metadata']['annotations'] = {key: 'cloud.google.com/gke-nodepool'}
  if _QUEUE.value and program.role == spec_lib.LEARNER:
    job_set['metadata']['labels']['kueue.x-k8s.io/queue-name'] = _QUEUE.value
  return [*documents, job_set]


def _job_set(program: spec_lib.Program, pod: dict[str, Any]) -> dict[str, Any]:
  codes = {'containerName': program.role, 'operator': 'In', 'values': [exits.NEVER_RETRY]}
  job = {
    'parallelism': program.hosts,
    'completions': program.hosts,
    'completionMode': 'Indexed',
    'backoffLimit': 0,
    'podFailurePolicy': {'rules': [{'action': 'FailJob', 'onExitCodes': codes}]},
    'template': pod,
  }
  never = {'name': 'never', 'action': 'FailJobSet', 'onJobFailureReasons': ['PodFailurePolicy']}
  several = program.hosts > 1  # the Service of the syncer has the name that a JobSet's would have
  return {
    'network': {'enableDNSHostnames': several, 'publishNotReadyAddresses': several},
    'failurePolicy': {'maxRestarts': _UNLIMITED, 'rules': [never]},
    'replicatedJobs': [{'name': 'hosts', 'replicas': 1, 'template': {'spec': job}}],
  }


def _pod(
  name: str, program: spec_lib.Program, choices: spec_lib.Choices, stop_s: int
) -> dict[str, Any]:
  pod: dict[str, Any] = {'restartPolicy': 'Never', 'terminationGracePeriodSeconds': stop_s}
  environment, resources, disk = dict(program.environment), {}, {'emptyDir': {}}
  if _SERVICE_ACCOUNT.value:
    pod['serviceAccountName'] = _SERVICE_ACCOUNT.value
  if program.topology:
    kind, _, shape = program.topology.partition(':')
    prefix = 'cloud.google.com/gke-'
    pod['nodeSelector'] = {f'{prefix}tpu-accelerator': _NODES[kind], f'{prefix}tpu-topology': shape}
    if _SPOT.value:
      pod['nodeSelector'][f'{prefix}spot'] = 'true'
    resources = {'limits': {'google.com/tpu': program.chips}}
  else:
    environment['JAX_PLATFORMS'] = 'cpu'
  if program.role == spec_lib.SYNCER:
    resources = {'requests': {'cpu': _CPUS.value, 'memory': f'{_MEMORY.value}Gi'}}
    disk = {'persistentVolumeClaim': {'claimName': name}}
  certs = {'name': 'certs', 'mountPath': f'{choices.tls}/{program.name}', 'readOnly': True}
  container = {
    'name': program.role,
    'image': _IMAGE.value,
    'command': ['sh', '-c', UNTIL_DONE],
    'args': list(program.argv),
    'env': [{'name': key, 'value': value} for key, value in environment.items()],
    'resources': resources,
    'volumeMounts': [{'name': 'workdir', 'mountPath': choices.workdir}, certs],
  }
  if port := _METRICS_PORT.value:
    container['ports'] = [{'name': 'metrics', 'containerPort': port}]
  secret = {'name': 'certs', 'secret': {'secretName': name, 'defaultMode': _OWNER_READS}}
  return {**pod, 'containers': [container], 'volumes': [{'name': 'workdir', **disk}, secret]}


# The same for every part of a run, so that several parts may be written into one folder.
_SCRIPT = """\
#!/usr/bin/env bash
# Starts the programs of run %(run)s whose files are here, each with its certificates as a secret.
# Again after a change of certificates: programs that run take them within minutes.
set -euo pipefail
certs=%(certs)s
here=$(dirname "$0")
kubectl() { command kubectl --namespace=%(namespace)s "$@"; }
shopt -s nullglob
files=("$here"/%(run)s-[s]yncer.yaml "$here"/%(run)s-l[0-9]*.yaml)  # the syncer first, if here
for file in "${files[@]}"; do  # without all of them nothing starts, and nothing costs
  name=$(basename "$file" .yaml)
  kubectl create secret generic "$name" --from-file="$certs/${name#%(run)s-}" \\
    --dry-run=client --output=yaml | kubectl apply --server-side --filename=-
done
for file in "${files[@]}"; do kubectl apply --filename="$file"; done
kubectl get jobsets,pods --selector=diloco.run=%(run)s
"""
