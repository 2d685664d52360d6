"""The settings of the protocol, each written once.

A field of `ProtocolConfig` is a setting: its name in the config of a run, its default, its meaning,
its bounds with the remedy. Both machines get a `ProtocolConfig`: integers only, times in
nanoseconds, shares in 1/1000. The config of a run, with times in seconds, is a view of the same
table (config/run_config.py). So a new setting is one field here, the code that uses it, a test and
a line in the docs.
"""

import dataclasses
import inspect
import math
import textwrap
from collections.abc import Callable
from typing import Any

SECOND_NS = 1_000_000_000
PERMILLE = 1_000
ADOPT = ('overwrite', 'rebase')  # what becomes of a learner's own steps when it adopts
MAX_FRAGMENTS = 10**4
MAX_SHARDS = 10**6
NORM_WINDOW = 16  # commits of a fragment by which a norm is judged (screening.py)
OF_MACHINE = ''  # the name of what is no setting of a run: only a simulator, or a task, changes it

Bound = int | Callable[['ProtocolConfig'], int]


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
  """One row of the table.

  Attributes:
    name: in the config of a run: 'sync.gamma', 'train.steps'; one without a section is not in it.
    default: the protocol's value; None: the setting is optional.
    doc: its meaning.
    low, high: the least and the greatest value of the protocol; a function of the config where a
      bound follows from other settings.
    remedy: the reason for the bounds, or how to meet them, where `doc` does not say it.
    unit: the protocol's value of a written 1: SECOND_NS for a time that is written in seconds.
    shared: every learner must have the value of the syncer.
    choices: the words that are written for 0, 1, 2, ...; () for a number.
  """

  name: str
  default: int | None
  doc: str
  high: Bound
  low: Bound = 0
  remedy: str = ''
  unit: int = 1
  shared: bool = True
  choices: tuple[str, ...] = ()

  def written(self, value: int | None) -> int | float | str | None:
    """The protocol's `value` as the config of a run has it."""
    if self.choices and value in range(len(self.choices)):
      return self.choices[value]
    return value if value is None or self.unit == 1 else value / self.unit

  def read(self, written: int | float | str | None) -> Any:
    """The protocol's value of a `written` one, not yet checked."""
    if written in self.choices:
      return self.choices.index(written)
    if isinstance(written, bool):
      return int(written)
    if self.unit == 1 or not isinstance(written, int | float) or not math.isfinite(written):
      return written
    return round(written * self.unit)

  def bounds(self, config: 'ProtocolConfig') -> tuple[int, int]:
    """The least and the greatest value."""
    low, high = (bound(config) if callable(bound) else bound for bound in (self.low, self.high))
    return low, high

  def check(self, config: 'ProtocolConfig', value: Any) -> None:
    """Raises ValueError, with the value, the bounds and the remedy."""
    if value is None and self.default is None:
      return
    low, high = self.bounds(config)
    if self.choices:
      if value not in range(len(self.choices)):
        raise ValueError(f'{self.name} is {value!r}; use one of: {", ".join(self.choices)}')
      return
    bounds = f'between {self.written(low)} and {self.written(high)}'
    why = self.remedy or self.doc
    if type(value) is not int:
      raise ValueError(f'{self.name} is {value!r}, it must be a number {bounds}: {why}')
    if not low <= value <= high:
      raise ValueError(f'{self.name} is {self.written(value)}, it must be {bounds}: {why}')


def setting(default: int | None, doc: str, **more: Any) -> Any:
  """A field of ProtocolConfig; the arguments are those of Setting. The field `lease_ns` is written
  as 'sync.lease_s', in seconds, unless `name` and `unit` say otherwise."""
  return dataclasses.field(default=default, metadata={'doc': doc, **more})


