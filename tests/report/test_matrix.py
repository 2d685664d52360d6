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
from tests.report.rows import add, child, exited, ledger, member, progress, row, step, synced

ROOT = pathlib.Path(__file__).resolve().parents[2] / 'diloco_jax'
BEGAN, STEPS = 1_795_900_000.0, 100  # wall-clock time of the first fact; T
Rows = list[tuple[str, dict[str, Any]]]


def names(count: int) -> list[str]:
  return [f'l{index}' for index in range(count)]


def startup(at: float, name: str, phase: str) -> tuple[str, dict[str, Any]]:
  return name, row(BEGAN + at, report_facts.Startup(phase=phase, cpu_s=1.0))


def state(at: float, state_: str, reason: str = '', name: str = 'l0') -> tuple[str, dict[str, Any]]:
  return name, row(BEGAN + at, facts.State(state=state_, incarnation=1, clock=20, reason=reason))


def no_step(at: float, doing: str, idle_s: float, by: str = 'l0') -> tuple[str, dict[str, Any]]:
  fact = facts.NoStep(learner='l0', doing=doing, idle_ns=int(idle_s * 1e9))
  return by, row(BEGAN + at, fact)


def of_member(at: float, *what: Any) -> tuple[str, dict[str, Any]]:
  return 'syncer', row(BEGAN + at, member('l0', 'lost', 1, *what))


def is_about(record: tuple[str, dict[str, Any]], name: str) -> bool:
  return name in (record[0], record[1].get('child'), record[1].get('learner'))


def training(count: int, until: int = 20) -> Rows:
  """Everybody trains: a step each second from 10 s on, an outer step every two."""
  again = 'restarted (process 2)'
  rows = [child(BEGAN, name, 'starting', again) for name in ('syncer', *names(count))]
  rows.append(startup(1, 'syncer', 'ready'))
  for name in names(count):
    joined = facts.State(state='joined', incarnation=1, clock=0)
    rows += [(name, row(BEGAN + 9, joined)), ('syncer', row(BEGAN + 9, member(name, 'joined')))]
    rows += [(name, step(BEGAN + 9 + n, n, n)) for n in range(1, until + 1)]
  for n in range(2, until + 1, 2):
    rows.append(('syncer', row(BEGAN + 9.5 + n, synced(n, *names(count)))))
  return rows


def goes_on(count: int, until: float, *but: str) -> Rows:
  """Rows from 31 s on: the ledger of the syncer, and the steps of the other learners."""
  rows = []
  for at in range(31, int(until) + 1, 2):
    rows += [(name, step(BEGAN + at, at - 9, at - 9)) for name in names(count) if name not in but]
    if 'syncer' not in but:
      trained = 50 * (at - 9)
      learners = {name: {'tokens': trained, 'merged': trained} for name in names(count)}
      rows.append(
        ('syncer', row(BEGAN + at, ledger(trained * count, learners, synced=10, sync=10)))
      )
  return rows


def then(*rows: tuple[str, dict[str, Any]], quiet: tuple[str, ...] = (), until: float = 60) -> Any:
  """After 20 steps of all this happens, while all but the `quiet` ones go on."""
  return lambda n: [*training(n), *rows, *goes_on(n, until, *quiet)]


def to_the_end(n: int) -> Rows:
  """The run is over."""
  rows = training(n, STEPS)
  for name in names(n):
    rows += [state(110, 'trained', name=name), state(111, 'ending', 'done', name)]
    rows.append(('syncer', row(BEGAN + 112, member(name, 'lost', 1, 'left: done'))))
    rows += [exited(BEGAN + 112, name, 0), child(BEGAN + 112, name, 'done')]
  return [*rows, exited(BEGAN + 113, 'syncer', 0), child(BEGAN + 113, 'syncer', 'done')]


def to_the_end_stuck(n: int) -> Rows:
  """The run is over, and l0 has not made its last steps: its loader blocks."""
  others = [record for record in to_the_end(n) if not is_about(record, 'l0')]
  own = [record for record in training(n) if is_about(record, 'l0')]
  ends = [state(111, 'ending', 'done'), ('l0', exited(BEGAN + 112, 'l0', 0)[1])]
  return [*others, *own, no_step(110, 'reading', 81), *ends]


