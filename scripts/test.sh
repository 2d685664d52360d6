#!/usr/bin/env bash
# Runs the tests; arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$python" -m pytest "$@"
