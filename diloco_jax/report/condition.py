"""The condition of each process of a run, and of the run: since when, why, how it is known.

It is decided here alone, from the newest facts (run_facts.py); the lines of `train`, the page, the
file, the report, /metrics and the notices print it. They print a state as present only while its
records are at most `silent_s` old: a process that lives adds to them more often.
"""

import dataclasses
import functools
import math
from typing import Any

from diloco_jax.protocol import messages
from diloco_jax.protocol.ids import SYNCER
from diloco_jax.report import header

STARTS, WORKS, WAITS, FAULT, ENDED, SILENT = 'starts works waits fault ended silent'.split()
STATES = {  # of what kind each is, and what it means
  'waiting': (WAITS, 'has not started, or waits for the other learners'),
  'starting': (STARTS, 'its process starts'),
  'importing': (STARTS, 'its process starts: imports'),
  'building': (STARTS, 'builds the model and its devices'),
  'restoring': (STARTS, 'reads its checkpoint'),
  'compiling': (STARTS, 'compiles its functions'),
  'joining': (STARTS, 'connects to the syncer'),
  'training': (WORKS, 'makes inner steps, and the syncer hears of it'),
  'merging': (WORKS, 'the syncer merges updates'),
  'alone': (WORKS, 'makes inner steps without a syncer; it connects again by itself'),
  'trained': (WAITS, 'has made its last step and waits for the end of the run'),
  'draining': (WAITS, 'was asked to end, and saves and sends what it has'),
  'no step': (FAULT, 'is alive and makes no step; its log has the calls in which it is'),
  'in quarantine': (FAULT, 'the syncer takes nothing from it: its updates were wrong'),
  'lost': (FAULT, 'the syncer has lost it, and nobody has recorded why it ended'),
  'down': (FAULT, 'its process has ended, and is to be started again'),
  'killed': (FAULT, 'its process was killed'),
  'failed': (FAULT, 'its process has ended with an error'),
  'refused': (FAULT, 'its process has ended for good: a person has to decide (exit code 42)'),
  'stopped': (ENDED, 'was ended before the last step'),
  'done': (ENDED, 'has ended: the run is over'),
}
MISSING_S = 30  # after which a step is missing (protocol/learner/missing_step.py)
_LONG_S = 600  # a start may be without a record for so long
_REPEATED_S = 5  # within which the syncer records again for whom it waits
_NAMED = 5  # notices of single processes
_READ = ' Read logs/{}.log in the folder of the run, or its terminal.'
_REMEDIES = {'failed': _READ, 'refused': _READ, 'no step': _READ} | {
  'in quarantine': ' Check its host, its data and its learning rate, then start it again.'
}
_WORDY = 'alone', 'draining'  # why is a sentence, which its log has, too
_GONE = 'killed', 'failed', 'refused', 'lost', 'in quarantine'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
  """What is so of a process, or of a run. Times in s since the first fact of the run.

  Attributes:
    state: of STATES; of a run one more (RUN_STATES).
    since_s: when it began; heard_s: the time of the newest record about it; now_s: of the look.
    known: whose records have it.
    silent: these records are so old that `state` is of the past.
  """

  state: str
  since_s: float = 0.0
  heard_s: float = 0.0
  now_s: float = 0.0
  why: str = ''
  known: str = ''
  silent: bool = False

  @property
  def kind(self) -> str:
    return SILENT if self.silent else (STATES | RUN_STATES)[self.state][0]

  @property
  def is_gone(self) -> bool:
    """Whether its process has ended, and nobody starts it again."""
    return self.state in _GONE or self.kind == ENDED

  @property
  def brief(self) -> str:
    """In words, for a line that has the time of day."""
    if self.silent:
      return f'{self.why} not heard of ({self.state} before)'.strip()
    if self.state == 'waiting':
      return self.text
    return f'{self.state} ({self.why})' if self.why and self.state not in _WORDY else self.state

  @property
  def text(self) -> str:
    """In words, with the time that binds it."""
    if self.silent:
      silence = f'{self.why} not heard of for {self._time(self.heard_s)} ({self.state} before)'
      return silence.strip()
    why = f': {self.why}' if self.why else ''
    if self.state == 'waiting':
      return f'{self.state} {self.why}'.strip()
    if self.kind == STARTS or self.state in ('no step', 'down'):
      return f'{self.state} for {self._time(self.since_s)}{why}'
    return f'{self.state}{why}' + f', {self._time(self.since_s)} ago' * (self.kind == FAULT)

  @property
  def meaning(self) -> str:
    known = f' (known from {self.known}, {self._time(self.heard_s)} ago)' if self.known else ''
    return 'before: ' * self.silent + (STATES | RUN_STATES)[self.state][1] + known

  def _time(self, at_s: float) -> str:
    return header.duration(max(0.0, self.now_s - at_s))


RUN_STATES = {
  'not begun': (WAITS, 'waiting for the first record of a process'),
  'closing': (WAITS, 'no learner has a step to make, or all wait for one'),
  'over': (ENDED, 'the model is written, and the syncer has ended'),
  'dead': (FAULT, 'its syncer has ended, and nobody starts it again'),
}