def to_the_end_without_l0(n: int) -> Rows:
  """The run is over before l0, which was killed, could be started again."""
  others = [record for record in to_the_end(n) if not is_about(record, 'l0')]
  l0 = [record for record in training(n) if is_about(record, 'l0')]
  down = child(BEGAN + 30, 'l0', 'down', 'killed; restart in 300 s')
  return [*others, *l0, exited(BEGAN + 30, 'l0', -9), down]


# --- The situations -------------------------------------------------------------------------------


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
  since: float | None = None  # the state of the program began, in s


def phase(name: str, *phases: str) -> Callable[[int], Rows]:
  starts = lambda n: [child(BEGAN, program, 'starting') for program in ('syncer', *names(n))]
  return lambda n: starts(n) + [startup(1, name, phase) for phase in phases]


def begins(state_: str, *phases: str, now: float = 5, **more: Any) -> Situation:
  """l0 has had these phases of its start."""
  return Situation(phase('l0', *phases), now, 'l0', state_, 'starting', state_, **more)


def learner(state_: str, *rows: Any, says: str = '', run: str = 'training', **more: Any):
  """l0 has no other records after its 20th step."""
  happens = then(*rows, quiet=('l0',))
  return Situation(happens, more.pop('now', 61), 'l0', state_, run, says or state_, **more)


def syncer(state_: str, run: str, *rows: Any, says: str = '', **more: Any) -> Situation:
  """The syncer has no other records."""
  return Situation(then(*rows, quiet=('syncer',)), 61, 'syncer', state_, run, says or run, **more)


def without(rows: Callable[[int], Rows], is_left_out: Callable[[Any], bool]) -> Any:
  return lambda n: [record for record in rows(n) if not is_left_out(record)]


