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


def places(request: spec_lib.Request) -> spec_lib.Places:
  return google_cloud.places(request, f'{request.run}-{spec_lib.SYNCER}')


def render(
  described: spec_lib.Spec, request: spec_lib.Request, places: spec_lib.Places
) -> dict[str, str]:
  texts = {}
  for program in described.programs:
    pods = _Pods(described.name, program, request, places)
    texts[f'{pods.name}.yaml'] = yaml.safe_dump_all(
      pods.documents(), sort_keys=False, explicit_start=True, width=100
    )
  return {**texts, f'{described.name}.sh': _script(described, request, list(texts))}


class _Pods:
  """The manifests of a program. `name`: of everything that belongs to it."""

  def __init__(
    self, run: str, program: spec_lib.Program, request: spec_lib.Request, places: spec_lib.Places
  ):
    self.name = f'{run}-{program.name}'
    self._program, self._request, self._places = program, request, places
    self._run = run

  @property
  def _labels(self) -> dict[str, str]:
    return {'diloco.run': self._run, 'diloco.program': self._program.name}

  def documents(self) -> list[dict[str, Any]]:
    port = {'port': google_cloud.PORT}
    rule: dict[str, Any] = {'from': [{'podSelector': {'matchLabels': self._labels}}]}
    documents = []
    if self._program.role == spec_lib.SYNCER:
      rule = {'ports': [port]}
      size = {'requests': {'storage': f'{self._program.disk_gib}Gi'}}
      disk = {'accessModes': ['ReadWriteOncePod'], 'resources': size}
      documents += [
        self._document('v1', 'PersistentVolumeClaim', disk),
        self._document('v1', 'Service', {'selector': self._labels, 'ports': [port]}),
      ]
    # The port where the hosts of a learner meet has no authentication.
    pods = {'podSelector': {'matchLabels': self._labels}, 'policyTypes': ['Ingress']}
    documents.append(
      self._document('networking.k8s.io/v1', 'NetworkPolicy', {**pods, 'ingress': [rule]})
    )
    return [*documents, self._job_set()]

  def _document(self, version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {'name': self.name, 'namespace': _NAMESPACE.value, 'labels': self._labels}
    return {'apiVersion': version, 'kind': kind, 'metadata': metadata, 'spec': spec}

  def _job_set(self) -> dict[str, Any]:
    program = self._program
    never = {'name': 'never', 'action': 'FailJobSet', 'onJobFailureReasons': ['PodFailurePolicy']}
    codes = {'containerName': program.role, 'operator': 'In', 'values': [cli.NEVER_RETRY]}
    job = {
      'parallelism': program.hosts,
      'completions': program.hosts,
      'completionMode': 'Indexed',
      'backoffLimit': 0,
      'podFailurePolicy': {'rules': [{'action': 'FailJob', 'onExitCodes': codes}]},
      'template': {'metadata': {'labels': self._labels}, 'spec': self._pod()},
    }
    several = program.hosts > 1
    found = self._document(
      'jobset.x-k8s.io/v1alpha2',
      'JobSet',
      {
        # The syncer has a Service, and the name of a JobSet's own would be the same.
        'network': {'enableDNSHostnames': several, 'publishNotReadyAddresses': several},
        'failurePolicy': {'maxRestarts': program.restarts, 'rules': [never]},
        'replicatedJobs': [{'name': 'hosts', 'replicas': 1, 'template': {'spec': job}}],
      },
    )
    if several:  # all pods on the nodes of one slice, and no other pod there
      key = 'alpha.jobset.sigs.k8s.io/exclusive-topology'
      found['metadata']['annotations'] = {key: 'cloud.google.com/gke-nodepool'}
    if _QUEUE.value and program.role == spec_lib.LEARNER:
      found['metadata']['labels']['kueue.x-k8s.io/queue-name'] = _QUEUE.value
    return found

  def _pod(self) -> dict[str, Any]:
    program, account = self._program, google_cloud.SERVICE_ACCOUNT.value
    disk = {'persistentVolumeClaim': {'claimName': self.name}} if program.disk_gib else None
    secret = {'secretName': self.name, 'defaultMode': _OWNER_READS}
    return {
      'restartPolicy': 'Never',
      'terminationGracePeriodSeconds': google_cloud.stop_s(self._request),
      **({'serviceAccountName': account} if account else {}),
      **({'nodeSelector': self._nodes()} if program.topology else {}),
      'containers': [self._container()],
      'volumes': [
        {'name': 'workdir', **(disk or {'emptyDir': {}})},
        {'name': 'certs', 'secret': secret},
      ],
    }

  def _nodes(self) -> dict[str, str]:
    kind, _, shape = self._program.topology.partition(':')
    return {
      'cloud.google.com/gke-tpu-accelerator': _NODES[kind],
      'cloud.google.com/gke-tpu-topology': shape,
      **({'cloud.google.com/gke-spot': 'true'} if google_cloud.SPOT.value else {}),
    }

  def _container(self) -> dict[str, Any]:
    program = self._program
    environment, resources = dict(program.environment), {}
    if program.topology:
      resources = {'limits': {'google.com/tpu': program.chips}}
    elif program.role == spec_lib.SYNCER:
      environment['JAX_PLATFORMS'] = 'cpu'
      resources = {'requests': {'cpu': _CPUS.value, 'memory': f'{_MEMORY.value}Gi'}}
    certs = f'{self._places.tls}/{program.name}'
    return {
      'name': program.role,
      'image': google_cloud.IMAGE.value,
      'command': ['sh', '-c', google_cloud.UNTIL_DONE],
      'args': list(program.argv),
      'env': [{'name': name, 'value': value} for name, value in environment.items()],
      **({'resources': resources} if resources else {}),
      'volumeMounts': [
        {'name': 'workdir', 'mountPath': self._places.workdir},
        {'name': 'certs', 'mountPath': certs, 'readOnly': True},
      ],
    }


def _script(described: spec_lib.Spec, request: spec_lib.Request, files: list[str]) -> str:
  """The commands of kubectl that make the secrets and start the programs."""
  run, names = described.name, [program.name for program in described.programs]
  return '\n'.join(
    [
      '#!/usr/bin/env bash',
      f'# Starts run {run}: its certificates as secrets, then its programs. Again after a change',
      '# of certificates: programs that run take them within two minutes.',
      'set -euo pipefail',
      f'certs={shlex.quote(request.tls.rstrip("/"))} here="$(dirname "$0")"',
      f'kubectl() {{ command kubectl --namespace={shlex.quote(_NAMESPACE.value)} "$@"; }}',
      'secret() {',
      '  kubectl create secret generic "$1" --from-file="$2" --dry-run=client --output=yaml |',
      '    kubectl apply --server-side --filename=-',
      '}',
      *(f'secret {run}-{name} "$certs/{name}"' for name in names),
      *(f'kubectl apply --filename="$here/{name}"' for name in files),
      f'kubectl get jobsets,pods --selector=diloco.run={run}',
      '',
    ]
  )
