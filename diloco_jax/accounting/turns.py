"""Folds of turns into an account: of all processes of a run, or of its syncer alone."""

from typing import Any

from diloco_jax.accounting import book as book_lib
from diloco_jax.protocol import actions, events, facts, messages
from diloco_jax.protocol.tape import observers

Life = observers.ObservedProcess


class Turns(observers.Observer):
  """Books the turns of all processes: of a simulated world as it runs, or of tapes."""

  def __init__(self, book: book_lib.Book):
    self.book = book

  def born(self, now_ns: int, life: Life) -> None:
    if life.start.role == 'learner':
      self.book.waits(life.start.node, now_ns)

  def saw(self, life: Life, now_ns: int, event: events.Event, out: observers.Actions) -> None:
    name = life.start.node
    if type(event) is events.StepDone and event.tokens:
      self.book.stepped(name, now_ns, event.tokens, event.step_ns, event.data_ns, event.saving_ns)
      self.book.waits(name, now_ns)  # until the next step: in this turn, if none is waited for
    for action in out:
      kind = type(action)
      if kind is actions.Report:
        self.book.take(name, now_ns, action.fact)
      elif kind is actions.Step:
        self.book.trains(name, now_ns)

  def died(self, now_ns: int, life: Life, killed: bool) -> None:
    if life.start.role == 'learner':
      self.book.died(life.start.node, now_ns, killed)
    else:
      self.book.syncer_died(now_ns)


class Told:
  """Books what a syncer hears of its learners, and gives its turns to its tape
  (node.ports.Tape)."""

  def __init__(self, book: book_lib.Book, tape: Any):
    self._book, self._tape = book, tape
    self.crash = tape.crash
    self._learners: dict[int, str] = {}  # by session
    self._totals: dict[str, tuple[int, int]] = {}  # steps and tokens of a learner's incarnation

  def record(self, now_ns: int, event: events.Event, out: observers.Actions) -> None:
    """Takes a turn of the syncer. Its reports first: a Confirm ends the session before it, of the
    same process."""
    for action in out:
      if type(action) is actions.Report:
        self._reported(now_ns, action.fact)
      elif type(action) is actions.Close:  # what still comes on this session does not count
        self._learners.pop(action.session, None)
    if type(event) is events.Received:
      if not any(type(one) is actions.Close and one.session == event.session for one in out):
        self._received(now_ns, event.session, event.message)
    elif type(event) is events.Disconnected:
      self._learners.pop(event.session, None)
    self._tape.record(now_ns, event, out)

  def _received(self, now_ns: int, session: int, message: messages.Message) -> None:
    if type(message) is messages.Join:
      self._learners[session] = message.learner
      return
    name = self._learners.get(session)
    if name is None:
      return
    steps, tokens = self._totals.get(name, (0, 0))
    match message:
      case messages.Confirm() if message.steps < steps or name not in self._totals:
        self._totals[name] = message.steps, message.tokens
      case messages.Progress(step_ns=step_ns) if step_ns and message.steps > steps:
        self._totals[name] = message.steps, message.tokens
        trained, count = message.tokens - tokens, message.steps - steps
        self._book.stepped(name, now_ns, trained, step_ns, count=count)
        if message.finished:
          self._book.trained(name, now_ns)

  def _reported(self, now_ns: int, fact: facts.Fact) -> None:
    self._book.take('', now_ns, fact)
    match fact:
      case facts.Member(state='joined'):
        self._book.joined(fact.learner, now_ns)
      case facts.Ledger():
        self._book.begins(fact)
        self._book.forget(fact.learners.keys())
      case facts.Member(state='lost'):
        self._totals.pop(fact.learner, None)
        self._book.died(fact.learner, now_ns, killed=not fact.reason.startswith('left'))
