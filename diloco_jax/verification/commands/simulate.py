"""Runs the production machines in the simulated world, with faults drawn from seeds.

    diloco simulate --seeds=0:1000                  # a thousand runs, no violation
    diloco simulate --seed=17 --story               # narrates one run
    diloco simulate --seed=17 --tapes=/tmp/seed17   # its tapes, for replay

Each seed draws its own settings, hardware, network and faults; then the simulator heals every
fault, and the run must finish (docs/simulator.md). Exit code 0: no violation; 1: the first
violations are printed with the commands that reproduce them; 42: wrong flags. A thousand seeds take
about 45 s on two cores.
"""

import os
import pathlib
import sys
import textwrap
import time

from absl import flags
from rich import progress

from diloco_jax.launch import die_with_parent
from diloco_jax.process import exits
from diloco_jax.protocol import config as config_lib
from diloco_jax.storage import tapes
from diloco_jax.verification.sim import many_seeds, narrate, random_settings
from diloco_jax.verification.sim import seeds as seeds_lib
from diloco_jax.verification.sim import tapes as sim_tapes

_SEEDS = flags.DEFINE_string(
  'seeds', None, 'The seeds to run, FIRST:END without END; the default is 0:1000.'
)
_SEED = flags.DEFINE_integer('seed', None, 'Run one seed only.')
_STORY = flags.DEFINE_bool('story', False, 'With --seed: narrate the run.')
_TAPES = flags.DEFINE_string('tapes', '', 'With --seed: write all tapes into this folder.')
_JOBS = flags.DEFINE_integer('jobs', 0, 'Run so many processes; 0 is one per core.', lower_bound=0)
_VIOLATIONS_SHOWN = 3  # violations printed in full


def main(argv: list[str]) -> int:
  del argv
  if _SEED.value is not None:
    if _SEEDS.value is not None:
      raise exits.NeverRetry('--seed and --seeds exclude each other: give one of them')
    return _one(_SEED.value)
  for flag, given in (('--story', _STORY.value), ('--tapes', _TAPES.value)):
    if given:
      raise exits.NeverRetry(f'{flag} applies to one run: add --seed=N')
  first, colon, beyond = (_SEEDS.value or '0:1000').partition(':')
  if not (colon and first.isdecimal() and beyond.isdecimal() and int(first) < int(beyond)):
    raise exits.NeverRetry(
      f'--seeds={_SEEDS.value}: write FIRST:END, two numbers, for example 0:1000'
    )
  return _many(int(first), int(beyond))


def _one(seed: int) -> int:
  """Runs one seed; prints its settings and, on request, its story, and writes its tapes."""
  print(_settings(seed))
  tape = sim_tapes.Tapes(_tapes_folder(), tapes.commit())
  teller = narrate.Story(print)
  if _STORY.value:
    print(f'{"ms":>6} node')
  watchers = [tape, teller] if _STORY.value else [tape]
  note = teller.note if _STORY.value else lambda now_ns, text: None
  outcome = seeds_lib.run_seed(seed, watchers, note)
  print(
    f'seed {seed}: {outcome.events:,} events, {len(outcome.faults)} faults in '
    f'{outcome.virtual_ns / 1e9:.1f} s of virtual time, hash {tape.hash}'
  )
  if _TAPES.value:
    print(f'tapes: diloco replay {_TAPES.value}')
  return _verdict([outcome])


def _settings(seed: int) -> str:
  """The settings of a seed that are not the default."""
  config = random_settings.draw(seed).config
  drawn = [
    f'{setting.name}={setting.written(value)}'
    for field, setting in config_lib.TABLE.items()
    if (value := getattr(config, field)) != setting.default
  ]
  return textwrap.fill(f'seed {seed}: {", ".join(drawn)}', 80, subsequent_indent='  ')


def _tapes_folder() -> pathlib.Path | None:
  if not _TAPES.value:
    return None
  folder = pathlib.Path(_TAPES.value)
  if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
    raise exits.NeverRetry(
      f'--tapes={folder} is a file or not empty. Nothing was overwritten; name a new folder'
    )
  return folder


def _many(first: int, beyond: int) -> int:
  """Runs many seeds with a progress bar."""
  os.environ['PYTHONSAFEPATH'] = '1'  # else the folder of the start is first on the path of each
  total, began = many_seeds.Summary(), time.monotonic()
  with progress.Progress(
    *progress.Progress.get_default_columns(),
    progress.MofNCompleteColumn(),
    progress.TextColumn('{task.fields[violations]} violations'),
    transient=True,
    disable=not sys.stdout.isatty(),
  ) as bar:
    task = bar.add_task('seeds', total=beyond - first, violations=0)
    for part in many_seeds.run(range(first, beyond), _JOBS.value, die_with_parent.die_with_parent):
      total.add(part)
      bar.update(task, completed=total.seeds, violations=len(total.failed))
  seconds = time.monotonic() - began
  code = _verdict(total.failed)
  print(
    f'{total.seeds:,} seeds, {total.events:,} events, {total.faults.total():,} faults: '
    f'{len(total.failed)} violations. {seconds:.0f} s, {total.seeds / seconds:.0f} seeds/s, '
    f'{total.events / seconds:,.0f} events/s, commit {tapes.commit()}'
  )
  return code


def _verdict(outcomes: list[seeds_lib.Outcome]) -> int:
  failed = sorted(
    (seed_run for seed_run in outcomes if seed_run.violation), key=lambda seed_run: seed_run.seed
  )
  for outcome in failed[:_VIOLATIONS_SHOWN]:
    print(many_seeds.explain(outcome, tapes.commit()), end='\n\n')
  if len(failed) > _VIOLATIONS_SHOWN:
    print(
      'more violations: seeds',
      ' '.join(str(seed_run.seed) for seed_run in failed[_VIOLATIONS_SHOWN:]),
    )
  if not failed:
    print('no violation')
  return 1 if failed else 0
