"""What is really so x every surface that tells of it, for 1, 2, 8 and 64 learners.

A situation is the records that its processes have left, and the truth: what `ps` would show. Each
surface must say it, and none may say what is not so. The same with real processes:
tests/runs/test_what_is_so.py. A new state, or a module that tells of one, has its row here first.
"""

import ast
import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from diloco_jax.config import load
from diloco_jax.configs import stdlib_lm
from diloco_jax.protocol import facts
from diloco_jax.report import condition, live, page, serve
from diloco_jax.report import facts as report_facts
from diloco_jax.report import folder as folder_lib
from diloco_jax.report import state as state_lib
from diloco_jax.report import summary as summary_lib
from tests.report.rows import add, child, exited, member, row, step, synced

ROOT = pathlib.Path(__file__).resolve().parents[2] / 'diloco_jax'
BEGAN, STEPS = 1_795_900_000.0, 100  # wall-clock time of the first fact; T
Rows = list[tuple[str, dict[str, Any]]]


def names(count: int) -> list[str]:
  return [f'l{index}' for index in range(count)]


def begun(count: int, until: int = 20) -> Rows:
  """Everybody trains: a step each second from 10 s on, an outer step every two."""
  rows = [child(BEGAN, name, 'starting') for name in ('syncer', *names(count))]
  rows.append(('syncer', row(BEGAN + 1, report_facts.Startup(phase='ready', cpu_s=1.0))))
  for name in names(count):
    joined = facts.State(state='joined', incarnation=1, clock=0)
    rows += [(name, row(BEGAN + 9, joined)), ('syncer', row(BEGAN + 9, member(name, 'joined')))]
    rows += [(name, step(BEGAN + 9 + n, n, n)) for n in range(1, until + 1)]
  for n in range(2, until + 1, 2):
    rows.append(('syncer', row(BEGAN + 9.5 + n, synced(n, *names(count)))))
  return rows


def alive(count: int, since: float, until: float, *but: str) -> Rows:
  """Later records: the ledger of the syncer, and what the other learners have to say."""
  rows = []
  for at in range(int(since), int(until) + 1, 2):
    rows += [(name, step(BEGAN + at, at - 9, at - 9)) for name in names(count) if name not in but]
    if 'syncer' not in but:
      tokens = 50 * (at - 9)
      told = {name: {'tokens': tokens, 'merged': tokens} for name in names(count)}
      zero = dict.fromkeys(('unsettled', 'cancelled', 'repaired', 'skipped'), 0)
      ledger = facts.Ledger(
        **zero,
        fragments=1,
        trained=tokens * count,
        merged=tokens * count,
        discarded={},
        learners=told,
        synced=10,
        sync=10,
      )
      rows.append(('syncer', row(BEGAN + at, ledger)))
  return rows


@dataclasses.dataclass(frozen=True)
class Situation:
  """What is so at `now` seconds. `program`: of whom; `state`, `run`: of it, and of the run;
  `says`: in each text for people; `never`: in none."""

  rows: Callable[[int], Rows]
  now: float
  program: str
  state: str
  run: str
  says: str
  never: str = r'\bnow\b'
  silent: bool = False


def phase(name: str, *phases: str) -> Callable[[int], Rows]:
  starts = lambda n: [child(BEGAN, one, 'starting') for one in ('syncer', *names(n))]
  return lambda n: (
    starts(n)
    + [(name, row(BEGAN + 1, report_facts.Startup(phase=one, cpu_s=1.0))) for one in phases]
  )


def then(*rows: tuple[str, dict[str, Any]], quiet: tuple[str, ...] = (), until: float = 60) -> Any:
  """After 20 steps of all this happens, while all but the `quiet` ones go on."""
  return lambda n: [*begun(n), *rows, *alive(n, 31, until, *quiet)]


def no_step(at: float, doing: str, idle_s: float, by: str = 'l0') -> tuple[str, dict[str, Any]]:
  fact = facts.NoStep(learner='l0', doing=doing, idle_ns=int(idle_s * 1e9))
  return by, row(BEGAN + at, fact)


def told(at: float, state_: str, reason: str = '', by: str = 'l0') -> tuple[str, dict[str, Any]]:
  return by, row(BEGAN + at, facts.State(state=state_, incarnation=1, clock=20, reason=reason))


