"""One step ahead: how much of an inner step's turn its dispatch takes, and steps/s.

    python scripts/benchmarks/ahead.py [--against=FOLDER] [--turns=1] [--quick] [--json=FILE]

About four minutes on two quiet cores, two of them for --against. Two parts:

  core    a learner on a core of its own, the syncer on the other one, against the lone learner, in
          turns, as in learner_overhead.py: the demo and the model of 25M parameters
  demo    the demo's four learners on all cores, in a single controller and in processes, without
          kills. --against: another checkout of this repository, in turns with this one

The dispatch of a step is the call that starts it; its turn lasts from one step to the next one of
the same learner. --quick leaves the model of 25M parameters out.
"""

import collections
import json
import pathlib
import statistics
import sys
import tempfile
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from scripts.benchmarks import learner_overhead, measured, processes

LEARNERS, DEVICES, STEPS, SKIPPED = 4, 2, 200, 24
OWN_CORE = {'demo': (2, 288), '25M': (1, 144)}  # twice as many turns of the shorter one; steps
ALL = ','.join(map(str, learner_overhead.CORES))


def run(single: bool, checkout: str) -> dict[str, float]:
  """Runs the demo once; returns steps/s of all learners together and the share of dispatches."""
  with tempfile.TemporaryDirectory() as workdir:
    common = [
      '--config=stdlib_lm:cpu',
      f'--workdir={workdir}',
      *(f'--config.{one}' for one in learner_overhead.QUIET),
      f'--config.train.steps={STEPS}',
    ]
    names = [f'l{k}' for k in range(LEARNERS)]
    times = [pathlib.Path(workdir) / f'{name}.json' for name in names]
    if single:
      devices, times = LEARNERS * DEVICES, times[:1]
      commands = [(['train', '--controller=single', *common], devices, times[0])]
    else:
      to_syncer = f'--syncer=file:{workdir}/syncer/address'
      commands = [
        (['learner', *common, f'--learner={name}', to_syncer], DEVICES, path)
        for name, path in zip(names, times)
      ]
      commands.append((['syncer', *common], 1, ''))
    running = [processes.start(ALL, *command, checkout) for command in commands]
    try:
      codes = [process.wait(processes.DEADLINE_S) for process in running]
    finally:
      for process in running:
        process.kill()
        process.wait()
    if any(codes):
      raise RuntimeError(f'processes of the demo ended with {codes}')
    rates = []
    for name in names:
      ends = [step['t_ns'] for step in processes.facts(workdir, name, 'step')[SKIPPED:]]
      rates.append(1e9 * (len(ends) - 1) / (ends[-1] - ends[0]))
    dispatched_s = [
      seconds
      for path in times
      for seconds, _ in json.loads(path.read_text('utf-8'))['dispatch'][
        SKIPPED * LEARNERS // len(times) :
      ]
    ]
    mean_s = statistics.fmean(dispatched_s)
    return {'steps_per_s': sum(rates), 'dispatch_share': mean_s * statistics.fmean(rates)}


def own_core(which: str, turns: int, steps: int) -> dict[str, Any]:
  taken = collections.defaultdict(list)
  for _ in range(turns):
    for way in ('alone', 'syncer'):
      taken[way].append(learner_overhead.turn(which, way == 'alone', steps))
  return learner_overhead.report(which, taken)


def demo(single: bool, turns: int, against: str) -> dict[str, Any]:
  taken = collections.defaultdict(list)
  for _ in range(turns):
    for checkout in filter(None, ('this', against)):
      taken[checkout].append(run(single, '' if checkout == 'this' else checkout))
  found = {}
  for checkout, runs in taken.items():
    found[checkout] = {name: measured.spread([one[name] for one in runs]) for name in runs[0]}
  if against:
    rates = [[one['steps_per_s'] for one in taken[checkout]] for checkout in ('this', against)]
    found['ratio'] = {'steps_per_s': measured.spread([a / b for a, b in zip(*rates)])}
  for name, one in found.items():
    text = ', '.join(f'{figure} {measured.text(value)}' for figure, value in one.items())
    print(f'demo, {"single controller" if single else "processes"}, {name}: {text}', flush=True)
  return found


def main() -> None:
  parser = measured.parser(__doc__)
  parser.add_argument('--against', default='', help='another checkout, for the demo')
  parser.add_argument('--turns', type=int, default=1, help='of each run')
  flags = parser.parse_args()
  found = {}
  for which, (times, steps) in OWN_CORE.items():
    if which == 'demo' or not flags.quick:
      found[which] = own_core(which, times * flags.turns, steps)
  for single in (True, False):
    found['single' if single else 'processes'] = demo(single, flags.turns, flags.against)
  measured.write(flags.json, found)


if __name__ == '__main__':
  main()
