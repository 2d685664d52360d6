"""From a config to the objects that learner and syncer must build alike.

The layout of fragments, the codecs and the outer optimizer follow from the config and the shapes of
the model alone, so processes do not exchange them. The agreement text has the settings that they
follow from, and digests of the layout and of the data, which prove that learner and syncer built
the same ones.

`config.task` names what is trained (train/task.py): 'decoder' is the reference; an own model is
'FILE.py:FUNCTION' or 'MODULE:FUNCTION', perhaps with arguments, 'mlp.py:task(width=64)'; of a
notebook's cell '__main__:task'. The function is called with the config and returns a Task.
"""

import dataclasses
import functools
import importlib
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from diloco_jax.config import brought, load, run_config
from diloco_jax.numerics import codecs, fragments, merge, outer, spec
from diloco_jax.protocol import agreement as agreement_lib
from diloco_jax.protocol import config as config_lib
from diloco_jax.storage import arrays
from diloco_jax.train import fingerprint
from diloco_jax.train import optimizer as optimizer_lib
from diloco_jax.train import task as task_lib

_ARRAYS_CHARS = 1 << 10  # an agreement has room for 3 KiB


@dataclasses.dataclass(frozen=True)
class Assembly:
  """The objects of a config, built once per process."""

  config: run_config.Config
  protocol: config_lib.ProtocolConfig
  init: Callable[[], Any] | None  # version 0: the initial parameters; None: not needed here
  shapes: Any  # the parameters as ShapeDtypeStructs
  exchanged: Any  # the same, with None instead of those that never leave a learner
  never_sent: tuple[str, ...]  # the names of these
  layout: fragments.Layout
  codec_up: codecs.Codec
  codec_down: codecs.Codec
  # By label (train/task.py), None: never sent; and the outer optimizer, applied to the merged
  # gradient. Of the user's own they are specs still: only the syncer needs the code.
  rules: dict[str, merge.MergeRule | str | None]
  transform: optax.GradientTransformation | str
  agreement: str
  task: task_lib.Task | None  # None: the user's own loop trains (api/peer.py)
  about: bytes = b''  # what the syncer tells such a loop (process/own_model.py)
  things: brought.Things = dataclasses.field(default_factory=dict)  # that a run reads (brought.py)

  @property
  def codec_log(self) -> codecs.Codec:
    """The codec of the merged outer gradient, in the log and for the outer optimizer.
    Four or two bits would be too few, since no later outer step makes up for what they lose."""
    return codecs.get('int8') if self.codec_up.name in ('int4', 'int2') else self.codec_up

  @property
  def payload_bytes(self) -> tuple[int, ...]:
    """Size of each fragment's pseudo-gradient on the wire."""
    layout = self.layout
    return tuple(self.codec_up.encoded_size(layout.size(p)) for p in range(layout.num_fragments))

  def frozen(self) -> dict[str, Any]:
    """The frozen parameters of version 0 of a task, by name."""
    assert self.task and self.init  # else nothing is frozen
    label = self.task.label
    frozen = fragments.keep(self.init(), lambda path: label(path) == fragments.FROZEN)
    return arrays.by_name(frozen)

  @property
  def of_the_model(self) -> set[str]:
    """The things that a reader of the trained model reads again."""
    frozen = self.task and fragments.FROZEN in map(self.task.label, self.never_sent)
    return {'task', brought.MODEL} if frozen else {'task'}

  @property
  def parameters(self) -> int:
    """How many parameters are exchanged."""
    return sum(self.layout.parameters(p) for p in range(self.layout.num_fragments))

  @property
  def publish_bytes(self) -> tuple[int, ...]:
    """The largest size of each fragment's published value on the wire: a delta, or the whole
    fragment in float32."""
    sizes = [self.layout.size(p) for p in range(self.layout.num_fragments)]
    return tuple(max(4 * size, self.codec_down.encoded_size(size)) for size in sizes)


def assemble(config: run_config.Config, data: bool = True) -> Assembly:
  """Builds the objects of a validated config.

  Args:
    config: validated.
    data: False: the data and train.init_from are not read, for who reads a model only. The
      agreement then lacks their digests, and no process of the run would accept it.

  Raises:
    ValueError: there is no such task, its data cannot be read, the model has too few tensors for P,
      a label has no merge rule, or a codec, merge rule or outer optimizer is unknown or has wrong
      arguments.
  """
  task = make_task(config)
  init = functools.partial(task.init, config.train.seed)
  try:
    shapes = jax.eval_shape(init)
  except TypeError:  # it computes with values, on the host, or its leaves are drawn when read
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), init())
  optimizer_lib.schedule(config.optimizer, config.train.steps)  # refuses a run that is too short
  shared = config.agreement()
  things = dict(brought.things(config, task))
  if config.train.init_from:
    start = task.start or (lambda path, seed: arrays.start(path, shapes))
    fingerprint_of, files = things[brought.MODEL]
    seen: list[str] = []  # of this process, which compares the first one with that of the run

    def look() -> str:
      seen.append(fingerprint_of())
      return seen[-1]

    def init() -> Any:
      look()
      params = start(config.train.init_from, config.train.seed)
      if look() != seen[0]:
        raise ValueError(
          'the initial model has changed since this process has read it: '
          f'{fingerprint.newest(files())}. Start again'
        )
      return params

    things[brought.MODEL] = look, files
    task = dataclasses.replace(task, init=lambda seed: init())
  if data:  # with `local` of the data only what all must have in common
    if config.train.init_from:
      init()  # refuses arrays of another model
    names = {'tokenizer' if config.data.local else 'data', brought.MODEL} & things.keys()
    shared |= {name: things[name][0]() for name in names}
  assembly = _assemble(config, init, shapes, task.label, shared, task)
  return dataclasses.replace(assembly, things=things)


