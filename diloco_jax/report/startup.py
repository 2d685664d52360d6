"""Where the time of a start goes: a fact `startup` for each phase, with the CPU time until then.

On a busy machine only the CPU time says what a start costs. The phases of a syncer: assembled (if
it stands by, its turn has come), listens, restored (its checkpoint), recovered (the log), ready
(every outer step compiled).
"""

import time

from diloco_jax.node import ports


def reached(records: ports.Records, phase: str) -> None:
  """This process has come so far."""
  records.report('startup', {'phase': phase, 'cpu_s': round(time.process_time(), 3)})
