"""The account of a run of real processes, from its tapes and from the starts and ends in its
records.

It agrees with the account that report/run_facts.py makes of the records alone, while the run is
under way: there a step is known by its end and its duration, here by the turns around it.
"""

import heapq
import pathlib
from collections.abc import Iterator
from typing import Any

from diloco_jax.accounting import book as book_lib
from diloco_jax.accounting import turns
from diloco_jax.protocol.tape import tape
from diloco_jax.report import facts, records, run_facts
from diloco_jax.storage import tapes
from diloco_jax.verification.checks import judge_tapes

_LIVES = facts.Process, facts.Exit, facts.Startup


def node_tapes(workdir: pathlib.Path) -> list[judge_tapes.Tape]:
  """The tapes of a run. Raises ValueError if it has none."""
  found = [(life.name, tapes.read(life)) for life in tapes.find(workdir)]
  return [
    judge_tapes.Tape(name, reader.header.start, reader) for name, reader in found if reader.header
  ]


def account(workdir: pathlib.Path, until_ns: int | None = None) -> tuple[book_lib.Book, int]:
  """The book of a run, and the time of its last fact or turn; `until_ns`: until then only.

  Raises:
    ValueError: the folder has no tapes.
    TapeError: one of them is damaged.
  """
  found = node_tapes(workdir)
  config = next(one.start.config for one in found)
  book = book_lib.Book(config.quorum, config.period / config.fragments)
  fold = turns.Turns(book)
  lives = facts_of(workdir, *_LIVES)
  supervised = {fact.child for _, _, fact in lives if isinstance(fact, facts.Exit)}
  now_ns = 0
  for at_ns, who, what in heapq.merge(_turns(found), lives, key=lambda one: one[0]):
    if until_ns is not None and at_ns > until_ns:
      break
    now_ns = at_ns
    if who is None:
      life, turn, last = what
      if turn.index == 0:
        fold.born(now_ns, life)
      if isinstance(turn, tape.Record):
        fold.saw(life, now_ns, turn.event, turn.actions)
      if last and life.start.node not in supervised:
        fold.died(now_ns, life, killed=True)
    else:
      run_facts.book(book, who, now_ns, what)
  return book, now_ns


def _turns(found: list[judge_tapes.Tape]) -> Iterator[tuple[int, None, Any]]:
  for _, life, turn, last in judge_tapes.in_order(found):
    yield turn.now_ns, None, (life, turn, last)


def facts_of(workdir: pathlib.Path, *kinds: type) -> list[tuple[int, str, Any]]:
  """The facts of these kinds in the records of a run: (time, process, fact) in order."""
  rows = ((row['t_ns'], who, facts.parse(row)) for who, row in records.TailAll(workdir).read())
  return sorted((row for row in rows if isinstance(row[2], kinds)), key=lambda row: row[0])