QUARANTINE = 'quarantined: NaN or Inf'
CLOSING = facts.Closing(learners=('l0',), merged=False, at_most_ns=9 * 10**9)
OVER = 'done|over'
LEFT = r'\bnow\b| (s|min|h) left'
DOWN = child(BEGAN + 30, 'l0', 'down', 'killed; restart in 9 s')
KILLED, FAILED, REFUSED = (exited(BEGAN + 30, 'l0', code) for code in (-9, 1, 42))
SITUATIONS = {
  'nothing is recorded': Situation(lambda n: [], 0, '', '', 'not begun', 'first record', '1970'),
  'it imports': begins('importing'),
  'it builds': begins('building', 'imported'),
  'it restores': begins('restoring', 'imported', 'built'),
  'it compiles for long': begins(
    'compiling', 'built', 'restored', now=300, never='not heard of .* .importing'
  ),
  'it dials': begins('joining', 'compiled'),
  'it waits for others': Situation(
    lambda n: [
      *phase('l0', 'compiled')(n),
      state(2, 'joined'),
      *(startup(3, name, 'built') for name in names(n)[1:]),
    ],
    *(5, 'l0', 'waiting', 'starting', 'waiting for l1'),
  ),
  'it was only started': Situation(
    lambda n: [
      startup(0, 'syncer', 'listens'),
      startup(0, 'l0', 'compiled'),
      exited(BEGAN, 'l0', 1),
      startup(1, 'l0', 'compiled'),
      *(state(0, 'waiting', name=name) for name in names(n)[1:]),
    ],
    *(3, 'l0', 'joining', 'starting', 'joining'),
  ),
  'all train': Situation(then(), 61, 'l0', 'training', 'training', 'training', 'silent|not heard'),
  'the syncer merges': Situation(then(), 61, 'syncer', 'merging', 'training', 'training'),
  'it is cut off': Situation(
    then(state(30, 'disconnected', 'Socket closed'), of_member(30, 'silent')),
    *(61, 'l0', 'alone', 'training', 'alone'),
  ),
  'it has joined again': Situation(
    then(
      *[state(at, 'joined') for at in (45, 100)],
      startup(50, 'l0', 'compiled'),
      *[('syncer', row(BEGAN + at, member('l0', 'joined'))) for at in (45, 100)],
      *[('l0', step(BEGAN + at, at - 9, at - 65)) for at in range(100, 111)],
      quiet=('l0',),
      until=110,
    ),
    *(111, 'l0', 'training', 'training', 'training', 'silent|not heard'),
  ),
  'it makes steps again': Situation(
    then(no_step(30, 'reading', 31)), 61, 'l0', 'training', 'training', 'training', 'no step'
  ),
  'it is back from quarantine': Situation(
    then(of_member(29, QUARANTINE), ('syncer', row(BEGAN + 30, member('l0', 'joined', 2)))),
    *(61, 'l0', 'training', 'training', 'training', 'in quarantine'),
  ),
  'nobody has joined the next syncer': Situation(
    without(
      then(
        ('syncer', row(BEGAN + 30, progress('l0', 40, 40))),
        startup(40, 'syncer', 'assembled'),
        quiet=names(64),
      ),
      lambda record: record[0] in names(64) or record[1].get('child') == 'l0',
    ),
    *(61, 'l0', 'training', 'training', 'not heard of|training when its records ended, 2'),
    silent=True,
  ),
  'its loader blocks': learner(
    'no step',
    *[no_step(at, 'reading', at - 29) for at in range(60, 63)],
    now=63,
    says='no step.*reads its next batch',
    since=29,
  ),
  'its sync blocks': learner(
    'no step', no_step(62, 'syncing', 33), now=63, says='no step.*peer.sync', never='not called'
  ),
  'its own step blocks': learner(
    'no step', no_step(62, 'looping', 33), now=63, says='no step.*has not called peer.sync'
  ),
  'its loader blocks, elsewhere': Situation(
    without(
      then(no_step(62, 'reading', 33, 'syncer'), quiet=('l0',)),
      lambda record: record[0] == 'l0' or record[1].get('child') == 'l0',
    ),
    *(63, 'l0', 'no step', 'training', 'no step.*reads its next batch'),
  ),
  'it is cut off, too': learner(
    'no step', no_step(60, 'reading', 31), state(61, 'disconnected', 'Socket closed'), now=62
  ),
  'it compiles again': learner('compiling', no_step(62, 'compiling', 33), now=63, since=29),
  'a long step runs': learner('training', no_step(62, '', 33), now=63, never='not heard'),
  'it is stopped by SIGSTOP': learner(
    'training', says='not heard of|training when its records ended, 3', silent=True
  ),
  'it is killed': learner('down', DOWN, KILLED, DOWN, since=30),
  'its record alone has 42': learner(
    'refused', ('l0', exited(BEGAN + 31, 'l0', 42)[1]), says='refused.*exit code 42', since=31
  ),
  'it was killed by hand': Situation(
    without(then(KILLED, quiet=('l0',)), lambda record: record[1].get('state') == 'starting'),
    *(61, 'l0', 'killed', 'training', 'killed'),
  ),
  'nobody saw it end': Situation(
    without(then(of_member(40, 'lease'), quiet=('l0',)), lambda record: record[0] == 'supervisor'),
    *(61, 'l0', 'lost', 'training', 'lost'),
  ),
  'it sends NaN': learner(
    'in quarantine',
    of_member(29, QUARANTINE),
    REFUSED,
    child(BEGAN + 30, 'l0', 'refused', 'in quarantine'),
    says='in quarantine.*NaN or Inf',
  ),
  'it failed': learner(
    'failed', FAILED, child(BEGAN + 30, 'l0', 'failed', 'exit code 1'), says='failed.*exit code 1'
  ),
  'its record alone has its end': learner(
    'stopped', ('l0', exited(BEGAN + 31, 'l0', 0)[1]), never='restarted|not heard'
  ),
  'it may not take part': learner(
    'refused',
    REFUSED,
    child(BEGAN + 30, 'l0', 'refused', 'another model'),
    says='refused.*another model',
  ),
  'it is asked to end': learner('draining', state(60, 'ending', 'preempted')),
  'it ended early': learner(
    'stopped', exited(BEGAN + 31, 'l0', 0), child(BEGAN + 31, 'l0', 'done')
  ),
  'it has trained to the end': learner('trained', state(60, 'trained')),
  'the end waits for it': Situation(
    then(no_step(60, 'reading', 31), ('syncer', row(BEGAN + 60, CLOSING)), quiet=('l0',)),
    *(61, 'syncer', 'merging', 'closing', r'for l0 \(no step .*\), at most 8 s more'),
  ),
  'the others are at the end': Situation(
    then(
      *[no_step(at, '', at - 29) for at in range(40, 61, 10)],
      ('syncer', row(BEGAN + 60, synced(STEPS))),
      quiet=('l0',),
    ),
    *(61, 'syncer', 'merging', 'closing', r'waits for l0 \(training\)', 'evaluates'),
  ),
  'the end waits for one in quarantine': Situation(
    then(
      of_member(29, QUARANTINE),
      ('l0', exited(BEGAN + 30, 'l0', 1)[1]),
      ('syncer', row(BEGAN + 60, CLOSING)),
      quiet=('l0',),
    ),
    *(61, 'syncer', 'merging', 'closing', r'waits for l0 \(in quarantine', 'evaluates'),
  ),
  'all are at the end': Situation(
    lambda n: training(n, STEPS), 110, 'syncer', 'merging', 'closing', 'evaluates', 'it waits'
  ),
  'the syncer is killed': syncer(
    'merging',
    'training',
    says='the syncer is not heard of|records of the syncer end',
    never=r'(?m)\bnow\b| (s|min|h) left|^not heard',
    silent=True,
  ),
  'the syncer starts again': syncer(
    'starting', 'training', child(BEGAN + 60, 'syncer', 'starting')
  ),
  'the syncer is down': syncer(
    'down',
    'down',
    child(BEGAN + 50, 'syncer', 'down', 'killed; restart in 9 s'),
    says='down.*its syncer has ended, killed',
    never=LEFT,
  ),
  'the record of the syncer alone has 42': Situation(
    without(
      then(('syncer', exited(BEGAN + 31, 'syncer', 42)[1]), quiet=('syncer',)),
      lambda record: record[0] == 'supervisor',
    ),
    *(61, 'syncer', 'refused', 'dead', 'dead|refused', LEFT),
  ),
  'the syncer is started by hand': Situation(
    without(
      then(('syncer', exited(BEGAN + 31, 'syncer', 42)[1]), startup(60, 'syncer', 'assembled')),
      lambda record: record[0] == 'supervisor' or record[1]['time'] > BEGAN + 60,
    ),
    *(61, 'syncer', 'starting', 'training', 'training', r'\bdead\b|refused \('),
  ),
  'the syncer ended with 42': syncer(
    'refused',
    'dead',
    exited(BEGAN + 31, 'syncer', 42),
    child(BEGAN + 31, 'syncer', 'refused', 'the log'),
    says='dead|refused',
    never=LEFT,
  ),
  'the run is over before its restart': Situation(
    to_the_end_without_l0, 900, 'l0', 'killed', 'over', 'killed', 'restart in|not heard'
  ),
  'the run is over without one in quarantine': Situation(
    lambda n: [*to_the_end_without_l0(n), of_member(29, QUARANTINE)],
    *(900, 'l0', 'in quarantine', 'over', 'quarantine', 'start it again'),
  ),
  'it was stuck until the end': Situation(
    to_the_end_stuck, 900, 'l0', 'done', 'over', 'no step in its last 1 min 21 s: reads its'
  ),
  'the run is over': Situation(
    to_the_end, 900, 'l0', 'done', 'over', OVER, r'not heard| (s|min|h) left'
  ),
}


