#!/usr/bin/env bash
# Trains on this machine: a syncer, two learners, the page of the run, a report at the end.
#
#   ./run.sh                               # in a new folder, runs/DATE-TIME
#   ./run.sh --config.train.steps=100      # with any setting, see config.py
#   PYTHON=/path/to/python ./run.sh        # with the Python that has diloco_jax
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python3}
run=runs/$(date +%Y%m%d-%H%M%S)
learners=2

fail() {
  echo "error: $1; the last lines of $run/syncer.log:" >&2
  tail -n 5 "$run/syncer.log" >&2
  exit 1
}

if ! "$python" -c 'import diloco_jax'; then
  echo "error: $python has no diloco_jax: activate its environment, or set PYTHON" >&2
  exit 1
fi
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT # Ctrl-C ends all of them, too

echo "$run: the syncer starts"
mkdir -p "$run"
"$python" -m diloco_jax syncer --config=config.py --workdir="$run" "$@" > "$run/syncer.log" 2>&1 &
syncer=$!
while [ ! -e "$run/syncer/address" ]; do
  kill -0 "$syncer" 2> /dev/null || fail 'the syncer has ended'
  sleep 0.2
done
echo "the page of the run (Ctrl-C ends the run, not the page alone):"
"$python" -m diloco_jax status --workdir="$run" &

loops=()
for ((number = 1; number <= learners; number++)); do
  "$python" loop.py "file:$run/syncer/address" &
  loops+=($!)
done
ended=0
for loop in "${loops[@]}"; do
  wait "$loop" && ended=1 # the run goes on without a learner that fails
done
[ "$ended" = 1 ] || fail 'no learner has come to the end'
wait "$syncer" || fail 'the syncer has failed'
"$python" -m diloco_jax report "$run"