def assemble_own_loop(
  config: run_config.Config, init: Callable[[], Any], shapes: Any, labels: Mapping[str, str]
) -> Assembly:
  """The same for a loop of the user's own, whose parameters are a dict of named arrays.

  Args:
    config: validated, without a task.
    init: returns version 0.
    shapes: name -> shape of each parameter, a ShapeDtypeStruct.
    labels: name -> label of its merge rule.
  """
  return _assemble(config, init, shapes, labels.__getitem__, config.agreement(), None)


def _assemble(
  config: run_config.Config,
  init: Callable[[], Any],
  shapes: Any,
  label: Callable[[str], str],
  shared: dict[str, Any],
  task: task_lib.Task | None,
) -> Assembly:
  # A loop of the user's own gives its arrays the label 'local' (process/own_model.py).
  later = lambda make: lambda text: text if spec.OWN.fullmatch(text) else make(text)
  rule = lambda text: None if task and text == fragments.LOCAL else later(merge.make)(text)
  body, vocabulary = (_from_spec(config, name, rule) for name in ('merge', 'embedding_merge'))
  rules = {
    'body': body,
    fragments.EXPERT: body,
    fragments.LAYER: body,
    'embedding': vocabulary,
    'head': vocabulary,
    'router': vocabulary,
    fragments.STATISTIC: merge.avg(),
    **dict.fromkeys(fragments.NEVER_SENT),
  }
  if unknown := sorted({label(path) for path in fragments.by_path(shapes)} - rules.keys()):
    raise ValueError(f'the labels {unknown} have no merge rule: use {sorted(rules)}')
  is_sent = lambda path: rules[label(path)] is not None
  exchanged = fragments.keep(shapes, is_sent)
  layout = fragments.make_layout(exchanged, config.sync.fragments, label)
  never_sent = tuple(arrays.by_name(fragments.keep(shapes, lambda path: not is_sent(path))))
  if names := ', '.join(never_sent):
    shared['never_sent'] = names if len(names) <= _ARRAYS_CHARS else f'{len(never_sent)} arrays'
  protocol = config.protocol()
  if task is not None:
    # Of a whole batch, of which this process may train on a share.
    most = task.tokens_per_batch * config.data.batch_size // config.data.rows
    protocol = dataclasses.replace(protocol, max_step_tokens=most)
  return Assembly(
    config=config,
    protocol=protocol,
    init=init,
    shapes=shapes,
    exchanged=exchanged,
    never_sent=never_sent,
    layout=layout,
    codec_up=_from_spec(config, 'codec_up', codecs.get),
    codec_down=_from_spec(config, 'codec_down', codecs.get),
    rules=rules,
    transform=_from_spec(config, 'outer', later(outer.make)),
    agreement=agreement_lib.encode({**shared, 'layout': layout.digest()}),
    task=task,
  )


def make_task(config: run_config.Config) -> task_lib.Task:
  """The task that `config.task` names. Raises ValueError."""
  if config.task == run_config.DECODER:
    from diloco_jax.train import decoder  # here: a loop of the user's own needs no flax

    return decoder.task(config.model, config.data)
  named = spec.OWN.fullmatch(config.task)
  if not named:
    raise ValueError(
      f'task is {config.task!r}; use {run_config.DECODER!r}, '
      "or 'FILE.py:FUNCTION' for an own model, '__main__:FUNCTION' for one in a notebook's cell; "
      "loops of one's own are no task: "
      '`diloco syncer --config=own_loop` and diloco_jax.join'
    )
  try:
    name, arguments = spec.parse(named['call'])
    where = named['where']
    in_file = where.endswith('.py')
    module = load.module(pathlib.Path(where)) if in_file else importlib.import_module(where)
    task = getattr(module, name)(config, **arguments)
  except (ImportError, AttributeError, TypeError, OSError, SyntaxError) as error:
    raise ValueError(f'task {config.task!r}: {type(error).__name__}: {error}') from error
  if not isinstance(task, task_lib.Task):
    raise ValueError(f'task {config.task!r} returned a {type(task).__name__}, not a Task')
  return task


def require_own(config: run_config.Config) -> None:
  """Raises ValueError if the syncer cannot make a rule or optimizer of the user's own."""
  for name, make in (('merge', merge.make), ('embedding_merge', merge.make), ('outer', outer.make)):
    if spec.OWN.fullmatch(getattr(config.sync, name)):
      _from_spec(config, name, make)


def _from_spec(config: run_config.Config, name: str, make: Callable[[str], Any]) -> Any:
  """Makes the object of a spec in config.sync. Raises ValueError, which names the setting."""
  try:
    return make(getattr(config.sync, name))
  except ValueError as error:
    raise ValueError(f'sync.{name}: {error}') from None
