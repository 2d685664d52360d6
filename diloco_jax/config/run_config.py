"""The config of a run, checked once before any compilation.

One typed object serves every process of a run. `--config=FILE.py:VARIANT` makes it (load.py), an
override `--config.sync.quorum=2` changes a field (launch/cli.py), and `validate()` refuses
settings that cannot work. The identity of a process (its learner id, port, workdir) is in plain
flags and not here, so the config is the same in all processes. `agreement()` is the part that
learners and syncer must share; the syncer compares it when a learner joins.

The dataclasses are mutable because overrides assign to fields; no code assigns after `validate()`.
"""

import dataclasses
import json
import re
import types
import typing
from typing import Any

from diloco_jax.config import protocol_sections
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.tape import codec
from diloco_jax.train import config as train_config

DECODER = 'decoder'  # the reference task
OWN_LOOP = ''  # no task: loops of the user's own train (api/peer.py)
NODE = '{node}'  # in data.corpus
_BUCKET = re.compile(r'gs://\w[\w.-]*(/\w[\w.=+-]*)+', re.ASCII)  # and a folder in it


@dataclasses.dataclass(kw_only=True, slots=True)
class SyncConfig(protocol_sections.Sync):
  """How learners and syncer exchange fragments. Letters: paper section 2. The protocol's settings
  are in protocol/config.py; here are those that concern arrays and bytes only.

  Attributes:
    codec_up: encoding of pseudo-gradients, a name of numerics/codecs.py: 'float32', 'bfloat16',
      'int8', 'int4' or 'int2'.
    codec_down: encoding of a published version, a delta from the version before.
    merge: how pseudo-gradients are merged, a spec of numerics/merge.py: 'rda(floor=0.02)', 'avg'
      (paper section 4), 'majority' against liars, or 'local': never sent, each learner trains its
      own. For all tensors but those of `embedding_merge`. One of your own is
      'package.module:rule(a=1)' or 'FILE.py:rule'; only the syncer needs the file.
    embedding_merge: the same for the embedding, an untied head, and the router of a Mixture of
      Experts. Learners change it in directions of their own, which rda would not shorten: it ended
      0.2 and 0.6 % worse with two seeds (docs/findings.md).
    outer: the outer optimizer, a spec of numerics/outer.py: 'nesterov(...)', 'adam(...)', or
      'package.module:make(...)', 'FILE.py:make' for one of your own. The
      default is the best of docs/studies/results.md at the best inner rate; a low inner rate
      wants a longer outer step, as 0.7 and 0.5.
    follow_bytes_per_s: what the syncer sends to all followers together (diloco_jax.follow): less
      than the learners leave of its up-link. 0: nobody may follow the run.
  """

  codec_up: str = 'int8'
  codec_down: str = 'int8'
  merge: str = 'rda'
  embedding_merge: str = 'avg'
  outer: str = 'nesterov(learning_rate=0.5, momentum=0.3)'
  follow_bytes_per_s: int = 1 << 22

  def validate(self) -> None:
    _within('sync.follow_bytes_per_s', self.follow_bytes_per_s, 0, 10**12, '0 allows no followers')


SyncConfig.__doc__ = config_lib.described(SyncConfig.__doc__, protocol_sections.settings('sync'))


@dataclasses.dataclass(kw_only=True, slots=True)
class TrainConfig(protocol_sections.Train):
  """How long to train, how often to evaluate and log, and how much to keep of it.

  Attributes:
    log_every: inner steps between two log lines.
    eval_every: clock steps between two evaluations of the global model (0: first and last), or of
      each learner's if parts of it are never sent.
    seed: of the initial parameters.
    init_from: begin with the arrays of a *.safetensors file, of a folder that Orbax wrote, such as
      RUN/model, or of a Hugging Face folder instead; '' for none.
    store: what must outlive a machine is kept there: checkpoints and the trained model. A folder
      that all processes reach, or gs://BUCKET/PREFIX; '' keeps everything in the workdir.
    store_log: whether the record of every outer step is in the store, too, before the outer step is
      published: a syncer that loses its disk then loses none.
  """

  log_every: int = 10
  eval_every: int = 60
  seed: int = 0
  init_from: str = ''
  store: str = ''
  store_log: bool = False

  def validate(self) -> None:
    _within('train.log_every', self.log_every, 1, 10**9, 'a large number gives few lines')
    _within('train.eval_every', self.eval_every, 0, 10**9, '0 evaluates at the start and the end')
    if re.match(r'\w+:/', self.store) and not _BUCKET.fullmatch(self.store):
      raise ValueError(
        f'train.store is {self.store!r}; use gs://BUCKET/PREFIX or a folder: no other store works'
      )
    if self.store_log and not self.store:
      raise ValueError('train.store_log is true without a store: set train.store, too')
    _within('train.seed', self.seed, 0, 2**31 - 1, 'seeds are 31-bit')


TrainConfig.__doc__ = config_lib.described(TrainConfig.__doc__, protocol_sections.settings('train'))


