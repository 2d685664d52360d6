"""Copies of the parameters among what a loop keeps, and how they move with what is adopted.

An adoption moves the parameters by what other learners have trained. What a loop computes its
parameters from must move, too, or its next step undoes the merge; what it compares them with must
not. Which of the two a copy is shows in what the loop's own steps do with it:

    a step leaves it as it was, bit for bit,       a reference (L2-SP, EWC, FedProx, a KL penalty):
    and moves the parameters                       it stays
    a step changes it, and the parameters are it,  masters, slow weights of lookahead: it moves by
    as their dtype rounds                          what the parameters move
    a step changes it, and they differ             an average, as an EMA: it stays, and follows by
                                                   its own rate
    none of these yet                              it moves; once it turns out to be a reference, it
                                                   is what it was again

Two kinds are known by their types in optax.contrib: copies of the first parameters from which the
next ones are computed (madgrad, mechanize, cocob) or a distance is measured (prodigy, DoG), which
move, and the z of schedule_free. Its parameters are y = (1 - b) z + b x with x, the average of all
z by their weights w. A gradient that differs by d in each of the h steps since the last adoption
moves z by h d and y by

    (1 - b) h d + b sum_j (w_j / W) j d = h d ((1 - b) + b (W - W_0) / W (h + 1) / (2 h)),

where W is the sum of all weights, and W_0 that of the last adoption. So z moves by so much more
than the parameters, as the gradients of all learners would have moved it: it would run away if it
moved as they do, since merging takes back little of the way that its own gradients have led it.
"""

import collections
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.process import own_model
from diloco_jax.train import mesh as mesh_lib

_NEW, _MOVES, _STAYS, _FREE = 'new', 'moves', 'stays', 'free'
_OPTAX_COPIES = {  # by the type of a node of optax.contrib, its field that is a copy
  'COCOBState': ('init_particles', _MOVES),
  'DoGState': ('init_params', _MOVES),
  'DoWGState': ('init_params', _MOVES),
  'MadgradState': ('x0', _MOVES),
  'MechanicState': ('x0', _MOVES),
  'ProdigyState': ('params0', _MOVES),
  'ScheduleFreeState': ('z', _FREE),
}
_SAMPLE = 4096  # values of an array that are compared after a step

Named = dict[str, jax.Array]


