"""What people write down about a run, checked once before anything is compiled.

One typed object serves every process of a run. `--config=FILE.py:VARIANT` makes it, an override
`--config.sync.quorum=2` changes a field (launch/program.py), `validate()` says what cannot work.
Who a process *is* (its learner id, port, workdir) is plain flags and never stands here, so the
config is the same everywhere, and `agreement()`, the part that learners and syncer must share, is
compared when a learner joins.

The dataclasses are mutable because overrides assign to fields; nothing assigns after `validate()`.
"""

import dataclasses
import json
from typing import Annotated, Any

from diloco_jax.protocol import config as protocol_config
from diloco_jax.protocol.tape import codec
from diloco_jax.train import config as train_config

FILE = 'config.json'  # in a run's folder: the config as it was started

OptionalInt = Annotated[int | None, 'an integer, or none']
"""A field that an override can set and clear (`=2`, `=none`); launch/program.py parses it."""

FRAGMENTATIONS = ('balanced', 'layer', 'strided')


def _written(section: str) -> tuple[type, dict[str, protocol_config.Setting]]:
  """The protocol's settings of a section as people write them: a dataclass, and the table's rows."""
  rows = {}
  for one in protocol_config.TABLE.values():
    where, name = one.name.split('.')
    if where == section:
      rows[name] = one
  fields = [(name, _type(one), one.written(one.default)) for name, one in rows.items()]
  return dataclasses.make_dataclass(f'_{section}', fields, kw_only=True, slots=True), rows


def _type(one: protocol_config.Setting) -> Any:
  return OptionalInt if one.default is None else int if one.unit == 1 else float


_Sync, _SYNC = _written('sync')
_Train, _TRAIN = _written('train')


@dataclasses.dataclass(kw_only=True, slots=True)
class SyncConfig(_Sync):
  """How learners and syncer exchange fragments. Letters: paper section 2. Most settings are the
  protocol's and stand in protocol/config.py; those that only arrays know are here.

  Attributes:
    fragmentation: 'balanced', 'layer' or 'strided' (paper section 5).
    codec_up: encoding of pseudo-gradients, a name of numerics/codecs.py: 'float32', 'bfloat16',
      'int8' or 'int4'.
    codec_down: encoding of what is published, a delta to the version before.
    merge: how pseudo-gradients are merged, a spec of numerics/merge.py: 'rda(floor=0.02)', 'avg'
      (paper section 4). For all tensors but the next.
    embedding_merge: the same for the embedding and an untied head.
    outer: the outer optimizer, a spec of numerics/outer.py: 'nesterov(...)', 'adam(...)'.
    alpha: share of the learner's own value that survives an adopt; 0 overwrites.
    donor_rate_mib_s: bandwidth that a donation may take, of the donor and of the syncer, in MiB a
      second. To arrive at most H steps old, as it must, it has to cross both within that time:
      2 * moments / rate < H * step time.
    keep_log: keep every outer step in the log, so that the whole run can be made again from its
      arrays (experiments/replay.py --arrays); else what two checkpoints hold is dropped.
  """

  fragmentation: str = 'balanced'
  codec_up: str = 'int8'
  codec_down: str = 'int8'
  merge: str = 'rda'
  embedding_merge: str = 'avg'
  outer: str = 'nesterov(learning_rate=0.7, momentum=0.9)'
  alpha: float = 0.0
  donor_rate_mib_s: int = 256
  keep_log: bool = False

  def validate(self) -> None:
    _one_of('sync.fragmentation', self.fragmentation, FRAGMENTATIONS)
    _within('sync.alpha', self.alpha, 0.0, 1.0, '0 overwrites, 1 would ignore the syncer')
    _within('sync.donor_rate_mib_s', self.donor_rate_mib_s, 1, 10**6, 'usual values are 64 to 1024')


SyncConfig.__doc__ = protocol_config.described(SyncConfig.__doc__, _SYNC)


@dataclasses.dataclass(kw_only=True, slots=True)
class TrainConfig(_Train):
  """How long to train, and what to write down on the way.

  Attributes:
    log_every: inner steps between two log lines.
    eval_every: outer clock steps between two evaluations of the global model (0: first and last).
    seed: of the initial parameters.
  """

  log_every: int = 10
  eval_every: int = 60
  seed: int = 0

  def validate(self) -> None:
    _within('train.log_every', self.log_every, 1, 10**9, 'use a large number for few lines')
    _within('train.eval_every', self.eval_every, 0, 10**9, '0 evaluates at the start and the end')
    _within('train.seed', self.seed, 0, 2**31 - 1, 'seeds are 31-bit')