def ended(n: int, code: int = 0) -> Rows:
  """The run is over."""
  rows = begun(n, STEPS)
  for name in names(n):
    rows += [told(110, 'trained', by=name), told(111, 'ending', 'done', by=name)]
    rows.append(('syncer', row(BEGAN + 112, member(name, 'lost', 1, 'left: done'))))
    rows += [exited(BEGAN + 112, name, 0), child(BEGAN + 112, name, 'done')]
  return [*rows, exited(BEGAN + 113, 'syncer', code), child(BEGAN + 113, 'syncer', 'done')]


def ended_down(n: int) -> Rows:
  """The run is over before l0, which was killed, could be started again."""
  others = [
    one for one in ended(n) if 'l0' not in (one[0], one[1].get('child'), one[1].get('learner'))
  ]
  l0 = [one for one in begun(n) if 'l0' in (one[0], one[1].get('child'), one[1].get('learner'))]
  down = child(BEGAN + 30, 'l0', 'down', 'killed; restart in 300 s')
  return [*others, *l0, exited(BEGAN + 30, 'l0', -9), down]


QUARANTINE = 'quarantined: NaN or Inf'
CLOSING = facts.Closing(learners=('l0',), merged=False, at_most_ns=9 * 10**9)
SITUATIONS = {
  'nothing is recorded': Situation(lambda n: [], 0, '', '', 'not begun', 'first record', '1970'),
  'it imports': Situation(phase('l0'), 5, 'l0', 'importing', 'starting', 'importing'),
  'it builds': Situation(phase('l0', 'imported'), 5, 'l0', 'building', 'starting', 'building'),
  'it restores': Situation(
    phase('l0', 'imported', 'built'), 5, 'l0', 'restoring', 'starting', 'restoring'
  ),
  'it compiles for long': Situation(
    phase('l0', 'built', 'restored'),
    300,
    'l0',
    'compiling',
    'starting',
    'compiling',
    'not heard of .* .importing',
  ),
  'it dials': Situation(phase('l0', 'compiled'), 5, 'l0', 'joining', 'starting', 'joining'),
  'it waits for others': Situation(
    lambda n: (
      [*phase('l0', 'compiled')(n), told(2, 'joined')]
      + [
        (name, row(BEGAN + 3, report_facts.Startup(phase='built', cpu_s=1.0)))
        for name in names(n)[1:]
      ]
    ),
    5,
    'l0',
    'waiting',
    'starting',
    'waiting for l1',
  ),
  'it was only started': Situation(
    lambda n: [
      ('syncer', row(BEGAN, report_facts.Startup(phase='listens', cpu_s=1.0))),
      ('l0', row(BEGAN, report_facts.Startup(phase='compiled', cpu_s=1.0))),
      exited(BEGAN, 'l0', 1),
      ('l0', row(BEGAN + 1, report_facts.Startup(phase='compiled', cpu_s=1.0))),
      *[
        (name, row(BEGAN, facts.State(state='waiting', incarnation=0, clock=0)))
        for name in names(n)[1:]
      ],
    ],
    3,
    'l0',
    'joining',
    'starting',
    'joining',
  ),
  'all train': Situation(then(), 61, 'l0', 'training', 'training', 'training', 'silent|not heard'),
  'the syncer merges': Situation(then(), 61, 'syncer', 'merging', 'training', 'training'),
  'it is cut off': Situation(
    then(
      told(30, 'disconnected', 'Socket closed'),
      ('syncer', row(BEGAN + 30, member('l0', 'lost', 1, 'silent'))),
    ),
    61,
    'l0',
    'alone',
    'training',
    'alone',
  ),
  'its loader blocks': Situation(
    then(*[no_step(at, 'reading', at - 29) for at in range(60, 63)], quiet=('l0',)),
    63,
    'l0',
    'no step',
    'training',
    'no step.*reads its next batch',
  ),
  'its loader blocks, elsewhere': Situation(
    lambda n: [
      one
      for one in then(no_step(62, 'reading', 33, 'syncer'), quiet=('l0',))(n)
      if one[0] != 'l0' and one[1].get('child') != 'l0'
    ],
    63,
    'l0',
    'no step',
    'training',
    'no step.*reads its next batch',
  ),
  'it compiles again': Situation(
    then(no_step(62, 'compiling', 33), quiet=('l0',)),
    63,
    'l0',
    'compiling',
    'training',
    'compiling',
  ),
  'a long step runs': Situation(
    then(no_step(62, '', 33), quiet=('l0',)),
    63,
    'l0',
    'training',
    'training',
    'training',
    'not heard',
  ),
  'it is stopped by SIGSTOP': Situation(
    then(quiet=('l0',)),
    61,
    'l0',
    'training',
    'training',
    'not heard of|training when its records ended, 3',
    silent=True,
  ),
  'it is killed': Situation(
    then(
      child(BEGAN + 30, 'l0', 'down', 'killed; restart in 9 s'),
      exited(BEGAN + 30, 'l0', -9),
      child(BEGAN + 30, 'l0', 'down', 'killed; restart in 9 s'),
      quiet=('l0',),
    ),
    61,
    'l0',
    'down',
    'training',
    'down',
  ),
  'it was killed by hand': Situation(
    lambda n: [
      one
      for one in then(exited(BEGAN + 30, 'l0', -9), quiet=('l0',))(n)
      if one[1].get('state') != 'starting'
    ],
    61,
    'l0',
    'killed',
    'training',
    'killed',
  ),
  'nobody saw it end': Situation(
    lambda n: [
      one
      for one in then(('syncer', row(BEGAN + 40, member('l0', 'lost', 1, 'lease'))), quiet=('l0',))(
        n
      )
      if one[0] != 'supervisor'
    ],
    61,
    'l0',
    'lost',
    'training',
    'lost',
  ),
  'it sends NaN': Situation(
    then(
      ('syncer', row(BEGAN + 30, member('l0', 'lost', 1, QUARANTINE))),
      exited(BEGAN + 31, 'l0', 42),
      child(BEGAN + 31, 'l0', 'refused', 'in quarantine'),
      quiet=('l0',),
    ),
    61,
    'l0',
    'in quarantine',
    'training',
    'in quarantine.*NaN or Inf',
  ),
  'it failed': Situation(
    then(
      exited(BEGAN + 31, 'l0', 1), child(BEGAN + 31, 'l0', 'failed', 'exit code 1'), quiet=('l0',)
    ),
    61,
    'l0',
    'failed',
    'training',
    'failed.*exit code 1',
  ),
  'it may not take part': Situation(
    then(
      exited(BEGAN + 31, 'l0', 42),
      child(BEGAN + 31, 'l0', 'refused', 'another model'),
      quiet=('l0',),
    ),
    61,
    'l0',
    'refused',
    'training',
    'refused.*another model',
  ),
  'it is asked to end': Situation(
    then(told(60, 'ending', 'preempted'), quiet=('l0',)),
    61,
    'l0',
    'draining',
    'training',
    'draining',
  ),
  'it ended early': Situation(
    then(exited(BEGAN + 31, 'l0', 0), child(BEGAN + 31, 'l0', 'done'), quiet=('l0',)),
    61,
    'l0',
    'stopped',
    'training',
    'stopped',
  ),
  'it has trained to the end': Situation(
    then(told(60, 'trained'), quiet=('l0',)), 61, 'l0', 'trained', 'training', 'trained'
  ),
  'the end waits for it': Situation(
    then(no_step(60, 'reading', 31), ('syncer', row(BEGAN + 60, CLOSING)), quiet=('l0',)),
    61,
    'syncer',
    'merging',
    'closing',
    'no step',
  ),
  'the others are at the end': Situation(
    then(
      *[no_step(at, '', at - 29) for at in range(40, 61, 10)],
      ('syncer', row(BEGAN + 60, synced(STEPS))),
      quiet=('l0',),
    ),
    61,
    'syncer',
    'merging',
    'closing',
    r'waits for l0 \(training\)',
    'evaluates',
  ),
  'all are at the end': Situation(
    lambda n: begun(n, STEPS), 110, 'syncer', 'merging', 'closing', 'evaluates', 'it waits'
  ),
  'the syncer is killed': Situation(
    then(quiet=('syncer',)),
    61,
    'syncer',
    'merging',
    'training',
    'the syncer is not heard of|records of the syncer end',
    r'(?m)\bnow\b| (s|min|h) left|^not heard',
    silent=True,
  ),
  'the syncer starts again': Situation(
    then(child(BEGAN + 60, 'syncer', 'starting'), quiet=('syncer',)),
    61,
    'syncer',
    'starting',
    'training',
    'training',
  ),
  'the syncer ended with 42': Situation(
    then(
      exited(BEGAN + 31, 'syncer', 42),
      child(BEGAN + 31, 'syncer', 'refused', 'the log'),
      quiet=('syncer',),
    ),
    61,
    'syncer',
    'refused',
    'dead',
    'dead|refused',
    r'\bnow\b| (s|min|h) left',
  ),
  'the run is over before its restart': Situation(
    ended_down, 900, 'l0', 'killed', 'over', 'killed', 'restart in|not heard'
  ),
  'the run is over': Situation(
    ended, 900, 'l0', 'done', 'over', 'done|over', r'not heard| (s|min|h) left'
  ),
}


