"""The engine of Slurm clusters: it writes a script that submits the jobs of a run, and submits
nothing itself.

The syncer is a job, and the learners are the tasks of an array job: Slurm requeues each of them
alone, but a heterogeneous job only as a whole. Each job runs the script again, which runs the
program and decides by its end whether Slurm is to start it again. The nodes share the folder of the
run, where the syncer leaves its address at each start.
"""

import json
import os
import pathlib
import re
import shlex

from absl import flags

from diloco_jax.launch import cli
from diloco_jax.launch import spec as spec_lib
from diloco_jax.process import exits, restarts, run_folder
from diloco_jax.storage import files as files_lib
from diloco_jax.transport import addresses

_RESERVED_OPTIONS = re.compile(  # options that the script sets itself, or that would break it
  '-[aDdeJNnoW]|--(array|chdir|dependency|error|job-name|nodes|no-requeue|ntasks|open-mode|output|'
  r'parsable|requeue|signal|test-only|wait|wrap)\b'
)

_ALL = flags.DEFINE_string(
  'sbatch', '', "slurm: options of sbatch for every job, as '--account=me --time=1-0'."
)
_SYNCER = flags.DEFINE_string('sbatch_syncer', '', "slurm: the same for the syncer's job alone.")
_LEARNERS = flags.DEFINE_string(
  'sbatch_learners', '', "slurm: the same for each learner, as '--gres=gpu:8 --mem=0'."
)


def choose(request: spec_lib.Request) -> spec_lib.Choices:
  """Words in brackets are variables of the script; no path of a run has a bracket."""
  if request.tpus:
    raise ValueError(f'--topology={request.topology}: a Slurm cluster has no TPU slices')
  for flag in (_ALL, _SYNCER, _LEARNERS):
    try:
      words = shlex.split(flag.value)
    except ValueError as error:
      raise ValueError(f'--{flag.name}={flag.value}: {error}') from error
    if ours := [word for word in words if _RESERVED_OPTIONS.match(word)]:
      raise ValueError(f'--{flag.name}: leave {" ".join(ours)} out, the script itself decides that')
  workdir = os.path.abspath(request.workdir)
  files_lib.require_name(pathlib.Path(workdir))
  return spec_lib.Choices(
    workdir=workdir,
    syncer=f'file:{workdir}/{run_folder.ADDRESS}',
    listen=f'[node]:{request.port or 0}',
    tls=os.path.abspath(request.tls),
    flags=['[config]'],
  )


def needs(described: spec_lib.Spec, request: spec_lib.Request) -> dict[str, object]:
  learners = described.learners
  gpus = re.search('gpu|-G', f'{_ALL.value} {_LEARNERS.value}')
  return {
    '--workdir=FOLDER, which all nodes share': request.workdir,
    '--tls, a folder that all nodes share and diloco certs made (diloco certs --help)': request.tls,
    "GPUs for each learner, as --sbatch_learners='--gres=gpu:8' (for learners on CPUs: "
    '--topology=cpu)': gpus or request.topology or not learners,
    'learners of one host, --config.mesh.hosts=1': all(learner.hosts == 1 for learner in learners),
  }


def render(
  described: spec_lib.Spec, request: spec_lib.Request, choices: spec_lib.Choices
) -> dict[str, str]:
  learners = described.learners
  environment = dict(described.programs[0].environment)
  if request.topology == spec_lib.CPU:
    environment['JAX_PLATFORMS'] = 'cpu'
  jobs = []
  if described.has_syncer:
    jobs.append(_SUBMIT_SYNCER % {'options': _options(_SYNCER.value)})
  if learners:
    numbers = ','.join(str(int(learner.name[1:])) for learner in learners)
    jobs.append(_SUBMIT_LEARNERS % {'array': numbers, 'options': _options(_LEARNERS.value)})
  words = {
    'run': described.name,
    'program': shlex.join(cli.PROGRAM),
    'cwd': shlex.quote(os.getcwd()),
    'workdir': shlex.quote(choices.workdir),
    'logs': shlex.quote(choices.workdir.replace('%', '%%') + '/logs'),  # % is special to sbatch
    'config': shlex.quote(f'--config={json.dumps(request.config.to_dict())}'),
    'environment': shlex.join(f'{key}={value}' for key, value in environment.items()),
    'digits': len(learners[0].name) - 1 if learners else 1,
    'jobs': '\n'.join(jobs),
    'options': _options(_ALL.value),
    'stop_s': request.stop_s,
    'ended': addresses.ENDED,
    'address': run_folder.ADDRESS,
    'commands': '\n'.join(
      f'  {role}) {_words(program, request, choices)} & ;;'
      for role, program in {program.role: program for program in described.programs}.items()
    ),
    'never': exits.NEVER_RETRY,
    'short_s': int(restarts.SHORT_S),
    'restarts': restarts.MAX_SHORT_PROCESSES - 1,
  }
  return {f'{described.name}.sh': _SCRIPT % words}


