"""A run as the facts in its records describe it; the page, the summary, the picture and a chaos
plan read it.

The facts about each program are in programs.py, with the units.
"""

import array
import bisect
import math
from collections.abc import Iterable, Mapping
from typing import Any

from diloco_jax.protocol import facts, ids
from diloco_jax.report import book as book_lib
from diloco_jax.report import condition, programs
from diloco_jax.report import facts as report_facts
from diloco_jax.report import steps as steps_lib

SET_BACK_S = 600  # facts of several machines may be out of order by less
_SMOOTHING = 0.2  # weight of the newest step in the step time shown
SILENT_S = 10.0  # a process that lives adds to the records more often: five times in a lease
_STATES = {'joined': 'training', 'disconnected': 'alone', 'ending': 'draining'}


class RunFacts:
  """The whole run.

  Attributes:
    learners: by learner id; those given, and every other one that joins.
    syncer_facts: of the syncer; None: the learner has none.
    looked_at: wall-clock time at which somebody looks; None: that of the newest fact.
    silent_s: a condition counts as past once its records are older than this.
    fresh: processes that have just added to their records, whatever their clocks say, and how many
      s ago.
    closing: the newest fact of the syncer for whom it waits: when, for whom, how long at most.
    total_steps: the clock at which the run is over; math.inf: it is not recorded.
    period: the newest that the syncer has chosen, in inner steps; 0: that of the settings.
    layout: what it trains and exchanges, in numbers and in words.
    synced: the newest outer step.
    merges_s, participants, live, waited_ns, staleness: one entry for each outer step: when it was
      published; how many learners were merged, and were live; from the opening of its sync to the
      decision; versions since its oldest anchor.
    evaluations: of the held-out loss; evaluated_s: when; evaluated_tokens: the tokens trained by
      then, ascending.
    cosines: by label, of each outer step (facts.Outer).
    ledger: the newest one.
    book: the account of the learners' time, in ns since the first fact.
    wire: bytes that the syncer received and sent.
    followers: the newest fact about them.
    tokens: trained by all learners.
    of_text: held-out losses are of text: there are bits per byte.
    missing: (when, process, how many of its facts could not be written, why) of each gap.
    began_s: wall-clock time of the first fact; end_s: seconds from there to the last one.
    went_back: when a restored syncer started, and its clock.
  """

  def __init__(
    self,
    learners: Iterable[str],
    total_steps: float,
    syncer: bool = True,
    quorum: int = 1,
    steps_per_sync: float = 1.0,
    counted: tuple[int, int] | None = (0, 0),
    silent_s: float = SILENT_S,
  ):
    """`quorum`, `steps_per_sync`: see book.py. `counted`: of a new learner."""
    self._counted = counted
    self.learners = {name: programs.LearnerFacts(counted=counted) for name in learners}
    self.syncer_facts = programs.ProgramFacts() if syncer else None
    self.silent_s, self.fresh = silent_s, dict[str, float]()
    self.looked_at: float | None = None
    self.closing: tuple[float, tuple[str, ...], float] | None = None
    self.total_steps, self.period = total_steps, 0
    self.layout: report_facts.Layout | None = None
    self.synced: facts.Synced | None = None
    self.merges_s = programs.times()
    self._clocks, self._steps_per_sync = array.array('q'), steps_per_sync  # of each merge
    self._passed = 0  # the newest sync, merged or cancelled
    self.participants, self.live, self.waited_ns, self.staleness = (
      array.array('q') for _ in range(4)
    )
    self.evaluations: list[report_facts.Eval] = []
    self.evaluated_s: list[float] = []
    self.evaluated_tokens: list[int] = []
    self.of_text = False
    self.cosines: dict[str, list[float]] = {}
    self.ledger: facts.Ledger | None = None
    self.book = book_lib.Book(quorum, steps_per_sync)
    self.wire = programs.Wire()
    self.followers = report_facts.Followers(count=0, behind=0)
    self.tokens = 0
    self.missing: list[tuple[float, str, int, str]] = []
    self._gaps: set[str] = set()  # processes without a step since their last gap
    self.began_s: float | None = None
    self.end_s = 0.0
    self.went_back: list[tuple[float, int]] = []
    self._reached = array.array('q'), array.array('q')  # clocks, ascending, and tokens of all then

  @property
  def syncer(self) -> str | None:
    """The state of the syncer."""
    return self.syncer_facts and self.syncer_facts.state

  @property
  def syncer_processes(self) -> list[programs.ProcessFacts]:
    return self.syncer_facts.processes if self.syncer_facts else []

  @property
  def ordered(self) -> list[str]:
    """The learners in the order of people: l2 before l10."""
    return sorted(self.learners, key=ids.natural)

  def look(self, time_s: float | None, fresh: Mapping[str, float] | None = None) -> 'RunFacts':
    """Sets when somebody looks."""
    self.looked_at = time_s
    self.fresh = dict(fresh or {})
    return self

  @property
  def looked_s(self) -> float:
    """When somebody looks, in s since the first fact."""
    if self.looked_at is None or self.began_s is None:
      return self.end_s
    return self.looked_at - self.began_s

  def condition(self, name: str) -> condition.Condition:
    """What is so of the syncer or a learner at the time of the look."""
    program = self.syncer_facts if name == ids.SYNCER else self.learners[name]
    others = ''
    if program.phase == 'waiting':  # each look asks for each learner
      absent = [
        other for other in self.ordered if not self.learners[other].is_live and other != name
      ]
      others = f'for {absent[0]}{" and others" * (len(absent) > 1)}' if absent else ''
    if name in self.fresh:
      program.heard_s = self.looked_s - self.fresh[name]
    over = self.syncer in ('done', 'stopped', 'refused', 'failed')
    return condition.of_program(program, self.looked_s, self.silent_s, others, over)

  @property
  def trained(self) -> int:
    """Tokens that were trained: those that the syncer has counted, and those in records beside."""
    counted = self.ledger.trained + self.book.untold if self.ledger else 0
    return counted if self.ledger and self.went_back else max(counted, self.tokens)

  @property
  def foremost(self) -> float:
    """The clock of the foremost learner as a share of the run: 0 to 1."""
    clock = max((learner.step for learner in self.learners.values()), default=0)
    return min(1.0, clock / self.total_steps)

  @property
  def progress(self) -> float:
    """Share of the run that is done: 0 to 1. Of learners that are ahead of the global model, the
    steps to the next outer step count."""
    merged = self._passed / self.total_steps if self._passed else self.foremost
    ahead = min(self.foremost - merged, self._steps_per_sync / self.total_steps)
    return min(1.0, merged + max(0.0, ahead))

  @property
  def tokens_per_second(self) -> float:
    """The rate of all learners that work."""
    return sum(
      learner.tokens_per_second for name, learner in self.learners.items() if self.works(name)
    )

  def works(self, name: str) -> bool:
    """Whether a learner makes steps, as far as the records show."""
    return self.condition(name).kind == condition.WORKS

  @property
  def seconds_left(self) -> float | None:
    """Until the last step, at the pace of the outer steps, or else of the learner that has stepped
    for longest without a restart, in the newer half of its steps; None: not known."""
    working = [learner for name, learner in self.learners.items() if self.works(name)]
    if (
      not working or condition.of_run(self).kind != condition.WORKS or self.total_steps == math.inf
    ):
      return None
    first_s = self.syncer_processes[-1].first_step_s if self.syncer_processes else 0.0
    _, pace = steps_lib.pace(self.merges_s, self._clocks, first_s)
    pace = pace or max(learner.pace for learner in working)[1]
    return (1 - self.progress) * self.total_steps / pace if pace > 0 else None

  def fate(self, name: str) -> str:
    """How a learner has ended, or its state if its end is not in the records."""
    learner = self.learners[name]
    trained = learner.state == 'trained' or learner.step >= self.total_steps
    return 'done' if trained and learner.state not in programs.ENDED else learner.state

  def training(self, name: str) -> float | None:
    """The share of the time since a learner joined that it spent in inner steps at the ideal pace;
    None: it has not joined."""
    account = self.book.learners.get(name)
    if account is None or account.joined_ns is None or self.end_s * 1e9 <= account.joined_ns:
      return None
    return account.ideal_ns / (self.end_s * 1e9 - account.joined_ns)

  @property
  def figures(self) -> book_lib.Figures | None:
    """The figures of the run so far; None: there is no ledger yet, the quorum is unknown, or no
    learner has its records here."""
    known = self.ledger and self.total_steps < math.inf and self.book.learners
    return self.book.figures(round(self.end_s * 1e9)) if known else None

  @property
  def spent_note(self) -> str:
    """Why time is not accounted for, or why so little of it is in steps; ''."""
    here = self.book.learners
    away = [name for name in self.ordered if self.learners[name].joined and name not in here]
    whose = ', '.join(away[:3]) + ' and others' * (len(away) > 3)
    notes = [f'Where the time of {whose} went is not known: no records of it are in this folder.']
    accounts = [self.book.partition(name, round(self.end_s * 1e9)) for name in here]
    begins = sum(account[what] for account in accounts for what in book_lib.STARTS)
    share = begins / max(1, sum(sum(account.values()) for account in accounts))
    starts = f'The start of processes took {share:.0%}: in a longer run it is less.'
    return ' '.join(notes * bool(away) + [starts] * (share > 0.3))

  def take(self, rows: Iterable[tuple[str, dict[str, Any]]]) -> 'RunFacts':
    """Takes lines of the records, in the order of time; skips lines without a known fact."""
    for process, row in rows:
      if (fact := report_facts.parse(row)) is not None:
        if self.began_s is None:
          self.began_s = row['time']
        at_s = row['time'] - self.began_s
        # Else the clock was set back, as it was ahead.
        self.end_s = max(self.end_s, at_s) if self.end_s - at_s <= SET_BACK_S else at_s
        self._note(process, at_s, fact)
    return self

  def _note(self, process: str, at_s: float, fact: report_facts.Fact) -> None:
    self.book.take(process, round(at_s * 1e9), fact)
    self._note_process(process, at_s, fact)
    if process in self.learners:
      self.learners[process].has_records = True
      self._note_of_learner(process, at_s, fact)
    self._note_record(process, at_s, 'its own records')
    if processes := self._processes_of(process):
      processes[-1].last_s = at_s
    self.of_text |= isinstance(fact, report_facts.Eval) and fact.bits_per_byte > 0
    match fact:
      case report_facts.Eval() if self.syncer and process in self.learners:
        self.learners[process].held_out.append((self.tokens, fact.loss))
      case report_facts.Eval():
        self._note_eval(at_s, fact)
      case report_facts.Recovered(sync=sync):  # after a restore the clocks go back
        index = bisect.bisect_right(self._reached[0], sync)
        for column in self._reached:
          del column[index:]
        if self.synced and sync < self.synced.sync:
          self.went_back.append((at_s, sync))
          for learner in self.learners.values():  # what the syncer counts went back, too
            learner.counted, learner.incarnation = None, 0
      case report_facts.Layout():
        self.layout = fact
      case facts.State(state='ending', reason=reason) if process == ids.SYNCER:
        self._set_state(ids.SYNCER, 'draining', at_s, why=reason)
      case report_facts.Outer(cosines=cosines):
        for label, cosine in cosines.items():
          self.cosines.setdefault(label, []).append(cosine)
      case report_facts.Traffic():
        self.wire.take(fact)
      case report_facts.Followers():
        self.followers = fact
      case report_facts.Missing(facts=count, error=error):
        self.missing.append((at_s, process, count, error))
        self._gaps.add(process)
      case facts.Ledger():
        self.ledger = fact
        if self.syncer == 'starting':
          self._set_state(ids.SYNCER, 'merging', at_s)
      case facts.Synced():
        self._note_sync(at_s, fact)
      case facts.Tempo(period=period):
        self.period = period
      case facts.Cancelled(sync=sync):
        self._passed = sync
      case facts.Member():
        self._note_member(at_s, fact)
      case facts.Progress(learner=name) if name in self.learners:
        self._note_progress(self.learners[name], at_s, fact)
      case facts.NoStep(learner=name, doing=doing) if name in self.learners:
        self.learners[name].no_step = at_s, doing, fact.idle_ns / 1e9
      case facts.Closing(learners=names):
        self.closing = at_s, tuple(names), fact.at_most_ns / 1e9
      case report_facts.Process():
        self._note_supervised(at_s, fact)
      case report_facts.Exit(child=name, code=code, stopped=stopped):
        if self._program_of(name) is not None:
          if not (processes := self._processes_of(name)):  # it had not even begun
            self._begin(name, at_s)
          ended = {0: self._end_without_error(name), 42: 'refused'}.get(
            42 if (own := processes[-1].ended == 'refused') else code,  # its last word, just before
            'killed' if code < 0 else 'failed',
          )
          processes[-1].end(at_s, ended := 'stopped' if stopped and not own else ended)
          program = self._program_of(name)
          if not program.supervised or program.state != 'down':  # else it is started again
            self._set_state(name, ended, at_s, why=f'exit code {code}' if code > 0 else '')

  def _note_record(self, name: str, at_s: float, known: str) -> None:
    """The syncer's records are also about its members on other machines."""
    program = self._program_of(name)
    if program is not None:
      program.heard_s, program.known = at_s, known
    for learner in self.learners.values() if name == ids.SYNCER else ():
      if not learner.has_records and (learner.is_live or not learner.known):
        learner.heard_s, learner.known = at_s, "the syncer's records"

  def _program_of(self, name: str) -> programs.ProgramFacts | None:
    return self.syncer_facts if name == ids.SYNCER else self.learners.get(name)

  def _note_process(self, name: str, at_s: float, fact: report_facts.Fact) -> None:
    """A process has a record: a new one, which no supervisor started, or one that was not lost."""
    if name != ids.SYNCER and name not in self.learners:
      return  # a supervisor, or a learner that the config has no longer
    if name == ids.SYNCER and self.syncer_facts is None:
      self.syncer_facts = programs.ProgramFacts()  # its records have begun after those of a learner
    processes = self._processes_of(name)
    if isinstance(fact, report_facts.Startup):
      ended = processes and processes[-1].ended not in ('', 'lost')
      if not processes or ended or fact.begins(processes[-1].phase):
        if processes and name == ids.SYNCER:
          self._set_state(name, 'starting', at_s)
          for learner in self.learners.values():
            learner.cut_s = at_s
        self._begin(name, at_s)
      processes[-1].phase = fact.phase
    if processes and processes[-1].ended == 'lost':  # it was the connection
      processes[-1].ended_s, processes[-1].ended = None, ''
      self._set_state(name, 'alone', at_s)

  def _note_eval(self, at_s: float, fact: report_facts.Eval) -> None:
    clocks, reached = self._reached
    tokens = self.tokens  # closing syncs have merged all that is left
    if not clocks or fact.step < clocks[-1]:  # of all learners when the foremost reached the clock
      index = bisect.bisect_right(clocks, fact.step)
      tokens = reached[index - 1] if index else 0
    if fact.step:  # learners on other machines may have reported no step yet
      tokens = max(tokens, 1)
    if self.evaluated_tokens and tokens <= self.evaluated_tokens[-1]:  # the same steps, once more
      self.evaluations.pop()
      self.evaluated_s.pop()
      tokens = max(tokens, self.evaluated_tokens.pop())
    self.evaluations.append(fact)
    self.evaluated_s.append(at_s)
    self.evaluated_tokens.append(tokens)

  def _end_without_error(self, name: str, left: str = '') -> str:
    """'done' if the learner, or the run, had trained to its end, else 'stopped'."""
    learner = self.learners.get(name)
    left = left or (learner.lost[-1][1] if learner and learner.lost else '')
    trained = learner and (learner.state in ('trained', 'done') or learner.step >= self.total_steps)
    return 'done' if trained or left == 'left: done' or self.progress >= 1 else 'stopped'

  def _set_state(self, name: str, state: str, at_s: float, why: str = '') -> None:
    if (program := self._program_of(name)) is not None:
      program.why = why
      program.since_s = program.since_s if program.state == state else at_s
      program.state = state
      if isinstance(program, programs.LearnerFacts):
        program.phase = 'importing' if state == 'starting' else ''

  def _processes_of(self, name: str) -> list[programs.ProcessFacts]:
    """The processes of a program, oldest first."""
    program = self._program_of(name)
    return program.processes if program else []

  def _note_member(self, at_s: float, fact: facts.Member) -> None:
    """Notes a fact of the syncer about a learner, also about one that was started by hand."""
    if fact.state == 'joined':
      learner = self.learners.setdefault(fact.learner, programs.LearnerFacts(counted=self._counted))
      learner.joined.append((at_s, fact.incarnation))
      learner.quarantine = ''
    elif fact.state == 'lost' and (learner := self.learners.get(fact.learner)):
      learner.lost.append((at_s, fact.reason))
      before, _, why = fact.reason.partition('quarantined: ')
      learner.quarantine = '' if before else why
    else:
      return
    if learner.supervised:
      return
    left = fact.reason.startswith('left')
    if fact.state == 'lost' or not learner.has_records:
      self._note_unsupervised(learner, at_s, fact, left)
    # Its state, until it has a newer record in this folder.
    left_as = self._end_without_error(fact.learner, fact.reason) if left else 'down'
    state = 'training' if fact.state == 'joined' else left_as
    learner.heard_s, learner.known = at_s, "the syncer's records"
    self._set_state(fact.learner, state, at_s, why=fact.reason if state == 'down' else '')
    learner.incarnation = max(learner.incarnation, fact.incarnation)

  def _note_unsupervised(
    self, learner: programs.LearnerFacts, at_s: float, fact: facts.Member, left: bool
  ) -> None:
    """Follows a process whose start, on another machine, or end only the syncer has recorded."""
    processes = learner.processes
    if fact.state == 'lost':
      if processes and processes[-1].ended_s is None:
        processes[-1].end(at_s, 'done' if left else 'lost')
      return
    if not processes or fact.incarnation > learner.incarnation:
      self._begin(fact.learner, at_s)
    else:  # it was the connection
      processes[-1].ended_s, processes[-1].ended = None, ''

  def _note_progress(
    self, learner: programs.LearnerFacts, at_s: float, fact: facts.Progress
  ) -> None:
    before = learner.counted or (fact.steps, fact.tokens)
    steps, tokens = fact.steps - before[0], fact.tokens - before[1]
    learner.counted = before if steps <= 0 else (fact.steps, fact.tokens)
    learner.no_step = learner.no_step if steps <= 0 else None
    if learner.has_records or steps <= 0:
      return
    learner.step_s = fact.step_ns / 1e9 or learner.step_s
    learner.tokens_per_step = tokens / steps
    self._add_trained(
      learner,
      at_s,
      tokens,
      round(min(fact.clock, self.total_steps)),  # closing syncs count on
      fact.loss,
      learner.step_s,
    )
    if learner.processes:
      process = learner.processes[-1]
      process.steps, process.last_s = process.steps + steps, at_s
      if process.first_step_s is None:
        process.first_step_s = at_s

  def _note_of_learner(self, name: str, at_s: float, fact: report_facts.Fact) -> None:
    learner = self.learners[name]
    match fact:
      case report_facts.Step():
        self._note_step(name, at_s, fact)
      case facts.Adopted():
        learner.staleness = fact.staleness
        if not fact.whole:
          learner.steps_between.append(fact.steps_between)
      case report_facts.Cost():
        learner.cost = fact
      case report_facts.Moments(of=''):
        learner.fresh += 1
      case report_facts.Startup(phase=done) if done in _PHASES:
        again = learner.state in programs.ENDED
        self._set_state(name, 'starting' if again else learner.state, at_s)
        learner.phase, learner.since_s = _PHASES[done], at_s
      case facts.State():
        phase, state = learner.phase, _STATES.get(fact.state, fact.state)
        if (learner.state, fact.reason) != ('trained', 'done'):  # it ends as all do
          self._set_state(name, state, at_s, why=fact.reason)
        learner.phase = phase
        learner.incarnation = max(learner.incarnation, fact.incarnation or 0)
        if learner.phase and fact.state == 'joined':
          learner.phase, learner.since_s = 'waiting', at_s

  def _note_step(self, name: str, at_s: float, fact: report_facts.Step) -> None:
    learner = self.learners[name]
    learner.tokens_per_step = fact.tokens / max(1, fact.steps)  # totals of a process, equal steps
    learner.step_s += (fact.seconds - learner.step_s) * (_SMOOTHING if learner.step_s else 1.0)
    learner.phase, learner.no_step = '', None
    if learner.state in ('waiting', 'starting'):
      self._set_state(name, 'training', at_s)
    if not learner.processes or learner.processes[-1].steps >= fact.steps:
      self._begin(name, at_s)  # started by hand: no supervisor has recorded it
    steps = fact.steps - learner.processes[-1].steps if name in self._gaps else 1
    self._gaps.discard(name)
    tokens = round(steps * learner.tokens_per_step)
    self._add_trained(learner, at_s, tokens, fact.step, fact.loss, fact.seconds)
    learner.processes[-1].steps = fact.steps
    if learner.processes[-1].first_step_s is None:
      learner.processes[-1].first_step_s = at_s

  def _add_trained(
    self,
    learner: programs.LearnerFacts,
    at_s: float,
    tokens: int,
    clock: int,
    loss: float | None,
    seconds: float,
  ) -> None:
    """A learner has reached a clock by `tokens` more."""
    self.tokens += tokens
    learner.tokens += tokens
    learner.has_loss = learner.has_loss or loss is not None
    loss = math.nan if loss is None else loss
    learner.steps.append(steps_lib.Step(at_s, self.tokens, clock, loss, seconds))
    clocks, reached = self._reached
    if not clocks or clock > clocks[-1]:
      clocks.append(clock)
      reached.append(self.tokens)

  def _note_sync(self, at_s: float, fact: facts.Synced) -> None:
    if self.syncer not in (None, 'merging'):
      self._set_state(ids.SYNCER, 'merging', at_s)
    self.synced = fact
    self.merges_s.append(at_s)
    self._clocks.append(fact.sync)
    self._passed = fact.sync
    self.participants.append(len(fact.participants))
    self.waited_ns.append(fact.waited_ns)
    self.staleness.append(fact.staleness)
    self.live.append(sum(learner.is_live for learner in self.learners.values()))
    if self.syncer_processes and self.syncer_processes[-1].first_step_s is None:
      self.syncer_processes[-1].first_step_s = at_s
    for name in fact.participants:
      if name in self.learners:
        self.learners[name].merged_s.append(at_s)

  def _note_supervised(self, at_s: float, fact: report_facts.Process) -> None:
    """Notes the new state of a program; a learner's new process is kept in its history."""
    if (program := self._program_of(fact.child)) is None:
      return
    program.supervised, program.known = True, "the supervisor's records"
    program.heard_s = at_s
    state = self._end_without_error(fact.child) if fact.state == 'done' else fact.state
    why = fact.text if state in programs.ENDED and fact.text != state else ''
    self._set_state(fact.child, state, at_s, why=why)
    if fact.state == 'starting':
      self._begin(fact.child, at_s)

  def _begin(self, name: str, at_s: float) -> None:
    program = self._program_of(name)
    program.no_step = None
    for process in program.processes[-1:]:
      if process.ended_s is None:  # nobody has recorded its end
        process.end(process.last_s, 'stopped' if program.supervised else 'lost')
    program.processes.append(programs.ProcessFacts(at_s))


_PHASES = {  # what follows a phase that has ended (facts.Startup)
  'imported': 'building',
  'built': 'restoring',
  'restored': 'compiling',
  'compiled': 'joining',
}