def written(workdir: pathlib.Path, what: str, count: int) -> pathlib.Path:
  config = stdlib_lm.get_config('tiny')
  config.sync.learners = min(count, 10)  # more join: the ids of more would be l00, l01, ...
  config.train.steps, config.sync.quorum = STEPS, 1
  load.write(workdir, config)
  rows = sorted(SITUATIONS[what].rows(count), key=lambda one: one[1]['time'])
  (workdir / 'records').mkdir(exist_ok=True)
  add(workdir, *rows)
  return workdir


def read(workdir: pathlib.Path, now: float) -> folder_lib.Read:
  found = folder_lib.read(workdir)
  found.run.look(BEGAN + now)
  return found


def shown(found: folder_lib.Read) -> dict[str, Any]:
  return state_lib.state(found.run, found.config, 'run')


def people(what: dict[str, Any], program: str) -> str:
  """What a page shows of a program and of the run."""
  one = what['learners'].get(program, {}).get('condition', {}).get('text', '')
  return '\n'.join([one, what['condition']['text'], *what['notices']])


# The surfaces, and the modules that tell of a state. Each is a text, and what it shows as rate.
SURFACES: dict[str, tuple[str, Callable[[folder_lib.Read, str], str]]] = {
  'line': ('report/live.py', lambda found, who: live.status_line(found.run)),
  'page': ('report/state.py', lambda found, who: people(shown(found), who)),
  'file': (
    'report/web/page.js',
    lambda found, who: people(_data(page.inline([shown(found)])), who),
  ),
  'report': (
    'report/summary.py',
    lambda found, who: ' '.join(
      summary_lib.text(summary_lib.summarize(found), found.workdir, 200).split('\n')
    ),
  ),
  'metrics': ('report/serve.py', lambda found, who: serve.metrics(shown(found))),
  'status': ('commands/status.py', lambda found, who: '\n'.join(shown(found)['notices'])),
}
_ASKS = 'condition', 'notices', 'of_run', 'brief'
_SILENT_IF_WELL = {'status'}  # it says what is wrong
_OTHERS = {  # which hand on what another one says, or decide it
  'report/condition.py',
  'report/run_facts.py',
  'launch/supervisor.py',
  'report/programs.py',
}


