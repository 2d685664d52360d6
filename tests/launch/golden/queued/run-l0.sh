#!/usr/bin/env bash
# Runs l0 of run run on Google Cloud until it is done (exit code 0) or must never
# be started again (42). It needs gcloud, signed in, and a terminal that stays, as that of tmux.
# Ctrl-C leaves the program and its machine alone: the next start ends that program in order first.
set -uo pipefail
name=run-l0
place=(--project=p --zone=us-east5-b)
certificates=certs/l0

hosts() { gcloud compute tpus tpu-vm "$@" "${place[@]}" --worker=all; }
queued() { gcloud compute tpus queued-resources "$1" "$name" "${place[@]}" "${@:2}"; }
release() { queued delete --force --quiet; }
obtain() {
  local state
  until state=$(queued describe --format='value(state.state)') && [ "$state" = ACTIVE ]; do
    case "$state" in
      '') queued create --node-id="$name" --accelerator-type=v5p-32 \
        --runtime-version=v2-alpha-tpuv5 --spot --service-account=trainer@p.iam ;;
      FAILED | SUSPENDED) release ;;
    esac
    sleep 20
  done
}

start=$(
  cat <<'END'
folder=/var/lib/diloco; rm -f diloco.code
sudo install -d -m 700 $folder/certs/l0 || exit 1
if [ -d l0 ]; then
  sudo install -m 600 l0/* $folder/certs/l0 && rm -r l0 || exit 1
fi
sudo docker stop --time=17 diloco 2>/dev/null; sudo docker rm --force diloco 2>/dev/null
sudo docker run --rm --name=diloco --network=host --privileged \
  --volume=$folder/run:/diloco --volume=$folder/certs:/certs:ro \
  --env=GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=1073741824:glibc.malloc.top_pad=16777216 \
  --env=GRPC_VERBOSITY=ERROR \
  --env=PYTHONUNBUFFERED=1 \
  --env=TF_CPP_MIN_LOG_LEVEL=2 \
  --entrypoint=sh registry/diloco:1 -c 'trap "kill -TERM \$!" TERM; "$0" "$@" & wait $!; code=$?; wait; exit $code' \
  diloco learner --config=JSON --workdir=/diloco --tls=/certs/l0 --learner=l0 --syncer=run-syncer.us-central1-a.c.p.internal:7070 --hosts=auto
code=$?; echo $code >diloco.code; exit $code
END
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
    hosts ssh "$name" --command='grep -qx 42 diloco.code && exit 42; exit 0'
    if [ $? = 42 ]; then
      echo "error: $name must not be started again; its machine is still there" >&2
      exit 42
    fi
  fi
  echo "$name is started again in 20 s" >&2
  sleep 20
done