TrainConfig.__doc__ = protocol_config.described(TrainConfig.__doc__, _TRAIN)


@dataclasses.dataclass(kw_only=True, slots=True)
class KillConfig:
  """One SIGKILL: whom ('' draws one by chaos.seed), at which share of the run, down how long."""

  victim: str = ''
  at_fraction: float = 0.45
  down_s: float = 8.0


@dataclasses.dataclass(kw_only=True, slots=True)
class ChaosConfig:
  """Faults that the local supervisor injects (launch/kill_plan.py)."""

  enabled: bool = False
  seed: int = 0
  kills: list[KillConfig] = dataclasses.field(default_factory=list)

  def validate(self, learners: int) -> None:
    names = tuple(learner_ids(learners))
    for index, kill in enumerate(self.kills):
      name = f'chaos.kills[{index}]'
      _within(f'{name}.at_fraction', kill.at_fraction, 0.0, 1.0, '0.5 is the middle of the run')
      _within(f'{name}.down_s', kill.down_s, 0.0, 86400.0, '0 restarts at once')
      if kill.victim:
        _one_of(f'{name}.victim', kill.victim, names)


@dataclasses.dataclass(kw_only=True, slots=True)
class Config:
  """Everything about a run that is the same in all its processes."""

  name: str
  model: train_config.ModelConfig
  optimizer: train_config.OptimizerConfig
  data: train_config.DataConfig
  mesh: train_config.MeshConfig
  sync: SyncConfig = dataclasses.field(default_factory=SyncConfig)
  train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
  chaos: ChaosConfig = dataclasses.field(default_factory=ChaosConfig)

  def validate(self) -> None:
    """Raises ValueError, one line with the values and the remedy, if the run could not work."""
    train_config.validate(self.model, self.optimizer, self.data, self.mesh)
    self.train.validate()
    self.sync.validate()
    self.chaos.validate(self.sync.learners)
    self.protocol()

  def protocol(self) -> protocol_config.ProtocolConfig:
    """The protocol's own numbers: integers, times in nanoseconds."""
    values = {}
    for field, one in protocol_config.TABLE.items():
      section, name = one.name.split('.')
      values[field] = one.read(getattr(getattr(self, section), name))
    return protocol_config.ProtocolConfig(**values)

  def to_dict(self) -> dict[str, Any]:
    """Nested plain values, fit for JSON."""
    return json.loads(codec.encode(self))

  @classmethod
  def from_dict(cls, values: dict[str, Any]) -> 'Config':
    """The inverse of `to_dict`. Raises ValueError; a missing or unknown name is an error."""
    try:
      return codec.decode(cls, values, 'config')
    except codec.TapeError as error:
      raise ValueError(str(error)) from None

  def flat(self) -> dict[str, Any]:
    """Dotted names to plain values, for example {'sync.quorum': 1, ...}."""
    return dict(_flatten('', dataclasses.asdict(self)))

  def agreement(self) -> dict[str, Any]:
    """What every learner must share with the syncer; where it trains and saves is its own, and what
    the syncer refuses or keeps can be changed by starting it again. The place of its corpus is its
    own too, but batch i of shard v must be the same text for all."""
    own = {one.name for one in protocol_config.TABLE.values() if not one.shared}
    own |= {'sync.donor_rate_mib_s', 'sync.keep_log'}
    shared = (
      'model.',
      'optimizer.',
      'sync.',
      'train.steps',
      'train.seed',
      'data.seq_len',
      'data.batch_size',
      'data.shards',
      'data.seed',
    )
    return {
      name: value
      for name, value in self.flat().items()
      if name.startswith(shared) and name not in own
    }


def learner_ids(learners: int) -> list[str]:
  """The ids that the local launcher gives: l0, l1, ... (their order is the order of merging).

  >>> learner_ids(3)
  ['l0', 'l1', 'l2']
  """
  width = len(str(max(learners - 1, 0)))
  return [f'l{index:0{width}d}' for index in range(learners)]


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
  if value not in allowed:
    raise ValueError(f'{name} is {value!r}; use one of: {", ".join(allowed)}')


def _within(name: str, value: float, low: float, high: float, remedy: str) -> None:
  if not low <= value <= high:  # written so that NaN fails
    raise ValueError(f'{name} is {value}, it must be between {low} and {high}: {remedy}')


def _flatten(prefix: str, value: Any):
  if isinstance(value, dict) and value:
    for key, item in value.items():
      yield from _flatten(f'{prefix}.{key}' if prefix else key, item)
  else:
    yield prefix, value