def write(workdir: pathlib.Path, what: str, count: int) -> pathlib.Path:
  config = stdlib_lm.get_config('tiny')
  config.sync.learners = min(count, 10)  # more join: the ids of more would be l00, l01, ...
  config.train.steps, config.sync.quorum = STEPS, 1
  load.write(workdir, config)
  rows = sorted(SITUATIONS[what].rows(count), key=lambda row: row[1]['time'])
  (workdir / 'records').mkdir(exist_ok=True)
  add(workdir, *rows)
  return workdir


def read(workdir: pathlib.Path, now: float) -> folder_lib.Read:
  read_run = folder_lib.read(workdir)
  read_run.run.look(BEGAN + now)
  return read_run


def page_state(run: folder_lib.Read) -> dict[str, Any]:
  return state_lib.state(run.run, run.config, 'run')


def page_text(what: dict[str, Any], program: str) -> str:
  """What a page shows of a program and of the run."""
  about = what['learners'].get(program, {}).get('condition', {}).get('text', '')
  return '\n'.join([about, what['condition']['text'], *what['notices']])


def file_state(run: folder_lib.Read) -> dict[str, Any]:
  html = page.inline([page_state(run)])
  data = re.search('<script id="data" type="application/json">(.*?)</script>', html)
  return json.loads(data[1])[0]


