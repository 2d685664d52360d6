"""A soak test: 200 kills of real processes in one run, and its figures.

    python scripts/soak.py                  # about 14 minutes on two quiet cores
    python scripts/soak.py --kills=40

Of ten kills, seven hit the syncer, at random moments and at every failpoint, two a learner, and one
all processes at once; plan and checks are those of tests/runs/test_syncer_kills.py. The figures:
lost committed outer steps, tokens unaccounted for, the time from a kill of the syncer to its next
outer step, the longest gap between two steps of a surviving learner. Exit code 1 if a check failed.
"""

import pathlib
import statistics
import sys
import tempfile

from absl import app, flags

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from diloco_jax.verification.faults import chaos_report
from tests.runs import test_syncer_kills as kills
from tests.runs.lib import failpoints

_KILLS = flags.DEFINE_integer('kills', 200, 'number of kills', 10)
_SEED = flags.DEFINE_integer('seed', 1, 'seed of the random moments')
_WORKDIR = flags.DEFINE_string('workdir', '', 'a new folder; default: a temporary one')
PATIENCE_S = 60.0  # per kill


def plan(count: int) -> dict:
  """Arguments of kills.Conductor."""
  site, learner = count // 10, count // 5
  syncer = count - site - learner
  named = [place for name in failpoints.NAMES for place in (kills.ANY, name)]
  rows = (named * (syncer // len(named) + 1))[:syncer]
  return {'plan': tuple(rows), 'learner_kills': learner, 'site_kills': site, 'seed': _SEED.value}


def restarts(run: kills.Run) -> list[float]:
  """Seconds from each death of the syncer to the next committed outer step."""
  outer = [fact['t_ns'] for fact in run.of('syncer', 'outer')]
  after = (next((t for t in outer if t > death), None) for death in run.deaths('syncer'))
  return [(t - death) / 1e9 for t, death in zip(after, run.deaths('syncer')) if t is not None]


def main(argv: list[str]) -> int:
  del argv
  with tempfile.TemporaryDirectory() as folder:
    workdir = pathlib.Path(_WORKDIR.value or folder)
    run = kills.play(workdir, 60 + PATIENCE_S * _KILLS.value, **plan(_KILLS.value))
    ledger, gaps = run.of('syncer', 'ledger')[-1], run.gaps_of_the_survivor()
    times, longest = restarts(run), max(gaps, key=lambda gap: gap.gap_ns / gap.limit_ns)
    pauses = sum(gap.pause for gap in gaps)
    missing, unaccounted = (
      sum(run.lost_versions()),
      chaos_report.balance(ledger) + ledger['unsettled'],
    )
  deaths = {name: len(run.deaths(name)) for name in ('syncer', *kills.LEARNERS)}
  print(f'kills: {deaths}, the run ended with {run.outcome.code}')
  print(f'committed outer steps: {ledger["synced"]}, lost: {missing}')
  print(
    f'tokens: {ledger["trained"]} trained in {ledger["fragments"]} fragments each, '
    f'{unaccounted} fragment-tokens unaccounted for'
  )
  print(
    f'syncer, from its death to the next outer step: median {statistics.median(times):.2f} s, '
    f'longest {max(times):.2f} s (pauses before a restart included)'
  )
  print(
    f'l0, around {len(gaps)} deaths of others: {pauses} pauses; longest gap between two steps '
    f'{longest.gap_ns / 1e6:.0f} ms without waiting for a CPU ({longest.wall_ns / 1e6:.0f} ms '
    f'with), allowed {longest.limit_ns / 1e6:.0f} ms'
  )
  bad = run.outcome.code or missing or unaccounted or pauses > len(gaps) // 10
  return int(bool(bad))


if __name__ == '__main__':
  app.run(main)