def _options(text: str) -> str:
  return ''.join(f'{shlex.quote(word)} ' for word in shlex.split(text))


def _words(program: spec_lib.Program, request: spec_lib.Request, choices: spec_lib.Choices) -> str:
  """A command for bash. Learners differ by their names only."""
  own = program.role == spec_lib.LEARNER and spec_lib.loop(request, choices, '[name]')
  words = [] if own else [f'diloco {program.argv[1]}']
  differ = [f'--learner={program.name}', f'--tls={choices.tls}/{program.name}']
  names = differ if program.role == spec_lib.LEARNER and not own else []
  for word in own or program.argv[2:]:
    if word in names:
      word = word.removesuffix(program.name) + '[name]'
    if shlex.quote(word) != word:
      escaped = re.sub(r'[\\"`$]', r'\\\g<0>', word)
      word = re.sub(r'\[(node|name|config)\]', r'$\1', f'"{escaped}"')
    words.append(word)
  return ' \\\n      '.join(words)


_SUBMIT_SYNCER = """\
  syncer=$(submit --job-name="$run-syncer" --output="$logs/syncer.log" \\
    %(options)s"$0" syncer)
  echo "job $syncer: the syncer\""""
_SUBMIT_LEARNERS = """\
  if ! learners=$(submit --job-name="$run${syncer:+-$syncer}" --output="$logs/l%%${digits}a.log" \\
    ${syncer:+"--dependency=after:$syncer"} --array=%(array)s \\
    %(options)s"$0" learner); then
    ${syncer:+scancel "$syncer"}
    exit 1
  fi
  echo "job $learners: the learners\""""
_SCRIPT = """\
#!/usr/bin/env bash
# Runs %(run)s on Slurm. `bash %(run)s.sh` submits a job of the syncer and an array job of learners,
# and each job runs this script again. Submitted again later, they continue the run.
set -euo pipefail
shopt -s nullglob
umask 077
run=%(run)s digits=%(digits)s
workdir=%(workdir)s
logs=%(logs)s
config=%(config)s

submit() {
  sbatch --parsable --requeue --open-mode=append --nodes=1 --ntasks=1 --signal=B:TERM@%(stop_s)s \\
    %(options)s"$@"
}
if (( $# == 0 )); then
  mkdir -p "$workdir/logs"
  if grep -sq '^%(ended)s' "$workdir/%(address)s"; then rm "$workdir/%(address)s"; fi
  syncer=
%(jobs)s
  exit
fi

# In a job. A task has a number of its own, but the last task's number means the whole array.
name=syncer job=$SLURM_JOB_ID
if [[ $1 == learner ]]; then
  printf -v name 'l%%0*d' "$digits" "$SLURM_ARRAY_TASK_ID"
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
    %(never)s)
      if [[ $name == syncer ]]; then scancel --name="$run-$job"; fi
      exit "$code"
      ;;
    esac
    if (( SECONDS < %(short_s)s && ${SLURM_RESTART_COUNT:-0} >= %(restarts)s )); then
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
cd %(cwd)s
export %(environment)s
diloco() { exec %(program)s "$@"; }
case $1 in
%(commands)s
esac
program=$!
wait "$program" && ended=0 || ended=$?
wait || true  # after SIGTERM, until the program has ended in order
exit "$ended"
"""