@dataclasses.dataclass(kw_only=True, slots=True)
class Config:
  """All settings of a run; they are the same in all its processes.

  Attributes:
    name: of the run, in the name of its folder and on its screens.
    task: what is trained (config/build.py): 'decoder' for text, 'vision' for captions of images,
      'FILE.py:FUNCTION' for an own model, '__main__:FUNCTION' for one in a cell of this notebook
      (no other process can read it), or '' if loops of the user's own train, so that the first
      learner brings the model.
    model: the shape of the decoder.
    optimizer: the inner optimizer.
    data: what the tasks 'decoder' and 'vision' are trained on; `shards` also for others.
    mesh: the devices of one learner.
    sync: how learners and syncer exchange fragments.
    train: how long to train, and how often to evaluate and log.
  """

  name: str
  task: str = DECODER
  model: train_config.ModelConfig = dataclasses.field(default_factory=train_config.ModelConfig)
  optimizer: train_config.OptimizerConfig = dataclasses.field(
    default_factory=train_config.OptimizerConfig
  )
  data: train_config.DataConfig = dataclasses.field(default_factory=train_config.DataConfig)
  mesh: train_config.MeshConfig = dataclasses.field(default_factory=train_config.MeshConfig)
  sync: SyncConfig = dataclasses.field(default_factory=SyncConfig)
  train: TrainConfig = dataclasses.field(default_factory=TrainConfig)

  def validate(self) -> None:
    """Raises ValueError, one line with the values and the remedy, if a setting cannot work."""
    require_types('', self)
    self.optimizer.validate()
    self.mesh.validate()
    if self.task == DECODER:
      train_config.validate_decoder(self.model, self.data, self.mesh)
    self.train.validate()
    self.sync.validate()
    self.protocol()

  def protocol(self) -> config_lib.ProtocolConfig:
    """The settings of the protocol: integers, times in nanoseconds."""
    values = {}
    for field, setting in config_lib.TABLE.items():
      section, _, name = setting.name.partition('.')
      if name:
        values[field] = setting.read(getattr(getattr(self, section), name))
    return config_lib.ProtocolConfig(**values)

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

  def of(self, node: str) -> 'Config':
    """The config as the node with this name reads it: its own files."""
    corpus = self.data.corpus.replace(NODE, node)
    return dataclasses.replace(self, data=dataclasses.replace(self.data, corpus=corpus))

  def flat(self) -> dict[str, Any]:
    """Dotted names to plain values, for example {'sync.quorum': 1, ...}."""
    values = {}
    for name, value in dataclasses.asdict(self).items():
      if isinstance(value, dict):
        values |= {f'{name}.{field}': setting for field, setting in value.items()}
      else:
        values[name] = value
    return values

  def agreement(self) -> dict[str, Any]:
    """The settings that every learner must share with the syncer. Not among them: the mesh, its
    share of a batch, how it saves memory and the times of saves, which each learner chooses, and
    limits and retention of the syncer, which its restart may change. The paths of the task and of
    the corpus may differ, too, but batch i of shard v must be the same for all: build.py adds a
    digest of the data. With `data.local` the data may differ, and build.py adds one of the
    tokenizer."""
    own = {setting.name for setting in config_lib.TABLE.values() if not setting.shared}
    own |= {'model.remat', 'model.loss_chunk', 'sync.follow_bytes_per_s'}
    if self.data.local:
      own |= {'data.shards', 'data.seed'}
    shared: tuple[str, ...] = ('sync.', 'train.steps', 'data.shards', 'data.local')
    if self.task != OWN_LOOP:
      shared += ('model.', 'optimizer.', 'train.seed')
      shared += ('data.seq_len', 'data.batch_size', 'data.seed')
    values = {
      name: value
      for name, value in self.flat().items()
      if name.startswith(shared) and name not in own
    }
    # The path of a file with a rule may differ, like the path of a task.
    short = lambda value: re.sub(r'^.*/(?=[^/]+\.py:)', '', value)
    return {
      name: short(value) if isinstance(value, str) else value for name, value in values.items()
    }


def learner_ids(learners: int) -> list[str]:
  """The ids that the local launcher assigns: l0, l1, ... Their order is the order of merging.

  >>> learner_ids(3)
  ['l0', 'l1', 'l2']
  """
  width = len(str(max(learners - 1, 0)))
  return [f'l{index:0{width}d}' for index in range(learners)]


def require_types(prefix: str, section: Any) -> None:
  """A notebook may have assigned anything: 1e3 steps, or a scalar of NumPy, which is no JSON."""
  for field, hint in typing.get_type_hints(type(section)).items():
    name, value = prefix + field, getattr(section, field)
    if dataclasses.is_dataclass(value):
      require_types(f'{name}.', value)
    else:
      kinds = typing.get_args(hint) or (hint,)
      if type(value) not in kinds and not (float in kinds and type(value) is int):
        wanted = ' or '.join('none' if kind is type(None) else kind.__name__ for kind in kinds)
        if isinstance(value, types.FunctionType):
          wanted += f", its name: '{value.__module__}:{value.__name__}'"
        raise ValueError(f'{name} is {value!r}, a {type(value).__name__}; it must be {wanted}')


def _within(name: str, value: float, low: float, high: float, remedy: str) -> None:
  if not low <= value <= high:  # written so that NaN fails
    raise ValueError(f'{name} is {value}, it must be between {low} and {high}: {remedy}')
