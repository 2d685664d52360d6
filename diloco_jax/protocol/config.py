"""The protocol's own numbers: integers only, the letters of the paper beside them.

Both machines get the same one. `config/run_config.py` holds what people write; it becomes this.
"""

import dataclasses

SECOND_NS = 1_000_000_000
PERMILLE = 1_000
NORM_WINDOW = 16  # commits of a fragment by which a norm is judged (screening.py)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolConfig:
  """Settings of one run. Data-parallel, DiLoCo, Streaming and Decoupled DiLoCo differ only here.

  Attributes:
    learners: M, how many learners are expected; more may join (see `streams`).
    fragments: P.
    period: H, inner steps between two syncs of one fragment.
    overlap: tau, syncs in flight and the latency budget of one sync in inner steps. 0: a learner
      waits at its step boundary for the sync (then at most one is in flight, and max_lag is 0).
    quorum: K, payloads without which nothing is merged.
    max_lag: how many steps a learner may run ahead of the sync it waits for; None: never waits.
    max_staleness: a payload whose anchor is more versions old than this is discarded.
    grace_permille: gamma in 1/1000, the share of the slack that the grace window may use.
    total_steps: the clock at which inner training ends.
    lease_ns: a learner unheard of for so long is dead. A closed stream is dead at once.
    heartbeat_ns: longest silence that a live peer keeps.
    start_wait_ns: a new run starts once `learners` have joined, or so long after the first of them.
    redial_ns: first and longest pause before a new attempt to connect.
    streams: V, how many data streams the text is cut into; a learner more than there are waits
      until one is free. None: as many as learners.
    donor_wait_ns: how long a joiner may wait for a donor's moments (donation.py); 0: nobody is
      asked.
    drain_ns: how long a learner that is asked to end waits for the verdicts on what it has given.
    save_steps: a learner saves every so many inner steps (0: only at the end).
    save_syncs: the syncer saves every so many outer steps (0: only at the end).
    norm_factor: a pseudo-gradient longer than so many times the median norm of its fragment is
      refused; 0: however long it is (screening.py).
    norm_warmup: commits of a fragment before its norms are judged.
    strikes: refused updates in a row that put their sender into quarantine; 0: never.
    snapshot_syncs: a snapshot of the whole run is taken every so many outer steps (0: only when
      somebody asks for one).
    snapshot_wait_ns: a learner that has not saved its part by then is left out of the snapshot.
  """

  learners: int
  fragments: int
  period: int
  overlap: int
  quorum: int
  max_lag: int | None = None
  max_staleness: int = 1
  grace_permille: int = 750
  total_steps: int
  lease_ns: int = 10 * SECOND_NS
  heartbeat_ns: int = 2 * SECOND_NS
  start_wait_ns: int = 0
  redial_ns: tuple[int, int] = (SECOND_NS // 5, 10 * SECOND_NS)
  streams: int | None = None
  donor_wait_ns: int = 0
  drain_ns: int = 3 * SECOND_NS
  save_steps: int = 0
  save_syncs: int = 0
  norm_factor: int = 10
  norm_warmup: int = 8
  strikes: int = 3
  snapshot_syncs: int = 0
  snapshot_wait_ns: int = 60 * SECOND_NS

  def __post_init__(self):
    for name, low, high, remedy in (
      ('learners', 1, None, 'a run needs a learner'),
      (
        'fragments',
        1,
        self.period,
        'the schedule syncs at most one fragment a step: fragments <= period',
      ),
      (
        'overlap',
        0,
        self.period - 1,
        'a sync must land before its fragment is due again: overlap < period',
      ),
      ('quorum', 1, self.learners, 'lower the quorum or expect more learners: quorum <= learners'),
      ('max_staleness', 0, None, '0 merges only payloads of the newest version'),
      ('grace_permille', 0, PERMILLE - 1, 'the grace window uses less than the slack: gamma < 1'),
      ('total_steps', 1, None, 'train at least one step'),
      (
        'heartbeat_ns',
        1,
        self.lease_ns // 2,
        'a lease must outlive a lost heartbeat: heartbeat <= lease / 2',
      ),
      ('start_wait_ns', 0, None, '0 starts with the first learner'),
      ('donor_wait_ns', 0, None, '0 asks nobody'),
      ('drain_ns', 0, None, '0 leaves at once'),
      ('save_steps', 0, None, '0 saves only at the end'),
      ('save_syncs', 0, None, '0 saves only at the end'),
      ('norm_factor', 0, None, '0 refuses nothing for its norm'),
      ('norm_warmup', 1, NORM_WINDOW, 'a median needs a few commits, and so many are kept'),
      ('strikes', 0, None, '0 puts nobody into quarantine'),
      ('snapshot_syncs', 0, None, '0 takes one only when asked'),
      ('snapshot_wait_ns', 1, None, 'a part takes a step and a save'),
    ):
      value = getattr(self, name)
      if value < low or (high is not None and value > high):
        bound = f'at least {low}' if high is None else f'between {low} and {high}'
        raise ValueError(f'{name} is {value}, it must be {bound}: {remedy}')
    if self.data_streams < self.learners:
      raise ValueError(
        f'streams is {self.streams}, it must be at least {self.learners}: every learner reads a '
        'data stream of its own, so that no text is read twice'
      )
    if self.max_lag is not None and not 0 <= self.max_lag < self.period:
      raise ValueError(
        f'max_lag is {self.max_lag}, it must be between 0 and {self.period - 1}: a learner that '
        f'runs a whole period ({self.period}) ahead would meet its fragment again; None never waits'
      )

  @property
  def lag(self) -> int | None:
    """max_lag as it acts: no overlap means waiting at the boundary."""
    return 0 if self.overlap == 0 else self.max_lag

  @property
  def data_streams(self) -> int:
    """V."""
    return self.learners if self.streams is None else self.streams

  @property
  def in_flight(self) -> int:
    """How many syncs may be open at once."""
    return max(1, self.overlap)