def report(run: folder_lib.Read) -> str:
  return summary_lib.text(summary_lib.summarize(run), run.workdir, 200).replace('\n', ' ')


# The surfaces, the modules that decide what they show, and their texts.
SURFACES: dict[str, tuple[str, Callable[[folder_lib.Read, str], str]]] = {
  'line': ('report/live.py', lambda run, who: live.status_line(run.run)),
  'page': ('report/state.py', lambda run, who: page_text(page_state(run), who)),
  'file': ('report/web/page.js', lambda run, who: page_text(file_state(run), who)),
  'report': ('report/summary.py', lambda run, who: report(run)),
  'metrics': ('report/serve.py', lambda run, who: serve.metrics(page_state(run))),
  'status': ('commands/status.py', lambda run, who: '\n'.join(page_state(run)['notices'])),
}
_ASKS = 'condition', 'notices', 'of_run', 'brief'
_SILENT_IF_WELL = {'status'}  # it says what is wrong
_OTHERS = {  # which hand on what another one says, or decide it
  'report/condition.py',
  'report/run_facts.py',
  'launch/supervisor.py',
  'report/programs.py',
}


def cells(workdir: pathlib.Path, what: str) -> Iterator[tuple[str, bool, str]]:
  """(surface, whether it is true, what it says)."""
  so, run = SITUATIONS[what], read(workdir, SITUATIONS[what].now)
  whole = condition.of_run(run.run)
  is_silent = so.silent and so.program == 'syncer'
  yield 'model', (whole.state, is_silent) == (so.run, whole.silent), f'{whole}'
  is_bad = False
  if so.program:
    program = run.run.condition(so.program)
    yield 'model', (program.state, program.silent) == (so.state, so.silent), f'{program}'
    yield 'model', so.since in (None, program.since_s), f'{program}'
    yield 'model', program.meaning.startswith('before: ') == so.silent, program.meaning
    is_bad = program.kind in (condition.FAULT, condition.SILENT)
    is_helped = bool(re.search('Read logs|Check its host', '\n'.join(condition.notices(run.run))))
    yield 'status', is_helped >= (is_bad and so.state in condition._REMEDIES), 'no remedy'
    events = page_state(run)['events']  # the newest of those of many learners
    is_told = any('quarantined' in event[2] for event in events) or len(events) >= state_lib._EVENTS
    yield 'page', is_told >= (QUARANTINE in f'{run.run.learners["l0"].lost}'), f'{events}'
  for name, (_, tell) in SURFACES.items():
    text = tell(run, so.program)
    if name == 'metrics':
      is_served = so.run not in ('dead', 'down', 'over') and not is_silent
      yield name, is_served or 'diloco_learners_connected 0' in text, text
      if so.program.startswith('l'):
        label = 'silent' if so.silent else so.state
        of = f'learner="{so.program}"'
        yield name, f'diloco_learner_state{{{of},state="{label}"}} 1' in text, text
        rate = re.search(rf'diloco_learner_tokens_per_second{{{of}}} (\S+)', text)
        is_connected = f'diloco_learner_connected{{{of}}} 1' in text
        yield name, not (is_connected and so.state in ('lost', 'in quarantine')), text
        works = so.state in ('training', 'alone') and not so.silent
        yield name, (float(rate[1]) > 0) == works, text
      continue
    quiet = so.program == 'syncer' and so.run == 'training' and not so.silent
    if name == 'report' and (quiet or (so.run == 'over' and so.says == OVER)):
      yield name, ('not ended' in text) == (so.run != 'over'), text
      continue  # it has no line about a syncer, or a learner, that is well
    is_well = not is_bad and so.run in ('training', 'starting', 'over')
    if not (name in _SILENT_IF_WELL and is_well):
      of_many = len(run.run.learners) > live._EACH and name == 'line'
      counted = of_many and not is_bad and so.program != 'syncer'
      if not counted and so.run != 'not begun':
        yield name, bool(re.search(so.says, text)), text
    yield name, not re.search(so.never, text), text


