"""The states that docs/protocol.md draws."""

from diloco_jax.verification.checks.invariants import invariant
from diloco_jax.verification.checks.model import diagrams
from diloco_jax.verification.checks.model import run as run_book


class AsDrawn(invariant.Invariant):
  id = 'I24'
  sentence = 'Every sync, every connection and all training move as drawn.'

  def __init__(self, run: run_book.Run):
    super().__init__(run)
    self._diagrams = diagrams.Diagrams()

  @invariant.after(invariant.LEARNER, invariant.EVERY)
  def learner(self, book, now_ns, event, out):
    self._check(book, event, out)

  @invariant.after(invariant.SYNCER, invariant.EVERY)
  def syncer(self, book, now_ns, event, out):
    self._check(book, event, out)

  def died(self, now_ns, book, killed):
    self._diagrams.died(book.life.number)

  def _check(self, book, event, out) -> None:
    for move in self._diagrams.moves(book.life, event, out):
      if move not in diagrams.DRAWN:
        self.fail(book, *move)
