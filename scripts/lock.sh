#!/usr/bin/env bash
# Writes the locks from pyproject.toml: requirements.lock has what running needs, and
# requirements-test.lock what the tests need beside it, at the same versions. A version that is
# locked stays unless `--upgrade` is given.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check uv
lock() {
  "$work/venv/bin/uv" pip compile pyproject.toml --quiet --universal --python-version 3.11 \
    --no-header --no-annotate "$@"
}
lock --extra test -o requirements-test.lock "$@"
lock --constraint requirements-test.lock -o requirements.lock "$@"
