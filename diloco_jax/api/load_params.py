"""The trained model of a run: WORKDIR/model once the run has ended, else the newest checkpoint; or
that in the store of the run.

WORKDIR/model is a state (storage/states.py) of named arrays; the syncer writes it at the end.
Before that the model is in the syncer's checkpoints, as flat fragments. A learner without a syncer
has it in its own checkpoints.
"""

import contextlib
import functools
import pathlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from diloco_jax.api import states as loop_states
from diloco_jax.config import brought, build, load, run_config
from diloco_jax.learner import baseline
from diloco_jax.process import own_model
from diloco_jax.protocol import agreement as agreement_lib
from diloco_jax.protocol import safe_json
from diloco_jax.report import folder as folder_lib
from diloco_jax.storage import arrays, folders, json_files, outer_log, states, tree_digest, wal
from diloco_jax.storage import claim as claim_lib
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import lineage as lineage_lib
from diloco_jax.storage import store as store_lib
from diloco_jax.syncer import global_model

ERRORS = ValueError, states.StateError, store_lib.StoreError


def load_params(workdir: str | pathlib.Path, into: Any = None) -> Any:
  """The global model of a run, numpy arrays in the tree and the types of the task's loss;
  of loops of the user's own a dict, name -> array. Frozen parameters are those of version 0; None
  stands for one of which each learner has its own. The run may be under way: then it is the model
  of the syncer's newest checkpoint. Of a learner without a syncer (the baseline) it is the model of
  its newest checkpoint. Instead of the folder of a run its store will do, a folder or
  gs://BUCKET/PREFIX. A damaged state is passed over for an older one, with a warning.

  `into`: what a loop of the user's own has given to `join`, a tree, a TrainState or (model,
  nnx.Optimizer), or the part of a state that `exchange` returns: returned with the parameters of
  the run, in the dtypes and shardings of its own; all else of it stays. (model, optimizer) is
  changed in place. For shapes (`jax.eval_shape`) arrays of NumPy are returned.

  Raises:
    ValueError: there is no run in the folder, or it has no model yet, or one that does not fit
      `into`, which is unchanged.
    StateError: the model cannot be read.
    StoreError: the store cannot be read.
  """
  with jax.set_mesh(None), local(workdir) as folder:
    assembled = assemble(folder)
    tree = _newest(assembled, folder)
    named = arrays.by_name(tree)
    if set(assembled.never_sent) - named.keys():
      named |= assembled.frozen()
    return in_tree(assembled, named, into, str(workdir))


def in_tree(
  assembled: build.Assembly, named: dict[str, Any], into: Any = None, place: str = ''
) -> Any:
  """Arrays by name in the tree of the run, or as `into` of `load_params`; None stands for those of
  which each learner has its own. `place`: where they are from."""
  own = set(assembled.never_sent) - named.keys()
  names = arrays.by_name(assembled.shapes)
  leaves = [None if name in own else np.asarray(named[name]) for name in names]
  if into is not None:
    return _into(into, dict(zip(names, leaves)), place)
  return jax.tree.unflatten(jax.tree.structure(assembled.shapes), leaves)


def _into(given: Any, values: dict[str, Any], place: str) -> Any:
  form = loop_states.Form(given)
  own, beside = form.split(given)
  kept = {name: leaf for name, leaf in own.items() if name in values and values[name] is None}
  shape_of = lambda named: {name: np.shape(leaf) for name, leaf in named.items()}
  arrays.require_shapes(place, shape_of(values | kept), shape_of(own), '`into`')

  def put(name: str, leaf: Any) -> Any:
    if name in kept:
      return leaf
    if not isinstance(leaf, jax.Array):
      like = leaf if hasattr(leaf, 'dtype') else np.asarray(leaf)  # or a ShapeDtypeStruct
      return values[name].astype(like.dtype)
    value = values[name].astype(leaf.dtype)
    return jax.device_put(value, leaf.sharding if leaf.committed else None)

  return form.rebuild({name: put(name, leaf) for name, leaf in own.items()}, beside)[0]


