#!/usr/bin/env bash
# Starts the programs of run run-1 whose files are here, each with its certificates as a secret.
# Again after a change of certificates: programs that run take them within minutes.
set -euo pipefail
certs=certs
kubectl() { command kubectl --namespace=research "$@"; }
for file in "$(dirname "$0")"/run-1-*.yaml; do
  name=$(basename "$file" .yaml)
  kubectl create secret generic "$name" --from-file="$certs/${name#run-1-}" \
    --dry-run=client --output=yaml | kubectl apply --server-side --filename=-
  kubectl apply --filename="$file"
done
kubectl get jobsets,pods --selector=diloco.run=run-1
