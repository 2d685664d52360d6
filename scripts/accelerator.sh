#!/usr/bin/env bash
# Proves the product on the GPU of this machine, with the jax that its Python has, in seven minutes:
#   ./scripts/accelerator.sh [--only=processes,beside,single] [--out=FOLDER]
#   ./scripts/accelerator.sh --rehearse     the same with tiny models on the CPU, in three minutes
#   ./scripts/accelerator.sh --wheels       on a machine with a network: what such a Python lacks,
#                                           for Python $FOR (3.12), into runs/wheels
# PYTHON=/path/to/python chooses the interpreter. docs/accelerators.md has what has run.
set -euo pipefail
lock=requirements.lock
scripts="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
case " $* " in
  *" --rehearse "* | *" --wheels "*) source "$scripts/setup.sh" ;;
  *) cd "$scripts/.."; python="${PYTHON:-python3}" ;;
esac
wheels=runs/wheels
if [ "${1:-}" = --wheels ]; then
  mkdir -p $wheels
  # Not what comes with jax, and what is the same for each jax.
  grep -vE '^(jax|jaxlib|ml-dtypes|numpy|scipy|flax|matplotlib|contourpy|fonttools|kiwisolver|pillow|tensorstore)=' \
    $lock | sed 's/ ;.*//' > $wheels/names
  exec "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version "${FOR:-3.12}" \
    $(printf -- '--platform=%s ' manylinux_2_{34,28,27,17}_x86_64 manylinux2014_x86_64) \
    --dest $wheels --requirement $wheels/names
fi
if [ "$python" = "${PYTHON:-python3}" ] && ls $wheels/*.whl >/dev/null 2>&1; then
  site="$(mktemp -d)"
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" $wheels/*.whl
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
"$python" -m scripts.accelerator "$@"
