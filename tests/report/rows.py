"""Lines of records, and the facts in them, with what a test does not care for filled in."""

import dataclasses
import json
import pathlib
from typing import Any

from diloco_jax.protocol import facts
from diloco_jax.report import facts as report_facts
from diloco_jax.report import records as records_lib


def row(at_s: float, fact: report_facts.Fact) -> dict[str, Any]:
  """A line of the records."""
  return {'t_ns': 0, 'time': at_s, 'name': report_facts.name(fact), **dataclasses.asdict(fact)}


def startup(at_s: float, phase: str) -> dict[str, Any]:
  return row(at_s, report_facts.Startup(phase=phase, cpu_s=1.0))


def evaluation(at_s: float, clock: int, loss: float, bits: float = 0.0) -> dict[str, Any]:
  return row(at_s, report_facts.Eval(step=clock, loss=loss, bits_per_byte=bits))


def joined(at_s: float, incarnation: int = 1, clock: int = 0) -> dict[str, Any]:
  """Of the learner itself."""
  return row(at_s, facts.State(state='joined', incarnation=incarnation, clock=clock))


def step(at_s: float, clock: int, steps: int, loss: float = 4.0) -> dict[str, Any]:
  """Each step has 50 tokens and takes half a second."""
  fact = report_facts.Step(step=clock, steps=steps, tokens=50 * steps, loss=loss, seconds=0.5)
  return row(at_s, fact)


def child(at_s: float, name: str, state: str, text: str = '') -> tuple[str, dict[str, Any]]:
  """Of the supervisor."""
  return 'supervisor', row(at_s, report_facts.Process(child=name, state=state, text=text))


def exited(at_s: float, name: str, code: int, stopped: bool = False) -> tuple[str, dict[str, Any]]:
  return 'supervisor', row(at_s, report_facts.Exit(child=name, pid=1, code=code, stopped=stopped))


def synced(sync: int = 1, *learners: str, **more: Any) -> facts.Synced:
  zero = dict.fromkeys(('fragment', 'waited_ns', 'grace_ns', 'tokens', 'staleness'), 0)
  values = {'sync': sync, 'version': sync, 'participants': learners or ('l0', 'l1'), 'late': ()}
  return facts.Synced(**{**zero, **values, 'why': 'all', **more})


def ledger(trained: int, learners: dict[str, dict[str, int]], **more: Any) -> facts.Ledger:
  """All tokens are merged, in one fragment, if `more` says nothing else."""
  zero = dict.fromkeys(('unsettled', 'cancelled', 'repaired', 'skipped'), 0)
  values = {'fragments': 1, 'merged': trained, 'discarded': {}, 'synced': 1, 'sync': 1}
  return facts.Ledger(**zero, **{**values, 'trained': trained, 'learners': learners, **more})


def progress(learner: str, clock: int, steps: int, loss: float | None = 2.5) -> facts.Progress:
  """Each step has 8 tokens and takes a tenth of a second."""
  tokens, step_ns = 8 * steps, 10**8
  return facts.Progress(
    learner=learner, clock=clock, steps=steps, tokens=tokens, loss=loss, step_ns=step_ns
  )


def member(learner: str, state: str, incarnation: int = 1, reason: str = ''):
  return facts.Member(learner=learner, state=state, incarnation=incarnation, reason=reason)


def add_of(workdir: pathlib.Path, process: str, *lines: dict[str, Any]) -> None:
  add(workdir, *[(process, line) for line in lines])


def add(workdir: pathlib.Path, *rows: tuple[str, dict[str, Any]]) -> None:
  """Appends the rows of processes to the records in a folder."""
  for process in {name for name, _ in rows}:
    path = workdir / records_lib.RECORDS / f'{process}.jsonl'
    path.parent.mkdir(exist_ok=True)
    with open(path, 'a', encoding='utf-8') as file:
      file.writelines(json.dumps(line) + '\n' for name, line in rows if name == process)
