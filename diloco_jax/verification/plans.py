"""Chaos plans: faults with their kinds, nodes, times and durations. Pure data.

The same plan drives the simulated world (verification/sim/faults.py) and real processes
(verification/faults/chaos_run.py). A fault has a kind, begins at `at_ns` of the run and ends
`for_ns` later:

| kind | what happens to `node` | `amount` |
|---|---|---|
| kill | its process is killed (SIGKILL), and started again `for_ns` later | |
| preempt | its process is asked to end (SIGTERM), killed `amount` later, and started again after
`for_ns` | notice, ns |
| freeze | its process is stopped (SIGSTOP, then SIGCONT) | |
| replace | as freeze, and meanwhile another process starts under its learner id | |
| slow | its steps take `amount` times as long | factor |
| cut_up, cut_down | no byte from it (to it) arrives; neither end gets an error | |
| partition | both | |
| reset | its sessions break, and bytes in flight are lost | |
| throttle | its link carries `amount` bytes a second | bytes/s |
| corrupt | a byte on its link is flipped: the checksum fails and the session is closed | |

Only in the simulated world:

| kind | what happens to `node` | `amount` |
|---|---|---|
| shrink | its island lost devices: steps take `amount` times as long, with 1/`amount` of the tokens
| factor |
| delay | every byte on its link takes `amount` longer | ns |
| nan | its next capture of a fragment holds a NaN (syncer: its next outer step) | fragment |
| huge, poison | its next `amount` captures of each fragment reach the syncer with an absurd norm,
with NaN | number |
| flip | its next adoption of a fragment has a wrong bit | fragment |
| disk_full | its disk has no space | |
| fsync_fails | the next fsyncs of its disk fail | number |
| rot | a bit on its disk flips | |
"""

import dataclasses

KINDS = (
  'kill',
  'preempt',
  'freeze',
  'replace',
  'slow',
  'cut_up',
  'cut_down',
  'partition',
  'reset',
  'throttle',
  'corrupt',
)
SIMULATED_KINDS = (
  'shrink',
  'delay',
  'nan',
  'huge',
  'poison',
  'flip',
  'disk_full',
  'fsync_fails',
  'rot',
)
SYNCER = 'syncer'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
  """One fault (see the top of this file). `node` is 'syncer' or a learner id."""

  at_ns: int
  kind: str
  node: str
  for_ns: int = 0
  amount: int = 0

  def __post_init__(self):
    if self.kind not in KINDS + SIMULATED_KINDS:
      raise ValueError(
        f'{self.kind!r} is not a kind of fault; use one of {", ".join(KINDS + SIMULATED_KINDS)}'
      )


def describe(fault: Fault) -> str:
  """One line of text."""
  amount = f', {fault.amount:,}' if fault.amount else ''
  return f'** {fault.node}: {fault.kind}{amount} for {fault.for_ns / 1e9:g} s'


# --- Plans for real processes ---------------------------------------------------------------------

STORM = 'storm'
SECOND_NS = 1_000_000_000
DEFAULT_AMOUNTS = {
  'preempt': 5 * SECOND_NS,
  'slow': 5,
  'throttle': 20_000,
}


def named(names: str, learners: list[str], for_ns: int) -> list[Fault]:
  """Faults of the kinds `names` (joined by commas; 'storm': all of them), in turn against every
  learner but the first.

  Raises:
    ValueError: one of them is none of KINDS.

  >>> plan = named('kill,slow,reset', ['l0', 'l1', 'l2'], SECOND_NS)
  >>> [(fault.kind, fault.node) for fault in plan]
  [('kill', 'l1'), ('slow', 'l2'), ('reset', 'l1')]
  """
  # Kinds that end a process come last in a storm: 'replace' leaves another process behind.
  ends = ('kill', 'preempt', 'replace').__contains__
  kinds = sorted(KINDS, key=ends) if names == STORM else names.split(',')
  for kind in kinds:
    if kind not in KINDS:
      raise ValueError(
        f'{kind!r} is not a kind of fault here; use one of {", ".join((*KINDS, STORM))}'
      )
  victims = learners[1:] or learners
  return [
    Fault(
      at_ns=index // len(victims) * for_ns,
      kind=kind,
      node=victims[index % len(victims)],
      for_ns=for_ns,
      amount=DEFAULT_AMOUNTS.get(kind, 0),
    )
    for index, kind in enumerate(kinds)
  ]
