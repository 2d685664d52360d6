"""The cost of the syncer to a learner: steps/s under the syncer, against the same learner alone.

    python scripts/benchmarks/learner_overhead.py [--quick] [--json=FILE]     # about 15 minutes

A learner process on the first core, a syncer process on the second one, M = 1, quorum 1, a fragment
every inner step; alone, the learner trains without the syncer, on the same core with the same
compiled step. They take turns. Two configs:

  25M     25 million parameters, P = H = 24, int8 both ways
  demo    the demo's model and settings (stdlib_lm:cpu), one learner, no kill

The figures, without the first two periods:

  ratio           of steps/s, and of steps for a CPU second of the learner's process: the second one
                  does not see other load on this host
  dispatch_share  the dispatch of an inner step, against the time from one step to the next
  gap             between the end of a step and the begin of the next one: encode, adopt, the turns
                  of the machine, records
  stalls          steps that begin more than 20 ms later than the median one, counted and longest;
                  alone they are the host's
  without_core    the time for which the step's own threads were ready and had no core
  exchange_cpu    CPU time of the step thread in an encoding and an adoption, without what the
                  devices compute: they are a step behind
  others_cpu      CPU time of the learner's other threads for each inner step, then each of them.
                  Those of Python hold the GIL for at most that long
"""

import collections
import json
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np

from scripts.benchmarks import measured, processes

CORES = sorted(os.sched_getaffinity(0))
LEARNER_CORE, SYNCER_CORE = CORES[0], CORES[-1]
STALL_S = 0.020
QUIET = ('train.checkpoint_every_steps=0', 'train.eval_every=0', 'train.log_every=1000000')
ONE = ('sync.learners=1', 'sync.quorum=1', 'sync.checkpoint_every_syncs=0')
LARGE = (
  *('model.num_layers=7', 'model.embed_dim=512', 'model.num_heads=8', 'model.num_kv_heads=2'),
  *('model.head_dim=64', 'model.hidden_dim=2048', 'mesh.data=1'),
  *('data.seq_len=32', 'data.batch_size=1', 'data.eval_batches=1', 'data.eval_batch_size=1'),
  *('sync.fragments=24', 'sync.period=24'),
)
CONFIGS = {'25M': ('stdlib_lm:tiny', LARGE, 24, 1), 'demo': ('stdlib_lm:cpu', (), 12, 2)}


def turn(
  which: str,
  alone: bool,
  steps: int,
  cores: Sequence[int | str] = (LEARNER_CORE, SYNCER_CORE),
  compiled: bool = True,
) -> dict[str, Any]:
  """The figures of one run of the learner. `cores`: of the learner, of the syncer. `compiled`: all
  functions are in the cache, so raises RuntimeError if fragments are exchanged late."""
  config, settings, period, devices = CONFIGS[which]
  with tempfile.TemporaryDirectory() as workdir:
    common = [
      f'--config={config}',
      f'--workdir={workdir}',
      *(f'--config.{setting}' for setting in (*ONE, *QUIET, *settings, f'train.steps={steps}')),
    ]
    times = pathlib.Path(workdir) / 'times.json'
    address = 'none' if alone else f'file:{workdir}/syncer/address'
    syncer = None if alone else processes.start(cores[1], ['syncer', *common])
    learner = processes.start(
      cores[0], ['learner', *common, '--learner=l0', f'--syncer={address}'], devices, times
    )
    try:
      samples = processes.watch(learner)
    finally:
      for process in filter(None, (syncer, learner)):
        process.kill()
        process.wait()
    steps_of = processes.facts(workdir, 'l0', 'step')[2 * period :]
    adopted = len(processes.facts(workdir, 'l0', 'adopted'))
    exchanged = json.loads(times.read_text('utf-8'))
  if compiled and not alone and adopted < 0.9 * (steps - period):
    raise RuntimeError(f'{which}: {adopted} adoptions in {steps} steps: this is not the full rate')
  return _figures(steps_of, samples, exchanged, 2 * period)


