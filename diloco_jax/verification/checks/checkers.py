"""The invariants of every run, with delayed, repeated and lost messages, frozen and killed
processes.

Each invariant is a class (invariants/) with an id, the sentence that it enforces, and the records
that it checks. It sees each record before the books (books/) are updated with it, and each turn
after the update, and it never asks a machine. So the same checkers watch the simulated world live
and read the tapes of real processes afterwards::

    checkers = Checkers(config)
    checkers.born(now_ns, process)                       # a process begins
    checkers.saw(process, now_ns, event, actions)        # a machine took a turn
    checkers.died(now_ns, process, killed)               # a process ended
    checkers.logged(now_ns, note)                     # simulated world: the syncer's disk
    checkers.healed(now_ns)                           # no fault happens from now on
    checkers.finished(now_ns)                         # the run is over: end-of-run statements

The ids I1 ... are those of safety, P1 ... of pace and L1 ... of liveness. A run that breaks one
raises `Violation` with its id, its sentence and the contradicting values. A turn costs the same
with any number of learners: checks over all learners run once per sync, once per heartbeat or at
the end.
"""

from collections.abc import Callable
from typing import Any

from diloco_jax.protocol import actions, events
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.tape import observers
from diloco_jax.verification.checks.books import learner as learner_book
from diloco_jax.verification.checks.books import run as run_book
from diloco_jax.verification.checks.books import syncer as syncer_book
from diloco_jax.verification.checks.invariants import (
  contributions,
  data,
  durability,
  ids,
  invariant,
  liveness,
  pace,
  tokens,
)

ObservedProcess = observers.ObservedProcess
Violation = invariant.Violation
LEARNER, SYNCER = invariant.LEARNER, invariant.SYNCER

INVARIANTS: tuple[type[invariant.Invariant], ...] = (
  contributions.InOrder,
  contributions.Quorum,
  contributions.OneAnswer,
  contributions.AtBoundaries,
  contributions.VersionsInOrder,
  contributions.NeverBack,
  contributions.DeltasFit,
  contributions.Fresh,
  tokens.HonestDigests,
  tokens.TokensConserved,
  tokens.Rebased,
  tokens.Verdicts,
  tokens.Finite,
  tokens.Bounded,
  durability.CheckpointIsACut,
  durability.DurableFirst,
  durability.RecoveredState,
  durability.CompactionKeeps,
  data.BatchesOnce,
  data.LeasesJoin,
  data.HonestReader,
  ids.Incarnations,
  ids.HolderStays,
  ids.OnlyMembers,
  pace.Pace,
  pace.LastWord,
  ids.LeaseEnds,
  liveness.NoStepWaits,
  liveness.DecidedInTime,
  liveness.EveryPullIsAnswered,
  liveness.MergesAgain,
  liveness.Joins,
  liveness.Contributes,
  liveness.Heard,
  durability.FinishIsKnown,
)

# The updates of the books, by kind of record.
BOOK_UPDATES = {LEARNER: learner_book.LEARNER_UPDATES, SYNCER: syncer_book.SYNCER_UPDATES}


class Checkers(observers.Observer):
  """All invariants of one run (see the top of this file)."""

  def __init__(self, config: config_lib.ProtocolConfig):
    self.run = run_book.Run(config)
    self.invariants = {kind: kind(self.run) for kind in INVARIANTS}
    self._on: dict[str, dict[Any, tuple[Callable, ...]]] = {LEARNER: {}, SYNCER: {}}
    self._after: dict[str, dict[Any, tuple[Callable, ...]]] = {LEARNER: {}, SYNCER: {}}
    self._register()

  def _register(self) -> None:
    """Fills the tables from kinds to the methods that check them, then to the books' updates."""
    for checker in self.invariants.values():
      for method in (getattr(checker, name) for name in dir(checker)):
        for mark, table in (('_on', self._on), ('_after', self._after)):
          for role, kind in getattr(method, mark, ()):
            table[role][kind] = (*table[role].get(kind, ()), method)
    for role, updates in BOOK_UPDATES.items():
      for kind, update in updates.items():
        self._on[role][kind] = (*self._on[role].get(kind, ()), update)
      every = self._after[role].pop(invariant.EVERY, ())
      kinds = self._after[role].keys()
      self._after[role] = {kind: (*self._after[role][kind], *every) for kind in kinds}
      self._after[role][invariant.EVERY] = every

  def born(self, now_ns: int, process: ObservedProcess) -> None:
    try:
      book = self.run.born(process)
    except run_book.WrongState as error:
      self.invariants[durability.RecoveredState].fail(error)
    if process.start.role == LEARNER:
      self.invariants[liveness.Joins].born(now_ns, book)

  def saw(
    self, process: ObservedProcess, now_ns: int, event: events.Event, out: observers.Actions
  ) -> None:
    book, role = self.run.books[process.number], process.start.role
    table, kind = self._on[role], type(event)
    if kind is events.Received:
      kind = type(event.message)
      if role == SYNCER:
        book.receives(now_ns, event, out)
    for look in table.get(kind, ()):
      look(book, now_ns, event, out)
    for action in out:
      what = type(action)
      if what is actions.Send:
        what = type(action.message)
      elif what is actions.Report:
        action = action.fact
        what = type(action)
      for look in table.get(what, ()):
        look(book, now_ns, action, event)
    table = self._after[role]
    if role == SYNCER:
      book.after(now_ns)
    for look in table[kind] if kind in table else table[invariant.EVERY]:
      look(book, now_ns, event, out)

  def died(self, now_ns: int, process: ObservedProcess, killed: bool) -> None:
    book = self.run.died(process)
    for checker in self.invariants.values():
      checker.died(now_ns, book, killed)

  def logged(self, now_ns: int, note: observers.LogNote) -> None:
    """The syncer's log changed; only the simulated world reports this."""
    for checker in self.invariants.values():
      checker.logged(now_ns, note)
    self.run.logged(note)

  def healed(self, now_ns: int) -> None:
    """No fault happens from now on, so the run must also make progress."""
    self.run.healed_ns = now_ns

  def finished(self, now_ns: int) -> None:
    """The run is over: checks what must be true of it as a whole, as far as it came to its end."""
    for checker in self.invariants.values():
      checker.finished(now_ns)
