"""The engine of Kubernetes, for clusters of Google Cloud (GKE): it writes manifests and a script
that applies them, and submits nothing.

Each program is a JobSet of one job, whose pods are the hosts of the program: if one of them ends,
all are started again together, except after exit code 42 of any of them. A learner has a JobSet of
its own, as the slices of one JobSet would become one program (MEGASCALE_*).
"""

import shlex
from typing import Any

import yaml
from absl import flags

from diloco_jax.launch import cli
from diloco_jax.launch import spec as spec_lib
from diloco_jax.launch.engines import google_cloud

_NAMESPACE = flags.DEFINE_string('namespace', 'default', 'gke: namespace of the run.')
_QUEUE = flags.DEFINE_string('kueue_queue', '', 'gke: LocalQueue of Kueue that admits learners.')
_CPUS = flags.DEFINE_integer('syncer_cpus', 8, 'gke: CPUs of the syncer.')
_MEMORY = flags.DEFINE_integer(
  'syncer_memory_gib', 32, 'gke: memory of the syncer; 16 bytes for each parameter of the model.'
)
flags.adopt_module_key_flags(google_cloud)

_NODES = {'v5e': 'tpu-v5-lite-podslice', 'v5p': 'tpu-v5p-slice', 'v6e': 'tpu-v6e-slice'}
_OWNER_READS = 0o400
_UNLIMITED = 10**6

needs = google_cloud.needs


def places(request: spec_lib.Request) -> spec_lib.Places:
  return google_cloud.places(request, f'{request.run}-{spec_lib.SYNCER}')


def render(
  described: spec_lib.Spec, request: spec_lib.Request, places: spec_lib.Places
) -> dict[str, str]:
  run, texts = described.name, {}
  for program in described.programs:
    pod = _pod(f'{run}-{program.name}', program, places, google_cloud.stop_s(request))
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
  port, documents = {'port': google_cloud.PORT}, []
  ingress: list[dict[str, Any]] = [{'from': [{'podSelector': {'matchLabels': labels()}}]}]
  if program.role == spec_lib.SYNCER:
    ingress = [{'ports': [port]}]
    size = {'requests': {'storage': f'{program.disk_gib}Gi'}}
    disk = {'accessModes': ['ReadWriteOncePod'], 'resources': size}
    documents.append(document('v1', 'PersistentVolumeClaim', disk))
    documents.append(document('v1', 'Service', {'selector': labels(), 'ports': [port]}))
  metadata: dict[str, Any] = {'labels': labels()}
  if metrics := google_cloud.METRICS_PORT.value:
    ingress.append({'ports': [{'port': metrics}]})
    metadata['annotations'] = {'prometheus.io/scrape': 'true', 'prometheus.io/port': str(metrics)}
  rules = {'policyTypes': ['Ingress'], 'ingress': ingress}
  policy = {'podSelector': {'matchLabels': labels()}, **rules}
  documents.append(document('networking.k8s.io/v1', 'NetworkPolicy', policy))

  job = _job(program, {'metadata': metadata, 'spec': pod})
  found = document('jobset.x-k8s.io/v1alpha2', 'JobSet', _job_set(program, job))
  if program.hosts > 1:  # all pods on the nodes of one slice, and no other pod there
    key = 'alpha.jobset.sigs.k8s.io/exclusive-topology'
    found['metadata']['annotations'] = {key: 'cloud.google.com/gke-nodepool'}
  if _QUEUE.value and program.role == spec_lib.LEARNER:
    found['metadata']['labels']['kueue.x-k8s.io/queue-name'] = _QUEUE.value
  return [*documents, found]


def _job_set(program: spec_lib.Program, job: dict[str, Any]) -> dict[str, Any]:
  never = {'name': 'never', 'action': 'FailJobSet', 'onJobFailureReasons': ['PodFailurePolicy']}
  several = program.hosts > 1  # the Service of the syncer has the name that a JobSet's would have
  return {
    'network': {'enableDNSHostnames': several, 'publishNotReadyAddresses': several},
    'failurePolicy': {'maxRestarts': _UNLIMITED, 'rules': [never]},
    'replicatedJobs': [{'name': 'hosts', 'replicas': 1, 'template': {'spec': job}}],
  }


def _job(program: spec_lib.Program, template: dict[str, Any]) -> dict[str, Any]:
  codes = {'containerName': program.role, 'operator': 'In', 'values': [cli.NEVER_RETRY]}
  return {
    'parallelism': program.hosts,
    'completions': program.hosts,
    'completionMode': 'Indexed',
    'backoffLimit': 0,
    'podFailurePolicy': {'rules': [{'action': 'FailJob', 'onExitCodes': codes}]},
    'template': template,
  }


def _pod(
  name: str, program: spec_lib.Program, places: spec_lib.Places, stop_s: int
) -> dict[str, Any]:
  pod: dict[str, Any] = {'restartPolicy': 'Never', 'terminationGracePeriodSeconds': stop_s}
  environment, resources, disk = dict(program.environment), {}, {'emptyDir': {}}
  if google_cloud.SERVICE_ACCOUNT.value:
    pod['serviceAccountName'] = google_cloud.SERVICE_ACCOUNT.value
  if program.topology:
    kind, _, shape = program.topology.partition(':')
    prefix = 'cloud.google.com/gke-'
    pod['nodeSelector'] = {f'{prefix}tpu-accelerator': _NODES[kind], f'{prefix}tpu-topology': shape}
    if google_cloud.SPOT.value:
      pod['nodeSelector'][f'{prefix}spot'] = 'true'
    resources = {'limits': {'google.com/tpu': program.chips}}
  else:
    environment['JAX_PLATFORMS'] = 'cpu'
  if program.role == spec_lib.SYNCER:
    resources = {'requests': {'cpu': _CPUS.value, 'memory': f'{_MEMORY.value}Gi'}}
    disk = {'persistentVolumeClaim': {'claimName': name}}
  certs = {'name': 'certs', 'mountPath': f'{places.tls}/{program.name}', 'readOnly': True}
  container = {
    'name': program.role,
    'image': google_cloud.IMAGE.value,
    'command': ['sh', '-c', google_cloud.UNTIL_DONE],
    'args': list(program.argv),
    'env': [{'name': key, 'value': value} for key, value in environment.items()],
    'resources': resources,
    'volumeMounts': [{'name': 'workdir', 'mountPath': places.workdir}, certs],
  }
  if port := google_cloud.METRICS_PORT.value:
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
