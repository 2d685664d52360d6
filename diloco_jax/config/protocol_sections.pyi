"""Written by scripts/config_stub.py from protocol/config.py."""

import dataclasses
from typing import Annotated, Literal

from diloco_jax.protocol import config as protocol_config

OptionalInt = Annotated[int | None, 'an integer, or none']

def settings(section: str) -> dict[str, protocol_config.Setting]: ...

@dataclasses.dataclass(kw_only=True, slots=True)
class Sync:
  learners: int = 4
  """M, how many learners are expected; more may join (see `shards`)"""
  quorum: int = 1
  """K, payloads without which nothing is merged; closing syncs, after the last inner step, need
  none"""
  period: int = 12
  """H, inner steps between two syncs of one fragment"""
  longest_period: int = 192
  """the longest period to which the syncer changes the run where the links of most learners do
  not carry `sync.period`, or payloads come too late for it; below twice `sync.period`: never"""
  fragments: int = 12
  """P, how many fragments the model is cut into"""
  overlap: int = 3
  """tau, how many syncs may be in flight, and the latency budget of one sync in inner steps. 0: a
  learner waits at its step boundary for the sync (one sync in flight, and max_lag is 0)"""
  max_lag: OptionalInt = None
  """how many steps a learner may run ahead of the oldest sync that it has not adopted; none: it
  never waits"""
  ahead: int = 1
  """how many inner steps before the time t of its sync a learner captures a fragment, so that the
  payload is there when the sync opens; in lock-step modes it captures at t"""
  adopt: Literal['overwrite', 'rebase'] = 'rebase'
  """what becomes of a learner's own steps when it adopts a version. rebase: it carries those that
  were not merged onto the new value; overwrite: it drops them, as in the paper"""
  gamma: float = 0.9
  """gamma, the share of the slack that the grace window may use"""
  lease_s: float = 10.0
  """a learner that sends nothing for this long is lost; a live peer sends something five times in
  it. A learner whose session closes is lost at once"""
  checkpoint_every_syncs: int = 0
  """after how many outer steps the syncer saves (0: only at the end)"""
  end_stuck_s: float = 0.0
  """after how long without a step, if that is also more than 30 s and ten usual steps, a learner
  ends with exit code 75, so that whoever starts it again helps (0: never). Compiling is no such
  time"""
  norm_factor: int = 4
  """the syncer refuses a pseudo-gradient whose norm is more than this many times the running
  median norm of its fragment (0: no such limit; NaN and Inf are always refused)"""
  keep_every: int = 0
  """every node keeps its first checkpoint of every so many inner steps of its clock, and saves
  then (0: only the newest two are kept)"""

@dataclasses.dataclass(kw_only=True, slots=True)
class Train:
  steps: int = 300
  """the clock at which training ends; a learner that joins late or adopts a newer version jumps
  ahead on the clock and makes fewer inner steps itself"""
  drain_s: float = 7.0
  """how long a process may take to end in order after SIGTERM; then it ends anyway. A learner
  waits half of this time, `drain_ns`, for the verdicts on its payloads"""
  checkpoint_every_steps: int = 60
  """after how many inner steps a learner saves (0: only at the end)"""
