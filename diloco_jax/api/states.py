"""What `join` and `sync` accept beside a tree of parameters: the whole state of a training loop.

    a TrainState of flax.training, or one of its kind    its `params`, and `batch_stats` if it has
                                                         them
    (model, nnx.Optimizer), as flax.nnx has them         what the optimizer trains, and BatchStat
    any other, with `exchange=` of join                  the float arrays of what that returns, as
                                                         `lambda state: state.model`

These are exchanged. All else is kept: it is saved and restored as the state of the optimizer is,
steps, averages of the parameters, other variables, streams of random keys. Not so parameters that
no optimizer of flax.nnx trains, and what is no array.

An iterator of batches is no such state: it has no position to which a learner that comes back, or
one that takes a shard over, could return. `zip(peer.steps(), batches)` takes one as it is; all
learners read the same batches unless each shuffles by its own `peer.shard`.
"""

import collections
import itertools
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.process import own_model
from diloco_jax.report import header
from diloco_jax.storage import arrays
from diloco_jax.train import task as task_lib

_SCHEDULES = 'ScaleByScheduleState', 'WrappedScheduleState'  # of optax
_COPIES = re.compile(  # names of what is no part of a model, where another part has the same shapes
  'ema|average|avg|shadow|swa|polyak|teacher|target|anchor|reference|master|moment|veloc|grad|accum'
)
_MOMENTS = re.compile('(^|/)(m|v|mu|nu)(/|$)')
_LEAST_SCALE = 1024.0  # of a loss; no scalar of a model is a power of two beyond it
_SHOWN = 6
_Fields = dict[str, dict[str, Any]]


