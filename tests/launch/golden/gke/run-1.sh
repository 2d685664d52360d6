#!/usr/bin/env bash
# Starts run run-1: its certificates as secrets, then its programs. Again after a change
# of certificates: programs that run take them within minutes.
set -euo pipefail
certs=certs here="$(dirname "$0")"
kubectl() { command kubectl --namespace=research "$@"; }
for name in syncer l0; do
  kubectl create secret generic "run-1-$name" --from-file="$certs/$name" \
    --dry-run=client --output=yaml | kubectl apply --server-side --filename=-
done
kubectl apply --filename="$here/run-1-syncer.yaml" --filename="$here/run-1-l0.yaml"
kubectl get jobsets,pods --selector=diloco.run=run-1
