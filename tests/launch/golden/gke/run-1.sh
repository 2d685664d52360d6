#!/usr/bin/env bash
# Starts run run-1: its certificates as secrets, then its programs. Again after a change
# of certificates: programs that run take them within two minutes.
set -euo pipefail
certs=certs here="$(dirname "$0")"
kubectl() { command kubectl --namespace=research "$@"; }
secret() {
  kubectl create secret generic "$1" --from-file="$2" --dry-run=client --output=yaml |
    kubectl apply --server-side --filename=-
}
secret run-1-syncer "$certs/syncer"
secret run-1-l0 "$certs/l0"
kubectl apply --filename="$here/run-1-syncer.yaml"
kubectl apply --filename="$here/run-1-l0.yaml"
kubectl get jobsets,pods --selector=diloco.run=run-1
