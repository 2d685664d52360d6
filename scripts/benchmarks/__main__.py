"""Runs the benchmarks of this folder, each in a process of its own, one after the other.

    python -m scripts.benchmarks [--quick] [--only=NAME,...] [--json=FILE]

--quick takes about 15 minutes on two idle cores, all of them about an hour. Everything that they
print is the table; FILE gets the figures of all, with the machine and the versions. A benchmark
that fails does not end the others, but the exit code is 1.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time

from scripts.benchmarks import measured, processes

NAMES = {
  'learner_overhead': 'steps/s of a learner under the syncer, against alone',
  'outer_round': 'an outer round, against an all-reduce and a bare gRPC star',
  'stages': 'an outer round by stage, CPU and wall time',
  'encoding': 'encode, and decode and add, against memcpy',
  'scale': 'one syncer with more learners, parameters and fragments; memory',
  'start_up': 'fingerprint of a corpus; first step, return of a learner, recovery of the syncer',
  'own_loop': "peer.sync in a loop of one's own",
  'store': 'objects, outer steps, copies and saves against a store in a bucket',
}
FOLDER = pathlib.Path(__file__).parent


def run(name: str, short: bool) -> dict | None:
  """Runs one benchmark; returns its figures, None if it failed."""
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'figures.json'
    words = [sys.executable, str(FOLDER / f'{name}.py'), f'--json={path}']
    done = subprocess.run(
      words + ['--quick'] * short, cwd=processes.ROOT, env=processes.environment()
    )
    return None if done.returncode else json.loads(path.read_text('utf-8'))


def main() -> int:
  lines = '\n'.join(f'  {name:18} {text}' for name, text in NAMES.items())
  parser = argparse.ArgumentParser(
    prog='python -m scripts.benchmarks',
    description=f'{__doc__}\n{lines}',
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument('--quick', action='store_true', help='small sizes and few rounds')
  parser.add_argument('--only', default=','.join(NAMES), help='names, with commas')
  parser.add_argument('--json', default='', help='a file for the figures')
  flags = parser.parse_args()
  names = flags.only.split(',')
  if unknown := set(names) - NAMES.keys():
    parser.error(f'there is no benchmark {", ".join(sorted(unknown))}; use {", ".join(NAMES)}')
  results = {}
  for name in names:
    print(f'--- {name}: {NAMES[name]}', flush=True)
    began_s = time.monotonic()
    results[name] = run(name, flags.quick)
    print(f'({time.monotonic() - began_s:.0f} s)', flush=True)
  failed = [name for name, figures in results.items() if figures is None]
  measured.write(flags.json, {'quick': flags.quick, **results})
  if failed:
    print(f'failed: {", ".join(failed)}', file=sys.stderr)
  return int(bool(failed))


if __name__ == '__main__':
  sys.exit(main())
