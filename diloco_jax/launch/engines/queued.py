"""The engine of TPU slices without a cluster: it writes a shell script for each program.

The script asks for a machine (a queued resource for a learner, a virtual machine for the syncer),
starts the program there in a container, through ssh, and starts it again unless it is done.
"""

import shlex
import string

from absl import flags

from diloco_jax.launch import cli
from diloco_jax.launch import spec as spec_lib
from diloco_jax.launch.engines import google_cloud

_PROJECT = flags.DEFINE_string('project', '', 'queued: project of Google Cloud.')
_ZONE = flags.DEFINE_string('zone', '', 'queued: zone of the learners, as us-east5-b.')
_SYNCER_ZONE = flags.DEFINE_string(
  'syncer_zone', '', 'queued: zone of the syncer; default: --zone.'
)
_MACHINE_TYPE = flags.DEFINE_string(
  'machine_type', 'n2-highmem-8', 'queued: of the syncer; 16 bytes of memory for each parameter.'
)
flags.adopt_module_key_flags(google_cloud)

_SLICES = {  # what --accelerator-type counts, for a chip; the image of the hosts
  'v5e': ('v5litepod', 1, 'v2-alpha-tpuv5-lite'),
  'v5p': ('v5p', 2, 'v2-alpha-tpuv5'),
  'v6e': ('v6e', 1, 'v2-alpha-tpuv6e'),
}


class _Template(string.Template):
  delimiter = '%'  # a shell needs the usual one


_SCRIPT = _Template("""\
#!/usr/bin/env bash
# Runs %title on Google Cloud until it is done (exit code 0) or must never
# be started again (42). It needs gcloud, signed in, and a terminal that stays, as that of tmux.
# Ctrl-C leaves the program and its machine alone: the next start ends that program in order first.
set -uo pipefail
name=%name
place=(--project=%project --zone=%zone)
certificates=%certificates

%machine
start=$(
  cat <<'END'
%{start}END
)
while :; do
  obtain
  if hosts scp --recurse "$certificates" "$name:"; then
    if hosts ssh "$name" --command="$start"; then
      echo "$name is done" >&2
      release
      exit 0
    fi
    # gcloud has the exit code of one host, but that of any host may be final.
    hosts ssh "$name" --command='grep -qx %never diloco.code && exit %never; exit 0'
    if [ $? = %never ]; then
      echo "error: $name must not be started again; its machine is still there" >&2
      exit %never
    fi
  fi
  echo "$name is started again in 20 s" >&2
  sleep 20
done
""")

_SLICE = _Template("""\
hosts() { gcloud compute tpus tpu-vm "$@" "${place[@]}" --worker=all; }
queued() { gcloud compute tpus queued-resources "$1" "$name" "${place[@]}" "${@:2}"; }
release() { queued delete --force --quiet; }
obtain() {
  local state
  until state=$(queued describe --format='value(state.state)') && [ "$state" = ACTIVE ]; do
    case "$state" in
      '') queued create --node-id="$name" --accelerator-type=%type \\
        --runtime-version=%runtime%spot%account ;;
      FAILED | SUSPENDED) release ;;
    esac
    sleep 20
  done
}
""")

_MACHINE = _Template("""\
hosts() { gcloud compute "$@" "${place[@]}"; }
release() { gcloud compute instances stop "$name" "${place[@]}"; }  # its disk stays
obtain() {
  gcloud compute instances describe "$name" "${place[@]}" >/dev/null ||
    gcloud compute instances create "$name" "${place[@]}" --machine-type=%type \\
      --image-family=cos-stable --image-project=cos-cloud --boot-disk-type=pd-ssd \\
      --boot-disk-size=%{size}GB --no-boot-disk-auto-delete --scopes=cloud-platform%account
  gcloud compute instances start "$name" "${place[@]}"
}
""")

# On each host, as the first user who may use sudo. A connection that was lost leaves a program
# behind, which is ended before the next one starts.
_START = _Template("""\
folder=/var/lib/diloco; rm -f diloco.code
sudo install -d -m 700 $folder/certs/%program || exit 1
if [ -d %program ]; then
  sudo install -m 600 %program/* $folder/certs/%program && rm -r %program || exit 1
fi
sudo docker stop --time=%stop_s diloco 2>/dev/null; sudo docker rm --force diloco 2>/dev/null
sudo docker run --rm --name=diloco --network=host%devices \\
  --volume=$folder/run:%workdir --volume=$folder/certs:%certs:ro \\
  %environment \\
  --entrypoint=sh %image -c %until_done \\
  %argv
code=$?; echo $code >diloco.code; exit $code
""")


def places(request: spec_lib.Request) -> spec_lib.Places:
  zone = _SYNCER_ZONE.value or _ZONE.value
  host = f'{request.run}-{spec_lib.SYNCER}.{zone}.c.{_PROJECT.value}.internal'
  return google_cloud.places(request, host)


def needs(described: spec_lib.Spec, request: spec_lib.Request) -> dict[str, object]:
  own = {'--project': _PROJECT.value, '--zone': _ZONE.value}
  return own | google_cloud.needs(described, request, cpus='')


def render(
  described: spec_lib.Spec, request: spec_lib.Request, places: spec_lib.Places
) -> dict[str, str]:
  texts = {}
  for program in described.programs:
    name, account = f'{described.name}-{program.name}', google_cloud.SERVICE_ACCOUNT.value
    words = {
      'title': f'{program.name} of run {described.name}',
      'name': name,
      'project': shlex.quote(_PROJECT.value),
      'certificates': shlex.quote(f'{request.tls.rstrip("/")}/{program.name}'),
      'account': f' --service-account={shlex.quote(account)}' if account else '',
      'never': cli.NEVER_RETRY,
      **_container(program, request, places),
    }
    if program.role == spec_lib.SYNCER:
      kind, zone, machine = _MACHINE_TYPE.value, _SYNCER_ZONE.value or _ZONE.value, _MACHINE
      words |= {'type': shlex.quote(kind), 'size': program.disk_gib}
    else:
      kind, count, image = _SLICES[program.topology.partition(':')[0]]
      words |= {'type': f'{kind}-{count * program.hosts * program.chips}', 'runtime': image}
      words['spot'] = ' --spot' if google_cloud.SPOT.value else ''
      zone, machine = _ZONE.value, _SLICE
    parts = {'machine': machine.substitute(words), 'start': _START.substitute(words)}
    texts[f'{name}.sh'] = _SCRIPT.substitute(words, zone=shlex.quote(zone), **parts)
  return texts


def _container(
  program: spec_lib.Program, request: spec_lib.Request, places: spec_lib.Places
) -> dict[str, object]:
  environment = (f'--env={name}={value}' for name, value in program.environment.items())
  return {
    'program': program.name,
    'stop_s': google_cloud.stop_s(request),
    'workdir': shlex.quote(places.workdir),
    'certs': places.tls,
    'environment': ' \\\n  '.join(map(shlex.quote, environment)),
    'devices': ' --privileged' if program.chips else '',
    'image': shlex.quote(google_cloud.IMAGE.value),
    'until_done': shlex.quote(google_cloud.UNTIL_DONE),
    'argv': shlex.join(program.argv),
  }