class Form:
  """How what a loop gives to `join` and `sync` falls into parts. Raises ValueError.

  Args:
    given: a state, or a tree of parameters.
    opt_state: the state of the optimizer, if it is given beside parameters.
    exchange: returns what of a state is exchanged.
    label: returns the label of an exchanged array, by its name; None: the usual one.

  Attributes:
    label: as given, or the usual one.
    optimizer: the names of what is kept and is the optimizer's.
    nodes: the types of the nodes of optax in what is kept, by name.
  """

  def __init__(
    self,
    given: Any,
    opt_state: Any = None,
    exchange: Callable[[Any], Any] | None = None,
    label: Callable[[str], str] | None = None,
  ):
    nnx = sys.modules.get('flax.nnx')  # a loop that uses it has imported it
    pair = given if isinstance(given, tuple) else (given,)
    self._nnx = nnx if nnx and any(isinstance(part, nnx.Optimizer) for part in pair) else None
    if self._nnx and exchange:
      raise ValueError('exchange: of (model, optimizer) it is what the optimizer trains')
    if all(hasattr(given, name) for name in ('params', 'opt_state', 'replace')):
      exchange = exchange or _of_train_state
    self._picks = exchange is not None
    self._whole = self._picks or self._nnx is not None
    if self._whole and opt_state is not None:
      raise ValueError('opt_state is part of the state that is given: leave `opt_state=` out')
    if not self._whole:
      require_model(given)
    # A float that is an attribute is a setting, as the rate of a dropout.
    paths = jax.tree_util.tree_leaves_with_path(given)
    self._numbers = not any(
      isinstance(k, jax.tree_util.GetAttrKey) for keys, _ in paths for k in keys
    )
    tree = self._tree(given, opt_state)
    picked = _pick(given, exchange) if exchange else tree[0]
    if exchange and (wrong := list(_wrong_in(given, picked).values())):
      raise ValueError(
        f'exchange: of what it returns {wrong[0]}, and no parameter. Nothing was sent. Return what '
        'the gradient is taken of alone, as `lambda state: state.model`'
      )
    counted = own_model.statistics(picked)
    usual = lambda name: 'statistic' if name in counted else task_lib.embeddings(name)
    self.label = label or usual
    paths = list(arrays.by_name(tree)) if exchange else []
    self._short = {paths[at]: name for name, at in arrays.by_name(picked).items()} if paths else {}
    self._structure = self._keys = None
    named, kept = self.split(given, opt_state)
    typed, at = (opt_state, '') if exchange is None else (given, '')
    if self._nnx:
      typed, at = pair[1].opt_state, 'opt_state/opt_state'
    self.nodes = {path: type(node).__name__ for path, node in _nodes(typed, at)}
    of_optax = tuple(f'{path}/' for path in self.nodes)
    is_optimizers = lambda name: 'opt_state' in name.split('/') or name.startswith(of_optax)
    self.optimizer = {name for name in kept or () if not self._whole or is_optimizers(name)}
    fields = {path.split('/')[0] for path in self._short}
    is_setting = lambda name: name.split('/')[0] in fields and not hasattr(kept[name], 'dtype')
    shown = [name for name in kept or () if self._whole and not is_setting(name)]
    labels = {name: self.label(name) for name in named}
    self._lines = _line(named, shown, self._short), header.labels(labels)

  def _tree(self, given: Any, opt_state: Any) -> Any:
    """One tree of all: the state, or what is exchanged and what is kept."""
    if self._nnx is None:
      return given if self._picks else (given, opt_state)
    try:
      nnx, (model, optimizer) = self._nnx, given
      frozen = nnx.Any(nnx.Param, nnx.Intermediate)  # or they come and go
      trained = nnx.Any(optimizer.wrt, nnx.BatchStat)
      trained, frozen, others = nnx.state(model, trained, frozen, ...)
    except (ValueError, AttributeError, TypeError):
      raise ValueError('of flax.nnx give (model, optimizer), one model and its Optimizer') from None
    self._given, self._frozen = given, tuple(arrays.by_name(frozen))
    return trained, {'opt_state': nnx.state(optimizer), 'rest': others}

  def split(self, given: Any, opt_state: Any = None) -> tuple[dict[str, Any], dict | None]:
    """What is exchanged, and what is kept, by name; of a typed key its data."""
    tree = self._tree(given, opt_state)
    leaves, structure = jax.tree.flatten(tree)
    if self._structure is None or structure != self._structure:
      self._keys, self._structure = self._named(tree), structure
    named, kept = {}, {}
    self._others, self._impls = {}, {}
    for (exchanged, name), leaf in zip(self._keys, leaves):
      if exchanged and _is_float(leaf) and (self._numbers or not isinstance(leaf, float)):
        named[name] = leaf
      elif not exchanged and _is_key(leaf):
        kept[name], self._impls[name] = jax.random.key_data(leaf), jax.random.key_impl(leaf)
      elif not exchanged and isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float):
        kept[name] = leaf
      else:
        self._others[exchanged, name] = leaf
    return named, (kept if self._whole or opt_state is not None else None)

  def _named(self, tree: Any) -> list[tuple[bool, str]]:
    """For each leaf, whether it is exchanged, and its name."""
    if self._picks:
      return [(path in self._short, self._short.get(path, path)) for path in arrays.by_name(tree)]
    names = [arrays.by_name(part) for part in tree]
    return [(not number, name) for number in range(2) for name in names[number]]

  def rebuild(self, params: dict[str, Any], kept: dict[str, Any] | None) -> tuple[Any, Any]:
    """What the loop has given last, with these arrays: (the state, None) or (parameters, the state
    of the optimizer)."""
    kept = dict(kept or {})
    for name, impl in self._impls.items():
      kept[name] = jax.random.wrap_key_data(kept[name], impl=impl)
    of = lambda key: self._others[key] if key in self._others else (kept, params)[key[0]][key[1]]
    tree = jax.tree.unflatten(self._structure, [of(key) for key in self._keys])
    if self._nnx is None:
      return (tree, None) if self._picks else tree
    trained, others = tree
    self._nnx.update(self._given[0], trained, others['rest'])
    self._nnx.update(self._given[1], others['opt_state'])
    return self._given, None

  @property
  def in_place(self) -> bool:
    """Whether `rebuild` changes the objects of the loop."""
    return self._nnx is not None

  def describe(self) -> Iterator[str]:
    """The lines about a state that a learner prints when it joins."""
    yield from self._lines
    if not {*_SCHEDULES}.isdisjoint(self.nodes.values()):
      yield (
        'the optimizer has a schedule by its own count of updates, which falls behind the clock of '
        'the run while this learner is slow or away: give it the rate of the clock '
        '(docs/your_model.md, "Schedule by clock")'
      )
    lost = [name for (_, name), leaf in self._others.items() if not callable(leaf)]
    if kept := [*(self._frozen if self._nnx else ()), *lost]:
      few = ', '.join(kept[:3])
      yield f'{len(kept)} leaves of the state are neither exchanged nor saved: {few}'


def _of_train_state(state: Any) -> Any:
  if hasattr(state, 'batch_stats'):
    return {'params': state.params, 'batch_stats': state.batch_stats}
  return state.params


