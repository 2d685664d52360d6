"""The trained model of a run: WORKDIR/model once the run has ended, else the newest checkpoint; or
STORE/model, of a run that has ended.

WORKDIR/model is a tree of named arrays that plain Orbax reads (storage/arrays.py); the syncer
writes it at the end. Before that the model is in the syncer's checkpoints, as flat fragments. A
learner without a syncer has it in its own checkpoints.
"""

import contextlib
import pathlib
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from diloco_jax.api import states
from diloco_jax.config import build, load
from diloco_jax.nodes import own_model
from diloco_jax.report import folder as folder_lib
from diloco_jax.storage import arrays, checkpoint, files, json_files
from diloco_jax.storage import folders as folders_lib
from diloco_jax.storage import store as store_lib
from diloco_jax.storage import tree_digest as tree_digest_lib
from diloco_jax.syncer import global_model as global_model_lib
from diloco_jax.syncer import stored

ERRORS = ValueError, checkpoint.CheckpointError, store_lib.StoreError


def load_params(workdir: str | pathlib.Path, into: Any = None) -> Any:
  """The global model of a run, numpy arrays in the tree and the types that the task's loss takes;
  of loops of the user's own a dict, name -> array. Frozen parameters are those of version 0; None
  stands for one of which each learner has its own. The run may be under way: then it is the model
  of the syncer's newest checkpoint. Of a learner without a syncer (the baseline) it is the model of
  its newest checkpoint. Instead of the folder of an ended run its store will do, a folder or
  gs://BUCKET/PREFIX.

  `into`: what a loop of the user's own has given to `join`, a tree, a TrainState or (model,
  nnx.Optimizer): returned with the parameters of the run, in the dtypes and shardings of its own;
  all else of it stays. (model, optimizer) is changed in place. For shapes (`jax.eval_shape`) arrays
  of NumPy are returned.

  Raises:
    ValueError: there is no run in the folder, or it has no model yet, or one that does not fit
      `into`, which is unchanged.
    CheckpointError: the model cannot be read.
    StoreError: the store cannot be read.
  """
  with jax.set_mesh(None), local(workdir) as folder:
    assembled = assemble(folder)
    if (folder / stored.MODEL).is_dir():
      most_bytes = tree_digest_lib.most_bytes(assembled.shapes)
      tree = arrays.load(folder / stored.MODEL, most_bytes=most_bytes)
    else:
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
  parts = states.split(given)
  mine = arrays.by_name(parts.params)
  kept = {name: leaf for name, leaf in mine.items() if name in values and values[name] is None}
  shape_of = lambda named: {name: np.shape(leaf) for name, leaf in named.items()}
  arrays.require_shapes(place, shape_of(values | kept), shape_of(mine))

  def put(name: str, leaf: Any) -> Any:
    if name in kept:
      return leaf
    if not isinstance(leaf, jax.Array):
      like = leaf if hasattr(leaf, 'dtype') else np.asarray(leaf)  # or a ShapeDtypeStruct
      return values[name].astype(like.dtype)
    value = values[name].astype(leaf.dtype)
    return jax.device_put(value, leaf.sharding if leaf.committed else None)

  leaves = [put(name, leaf) for name, leaf in mine.items()]
  return parts.rebuild(
    jax.tree.unflatten(jax.tree.structure(parts.params), leaves), parts.opt_state
  )


@contextlib.contextmanager
def local(place: str | pathlib.Path | None) -> Iterator[pathlib.Path]:
  """The folder of a run, None: of the newest here; of a store in a bucket a temporary copy of its
  model and what describes it. Raises ValueError, StoreError."""
  place = folder_lib.chosen(place)
  if not str(place).startswith(folders_lib.BUCKET):
    yield pathlib.Path(place).absolute()
    return
  bucket = store_lib.Store(str(place))
  with tempfile.TemporaryDirectory(prefix='diloco-') as copy:
    for prefix in (*load.WRITTEN, f'{stored.MODEL}/', f'syncer/{stored.MODEL}/'):
      for name in bucket.names(prefix):
        inside = '..' not in name.split('/') and not name.endswith('/')  # the latter is a folder
        if inside and (found := bucket.read(name, size=1 << 30)):
          json_files.replace(pathlib.Path(copy, name), found.data)
    if not pathlib.Path(copy, load.FILE).exists():
      raise ValueError(f'there is no run in {place}: it has no {load.FILE}')
    yield pathlib.Path(copy)


def load_all(workdir: pathlib.Path) -> Any:
  """The same for who needs every parameter. Raises ValueError, also if each learner has some of its
  own."""
  return require_all(load_params(workdir), workdir)


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
  files.require_name(workdir)
  model = own_model.read(workdir)
  if (config := folder_lib.config_of(workdir)) is None:
    raise ValueError(f'there is no model in {workdir}: its config is {folder_lib.UNKNOWN}')
  if model is not None:
    return own_model.complete(model, config)
  return build.assemble(config, data=False)


def _newest(assembled: build.Assembly, workdir: pathlib.Path) -> Any:
  """The model in the syncer's newest checkpoint that verifies; later outer steps are not in it."""
  node = folders_lib.syncer_folder(workdir)
  most_bytes = tree_digest_lib.most_bytes(assembled.shapes)
  if not folders_lib.log_folder(workdir).is_dir():
    place = folders_lib.of_learners(workdir, assembled.config.train.store)
    if (params := _of_baseline(place, most_bytes)) is not None:
      return params
  folder = _verified(_checkpoints(node), most_bytes)
  if folder is None:
    raise ValueError(f'the run in {workdir} has no model yet: its syncer has saved no checkpoint')
  return in_checkpoint(global_model_lib.Theta(assembled), pathlib.Path(folder))


def in_checkpoint(theta: global_model_lib.Theta, folder: pathlib.Path) -> Any:
  """The model in a checkpoint of a syncer; `theta`, of its run, forgets it. Raises
  CheckpointError."""
  like = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=theta.sharding), theta.like
  )
  saved = arrays.load(folder, like, 'state')
  theta.restore(saved, [0] * len(theta.versions))
  params = theta.params()
  theta.forget()
  return params


def _of_baseline(place: json_files.Place, most_bytes: int) -> Any:
  """The model in the newest checkpoint of a learner without a syncer that verifies, or None."""
  for node in sorted((place / folders_lib.ISLANDS).glob('*')):
    folder = _verified(_checkpoints(node), most_bytes)
    if folder is not None:
      protocol, saved = checkpoint.verify(folder, most_bytes=most_bytes)
      if not protocol['protocol']:  # else of a learner whose syncer has another folder
        return saved['state']['params']
  return None


def _checkpoints(node: json_files.Place) -> list[json_files.Place]:
  return [node / folders_lib.CHECKPOINTS / str(number) for number in folders_lib.checkpoints(node)]


def _verified(folders: list[json_files.Place], most_bytes: int) -> json_files.Place | None:
  """The last checkpoint that is as it was saved. Raises CheckpointError: there are only others."""
  failed = None
  for folder in reversed(folders):
    try:
      checkpoint.verify(folder, most_bytes=most_bytes)
      return folder
    except checkpoint.CheckpointError as error:
      warnings.warn(f'{error}; an older checkpoint is tried', stacklevel=4)
      failed = failed or error
  if failed:
    raise failed
  return None