def _data(html: str) -> dict[str, Any]:
  return json.loads(re.search('<script id="data" type="application/json">(.*?)</script>', html)[1])[
    0
  ]


def cells(workdir: pathlib.Path, what: str) -> Iterator[tuple[str, bool, str]]:
  """(surface, whether it is true, what it says)."""
  so, found = SITUATIONS[what], read(workdir, SITUATIONS[what].now)
  whole = condition.of_run(found.run)
  yield (
    'model',
    (whole.state, bool(so.silent and so.program == 'syncer')) == (so.run, whole.silent),
    f'{whole}',
  )
  if so.program:
    one = found.run.condition(so.program)
    yield 'model', (one.state, one.silent) == (so.state, so.silent), f'{one}'
  bad = so.program and found.run.condition(so.program).kind in (condition.FAULT, condition.SILENT)
  for name, (_, tell) in SURFACES.items():
    text = tell(found, so.program)
    if name == 'metrics':
      who = f'learner="{so.program}",' if so.program.startswith('l') else ''
      label = 'silent' if so.silent else so.state
      if so.program.startswith('l'):
        yield name, f'diloco_learner_state{{{who}state="{label}"}} 1' in text, text
        rate = re.search(rf'diloco_learner_tokens_per_second{{learner="{so.program}"}} (\S+)', text)
        works = so.state in ('training', 'alone') and not so.silent
        yield name, (float(rate[1]) > 0) == works, text
      continue
    quiet = so.program == 'syncer' and so.run == 'training' and not so.silent or so.run == 'over'
    if name == 'report' and quiet:
      yield name, ('not ended' in text) == (so.run != 'over'), text
      continue  # it has no line about a syncer, or a learner, that is well
    if not (name in _SILENT_IF_WELL and not bad and so.run in ('training', 'starting', 'over')):
      many = len(found.run.learners) > live._EACH and name == 'line'
      if not (many and (not bad or so.program == 'syncer')) and so.run not in ('not begun',):
        yield (
          name,
          bool(re.search(so.says, text)) or (name == 'line' and so.program == 'syncer'),
          text,
        )
    yield name, not re.search(so.never, text), text