def _setting_of(field: dataclasses.Field) -> Setting:
  name, unit = f'sync.{field.name}', 1
  if name.endswith('_ns'):
    name, unit = name.removesuffix('ns') + 's', SECOND_NS
  given = {**field.metadata}
  if given.get('name') == OF_MACHINE:
    given |= {'name': field.name, 'unit': 1}
  return Setting(**{'name': name, 'unit': unit, 'default': field.default, **given})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolConfig:
  """Settings of one run. Data-parallel, DiLoCo, Streaming and Decoupled DiLoCo differ only here."""

  learners: int = setting(
    4,
    'M, how many learners are expected; more may join (see `shards`)',
    low=1,
    high=10**4,
    remedy='a run needs a learner',
  )
  quorum: int = setting(
    1,
    'K, payloads without which nothing is merged; closing syncs, after the last inner step, need '
    'none',
    low=1,
    high=lambda config: config.learners,
    remedy='lower the quorum or expect more learners: quorum <= learners',
  )
  period: int = setting(12, 'H, inner steps between two syncs of one fragment', low=1, high=10**6)
  longest_period: int = setting(
    192,
    'the longest period to which the syncer changes the run where the links of most learners do '
    'not carry `sync.period`, or payloads come too late for it; below twice `sync.period`: never',
    high=10**7,
    shared=False,
  )
  fragments: int = setting(
    12,
    'P, how many fragments the model is cut into',
    low=1,
    high=lambda config: min(config.period, MAX_FRAGMENTS),
    remedy='the schedule syncs at most one fragment a step: fragments <= period, and each has '
    'messages of its own',
  )
  overlap: int = setting(
    3,
    'tau, how many syncs may be in flight, and the latency budget of one sync in inner steps. 0: a '
    'learner waits at its step boundary for the sync (one sync in flight, and max_lag is 0)',
    high=lambda config: config.period - 1,
    remedy='a sync must land before its fragment is due again: overlap < period',
  )
  max_lag: int | None = setting(
    None,
    'how many steps a learner may run ahead of the oldest sync that it has not adopted; none: it '
    'never waits',
    high=lambda config: config.period - 1,
    remedy='a learner that is a whole period ahead would reach the next sync of the same fragment; '
    'none: it never waits',
  )
  ahead: int = setting(
    1,
    'how many inner steps before the time t of its sync a learner captures a fragment, so that the '
    'payload is there when the sync opens; in lock-step modes it captures at t',
    high=lambda config: max(1, config.period - 1),
    remedy='a fragment is due once in a period: ahead < period',
  )
  adopt: int = setting(
    ADOPT.index('rebase'),
    "what becomes of a learner's own steps when it adopts a version. rebase: it carries those that "
    'were not merged onto the new value; overwrite: it drops them, as in the paper',
    high=len(ADOPT) - 1,
    choices=ADOPT,
  )
  max_misses: int = setting(
    2,
    'how many payloads of a fragment in a row may come too late to be merged, while the learner '
    'carries their steps on; after one more it drops them, as too old',
    high=10**6,
    name=OF_MACHINE,
  )
  max_staleness: int = setting(
    1,
    'a payload whose anchor is more versions old than this is not merged',
    high=10**6,
    name=OF_MACHINE,
  )
  grace_permille: int = setting(
    900,
    'gamma, the share of the slack that the grace window may use',
    high=PERMILLE - 1,
    remedy='the grace window uses a part of the slack, 0 merges as soon as the quorum is reached',
    unit=PERMILLE,
    name='sync.gamma',
  )
  total_steps: int = setting(
    300,
    'the clock at which training ends; a learner that joins late or adopts a newer version jumps '
    'ahead on the clock and makes fewer inner steps itself',
    low=1,
    high=10**9,
    remedy='train at least one step',
    name='train.steps',
  )
  max_step_tokens: int = setting(
    1 << 24,
    'the most tokens of one inner step; a learner that reports more is refused. A task of the '
    'config lowers it to the tokens of its batch',
    low=1,
    high=1 << 40,
    remedy='tokens of a batch',
    name=OF_MACHINE,
  )
  lease_ns: int = setting(
    10 * SECOND_NS,
    'a learner that sends nothing for this long is lost; a live peer sends something five times in '
    'it. A learner whose session closes is lost at once',
    low=SECOND_NS // 50,
    high=7_200 * SECOND_NS,
    remedy='usual values are 5 to 50',
  )
  start_wait_ns: int = setting(
    20 * SECOND_NS,
    'a new run starts once M learners have joined, or this long after the first of them',
    high=86_400 * SECOND_NS,
    name=OF_MACHINE,
  )
  shards: int | None = setting(
    None,
    'V, how many shards the text is cut into; further learners wait until a shard is free. None: '
    'as many as learners',
    low=lambda config: 0 if config.local else config.learners,
    high=MAX_SHARDS,
    remedy='every learner reads a shard of its own, so that no text is read twice: '
    'data.shards >= sync.learners',
    name='data.shards',
  )
  local: int = setting(
    0,
    'each learner has data of its own: its batches have a number that no other learner ever gets, '
    'instead of a shard, and no learner waits for one. The syncer does not compare their data',
    high=1,
    name='data.local',
  )
  drain_ns: int = setting(
    7 * SECOND_NS // 2,
    'how long a process may take to end in order after SIGTERM; then it ends anyway. A learner '
    'waits half of this time, `drain_ns`, for the verdicts on its payloads',
    low=SECOND_NS // 20,
    high=1_800 * SECOND_NS,
    remedy='Kubernetes gives 30 s, spot machines less',
    unit=SECOND_NS // 2,
    shared=False,
    name='train.drain_s',
  )
  save_steps: int = setting(
    60,
    'after how many inner steps a learner saves (0: only at the end)',
    high=10**9,
    shared=False,
    name='train.checkpoint_every_steps',
  )
  save_syncs: int = setting(
    0,
    'after how many outer steps the syncer saves (0: only at the end)',
    high=10**9,
    shared=False,
    name='sync.checkpoint_every_syncs',
  )
  patience_ns: int = setting(
    30 * SECOND_NS,
    'how long a step may take, if that is more than ten usual ones, before it is missing',
    low=1,
    high=3_600 * SECOND_NS,
    name=OF_MACHINE,
  )
  end_stuck_ns: int = setting(
    0,
    'after how long without a step, if that is also more than 30 s and ten usual steps, a learner '
    'ends with exit code 75, so that whoever starts it again helps (0: never). Compiling is no '
    'such time',
    high=86_400 * SECOND_NS,
    shared=False,
  )
  norm_factor: int = setting(
    4,
    'the syncer refuses a pseudo-gradient whose norm is more than this many times the running '
    'median norm of its fragment (0: no such limit; NaN and Inf are always refused)',
    high=10**6,
    shared=False,
  )
  norm_warmup: int = setting(
    8,
    'how many outer steps of a fragment come before its first norm limit',
    low=1,
    high=NORM_WINDOW,
    remedy=f'a median needs a few commits, and the syncer keeps {NORM_WINDOW}',
    name=OF_MACHINE,
  )
  strikes: int = setting(
    3,
    'how many refused updates or implausible messages in a row put a learner into quarantine '
    '(0: never)',
    high=10**6,
    name=OF_MACHINE,
  )
  keep_every: int = setting(
    0,
    'every node keeps its first checkpoint of every so many inner steps of its clock, and saves '
    'then (0: only the newest two are kept)',
    high=10**9,
    shared=False,
  )

  def __post_init__(self):
    for field, row in TABLE.items():
      row.check(self, getattr(self, field))

  @property
  def heartbeat_ns(self) -> int:
    """The longest time that a live peer sends nothing; a lease outlives lost heartbeats."""
    return self.lease_ns // 5

  @property
  def redial_ns(self) -> int:
    """The first pause of a learner before a new attempt to connect; each is a quarter longer."""
    return min(SECOND_NS // 5, self.lease_ns // 50)

  @property
  def longest_redial_ns(self) -> int:
    """The longest of these pauses."""
    return min(2 * SECOND_NS, self.lease_ns // 5)

  @property
  def lag(self) -> int | None:
    """The effective max_lag: 0 if there is no overlap."""
    return 0 if self.overlap == 0 else self.max_lag

  @property
  def rebases(self) -> bool:
    """Whether a learner carries its unmerged steps onto a version that it adopts."""
    return ADOPT[self.adopt] == 'rebase'

  @property
  def steps_ahead(self) -> int:
    """The effective `ahead`."""
    return self.ahead if self.lag is None else 0

  @property
  def lead(self) -> int:
    """How many inner steps before it opens a sync may be announced, and how many at once. At least
    one, so that a learner which reaches the step before the others can encode at once."""
    return max(1, self.overlap + self.steps_ahead)

  def closing(self, sync: int) -> bool:
    """Whether a sync is after the last inner step: it merges the remaining steps."""
    return sync > self.total_steps

  def needed(self, sync: int) -> int:
    """How many payloads a sync waits for: K; a closing one merges what there is."""
    return 0 if self.closing(sync) else self.quorum

  @property
  def data_shards(self) -> int:
    """V; with `local`, the most learners whose batches can be told apart."""
    if self.local:
      return MAX_SHARDS
    return self.learners if self.shards is None else self.shards

  @property
  def in_flight(self) -> int:
    """How many syncs may be open at once."""
    return max(1, self.overlap)


TABLE = {field.name: _setting_of(field) for field in dataclasses.fields(ProtocolConfig)}


def described(doc: str | None, names: dict[str, Setting]) -> str:
  """A docstring with the meaning of these fields, for `help()`."""
  lines = [
    textwrap.fill(f'{name}: {row.doc}', 98, initial_indent='  ', subsequent_indent='    ')
    for name, row in names.items()
  ]
  # Python 3.13 has taken the indentation from a docstring, older ones have not.
  return '\n'.join([inspect.cleandoc(doc or ''), '', 'Of the protocol:', *lines])


ProtocolConfig.__doc__ = described(ProtocolConfig.__doc__, TABLE)