def _figures(
  steps: list[dict], samples: list[processes.Sample], exchanged: dict, skipped: int
) -> dict[str, Any]:
  ends = np.array([step['t_ns'] for step in steps])
  begins = ends - np.array([step['seconds'] for step in steps]) * 1e9
  between_s, gaps_s = np.diff(begins) / 1e9, (begins[1:] - ends[:-1]) / 1e9
  late_s = between_s - np.median(between_s)
  used = processes.between(samples, ends[0], ends[-1])
  share = used.t_ns / (ends[-1] - ends[0])  # of the steps that lie between the two samples
  counted, inner = share * len(between_s), (processes.STEP, processes.XLA)
  dispatched_s = [seconds for seconds, _ in exchanged.pop('dispatch')[skipped:]]
  return {
    'steps_per_s': len(between_s) / between_s.sum(),
    'steps_per_cpu_s': counted / (used.cpu_ns.total() / 1e9),
    'cpu_ms': used.cpu_ns.total() / 1e6 / counted,
    'dispatch_share': statistics.fmean(dispatched_s) / float(between_s.mean()),
    'step_ms': 1e3 * float(np.median([step['seconds'] for step in steps])),
    'gap_ms': 1e3 * float(np.median(gaps_s)),
    'gap_p99_ms': 1e3 * float(np.percentile(gaps_s, 99)),
    'gap_longest_ms': 1e3 * float(gaps_s.max()),
    'stalls_per_1000': 1e3 * float((late_s > STALL_S).mean()),
    'stall_longest_ms': 1e3 * float(late_s.max()),
    'without_core_ms': sum(used.waits_ns[name] for name in inner) / 1e6 / counted,
    'others_cpu_ms': (used.cpu_ns.total() - sum(used.cpu_ns[name] for name in inner))
    / 1e6
    / counted,
    **{
      f'{name}_ms': 1e3 * statistics.median(seconds for seconds, _ in times[skipped:])
      for name, times in exchanged.items()
      if times
    },
    'exchange_cpu_ms': 1e3 * sum(_mean_cpu_s(times[skipped:]) for times in exchanged.values()),
    'threads_ms': {name: ns / 1e6 / counted for name, ns in used.cpu_ns.most_common()},
  }


def _mean_cpu_s(times: list[tuple[float, float]]) -> float:
  return statistics.fmean(cpu_s for _, cpu_s in times) if times else 0.0


def main() -> None:
  flags = measured.flags(__doc__)
  turns, periods = (1, 6) if flags.quick else (5, 8)
  reports = {}
  for which, (_, _, period, _) in CONFIGS.items():
    steps = period * periods * (1 if which == '25M' else 4)
    runs = collections.defaultdict(list)
    for _ in range(turns):
      for way in ('alone', 'syncer'):
        runs[way].append(turn(which, way == 'alone', steps))
    reports[which] = report(which, runs)
  measured.write(flags.json, reports)


def report(which: str, runs_of: dict[str, list[dict]]) -> dict[str, Any]:
  ratios = {
    name: measured.spread(
      [beside[name] / alone[name] for beside, alone in zip(runs_of['syncer'], runs_of['alone'])]
    )
    for name in ('steps_per_s', 'steps_per_cpu_s')
  }
  figures = {'ratio': ratios}
  for way, runs in runs_of.items():
    figures[way] = {
      name: measured.spread([run[name] for run in runs]) for name in runs[0] if name != 'threads_ms'
    }
    names = {name: None for run in runs for name in run['threads_ms']}
    figures[way]['threads_ms'] = {
      name: statistics.median(run['threads_ms'].get(name, 0.0) for run in runs) for name in names
    }
  texts = [f'{name} {measured.text(ratio)}' for name, ratio in ratios.items()]
  print(f'{which}: {", ".join(texts)}')
  print(f'  {"":18}' + ''.join(f'{way:>28}' for way in runs_of))
  for name in list(figures['syncer']):
    if name != 'threads_ms':
      rows = [figures[way].get(name) for way in runs_of]
      cells = [measured.text(row) if row else '' for row in rows]
      print(f'  {name:18}' + ''.join(f'{cell:>28}' for cell in cells))
  for name, cpu_ms in figures['syncer']['threads_ms'].items():
    before = figures['alone']['threads_ms'].get(name, 0.0)
    if max(cpu_ms, before) >= 0.01:
      print(f'  thread {name:18} {before:20.2f} {cpu_ms:27.2f} ms of CPU for an inner step')
  sys.stdout.flush()
  return figures


if __name__ == '__main__':
  main()
