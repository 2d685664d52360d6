#!/usr/bin/env bash
# Generates sync_pb2.py in diloco_jax/transport from diloco/v1/sync.proto there.
#
# It uses an OLD grpcio-tools on purpose: generated code needs at least the protobuf that made it.
# Stubs of 1.73 (protobuf 6.31) import with protobuf 6.31 to 7.x; newer stubs need a newer protobuf.
# Run it after every change of the proto and commit the result; training does not need it.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet 'grpcio-tools==1.73.1'
"$work/venv/bin/python" -m grpc_tools.protoc \
  --proto_path="$root/diloco_jax/transport" --python_out="$work" \
  diloco/v1/sync.proto
cp "$work/diloco/v1/sync_pb2.py" "$root/diloco_jax/transport/"
