"""The arrays of a user's loop, as the island of a learner (learner/island_port.py)."""

import contextlib
import dataclasses
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

  def __init__(self, form: loop_states.Form, params: Any, opt_state: Any):
    """What a loop gives to `join`, of this form. Raises ValueError."""
    self.form = form
    self.checkpoints: checkpoint.Checkpoints | None = None
    named, kept = form.split(params, opt_state)
    self._numbers = _numbers(kept)
    named = jax.tree.map(copies.own, own_model.as_arrays(named, 'params'))
    kept = jax.tree.map(copies.own, own_model.as_arrays(kept, 'opt_state'))
    several = hosts_lib.are_several(named)
    put = (lambda tree: hosts_lib.put_on_all(tree, named)) if several else jax.device_put
    self.params, self.moments = put((named, kept))
    self.replicated = _replicated(self.params)
    self.shardings = _Shardings(
      {name: self.replicated and leaf.sharding for name, leaf in self.params.items()},
      jax.tree.map(lambda leaf: leaf.sharding if leaf.committed else None, self.moments),
    )
    self.copies = copies.Copies(self.params, self.moments or {}, form.nodes)
    self.devices = next(iter(self.params.values())).devices()
    self.shard, self.next_index = 0, 0
    self.tokens_per_step = 0  # in the newest step

  def describe(self) -> own_model.ModelDescription:
    """The model for the syncer. All hosts of a learner call it together: the lead gets the values
    of all."""
    model = own_model.describe(self.params, self.form.label)
    if jax.process_count() > 1:
      sent = {name: self.params[name] for name in model.shapes}
      model = dataclasses.replace(model, values=hosts_lib.gather(sent))
    return model

  @property
  def consumed(self) -> bool:
    """Whether a step has been given these arrays as donated ones."""
    held = self.params, self.moments
    return any(leaf.is_deleted() for leaf in jax.tree.leaves(held))

  @property
  def kept(self) -> dict[str, Any] | None:
    """The moments, in which Python's own numbers are such numbers, as the loop gave them."""
    return self.moments and self.moments | self._numbers

  def take(self, params: dict[str, Any], moments: dict[str, Any] | None) -> None:
    """Holds these arrays from now on, where those of `join` were."""
    at = self.shardings
    self.params = {name: copies.put(leaf, at.params[name]) for name, leaf in params.items()}
    self._numbers = _numbers(moments)
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
  def saving(
    self,
    workdir: pathlib.Path,
    learner: str,
    config: run_config.Config,
    run: str,
    say: Callable[[str], None],
  ) -> Iterator[moments_lib.SavedMoments | None]:
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
        restored = moments_lib.find(place, learner, self.moments, say, run=run)
        hosts_lib.require_same('the state', str(restored and (restored.learner, restored.step)))
        if restored is not None:
          moments, numbers = self._moments_of(restored, learner), self._numbers
          self.take(self.params, self.moments | moments)
          of_saved = lambda name, number: type(number)(moments.get(name, number))
          self._numbers = {name: of_saved(name, number) for name, number in numbers.items()}
          of = moments_lib.find(place, restored.learner, self._copied(), say, 'copied')
          alike = of is not None and of[:2] == restored[:2]
          copied = jax.tree.map(jnp.asarray, of.moments) if alike else {}
          self.copies.restore(self.params, self.moments, moments, copied)
          restored = restored._replace(moments=None)
        yield restored

  def _moments_of(self, restored: moments_lib.SavedMoments, learner: str) -> dict[str, Any]:
    """What of a checkpoint is taken: of another learner the state of its optimizer alone, without
    random keys, which are unsigned numbers: two learners would draw the same ones."""
    if restored.learner == learner:
      return restored.moments
    is_own = lambda name: name not in self.form.optimizer or self.moments[name].dtype.kind == 'u'
    return {name: leaf for name, leaf in restored.moments.items() if not is_own(name)}


def _numbers(kept: dict[str, Any] | None) -> dict[str, Any]:
  return {name: leaf for name, leaf in (kept or {}).items() if not hasattr(leaf, 'dtype')}


def _replicated(params: dict[str, jax.Array]) -> jax.sharding.Sharding | None:
  """The sharding of an array that is whole on these devices; None if no array is committed. Raises
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


def require_alike(first: dict[str, Any], new: dict[str, Any], what: str = '') -> None:
  """Raises ValueError for the first array that is not like the one that `join` was given."""
  for name in {**first, **new}:
    before, now = first.get(name), new.get(name)
    if not _alike(before, now):
      raise ValueError(f'{what}{name} is {_shape(now)}, join was given {_shape(before)}')


def _alike(first: Any, new: Any) -> bool:
  """Whether both have one shape and dtype."""
  if isinstance(first, jax.Array) and isinstance(new, jax.Array):  # called for each in each step
    return first.shape == new.shape and first.dtype == new.dtype
  return _shape(first) == _shape(new)


def _shape(leaf: Any) -> str:
  if leaf is None:
    return 'absent'
  value = leaf if hasattr(leaf, 'dtype') else np.asarray(leaf)  # of a number
  is_key = jax.numpy.issubdtype(value.dtype, jax.dtypes.extended)
  dtype = value.dtype if is_key else jax.dtypes.canonicalize_dtype(value.dtype)
  return f'{dtype}{list(value.shape)}'