class Copies:
  """The copies of parameters among what a loop keeps; both by name.

  Args:
    nodes: the types of those of optax in what is kept, by name.
  """

  def __init__(self, params: Named, kept: Named, nodes: Mapping[str, str]):
    known = {}
    for path, node in nodes.items():
      if node in _OPTAX_COPIES:
        field, kind = _OPTAX_COPIES[node]
        known[f'{path}/{field}'.lstrip('/')] = kind
    groups = groups_of(params, kept)
    self._groups = {
      path: group for path, group in groups.items() if path in known or _equal(params, kept, group)
    }
    self._kinds = {path: known.get(path, _NEW) for path in self._groups}
    self._judged = [path for path, kind in self._kinds.items() if kind == _NEW]
    # Moments that begin with zeros, as the parameters do, are no copies: the first step shows it.
    zeros = lambda path: not any(kept[name].any() for name in self._groups[path])
    self._zeros = {path for path in self._judged if zeros(path)}
    self.params = sorted({name for group in self._groups.values() for name in group.values()})
    self._first: Named = {}  # copies that have moved and may be references, as they were
    self._before: Named = {}  # by the name of a copy, the parameter that it is of
    self._seen: Any = None  # what the newest step has done, not read yet
    self._marks: dict[str, tuple[jax.Array, ...]] = {}  # of a z, at its last adoption
    self._hold(params, kept)

  @property
  def moving(self) -> bool:
    """Whether adoptions move one of them, as far as is known."""
    return any(kind != _STAYS for kind in self._kinds.values())

  def moves(self, name: str) -> bool:
    """Whether adoptions move this copy."""
    return any(name in group and self._kinds[at] != _STAYS for at, group in self._groups.items())

  def take(self, params: Named, kept: Named) -> None:
    """A step has made these. A copy that turns out to be a reference is put back in `kept`."""
    if not self._groups:
      return
    now = self._samples(params, kept)
    seen, self._held = _compare(self._held, now), now
    if any(kind == _NEW for kind in self._kinds.values()):
      self._judge(seen, kept)
    else:  # what the step before has done can be read without a wait
      last, self._seen = self._seen, seen
      self._judge(last, kept)
    self._remember(params)

  def follow(self, params: Named, kept: Named) -> str:
    """Moves copies in `kept` by what adoptions have changed since `take`. Returns the name of one
    that has moved, or ''."""
    moved = ''
    for path, group in self._groups.items():
      kind = self._kinds[path]
      if kind == _STAYS or (kind == _NEW and path in self._zeros):
        continue
      for name, of in group.items():
        now, before, copy = params[of], self._before.get(name), kept[name]
        if before is None or now is before:
          continue
        change = now.astype(copy.dtype) - before.astype(copy.dtype)
        if kind == _FREE:
          change = _lead(self._marks[name], self._mark(path, kept)).astype(copy.dtype) * change
          self._marks[name] = self._mark(path, kept)
        elif kind == _NEW:
          self._first.setdefault(name, copy)
        elif self._seen is not None and path in self._judged:
          touched, _, same = self._seen[self._judged.index(path)]  # which may not be read yet
          change = jnp.where(touched & ~same, jnp.zeros_like(change), change)
        kept[name] = put(copy + beside(copy, change), copy.sharding if copy.committed else None)
        moved = moved or name
    if moved:
      self._held = self._samples(params, kept)
    self._remember(params)
    return moved

  def restore(
    self, params: Named, kept: Named, restored_names: Collection[str], copied: Named
  ) -> None:
    """The values of `restored_names` come from a checkpoint, whose copies are of the parameters
    `copied`; {}: these are not known, since none has moved."""
    self._hold(params, kept)
    for path, group in self._groups.items():
      if group.keys() <= set(restored_names):
        self._before |= {name: copied.get(of) for name, of in group.items()}
        if path in self._judged and copied and not _equal(copied, kept, group):
          self._kinds[path] = _STAYS

  def _hold(self, params: Named, kept: Named) -> None:
    self._held = self._samples(params, kept)
    self._remember(params)
    for path, group in self._groups.items():
      if self._kinds[path] == _FREE:
        self._marks |= dict.fromkeys(group, self._mark(path, kept))

  def _remember(self, params: Named) -> None:
    """Else the parameters would live on."""
    moving = [group for path, group in self._groups.items() if self._kinds[path] != _STAYS]
    self._before = {name: params[of] for group in moving for name, of in group.items()}

  def _samples(self, params: Named, kept: Named) -> list[Any]:
    pair = lambda name, of: (beside(kept[name], params[of]), kept[name])
    groups = [[pair(*names) for names in self._groups[path].items()] for path in self._judged]
    return _sampled(groups) if groups else []

  def _judge(self, seen: Any, kept: Named) -> None:
    for path, (touched, trained, same) in zip(self._judged, [] if seen is None else np.array(seen)):
      is_new = self._kinds[path] == _NEW
      if not touched and not (is_new and trained):
        continue
      self._kinds[path] = _MOVES if touched and same else _STAYS
      first = {name: self._first.pop(name) for name in self._groups[path] if name in self._first}
      kept |= {} if touched else first

  def _mark(self, path: str, kept: Named) -> tuple[jax.Array, ...]:
    node = path.removesuffix('z')
    return tuple(jnp.copy(kept[f'{node}{name}']) for name in ('weight_sum', 'step_count', 'b1'))


