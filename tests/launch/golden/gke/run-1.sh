#!/usr/bin/env bash
# Starts the programs of run run-1 whose files are here, each with its certificates as a secret.
# Again after a change of certificates: programs that run take them within minutes.
set -euo pipefail
certs=certs
here=$(dirname "$0")
kubectl() { command kubectl --namespace=research "$@"; }
shopt -s nullglob
files=("$here"/run-1-[s]yncer.yaml "$here"/run-1-l[0-9]*.yaml)  # the syncer first, if here
for file in "${files[@]}"; do  # without all of them nothing starts, and nothing costs
  name=$(basename "$file" .yaml)
  kubectl create secret generic "$name" --from-file="$certs/${name#run-1-}" \
    --dry-run=client --output=yaml | kubectl apply --server-side --filename=-
done
for file in "${files[@]}"; do kubectl apply --filename="$file"; done
kubectl get jobsets,pods --selector=diloco.run=run-1
