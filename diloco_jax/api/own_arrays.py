"""The arrays of a user's loop, as the island of a learner (learner/island_port.py)."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.api import copies
from diloco_jax.api import states as loop_states
from diloco_jax.config import run_config
from diloco_jax.learner import hosts as hosts_lib
from diloco_jax.learner import moments as moments_lib
from diloco_jax.process import own_model
from diloco_jax.storage import checkpoint, folders, tree_digest
from diloco_jax.storage import files as files_lib
from diloco_jax.train import flops


class _Shardings(NamedTuple):
  params: Any
  opt_state: Any


class OwnArrays:
  """The user's arrays between two steps (learner/island_port.py). Arrays that are committed to no
  device stay so, since a jitted step is compiled anew for committed ones."""

  def __init__(
    self,
    params: dict[str, jax.Array],
    moments: dict[str, jax.Array] | None,
    form: loop_states.Form | None = None,
  ):
    """`form`: of what the loop gives."""
    self.checkpoints: checkpoint.Checkpoints | None = None
    self.replicated = _replicated(params)
    self.shardings = _Shardings(
      {name: self.replicated and leaf.sharding for name, leaf in params.items()},
      jax.tree.map(lambda leaf: leaf.sharding if leaf.committed else None, moments),
    )
    self.params, self.moments = params, moments
    self._optimizer = form.optimizer if form else set(moments or ())
    self.copies = copies.Copies(params, moments or {}, form.nodes if form else {})
    self.devices = next(iter(params.values())).devices()
    self.shard, self.next_index = 0, 0
    self.tokens_per_step = 0  # in the newest step

  @property
  def consumed(self) -> bool:
    """Whether a step has been given these arrays as donated ones."""
    held = self.params, self.moments
    return any(leaf.is_deleted() for leaf in jax.tree.leaves(held))

  def take(self, params: dict[str, Any], moments: dict[str, Any] | None) -> None:
    """Holds these arrays from now on, where those of `join` were."""
    at = self.shardings
    self.params = {name: copies.put(leaf, at.params[name]) for name, leaf in params.items()}
    put = lambda name, leaf: copies.put(leaf, at.opt_state[name])
    self.moments = moments and {name: put(name, leaf) for name, leaf in moments.items()}

  def follow(self) -> str:
    """Moves the copies of parameters in the moments by what adoptions have changed since `take`.
    Returns the name of one that has moved, or ''."""
    return self.copies.follow(self.params, self.moments or {})

  def read_from(self, shard: int, next_index: int = 0) -> None:
    self.shard, self.next_index = shard, next_index

  def cost(self) -> flops.Cost:
    """As of an Island; the FLOPs are not known."""
    devices = sorted(self.devices, key=lambda device: device.id)
    local = [device for device in devices if device.process_index == jax.process_index()]
    used, limit = flops.memory(local)
    return flops.Cost(
      parameters=sum(leaf.size for leaf in self.params.values()),
      tokens=self.tokens_per_step,
      devices=len(devices),
      kind=devices[0].device_kind,
      flops=0.0,
      peak_flops=flops.peak(devices[0].device_kind),
      memory_bytes=used,
      memory_limit_bytes=limit,
    )

  def must_finish(self, ahead: int) -> bool:  # the loop waits for its own steps
    return False

  def save(self, clock: int, protocol: dict[str, Any]) -> Callable[[], int]:
    """Saves the moments, if there are any: a process takes the parameters from the syncer."""
    if self.checkpoints is None:
      return lambda: clock
    record = {'shard': self.shard, 'protocol': protocol}
    self.follow()
    of = {'copied': self._copied()} if self.copies.moving else {}
    return self.checkpoints.save(clock, {'opt_state': self.moments, **of}, self.next_index, record)

  def _copied(self) -> dict[str, jax.Array]:
    """The parameters that copies in the moments are of."""
    return {name: self.params[name] for name in self.copies.params}

  @contextlib.contextmanager
  def saved(
    self,
    workdir: pathlib.Path,
    learner: str,
    config: run_config.Config,
    run: str,
    say: Callable[[str], None],
  ) -> Iterator[moments_lib.Found | None]:
    """Takes the moments that are found, of others those of this `run`, and a folder to save these.
    `say` prints a line for people. Raises DirectoryError if another process has it, ValueError if
    some cannot be saved."""
    tree_digest.require_digests({'opt_state': self.moments})
    place = folders.of_learners(workdir, config.train.store)
    root = str(moments_lib.folder(place, learner))
    with contextlib.closing(files_lib.Files(str(moments_lib.folder(workdir, learner)))) as locked:
      if hosts_lib.leads():
        locked.lock('learner')
      saved = checkpoint.Checkpoints(root, config.sync.keep_every)
      with contextlib.closing(saved) as self.checkpoints:
        found = moments_lib.find(place, learner, self.moments, say, run=run)
        hosts_lib.require_same('the state', str(found and (found.learner, found.step)))
        if found is not None:
          taken = self._taken(found, learner)
          self.take(self.params, self.moments | taken)
          of = moments_lib.find(place, found.learner, self._copied(), say, 'copied')
          alike = of is not None and of[:2] == found[:2]
          copied = jax.tree.map(jnp.asarray, of.moments) if alike else {}
          self.copies.restored(self.params, self.moments, taken, copied)
          found = found._replace(moments=None)
        yield found

  def _taken(self, found: moments_lib.Found, learner: str) -> dict[str, Any]:
    """What of a checkpoint is taken: of another learner the state of its optimizer alone, without
    random keys, which are unsigned numbers: two learners would draw the same ones."""
    if found.learner == learner:
      return found.moments
    mine = lambda name: name not in self._optimizer or self.moments[name].dtype.kind == 'u'
    return {name: leaf for name, leaf in found.moments.items() if not mine(name)}


class Watch:
  """Compares the first step after the first adoption with one array as it was before and after it:
  a loop that computes its parameters from a tree of its own undoes each merge."""

  def __init__(self, params: dict[str, jax.Array]):
    counted = own_model.statistics(params)
    fits = lambda leaf: leaf.is_fully_addressable and leaf.size <= 1 << 16  # read here
    names = [name for name, leaf in params.items() if fits(leaf) and name not in counted]
    self._name = max(names, key=lambda name: params[name].size, default=None)
    self._steps, self._begun, self._kept = 0, None, ()

  @contextlib.contextmanager
  def boundary(self, held: OwnArrays) -> Iterator[None]:
    """Around the work of a boundary, which may consume the array."""
    trained = held.params.get(self._name)
    before = None if trained is None else jnp.copy(trained)
    yield
    self._steps += 1
    if trained is not None:
      after = jnp.copy(held.params[self._name])
      if held.params[self._name] is not trained:
        # In fewer steps a merge moves no farther than a step, which may well go back.
        self._kept = (self._begun, before, after) if self._steps >= 4 else ()
        self._steps = 0
      self._begun = after

  def undone(self, params: dict[str, Any]) -> str:
    """The name of the array if the loop's step, the first after an adoption, has undone it: it is
    far longer than the one before, and goes back. A step of usual length that goes back is none."""
    name, kept, self._kept = self._name, self._kept, ()
    if not kept:
      return ''
    begun, before, adopted, now = (np.asarray(one, np.float32) for one in (*kept, params[name]))
    self._name = None if (before != adopted).any() else name
    short = max(map(np.linalg.norm, (now - before, before - begun)))
    return (name or 'params') if short < np.linalg.norm(now - adopted) / 2 else ''


def on_devices(params: Any, opt_state: Any) -> tuple[Any, Any]:
  """The arrays of the user as those of jax, on all hosts of the learner."""
  own = lambda tree, what: jax.tree.map(copies.own, own_model.as_arrays(tree, what))
  params, opt_state = own(params, 'params'), own(opt_state, 'opt_state')
  if hosts_lib.are_several(params):
    return hosts_lib.put_on_all(params, params), hosts_lib.put_on_all(opt_state, params)
  return jax.device_put(params), jax.device_put(opt_state)


def _replicated(params: dict[str, jax.Array]) -> jax.sharding.Sharding | None:
  """Of an array that is whole on the same devices; None if no array is committed. Raises
  ValueError."""
  shardings = [leaf.sharding for leaf in params.values()]
  devices = {frozenset(sharding.device_set) for sharding in shardings}
  if len(devices) != 1:
    raise ValueError(
      f'the parameters are on {len(devices)} different sets of devices; put all of them on the '
      'devices of one learner'
    )
  if not any(leaf.committed for leaf in params.values()):
    return None
  for sharding in shardings:
    if isinstance(sharding, jax.sharding.NamedSharding):
      return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
  return shardings[0]


def require_alike(mine: Any, its: Any, what: str = '') -> None:
  """Raises ValueError if a tree has other arrays than the one that `join` was given."""
  same = jax.tree.structure(mine) == jax.tree.structure(its)
  if not (same and all(map(_alike, jax.tree.leaves(mine), jax.tree.leaves(its)))):
    raise ValueError(f'{what}{_difference(mine, its)}')


def _alike(mine: jax.Array, its: Any) -> bool:
  """Whether both have one shape and dtype."""
  if isinstance(mine, jax.Array) and isinstance(its, jax.Array):  # each step asks it of each array
    return mine.shape == its.shape and mine.dtype == its.dtype
  return _shape(mine) == _shape(its)


def _difference(mine: Any, its: Any) -> str:
  """The first leaf that differs in two trees, by its path, and both sides."""
  ours, theirs = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (mine, its))
  for path in {**ours, **theirs}:
    before, now = map(_shape, (ours.get(path), theirs.get(path)))
    if before != now:
      name = jax.tree_util.keystr(path, simple=True, separator='/')
      return f'{name} is {now}, join was given {before}'
  return 'its nodes are of other types than those given to join'


def _shape(leaf: Any) -> str:
  if leaf is None:
    return 'absent'
  value = leaf if hasattr(leaf, 'dtype') else np.asarray(leaf)  # of a number
  is_key = jax.numpy.issubdtype(value.dtype, jax.dtypes.extended)
  dtype = value.dtype if is_key else jax.dtypes.canonicalize_dtype(value.dtype)
  return f'{dtype}{list(value.shape)}'
