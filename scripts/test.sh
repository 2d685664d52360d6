#!/usr/bin/env bash
# Sets itself up, then runs a lane of the tests:
#   ./scripts/test.sh              the default lane: minutes on two cores
#   ./scripts/test.sh --changed    what your change since origin/main can reach, the nearest first
#   ./scripts/test.sh --long       the default lane and the tests marked `long` (.ci/run)
#   ./scripts/test.sh --all        everything, at full counts
#   ./scripts/test.sh --trainers   quickstarts in the environments of their frameworks
# Other arguments go to pytest, for example
#   ./scripts/test.sh tests/protocol -n 0       in this process
set -euo pipefail
[[ " $* " == *" --help "* ]] && { sed -n '2,/^set/s/^# \?//p' "$0"; exit; }
lock=requirements-test.lock
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
[ "${1:-}" = --trainers ] && set -- tests/trainers --all "${@:2}"
unset PYTHONDONTWRITEBYTECODE  # the tests start this package a hundred times
exec "$python" -m pytest -n auto --dist loadscope --no-loadscope-reorder \
  --max-worker-restart=0 "$@"  # a suite whose worker was replaced can wait for ever