def _pick(given: Any, exchange: Callable[[Any], Any]) -> Any:
  """The tree that `exchange` returns, with the index of a leaf of `given` for each float array: one
  array may be two leaves."""
  leaves, structure = jax.tree.flatten(given)
  traced = {at: leaf for at, leaf in enumerate(leaves) if hasattr(leaf, 'dtype')}
  out = []

  def run(*values: Any) -> list[Any]:
    all_leaves = [*leaves]
    for at, value in zip(traced, values):
      all_leaves[at] = value
    out.append(exchange(jax.tree.unflatten(structure, all_leaves)))
    return [leaf for leaf in jax.tree.leaves(out[0]) if isinstance(leaf, jax.core.Tracer)]

  jaxpr = jax.make_jaxpr(run)(*traced.values()).jaxpr
  index_of = dict(zip(jaxpr.invars, traced))
  at = [index_of.get(out) if type(out) is type(jaxpr.invars[0]) else None for out in jaxpr.outvars]
  if not at or None in at:
    raise ValueError(
      'exchange: it must return parts of the state as they are, as `lambda state: state.model`, '
      'and has returned ' + ('arrays that are computed' if at else 'no array')
    )
  numbers = iter(at)
  number = lambda leaf: next(numbers) if isinstance(leaf, jax.core.Tracer) else None
  picked = jax.tree.map(number, out[0])
  return jax.tree.map(lambda at: at if _is_float(leaves[at]) else None, picked)


# --- A model, or a state? -------------------------------------------------------------------------


def require_model(given: Any) -> None:
  """Raises ValueError if a tree of parameters has moments, counters, scales or copies in it."""
  wrong, fields = _of_optimizers(given), _fields(given)
  wrong |= _objections({at: fields[at] for at in fields if at not in wrong}, fields)
  if not wrong:
    return
  firsts = {_path(keys[:1]): keys[:1] for keys, _ in jax.tree_util.tree_leaves_with_path(given)}
  ways = (jax.tree_util.keystr(firsts[field]) for field in fields if field not in wrong)
  model, first = next(ways, '.model'), next(iter(wrong.values()))
  whole = '. Of a model that has it, it is `exchange=lambda model: model`'
  whole *= first.endswith('as a counter')
  raise ValueError(
    f'{first}, and no parameter. Nothing was sent. What the gradient is taken of is exchanged, and '
    'all else of a state is kept and saved: `diloco_jax.join(state, exchange=lambda state: '
    f'state{model}, ...)`; load_params and follow accept the part alone, `into=state{model}`{whole}'
  )


def _wrong_in(state: Any, picked: Any) -> dict[str, str]:
  """What is no parameter in what `_pick` has returned, by the names in the state or there."""
  leaves, chosen = jax.tree.leaves(state), {*jax.tree.leaves(picked)}
  types = {leaves[at].dtype for at in chosen}  # a master is no copy of the parameters that are kept
  beside = {at for at, leaf in enumerate(leaves) if getattr(leaf, 'dtype', None) in types}
  part = jax.tree.map(leaves.__getitem__, picked)
  wrong = _of_optimizers(part) or _objections(_fields(state, chosen), _fields(state, beside))
  return wrong or _objections(_fields(part), _fields(part))


def _of_optimizers(tree: Any) -> dict[str, str]:
  """The fields of a tree that have the state of an optimizer in them, and which."""
  wrong: dict[str, str] = {}
  for path, node in _nodes(tree):
    what = f'{own_model.shown(path or "the whole")} is a {type(node).__name__}'
    if what.endswith('State'):
      wrong.setdefault(path.split('/')[0], f'{what} of optax')
  return wrong


