"""The config of a run, checked once before any compilation.

One typed object serves every process of a run. `--config=FILE.py:VARIANT` makes it, an override
`--config.sync.quorum=2` changes a field (launch/program.py), and `validate()` refuses settings that
cannot work. The identity of a process (its learner id, port, workdir) is in plain flags and not
here, so the config is the same in all processes. `agreement()` is the part that learners and syncer
must share; the syncer compares it when a learner joins.

The dataclasses are mutable because overrides assign to fields; no code assigns after `validate()`.
"""

import dataclasses
import json
from typing import Annotated, Any

from diloco_jax.protocol import config as protocol_config
from diloco_jax.protocol.tape import codec
from diloco_jax.train import config as train_config

FILE = 'config.json'  # in a run's folder: the config that started the run

OptionalInt = Annotated[int | None, 'an integer, or none']
"""A field that an override can set and clear (`=2`, `=none`); launch/program.py parses it."""

FRAGMENTATIONS = ('balanced', 'layer', 'strided')


def _section(section: str) -> tuple[type, dict[str, protocol_config.Setting]]:
  """The protocol's settings of a section: a dataclass in the units of the config, and the rows of
  the table."""
  rows = {}
  for one in protocol_config.TABLE.values():
    where, name = one.name.split('.')
    if where == section:
      rows[name] = one
  fields = [(name, _type(one), one.written(one.default)) for name, one in rows.items()]
  return dataclasses.make_dataclass(f'_{section}', fields, kw_only=True, slots=True), rows


def _type(one: protocol_config.Setting) -> Any:
  return OptionalInt if one.default is None else int if one.unit == 1 else float


_Sync, _SYNC = _section('sync')
_Train, _TRAIN = _section('train')


@dataclasses.dataclass(kw_only=True, slots=True)
class SyncConfig(_Sync):
  """How learners and syncer exchange fragments. Letters: paper section 2. The protocol's settings
  are in protocol/config.py; here are those that concern arrays and bytes only.

  Attributes:
    fragmentation: 'balanced', 'layer' or 'strided' (paper section 5).
    codec_up: encoding of pseudo-gradients, a name of numerics/codecs.py: 'float32', 'bfloat16',
      'int8' or 'int4'.
    codec_down: encoding of a published version, a delta from the version before.
    merge: how pseudo-gradients are merged, a spec of numerics/merge.py: 'rda(floor=0.02)', 'avg'
      (paper section 4). For all tensors but those of embedding_merge.
    embedding_merge: the same for the embedding and an untied head.
    outer: the outer optimizer, a spec of numerics/outer.py: 'nesterov(...)', 'adam(...)'.
    alpha: share of the learner's own value that survives an adopt; 0 overwrites.
    donor_rate_mib_s: bandwidth that a donation may use at the donor and at the syncer, in MiB per
      second. A donation must arrive at most H steps old, so it has to cross both within that time:
      2 * moments / rate < H * step time.
    keep_log: keep every outer step in the log, so that the arrays of the whole run can be computed
      again (experiments/replay.py --arrays); else the log drops what two checkpoints hold.
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
  """How long to train, how often to evaluate and log, and how much to keep of it.

  Attributes:
    log_every: inner steps between two log lines.
    eval_every: clock steps between two evaluations of the global model (0: first and last).
    seed: of the initial parameters.
    tapes_mib: the most that the tapes of one node may take on disk, in MiB (storage/tapes.py).
  """

  log_every: int = 10
  eval_every: int = 60
  seed: int = 0
  tapes_mib: int = 2048

  def validate(self) -> None:
    _within('train.log_every', self.log_every, 1, 10**9, 'a large number gives few lines')
    _within('train.eval_every', self.eval_every, 0, 10**9, '0 evaluates at the start and the end')
    _within('train.seed', self.seed, 0, 2**31 - 1, 'seeds are 31-bit')
    _within('train.tapes_mib', self.tapes_mib, 32, 10**6, 'a day of a small run needs about 1000')


TrainConfig.__doc__ = protocol_config.described(TrainConfig.__doc__, _TRAIN)


@dataclasses.dataclass(kw_only=True, slots=True)
class KillConfig:
  """One SIGKILL: the victim ('' draws one by chaos.seed), the share of the run that is done at the
  kill, and the seconds before the restart."""

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
  """All settings of a run; they are the same in all its processes."""

  name: str
  model: train_config.ModelConfig
  optimizer: train_config.OptimizerConfig
  data: train_config.DataConfig
  mesh: train_config.MeshConfig
  sync: SyncConfig = dataclasses.field(default_factory=SyncConfig)
  train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
  chaos: ChaosConfig = dataclasses.field(default_factory=ChaosConfig)

  def validate(self) -> None:
    """Raises ValueError, one line with the values and the remedy, if a setting cannot work."""
    train_config.validate(self.model, self.optimizer, self.data, self.mesh)
    self.train.validate()
    self.sync.validate()
    self.chaos.validate(self.sync.learners)
    self.protocol()

  def protocol(self) -> protocol_config.ProtocolConfig:
    """The settings of the protocol: integers, times in nanoseconds."""
    values = {}
    for field, one in protocol_config.TABLE.items():
      section, name = one.name.split('.')
      values[field] = one.read(getattr(getattr(self, section), name))
    return protocol_config.ProtocolConfig(**values)

  def to_dict(self) -> dict[str, Any]:
    """Nested plain values for JSON."""
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
    """The settings that every learner must share with the syncer. Not among them: the mesh and the
    times of saves, which each learner chooses, and limits and retention of the syncer, which its
    restart may change. The path of the corpus may differ, too, but batch i of shard v must be the
    same text for all."""
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
  """The ids that the local launcher assigns: l0, l1, ... Their order is the order of merging.

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
