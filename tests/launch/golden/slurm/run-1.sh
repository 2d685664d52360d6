#!/usr/bin/env bash
# Runs run-1 on Slurm. `bash run-1.sh` submits a job of the syncer and an array job of learners,
# and each job runs this script again. Submitted again later, they continue the run.
set -euo pipefail
shopt -s nullglob
umask 077
run=run-1 digits=1
workdir=/shared/x
logs=/shared/x/logs
config=--config=JSON

submit() {
  sbatch --parsable --requeue --open-mode=append --nodes=1 --ntasks=1 --signal=B:TERM@17 \
    --account=me "$@"
}
if (( $# == 0 )); then
  mkdir -p "$workdir/logs"
  if grep -sq '^the run has ended' "$workdir/syncer/address"; then rm "$workdir/syncer/address"; fi
  syncer=
  syncer=$(submit --job-name="$run-syncer" --output="$logs/syncer.log" \
    --time=7-0 "$0" syncer)
  echo "job $syncer: the syncer"
  if ! learners=$(submit --job-name="$run${syncer:+-$syncer}" --output="$logs/l%${digits}a.log" \
    ${syncer:+"--dependency=after:$syncer"} --array=0,1,2 \
    --gres=gpu:8 '--comment=two words' "$0" learner); then
    ${syncer:+scancel "$syncer"}
    exit 1
  fi
  echo "job $learners: the learners"
  exit
fi

# In a job. A task has a number of its own, but the last task's number means the whole array.
name=syncer job=$SLURM_JOB_ID
if [[ $1 == learner ]]; then
  printf -v name 'l%0*d' "$digits" "$SLURM_ARRAY_TASK_ID"
  job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi
asked='' program='' ended=''
# shellcheck disable=SC2329
finish() {  # whatever ends this job but the end of the run and 42 puts it back into the queue
  local code=$? state
  trap - EXIT
  set +e
  if [[ ! $asked ]]; then
    case $ended in
    0)
      if [[ $name == syncer ]]; then
        for log in "$workdir"/logs/l*.log; do flock "$log" true; done  # learners
        (diloco report "$workdir")
      fi
      exit 0
      ;;
    42)
      if [[ $name == syncer ]]; then scancel --name="$run-$job"; fi
      exit "$code"
      ;;
    esac
    if (( SECONDS < 20 && ${SLURM_RESTART_COUNT:-0} >= 4 )); then
      echo "$name has ended with $code after $SECONDS s, and is not started again"
      exit "$code"
    fi
  fi
  for _ in {1..60}; do  # a controller may be away
    if state=$(scontrol show job --oneliner "$job"); then
      # Else it is cancelled, or Slurm has requeued it.
      [[ $state == *" JobState=RUNNING "*" Restarts=${SLURM_RESTART_COUNT:-0} "* ]] || break
      echo "$name has ended with $code, and is to start again"
      scontrol requeue "$job" && break
    fi
    sleep 10
  done
  exit "$code"
}
trap finish EXIT
trap 'asked=yes; [[ ! $program ]] && exit 143; kill -TERM "$program"' TERM

exec 9>>"$workdir/logs/$name.log"
flock 9  # where Slurm has lost sight of a node, the program may still run there
if [[ $name == syncer ]]; then
  until node=$(scontrol show node "$SLURMD_NODENAME" | grep -o 'NodeAddr=[^ ]*'); do sleep 10; done
  node=${node#*=}
  if [[ $node == *:* ]]; then node="[$node]"; fi
fi
cd /
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=1073741824:glibc.malloc.top_pad=16777216 GRPC_VERBOSITY=NONE PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=2
diloco() { exec /env/bin/python -m diloco_jax "$@"; }
case $1 in
  syncer) diloco syncer \
      "$config" \
      --workdir=/shared/x \
      --tls=/shared/certs/syncer \
      "--listen=$node:0" & ;;
  learner) diloco learner \
      "$config" \
      --workdir=/shared/x \
      "--tls=/shared/certs/$name" \
      "--learner=$name" \
      --syncer=file:/shared/x/syncer/address & ;;
esac
program=$!
wait "$program" && ended=0 || ended=$?
wait || true  # after SIGTERM, until the program has ended in order
exit "$ended"
