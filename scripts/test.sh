#!/usr/bin/env bash
# Runs the default suite; with --all everything, at full counts. Arguments go to pytest, for example
#   ./scripts/test.sh tests/protocol -n 0       in this process
set -euo pipefail
lock=requirements-test.lock
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
unset PYTHONDONTWRITEBYTECODE  # the tests start this package a hundred times
exec "$python" -m pytest -n auto --dist loadscope --no-loadscope-reorder \
  --max-worker-restart=0 "$@"  # a suite whose worker was replaced can wait for ever
