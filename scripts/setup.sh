# The other scripts set $lock and source this file. It changes to the repo's root, installs the
# packages of that lock into .venv there, and sets $python. It copies the lock into .venv last, to
# mark a finished set-up: a second run costs nothing, and an interrupted set-up continues.
#   PYTHON=/path/to/python3.12 ./scripts/train.sh      chooses the interpreter (3.11 or newer)

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
python="$root/.venv/bin/python"

fail() { echo "error: $*" >&2; exit 42; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local found=()
  for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if is_new_enough "$candidate"; then echo "$candidate"; return; fi
    found+=("$candidate ($("$candidate" --version 2>/dev/null || echo 'not found'))")
  done
  fail "this project needs Python 3.11 or newer; found only: ${found[*]};" \
    "install one, or name it: PYTHON=/path/to/python3.12 $0"
}

set_up() {
  if ! is_new_enough "$python"; then
    local base; base="$(find_python)" || exit 42
    "$base" -m venv --clear .venv \
      || fail "$base cannot make a virtual environment; on Debian: apt install python3-venv"
  fi
  echo "setting up .venv (once; a minute or two)" >&2
  "$python" -m pip install --quiet --disable-pip-version-check --no-compile \
    -r "$lock" >&2 \
    || fail "pip could not install $lock (see above); run $0 again to continue"
  "$python" -m compileall -qq -j 0 .venv/lib || true  # on all cores; pip uses one
  for installed in requirements.lock "$lock"; do cp "$installed" .venv/; done  # the tests' has both
}

is_set_up() { [ -x "$python" ] && cmp -s "$lock" ".venv/$lock"; }

if ! is_set_up; then
  if command -v flock >/dev/null; then
    mkdir -p .cache; exec 9>.cache/setup.lock; flock 9   # only one of two scripts may install
  fi
  is_set_up || set_up
  exec 9>&- || true
fi