@contextlib.contextmanager
def local(place: str | pathlib.Path | None) -> Iterator[pathlib.Path]:
  """The folder of a run, None: of the newest here; of a store a temporary copy of its newest model
  and what describes it. Raises ValueError, StateError, StoreError."""
  place = folder_lib.choose(place)
  if not is_store(place):
    yield pathlib.Path(place).absolute()
    return
  store = store_lib.Store(str(place))
  with tempfile.TemporaryDirectory(prefix='diloco-') as temporary:
    copy = pathlib.Path(temporary)
    for name in (name for prefix in load.WRITTEN for name in store.names(prefix)):
      if '/' not in name and (content := store.read(name)):
        json_files.replace(copy / name, content.data)
    if not (copy / load.FILE).exists():
      raise ValueError(f'there is no run in {place}: it has no {load.FILE}')
    if store.read(f'{(own := folders.OWN_MODEL)}/{states.MANIFEST}'):
      states.fetch(store, own, copy / own, folders.VERSION_0)
    claim, _ = claim_lib.read(store)
    lineage = claim_lib.lineage_in(store, claim)
    if claim and claim.agreement:
      json_files.replace(folders.log_folder(copy) / outer_log.AGREEMENT, claim.agreement.encode())
    copies = lambda: states.copies(store, lineage.part)

    def candidates() -> list[str]:
      has_model = store.read(f'{folders.MODEL}/{states.MANIFEST}') is not None
      return [*copies(), *[folders.MODEL] * has_model]

    def fetch(name: str) -> states.Manifest:
      if name == folders.MODEL:
        read = lambda at: states.fetch_manifest(store, at)[0]
        _require_last(read(name), copies()[-1:], read)
        return states.fetch(store, name, copy / name, folders.MODEL, lineage.run)
      to = folders.syncer_folder(copy) / folders.CHECKPOINTS / str(states.number(name))
      return states.fetch(store, name, to, f'syncer/{to.name}', lineage.run)

    states.newest(candidates, fetch, _warn)
    try:
      yield copy
    except (ValueError, states.StateError) as error:
      error.args = (str(error).replace(temporary, store.place),)
      raise


def is_store(place: str | pathlib.Path) -> bool:
  """Whether a place is the store of a run, and not its folder."""
  if str(place).startswith(folders.BUCKET) or pathlib.Path(place, claim_lib.NAME).is_file():
    return True
  return bool(states.copies(store_lib.Store(str(place)), 'syncer/'))  # whose claim is gone


def _warn(place: Any, error: Exception) -> None:
  warnings.warn(f'{error}: an older checkpoint is tried', stacklevel=4)


def require_all(params: Any, workdir: pathlib.Path) -> Any:
  """The model of a run with a task. Raises ValueError if each learner has some of its own."""
  names = arrays.by_name(assemble(workdir).shapes)
  if absent := [name for name in names if name not in arrays.by_name(params)]:
    raise ValueError(
      f'{len(absent)} parameters ({", ".join(absent[:3])}) of the run in {workdir} never leave a '
      'learner, so there is no model of all of them. The report has the held-out losses of the '
      'learners, and their checkpoints have their parameters'
    )
  return params


def assemble(workdir: pathlib.Path) -> build.Assembly:
  """The objects of the run in a folder without its data, to read its model: the folder may have
  been copied to another machine. Raises ValueError."""
  files_lib.require_name(workdir)
  model = own_model.read(workdir)
  if (config := folder_lib.config_of(workdir)) is None:
    raise ValueError(f'there is no model in {workdir}: its config is {folder_lib.UNKNOWN}')
  _require_settings(config, workdir)
  if model is not None:
    return own_model.complete(model, config)
  assembled = build.assemble(config, data=False)
  brought.require(load.brought(workdir), assembled.things, assembled.of_the_model)
  return assembled


def _require_settings(config: run_config.Config, workdir: pathlib.Path) -> None:
  """Raises ValueError: the config is not that with which the log has begun. A list of settings of
  which the log has another hash is damaged, and compared with nothing."""
  log = folders.log_folder(workdir)
  try:
    text = json_files.read_bytes(log / outer_log.AGREEMENT, json_files.MAX_BYTES).decode()
    for record in sorted(log.glob('*.rec'))[-1:]:
      with open(record, 'rb') as file:
        if wal.run_in(file.read(wal.HEADER_BYTES)) != outer_log.run_of(text):
          return
    begun = safe_json.parse_object(text)
  except (OSError, ValueError):
    return
  require_same(config.agreement() | load.brought(workdir), begun, workdir)