def of_program(
  program: Any, now_s: float, silent_s: float, others: str = '', over: bool = False
) -> Condition:
  """The condition of the syncer or a learner. `program`: programs.ProgramFacts; `others`: for whom
  a learner waits; `over`: nobody starts it again, as the syncer has ended."""
  state, why, since_s = program.phase or program.state, program.why, program.since_s
  at_s, doing, idle_s = program.no_step or (0.0, '', 0.0)
  is_missing = doing not in ('', messages.WAITING, messages.COMPILING) and idle_s >= MISSING_S
  if program.quarantine:
    state, why = 'in quarantine', program.quarantine
  elif state == 'waiting':
    state, why = 'joining' if program.phase and not others else state, others
  elif state == 'down' and not program.supervised:
    state = 'lost'
  elif state == 'down' and over:
    state, why = (program.processes and program.processes[-1].ended) or 'stopped', ''
  elif doing == messages.COMPILING and state in ('training', 'alone'):
    state, why, since_s = 'compiling', '', at_s - idle_s
  elif is_missing and state in ('training', 'alone'):
    state, why, since_s = 'no step', messages.DOING[doing], at_s - idle_s
  elif is_missing and state in ('done', 'stopped', 'failed'):
    stuck = f'no step in its last {header.duration(idle_s)}: {messages.DOING[doing]}'
    why = f'{why}; {stuck}'.removeprefix('; ')
  condition = Condition(
    state=state, since_s=since_s, heard_s=program.heard_s, now_s=now_s, why=why, known=program.known
  )
  patience_s = max(silent_s, _LONG_S) if condition.kind == STARTS else silent_s
  alive = not condition.is_gone and state != 'down' and (state != 'waiting' or program.processes)
  if alive and now_s - program.heard_s > patience_s:
    return dataclasses.replace(condition, silent=True, why='')
  return condition


def of_run(run: Any) -> Condition:
  """The condition of a whole run (run_facts.RunFacts)."""
  make = functools.partial(Condition, now_s=run.looked_s, heard_s=run.end_s)
  if run.began_s is None:
    return make(state='not begun')
  learners = {name: run.condition(name) for name in run.ordered}
  syncer = None if run.syncer is None else run.condition(SYNCER)
  if syncer is None or (syncer.state == 'waiting' and not syncer.silent):
    states = [learner.state for learner in learners.values()]
    if states and all(learner.is_gone for learner in learners.values()):
      return make(state='over' if 'done' in states else 'stopped')
    silent = bool(states) and all(so.silent or so.is_gone for so in learners.values())
    has_begun = any(learner.steps for learner in run.learners.values())
    why = 'its learners are' * silent
    return make(state='training' if has_begun else 'starting', silent=silent, why=why)
  if syncer.state == 'done':
    return make(state='over', since_s=syncer.since_s)
  if syncer.is_gone and syncer.state != 'stopped':
    return make(state='dead', since_s=syncer.since_s, why=f'the syncer {syncer.brief}')
  active_state = 'training' if run.tokens or run.merges_s else 'starting'
  if syncer.silent:
    return dataclasses.replace(syncer, state=active_state, why='the syncer is')
  if syncer.state in ('down', 'stopped'):
    why = ', '.join(filter(None, ['its syncer has ended', syncer.why]))
    return dataclasses.replace(syncer, why=why)
  at_s, late, at_most_s = run.closing or (-math.inf, (), 0.0)
  waits = run.looked_s - at_s <= min(run.silent_s, at_most_s + _REPEATED_S)
  if not waits and run.progress < 1:
    return make(state=active_state)
  behind = [
    name for name, facts in run.learners.items() if facts.is_live and facts.step < run.total_steps
  ]
  late_ones = {name: learners[name] for name in (late if waits else behind) if name in learners}
  texts = [f'{name} ({so.text})' for name, so in late_ones.items() if so.kind != ENDED]
  left = f', at most {header.duration(max(0.0, at_s + at_most_s - run.looked_s))} more' * waits
  why = f'it waits for {", ".join(texts)}{left}' if texts else 'it evaluates, and writes the model'
  return make(state='closing', why=why)


def notices(run: Any) -> list[str]:
  """What a person should know, or do, about a run: whole sentences."""
  whole, sentences = of_run(run), []
  if whole.state == 'not begun':
    return ['Waiting for the first record: no process of this run has written one yet.']
  if whole.silent:
    whose, ago = 'the syncer' if run.syncer else 'all learners', whole.now_s - whole.heard_s
    sentences.append(
      f'The records of {whose} ended {header.duration(ago)} ago: does it still run? Its log, or '
      'terminal, says why not.'
    )
  elif whole.state in ('dead', 'closing', 'down'):
    remedy = _REMEDIES.get(run.syncer, '').format(SYNCER) if whole.state == 'dead' else ''
    sentences.append(f'The run is {whole.text}.{remedy}')
  conditions = {name: run.condition(name) for name in run.ordered}
  faults = {name: so for name, so in conditions.items() if so.kind == FAULT}
  if not whole.silent and whole.kind != ENDED:
    faults |= {name: so for name, so in conditions.items() if so.silent}
  for name, so in list(faults.items())[:_NAMED]:
    remedy = _REMEDIES.get(so.state, '').format(name)
    if whole.kind == ENDED:  # there are no steps left
      remedy = remedy.replace(', then start it again', '')
    sentences.append(f'{name}: {so.text}.{remedy}')
  if len(faults) > _NAMED:
    sentences.append(f'So {len(faults) - _NAMED} more: the table of learners has them all.')
  return sentences
