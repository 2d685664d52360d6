"""The facts that processes report about themselves, and all facts by their names in the records.

The facts of the protocol's machines are in protocol/facts.py.
"""

import dataclasses
import typing
from typing import Any

from diloco_jax.protocol import facts
from diloco_jax.train import flops

# --- Of a learner ---------------------------------------------------------------------------------


@facts.fact
class Step:
  """An inner step. `step`: the clock after it; `steps`, `tokens`: totals of this process; `loss`:
  None if a loop has none; `seconds`: with `data_s`, the wait for its batch. `saving_s`: how long
  saves kept the island since the step before; `waited_s`: how long the learner waited for others
  since then (in lock step)."""

  step: int
  steps: int
  tokens: int
  loss: float | None
  seconds: float
  data_s: float = 0.0
  saving_s: float = 0.0
  waited_s: float = 0.0


@facts.fact
class Metrics:
  """What a loop, or the loss of a task, has measured in the step before, beside the loss."""

  step: int
  values: dict[str, float]


Cost = flops.Cost
SPEED = {'tflops': ('TFLOP/s', '{:.3g}'), 'mfu': ('MFU', '{:.0%}'), 'memory': ('HBM', '{:.0%}')}
"""The title and form for people of each figure of Cost.speed."""


def speed_text(speed: dict[str, float]) -> str:
  """
  >>> speed_text({'tflops': 412.37, 'mfu': 0.449, 'memory': 0.871})
  'TFLOP/s 412, MFU 45%, HBM 87%'
  """
  return ', '.join(f'{SPEED[name][0]} {SPEED[name][1].format(v)}' for name, v in speed.items())


@facts.fact
class Eval:
  """Held-out loss at a clock: of the global model, or of a learner without a syncer. The bits per
  byte are 0 where there is no text."""

  step: int
  loss: float
  bits_per_byte: float = 0.0

  @property
  def text(self) -> str:
    bits = f' ({self.bits_per_byte:.4f} bits per byte)' if self.bits_per_byte else ''
    return f'{self.loss:.4f}{bits}'


# --- Of a learner or the syncer -------------------------------------------------------------------


@facts.fact
class Startup:
  """CPU time of the process until a phase; on a busy machine wall time does not show the cost of a
  start. The phases of a syncer: assembled, listens, restored (its checkpoint), recovered (the log),
  ready (every outer step compiled). Of a learner: imported, built (its island), restored (its
  checkpoint), compiled (the step and, without a checkpoint, the exchange; a learner that comes back
  compiles that while it trains). A loop of a user's own has the last two."""

  phase: str
  cpu_s: float

  def begins(self, last: str) -> bool:
    """Whether this is a new process; `last`: the phase that was recorded before, or ''."""
    again = _STARTUP.index(self.phase) <= _STARTUP.index(last)
    return again and self.phase != 'compiled'  # one may compile twice


_STARTUP = ['', 'imported', 'assembled', 'listens', 'built', 'restored', 'recovered']
_STARTUP += ['compiled', 'ready']  # in the order of a learner, and of a syncer


@facts.fact
class Moments:
  """A process without a checkpoint joins a run in progress: it begins with the moments of the
  learner `of`, from its checkpoint of `step`, or ('') with fresh ones."""

  clock: int
  of: str
  step: int


@facts.fact
class Missing:
  """So many facts of this process, right before this one, could not be written; `error`: why."""

  facts: int
  error: str


# --- Of the syncer --------------------------------------------------------------------------------


@facts.fact
class Layout:
  """What a run trains and exchanges. `tokens`: of an inner step, 0: only the user's loop knows;
  `bytes_up`, `bytes_down`: of the pseudo-gradients and of the deltas of all fragments; `lines`: for
  people."""

  parameters: int
  tokens: int
  bytes_up: int
  bytes_down: int
  lines: list[str]


@facts.fact
class Outer:
  """An outer step was computed and is in the log; `norm`: of the outer gradient; `cosines`: by
  label of the tensors, the mean cosine between the pseudo-gradients of two learners."""

  sync: int
  fragment: int
  version: int
  norm: float
  cosines: dict[str, float]


@facts.fact
class Traffic:
  """Bytes on the wire in this process of the syncer, and the bytes that data-parallel training of
  the same steps would have moved."""

  bytes_up: int
  bytes_down: int
  bytes_data_parallel: int


@facts.fact
class Followers:
  """How many processes follow the run (syncer/followers.py), and how many versions of fragments the
  last one is behind."""

  count: int
  behind: int


@facts.fact
class Recovered:
  """The syncer has recovered: outer steps replayed from its log, the clock, the number of the
  newest record, the version of each fragment."""

  replayed: int
  sync: int
  log: int
  versions: list[int]


# --- Of the supervisor ----------------------------------------------------------------------------


@facts.fact
class Process:
  """A program has a new state (launch/supervisor.py). `text`: for people; `pid`: once it starts."""

  child: str
  state: str
  text: str
  pid: int | None = None


@facts.fact
class Exit:
  """A process of a program has ended; `code` is negative if a signal killed it. `stopped`: the
  supervisor killed it to end the run, as after a second Ctrl-C, or one while it began."""

  child: str
  pid: int
  code: int
  stopped: bool = False


_SyncerFact = Layout | Outer | Traffic | Followers | Recovered
_LearnerFact = Step | Metrics | Cost | Eval | Moments
Fact = facts.Fact | _LearnerFact | _SyncerFact | Startup | Missing | Process | Exit

name = facts.name
_KINDS = {
  kind.__name__.lower(): (kind, {field.name for field in dataclasses.fields(kind)})
  for kind in typing.get_args(Fact)
}
_COMMON = {'t_ns', 'time', 'name'}  # in every line of the records


def parse(row: dict[str, Any]) -> Fact | None:
  """The fact in a line of the records; None if there is no such fact or its fields differ.

  >>> row = {'t_ns': 1, 'time': 1.0, 'name': 'eval', 'step': 3, 'loss': 2.5, 'bits_per_byte': 0.9}
  >>> parse(row)
  Eval(step=3, loss=2.5, bits_per_byte=0.9)
  """
  kind, fields = _KINDS.get(row.get('name'), (None, set()))
  if row.keys() != fields | _COMMON or kind is None:
    return None
  return kind(**{field: row[field] for field in fields})