def _fields(tree: Any, chosen: Collection[int] | None = None) -> _Fields:
  """Leaves, all or these, by their first key and the path below it."""
  fields: _Fields = {}
  for at, (keys, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
    if keys and isinstance(keys[-1], jax.tree_util.GetAttrKey) and isinstance(leaf, int):
      continue  # a setting, as the number of heads of an equinox module
    if chosen is None or at in chosen:
      fields.setdefault(_path(keys[:1]), {})[_path(keys[1:])] = leaf
  return fields


def _objections(fields: _Fields, others: _Fields) -> dict[str, str]:
  """The fields that are no part of a model, and why; `others`: what they may be copies of."""
  return {at: what for at in fields if (what := _objection(at, fields[at], others))}


def _objection(field: str, leaves: dict[str, Any], others: _Fields) -> str:
  """Why a field is no part of a model, or ''."""
  for path, leaf in leaves.items():
    name = own_model.shown(f'{field}/{path}'.strip('/'))
    if _is_key(leaf):
      return f'{name} is a random key'
    if isinstance(leaf, int) or (hasattr(leaf, 'dtype') and not _is_float(leaf)):
      return f'{name} is {getattr(leaf, "dtype", type(leaf).__name__)}, as a counter'
    if _is_float(leaf) and not np.shape(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct):
      if (value := float(leaf)) >= _LEAST_SCALE and math.frexp(value)[0] == 0.5:
        return f'{name} is {value:g}, as the scale of a loss'
  return _copy(field, leaves, others)


def _copy(field: str, leaves: dict[str, Any], others: _Fields) -> str:
  """Why a field is a copy of another one, or an average of it that begins at zero, or ''. Its name,
  or that of a part, is that of a copy; its arrays are those of the other field, once or more."""
  shapes_of = lambda leaves: {at: np.shape(leaf) for at, leaf in leaves.items() if np.ndim(leaf)}
  names_one = lambda at, many: _COPIES.search(at.lower()) or (many and _MOMENTS.search(at))
  if not any(names_one(f'{field}/{path}', True) for path in leaves):
    return ''
  shapes = shapes_of(leaves)
  for other, twins in others.items():
    theirs = {} if other == field or names_one(other, True) else shapes_of(twins)
    first = next(iter(theirs), '/')
    starts = [path.removesuffix(first) for path in shapes if f'/{path}'.endswith(f'/{first}')]
    at = next((at for at in starts if names_one(f'{field}/{at}', len(theirs) > 1)), None)
    pairs = [(f'{start}{path}', path) for start in starts for path in theirs]
    if at is not None and shapes == {path: theirs[twin] for path, twin in pairs}:
      values = [(leaves[path], twins[twin]) for path, twin in pairs]
      if all(not np.any(leaf) or bool(jnp.all(leaf == twin)) for leaf, twin in values):
        return f'{field}/{at}'.strip('/') + f' has the shapes of {other}, and its values or zeros'
  return ''


def _path(keys: tuple[Any, ...]) -> str:
  return jax.tree_util.keystr(keys, simple=True, separator='/')


def _nodes(tree: Any, at: str = '') -> Iterator[tuple[str, Any]]:
  """The named tuples of optax in a tree, with their paths."""
  is_node = lambda leaf: type(leaf).__module__.startswith('optax') and hasattr(leaf, '_fields')
  for keys, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_node):
    if is_node(node):
      path = '/'.join(filter(None, (at, _path(keys))))
      yield path, node
      for field in node._fields:
        yield from _nodes(getattr(node, field), f'{path}/{field}'.lstrip('/'))


def _is_key(leaf: Any) -> bool:
  return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_float(leaf: Any) -> bool:
  return isinstance(leaf, float) or (
    hasattr(leaf, 'dtype') and jnp.issubdtype(leaf.dtype, jnp.floating)
  )


def _line(named: dict[str, Any], kept: list[str], exchanged: Collection[str]) -> str:
  """What is exchanged, by name and size, and what of a state is kept: as large parts as there are
  with none of the paths that are exchanged.

  >>> _line({'w': np.ones((8, 4)), 'b': np.ones(4)}, ['o/mu/w', 'o/nu/w', 's/n'], ['s/w', 's/b'])
  'exchanges 36 parameters (288 B) in 2 arrays: w [8, 4], b [4]; keeps o, s/n'
  """
  count = sum(map(np.size, named.values()))
  size = lambda leaves: sum(getattr(leaf, 'nbytes', 4) for leaf in leaves)
  short = {name: re.sub(r'(?<=[/._])\d+(?![^/._])', '*', name) for name in named}
  shared = os.path.commonprefix([*short.values()]).rfind('/') + 1
  groups = collections.defaultdict(list)  # by how their names begin
  for name, path in short.items():
    groups[own_model.shown(path[:shared] + path[shared:].split('/')[0])].append(named[name])
  largest = sorted(groups.items(), key=lambda group: -size(group[1]))
  shown = [f'{len(group)} of {start} ({header.size(size(group))})' for start, group in largest]
  if len(named) <= _SHOWN:
    shown = [f'{own_model.shown(name)} {list(np.shape(named[name]))}' for name in named]
  shown[_SHOWN:] = [f'{len(shown) - _SHOWN} more'] * (len(shown) > _SHOWN)
  above = {path[:at] for path in exchanged for at, c in enumerate(path) if c == '/'}
  down = lambda path: itertools.accumulate(path.split('/'), '{}/{}'.format)
  parts = dict.fromkeys(next(at for at in down(path) if at not in above) for path in kept)
  return (
    f'exchanges {count:,} parameters ({header.size(size(named.values()))}) in {len(named)} arrays: '
    + ', '.join(shown)
    + f'; keeps {", ".join(parts)}' * bool(parts)
  )