@jax.jit
def _sampled(groups: list[Any]) -> list[Any]:
  """Values from all over each array, which stay where they are."""

  def some(leaf: jax.Array) -> jax.Array:
    each = max(1, int(_SAMPLE ** (1 / max(1, leaf.ndim))))
    return leaf[tuple(slice(None, None, max(1, -(-size // each))) for size in leaf.shape)]

  return jax.tree.map(some, groups)


@jax.jit
def _compare(held: list[Any], now: list[Any]) -> list[list[jax.Array]]:
  """For each group of (parameter, copy), whether a step has changed a copy, whether it has changed
  a parameter, and whether all copies are the parameters, as these round."""

  def same(own: jax.Array, copy: jax.Array) -> jax.Array:
    eps, wide = float(jnp.finfo(own.dtype).eps), jnp.promote_types(jnp.float32, own.dtype)
    own, copy = own.astype(wide), copy.astype(wide)
    near = eps * (jnp.abs(own) + jnp.sqrt(jnp.mean(own**2)) / 4)  # an optimizer adds differences
    return (jnp.abs(copy - own) <= near).all()

  def changed(which: int, before: list[Any], after: list[Any]) -> jax.Array:
    return jnp.any(jnp.stack([(a[which] != b[which]).any() for a, b in zip(before, after)]))

  return [
    [changed(1, *both), changed(0, *both), jnp.stack([same(*pair) for pair in both[1]]).all()]
    for both in zip(held, now)
  ]


@jax.jit
def _lead(before: tuple[jax.Array, ...], now: tuple[jax.Array, ...]) -> jax.Array:
  """By how many times the move of y the z of schedule_free moves; `before`, `now`: the sum of the
  weights, the count of steps and b, when y was last adopted and at present."""
  weight, steps, b = (jnp.float32(value) for value in now)
  share = jnp.nan_to_num((weight - before[0].astype(jnp.float32)) / weight)
  new_steps = steps - before[1].astype(jnp.float32)
  return jnp.where(new_steps > 0, 1 / (1 - b + b * share * (new_steps + 1) / (2 * new_steps)), 1.0)


def groups_of(params: Named, kept: Named) -> dict[str, dict[str, str]]:
  """Where in what is kept there may be copies of parameters: by the path of a node, from the name
  of an array in it to that of the parameter of its shape. The node has an array for each parameter
  that is trained, or else nothing beside those for some, as where an optimizer is masked."""
  counted = own_model.statistics(params)
  tails = {name.removeprefix('params/'): name for name in params if name not in counted}
  groups: dict[str, dict[str, str]] = collections.defaultdict(dict)
  below: collections.Counter[str] = collections.Counter()
  for path, leaf in kept.items():
    at = [at for at, c in enumerate(f'/{path}/') if c == '/']  # the last is for a bare array, ''
    below.update(path[:k].strip('/') for k in at)
    start = next((k for k in at if path[k:] in tails), None)
    if start is not None and jnp.issubdtype(leaf.dtype, jnp.floating):
      name = tails[path[start:]]
      if leaf.shape == params[name].shape:
        groups[path[:start].strip('/')][path] = name
  return {at: group for at, group in groups.items() if len(group) in (len(tails), below[at])}


def _equal(params: Named, kept: Named, group: dict[str, str]) -> bool:
  """Whether all are the parameters, rounded as these."""
  pairs = ((kept[name], params[of]) for name, of in group.items())
  return all(bool((copy.astype(own.dtype) == beside(copy, own)).all()) for copy, own in pairs)


def beside(leaf: jax.Array, other: jax.Array) -> jax.Array:
  """The other where the leaf is."""
  return put(other, leaf.sharding if leaf.committed else None)


def put(leaf: Any, sharding: jax.sharding.Sharding | None) -> jax.Array:
  leaf = own(leaf)
  if isinstance(leaf, jax.Array) and (sharding is None or leaf.sharding == sharding):
    return leaf
  if isinstance(leaf, np.ndarray) and sharding is not None:
    return mesh_lib.put(leaf, sharding)
  return jax.device_put(leaf, sharding)


def own(leaf: Any) -> Any:
  """A copy of memory of the host, which its program may write again: jax would share it."""
  return leaf if isinstance(leaf, jax.Array) else np.array(leaf)