def require_same(here: dict[str, Any], begun: dict[str, Any], workdir: pathlib.Path) -> None:
  """Raises ValueError: the settings in a folder differ from those of the run. Those that only one
  has are not compared."""
  alone = here.keys() ^ begun.keys()
  if differences := agreement_lib.changed(here, begun, {*agreement_lib.MAY_CHANGE, *alone}):
    raise ValueError(
      f'{workdir / load.FILE} is not the config of the run: {"; ".join(differences)}. Nothing was '
      'changed: put its own one back'
    )


def _newest(assembled: build.Assembly, workdir: pathlib.Path) -> Any:
  """The tree of the newest state of a run; later outer steps are not in it. Raises ValueError,
  StateError."""
  node, model = folders.syncer_folder(workdir), workdir / folders.MODEL
  lineage, most_bytes = lineage_lib.peek(workdir), tree_digest.most_bytes(assembled.shapes)
  run = lineage.run if lineage else ''
  checkpoint = lambda number: node / folders.CHECKPOINTS / str(number)

  def use(path: pathlib.Path) -> Any:
    states.verify(path)  # Orbax prints tracebacks of what it cannot read
    if path != model:
      theta = global_model.Theta(assembled)
      return in_checkpoint(theta, path, f'syncer/{path.name}', run)[1]
    manifest, tree = states.load_on_host(path, None, '', most_bytes, folders.MODEL, run)
    _require_last(manifest, [*map(checkpoint, folders.checkpoints(node)[-1:])], states.read)
    return tree

  candidates = lambda: [*map(checkpoint, folders.checkpoints(node)), *[model] * model.is_dir()]
  tree = states.newest(candidates, use, _warn)
  if tree is None and not folders.log_folder(workdir).is_dir():
    tree = _of_baseline(assembled, folders.of_learners(workdir, assembled.config.train.store))
  if tree is None:
    raise ValueError(f'the run in {workdir} has no model yet: its syncer has saved no checkpoint')
  return tree


def _require_last(
  model: states.Manifest, newest: Sequence[Any], read: Callable[[Any], states.Manifest]
) -> None:
  """Raises Damaged: the newest checkpoint, if there is one, is of later outer steps."""
  for place in newest:
    later = 0
    with contextlib.suppress(states.Damaged):
      later = read(place).record['protocol'][outer_log.POSITION]
    if later > model.record[outer_log.POSITION]:
      raise states.Damaged(f'the model is older than {place}, of outer step {later}')


def in_checkpoint(
  theta: global_model.Theta, folder: pathlib.Path, name: str = '', run: str = ''
) -> tuple[states.Manifest, Any]:
  """The manifest of a checkpoint of a syncer (of this name and run) and the model in it; `theta`,
  of its run, forgets it. Raises Damaged; ValueError: it is of another model."""
  like = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=theta.sharding), theta.like
  )
  try:
    manifest, saved = states.load(folder, like, name, run)
  except tree_digest.Mismatch as mismatch:
    raise ValueError(f'{folder}: {mismatch}') from None
  theta.restore(saved, [0] * len(theta.versions))
  params = theta.params()
  theta.forget()
  return manifest, params


def _of_baseline(assembled: build.Assembly, place: json_files.Place) -> Any:
  """The model in the newest checkpoint of a learner without a syncer, None: there is none."""
  most_bytes = tree_digest.most_bytes(assembled.shapes)
  run = baseline.state(assembled.config)['run']
  for node in sorted((place / folders.ISLANDS).glob('*')):

    def use(number: int) -> Any:
      folder, name = node / folders.CHECKPOINTS / str(number), f'{node.name}/{number}'
      if not baseline.is_state(states.read(folder, name).record['protocol']['protocol']):
        return None  # of a learner whose syncer has another folder
      return states.load_on_host(folder, assembled.shapes, 'params/', most_bytes, name, run)[1]

    tree = states.newest(functools.partial(folders.checkpoints, node), use, _warn)
    if tree is not None:
      return tree
  return None