@pytest.fixture(name='false')
def _false(tmp_path) -> Callable[[str, int], list[tuple[str, str]]]:
  """The false cells of a situation."""

  def false(what: str, count: int) -> list[tuple[str, str]]:
    (folder_ := tmp_path / f'{what} {count}').mkdir(exist_ok=True)
    if not (folder_ / 'records').is_dir():
      written(folder_, what, count)
    return [(name, text) for name, true, text in cells(folder_, what) if not true]

  return false


@pytest.mark.parametrize('count', [1, 2, 8, pytest.param(64, marks=pytest.mark.long)])
@pytest.mark.parametrize('what', SITUATIONS)
def test_every_surface_tells_what_is_so(what, count, false):
  if what == 'it waits for others' and count == 1:
    count = 3
  assert not false(what, count)


def test_a_new_state_has_its_row():
  states = {situation.state for situation in SITUATIONS.values()} | {
    situation.run for situation in SITUATIONS.values()
  }
  assert states - {''} == set(condition.STATES) | set(condition.RUN_STATES) - _UNREACHED


_UNREACHED: set[str] = set()


def test_a_new_surface_has_its_column():
  """Each module that asks what is so, or prints what was answered."""
  asks = set()
  for path in ROOT.rglob('*.py'):
    for node in ast.walk(ast.parse(path.read_text('utf-8'))):
      text = node.value if isinstance(node, ast.Constant) else None
      room = path.relative_to(ROOT).parts[0]
      if getattr(node, 'attr', text) in _ASKS and room not in ('protocol', 'storage'):
        asks.add(str(path.relative_to(ROOT)))
  told = {module for module, _ in SURFACES.values() if module.endswith('.py')} | _OTHERS
  assert asks <= told, asks - told


# --- Mutants --------------------------------------------------------------------------------------

of_program, of_run, notices = condition.of_program, condition.of_run, condition.notices
replace = dataclasses.replace


def _as(one: condition.Condition, **changes: Any) -> condition.Condition:
  return replace(one, **changes)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
  'a state that is not ended': lambda patch: patch.setattr(
    condition,
    'of_program',
    lambda *a: (
      _as(one, state='training') if (one := of_program(*a)).state in ('failed', 'killed') else one
    ),
  ),
  'silence is not noticed': lambda patch: patch.setattr(
    condition, 'of_program', lambda *a: _as(of_program(*a), silent=False)
  ),
  'a step that is missing is not said': lambda patch: patch.setattr(condition, 'MISSING_S', 1e9),
  'the reason of a quarantine is lost': lambda patch: patch.setattr(
    condition,
    'of_program',
    lambda *a: _as(one, why='') if (one := of_program(*a)).state == 'in quarantine' else one,
  ),
  'a quarantine is a mere refusal': lambda patch: patch.setattr(
    condition,
    'of_program',
    lambda *a: (
      _as(one, state='refused') if (one := of_program(*a)).state == 'in quarantine' else one
    ),
  ),
  'a dead run trains': lambda patch: patch.setattr(
    condition,
    'of_run',
    lambda run: _as(one, state='training') if (one := of_run(run)).state == 'dead' else one,
  ),
  'nobody says for whom the end waits': lambda patch: patch.setattr(
    condition,
    'of_run',
    lambda run: _as(one, state='training') if (one := of_run(run)).state == 'closing' else one,
  ),
  'who is silent has a rate': lambda patch: patch.setattr(
    'diloco_jax.report.run_facts.RunFacts.works', lambda self, name: True
  ),
  'a long compilation is a silence': lambda patch: patch.setattr(condition, '_LONG_S', 0),
  'the notices are empty': lambda patch: patch.setattr(condition, 'notices', lambda run: []),
  'a run that is over is silent': lambda patch: patch.setattr(
    condition,
    'of_program',
    lambda *a: _as(one, silent=True) if (one := of_program(*a)).state == 'done' else one,
  ),
  'a run that is over starts who is down again': lambda patch: patch.setattr(
    condition, 'of_program', lambda *a: of_program(*a[:4])
  ),
  'before the first record it is 1970': lambda patch: patch.setattr(
    condition, 'notices', lambda run: notices(run) if run.began_s is not None else ['1970']
  ),
}


@pytest.mark.parametrize('mutant', MUTANTS)
def test_each_mutant_has_a_false_cell(mutant, false, monkeypatch):
  MUTANTS[mutant](monkeypatch)
  assert any(false(what, 2) for what in SITUATIONS)
