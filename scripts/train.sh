#!/usr/bin/env bash
# Trains the demo on this machine: one syncer, four learners; one learner is killed and restarted.
# At the end the trained model continues a text.
#   ./scripts/train.sh [--workdir=DIR] [--config=stdlib_lm:tiny] \
#     [--config.sync.quorum=2 ...]
set -euo pipefail
lock=requirements.lock
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
[[ " $* " == *" --config="* ]] || set -- --kill=l3@0.45+8 --prompt='def ' "$@"
exec "$python" -P diloco_jax/__main__.py train "$@"