@pytest.fixture(name='false')
def _false(tmp_path) -> Callable[[str, int], list[tuple[str, str]]]:
  """The false cells of a situation."""

  def false(what: str, count: int) -> list[tuple[str, str]]:
    (folder_ := tmp_path / f'{what} {count}').mkdir(exist_ok=True)
    if not (folder_ / 'records').is_dir():
      write(folder_, what, count)
    return [(name, text) for name, true, text in cells(folder_, what) if not true]

  return false


@pytest.mark.parametrize('count', [1, 2, 8, pytest.param(64, marks=pytest.mark.long)])
@pytest.mark.parametrize('what', SITUATIONS)
def test_every_surface_tells_what_is_so(what, count, false):
  if what == 'it waits for others' and count == 1:
    count = 3
  assert not false(what, count)


def test_a_new_state_has_its_row():
  states = {state for so in SITUATIONS.values() for state in (so.state, so.run)}
  assert states - {''} == set(condition.STATES) | set(condition.RUN_STATES)


def test_a_new_surface_has_its_column():
  """Each module that asks what is so, or prints what was answered."""
  asks = set()
  for path in ROOT.rglob('*.py'):
    for node in ast.walk(ast.parse(path.read_text('utf-8'))):
      text = node.value if isinstance(node, ast.Constant) else None
      room = path.relative_to(ROOT).parts[0]
      if getattr(node, 'attr', text) in _ASKS and room not in ('protocol', 'storage'):
        asks.add(str(path.relative_to(ROOT)))
  known = {module for module, _ in SURFACES.values() if module.endswith('.py')} | _OTHERS
  assert asks <= known, asks - known


# --- Mutants --------------------------------------------------------------------------------------

of_program, notices = condition.of_program, condition.notices
Mutant = Callable[[pytest.MonkeyPatch], None]


def changed(function: str, states: str, **changes: Any) -> Mutant:
  """What a function of condition.py answers in these states ('': in all of them) is another."""
  ask = getattr(condition, function)

  def mutant(*arguments: Any) -> condition.Condition:
    so = ask(*arguments)
    return dataclasses.replace(so, **changes) if so.state in (states or so.state) else so

  return lambda patch: patch.setattr(condition, function, mutant)


MUTANTS: dict[str, Mutant] = {
  'a state that is not ended': changed('of_program', 'failed killed', state='training'),
  'silence is not noticed': changed('of_program', '', silent=False),
  'a step that is missing is not said': lambda patch: patch.setattr(condition, 'MISSING_S', 1e9),
  'the reason of a quarantine is lost': changed('of_program', 'in quarantine', why=''),
  'a quarantine is a mere refusal': changed('of_program', 'in quarantine', state='refused'),
  'a dead run trains': changed('of_run', 'dead', state='training'),
  'nobody says for whom the end waits': changed('of_run', 'closing', state='training'),
  'who is silent has a rate': lambda patch: patch.setattr(
    'diloco_jax.report.run_facts.RunFacts.works', lambda self, name: True
  ),
  'a long compilation is a silence': lambda patch: patch.setattr(condition, '_LONG_S', 0),
  'the notices are empty': lambda patch: patch.setattr(condition, 'notices', lambda run: []),
  'a run that is over is silent': changed('of_program', 'done', silent=True),
  'a run that is over starts who is down again': lambda patch: patch.setattr(
    condition, 'of_program', lambda *arguments: of_program(*arguments[:4])
  ),
  'before the first record it is 1970': lambda patch: patch.setattr(
    condition, 'notices', lambda run: notices(run) if run.began_s is not None else ['1970']
  ),
}


@pytest.mark.parametrize('mutant', MUTANTS)
def test_each_mutant_has_a_false_cell(mutant, false, monkeypatch):
  MUTANTS[mutant](monkeypatch)
  assert any(false(what, 2) for what in SITUATIONS)
