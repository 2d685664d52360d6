"""Books the facts of the records in the account of the learners' time (accounting/book.py)."""

from diloco_jax.accounting import book as book_lib
from diloco_jax.protocol import ids
from diloco_jax.report import facts

PHASES = {'imported': book_lib.PREP, 'built': book_lib.RESTORE, 'restored': book_lib.COMPILE}


def book(account: book_lib.Book, process: str, at_ns: int, fact: facts.Fact) -> None:
  """Books a fact from the records."""
  match fact:
    case facts.Process(child=child, state='starting') if child not in ids.NO_LEARNERS:
      account.starts(child, at_ns)
    case facts.Exit(child='syncer'):
      account.syncer_died(at_ns)
    case facts.Exit(child=child, code=code, stopped=stopped):
      account.died(child, at_ns, killed=code != 0 and not stopped)
    case facts.Startup(phase='compiled') if process not in ids.NO_LEARNERS:
      account.waits(process, at_ns)
    case facts.Startup(phase=phase) if process not in ids.NO_LEARNERS:
      account.enters(process, at_ns, PHASES[phase])
    case facts.Step():
      account.stepped(
        process,
        at_ns,
        fact.tokens // fact.steps,
        round(fact.seconds * 1e9),
        round(fact.data_s * 1e9),
        round(fact.saving_s * 1e9),
        round(fact.waited_s * 1e9),
      )
    case _:
      account.take(process, at_ns, fact)
