#!/usr/bin/env bash
# Runs syncer of run run on Google Cloud until it is done (exit code 0) or must never
# be started again (42). It needs gcloud, signed in, and a terminal that stays, as that of tmux.
# Ctrl-C leaves the program and its machine alone: the next start ends that program in order first.
set -uo pipefail
name=run-syncer
place=(--project=p --zone=us-central1-a)
certificates=certs/syncer

hosts() { gcloud compute "$@" "${place[@]}"; }
release() { gcloud compute instances stop "$name" "${place[@]}"; }  # its disk stays
obtain() {
  gcloud compute instances describe "$name" "${place[@]}" >/dev/null ||
    gcloud compute instances create "$name" "${place[@]}" --machine-type=n2-highmem-8 \
      --image-family=cos-stable --image-project=cos-cloud --boot-disk-type=pd-ssd \
      --boot-disk-size=200GB --no-boot-disk-auto-delete --scopes=cloud-platform --service-account=trainer@p.iam
  gcloud compute instances start "$name" "${place[@]}"
}

start=$(
  cat <<'END'
folder=/var/lib/diloco; rm -f diloco.code
sudo install -d -m 700 $folder/certs/syncer || exit 1
if [ -d syncer ]; then
  sudo install -m 600 syncer/* $folder/certs/syncer && rm -r syncer || exit 1
fi
sudo docker stop --time=17 diloco 2>/dev/null; sudo docker rm --force diloco 2>/dev/null
sudo docker run --rm --name=diloco --network=host \
  --volume=$folder/run:/diloco --volume=$folder/certs:/certs:ro \
  --env=GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=1073741824:glibc.malloc.top_pad=16777216 \
  --env=GRPC_VERBOSITY=ERROR \
  --env=PYTHONUNBUFFERED=1 \
  --env=TF_CPP_MIN_LOG_LEVEL=2 \
  --entrypoint=sh registry/diloco:1 -c 'trap "kill -TERM \$!" TERM; "$0" "$@" & wait $!; code=$?; wait; exit $code' \
  diloco syncer --config=JSON --workdir=/diloco --tls=/certs/syncer --listen=0.0.0.0:7070
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
