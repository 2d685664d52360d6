"""An anchor: the published value from which a learner measures its progress on one fragment."""

import dataclasses

from diloco_jax.protocol import messages

# Of a process that takes the fragment from the syncer.
UNKNOWN = messages.Held(version=-1, digest=0)


@dataclasses.dataclass(slots=True)
class Anchor:
  """The published value of one fragment as this learner holds it, and its counts when adopted."""

  version: int
  digest: int
  steps: int = 0
  tokens: int = 0
  contributed: int = 0  # the sync that this learner contributed to, 0: none yet
  sound: bool = True  # False: the adopted bits differ from the published ones
  next_due: int = 0  # the sync this learner waits for in lock-step modes
