"""An invariant: a statement about every run, with an id, a sentence and the records that it checks.

An invariant sees each record before the books (checks/books) are updated with it, and each turn
after the update, so it can compare what a machine does with what is true. It never asks a machine.
"""

from collections.abc import Callable, Iterable
from typing import Any

from diloco_jax.protocol import actions, events
from diloco_jax.protocol.tape import observers
from diloco_jax.verification.checks.books import run as run_book

Event, Out, Send = events.Event, observers.Actions, actions.Send

LEARNER, SYNCER = 'learner', 'syncer'
EVERY = 'every turn'


class Violation(AssertionError):
  """An invariant does not hold: its id, its sentence, and the values that contradict it."""

  def __init__(self, invariant_id: str, sentence: str, detail: str):
    super().__init__(f'{invariant_id}: {sentence} {detail}')
    self.invariant, self.sentence, self.detail = invariant_id, sentence, detail


def on(role: str, *kinds: Any) -> Callable:
  """The method sees every such event or action (a message's class; a fact's) of a role,
  before the books do: method(book, now_ns, what, the turn's actions or event)."""
  return _mark('_on', role, kinds)


def after(role: str, *kinds: Any) -> Callable:
  """The method sees every turn of a role that such an event began, after the books are updated:
  method(book, now_ns, event, actions)."""
  return _mark('_after', role, kinds)


def _mark(name: str, role: str, kinds: Iterable[Any]) -> Callable:
  def decorate(method: Callable) -> Callable:
    setattr(method, name, [(role, kind) for kind in kinds])
    return method

  return decorate


class Invariant:
  """One statement about every run."""

  id = ''
  sentence = ''

  def __init__(self, run: run_book.Run):
    self.run, self.config = run, run.config

  def fail(self, *seen: Any) -> None:
    raise Violation(self.id, self.sentence, ', '.join(str(value) for value in seen))

  def died(self, now_ns: int, book: run_book.Book, killed: bool) -> None:
    """A process has ended."""

  def logged(self, now_ns: int, note: observers.LogNote) -> None:
    """The syncer's log changed; called before the books are updated."""

  def finished(self, now_ns: int) -> None:
    """The run is over, or was stopped before its last step."""
