"""The outer step of one learner on one machine, as a transform of optax: no syncer, no network.

One learner that waits for each sync needs no other process. Every H inner steps of a fragment, with
Theta its float32 master and theta what the inner optimizer made of it:

  D      = held(Theta) - theta           the pseudo-gradient, and all that is merged
  Theta' = Theta - OuterOpt(D)
  theta <- held(Theta')                  in the type of the parameters (numerics/exchange.py)

These are the bits of a run through `join` with one learner, in lock step, with float32 payloads and
the merge rule `avg`, for each value that moves by at most half of itself in a period, if the
compiler fuses the sums of both programs alike. The rule `rda` divides D by its length and stretches
it again, so it differs in the last bits.

optax adds an update to a parameter: p + (new - p). For p / 2 <= new <= 2 p the difference is exact,
so the sum is `new`. Else it may miss `new` by an ulp of the larger of the two; there the published
value of a syncer misses Theta', too, since it travels as a difference. That is no drift: the next
pseudo-gradient is measured from Theta. Parameters of fewer bits than float32 get float32 updates.

References: DiLoCo, arXiv 2311.08105; of one learner, arXiv 2505.23725 and 2512.17131.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from diloco_jax.config import run_config
from diloco_jax.numerics import exchange
from diloco_jax.numerics import fragments as fragments_lib
from diloco_jax.numerics import outer as outer_lib
from diloco_jax.protocol import config as protocol_config
from diloco_jax.protocol import schedule

PyTree = Any

_USUAL = run_config.SyncConfig()


class OuterState(NamedTuple):
  """Arrays only, for a checkpoint of any kind.

  Attributes:
    inner: the state of the inner optimizer.
    step: int32, the index in the period.
    masters: Theta by fragment, in float32; each a tree like the parameters, with a tuple of rows
      instead of a leaf that is cut, and None for one that the fragment lacks.
    outer: the state of the outer optimizer by fragment.
  """

  inner: PyTree
  step: jax.Array
  masters: tuple[PyTree, ...]
  outer: tuple[PyTree, ...]


def outer_optimizer(
  inner: optax.GradientTransformation,
  *,
  period: int,
  outer: str | optax.GradientTransformation = _USUAL.outer,
  fragments: int = 1,
) -> optax.GradientTransformationExtraArgs:
  """The inner optimizer with an outer step after every `period` of its steps: DiLoCo with one
  learner, for who has one machine.

    tx = diloco_jax.outer_optimizer(optax.adamw(1e-3), period=30)

  It must be the last transform of a chain, as it needs the parameters that its update makes. The
  state has a float32 copy of the parameters, and that of the outer optimizer.

  Args:
    inner: any optimizer of optax.
    period: H, inner steps between two outer steps of one fragment.
    outer: a spec as in `SyncConfig.outer`, or a transform of the outer gradient.
    fragments: P; each has its outer step at another step of the period.

  Raises:
    ValueError: the period is below 1, has fewer steps than there are fragments, or the spec is
      unknown; in `init`: a leaf is not of floats, or the tree cannot fill P fragments.
  """
  settings = protocol_config.ProtocolConfig(period=period, fragments=fragments, overlap=0)
  offsets = schedule.Schedule(settings).offsets
  tx = outer_lib.make(outer) if isinstance(outer, str) else outer
  inner = optax.with_extra_args_support(inner)

  def init(params: PyTree) -> OuterState:
    copy = lambda leaf: jnp.array(leaf, _wide(leaf))  # a step may donate both, parameters and state
    masters = tuple(jax.tree.map(copy, _part(one, params)) for one in _layout(params, fragments))
    return OuterState(inner.init(params), jnp.int32(0), masters, tuple(map(tx.init, masters)))

  def update(
    grads: PyTree, state: OuterState, params: PyTree = None, **extra: Any
  ) -> tuple[PyTree, OuterState]:
    if params is None:
      raise ValueError('outer_optimizer needs the parameters: tx.update(grads, state, params)')
    updates, inner_state = inner.update(grads, state.inner, params, **extra)
    widened = lambda u, leaf: u.astype(jnp.promote_types(u.dtype, _wide(leaf)))
    updates = jax.tree.map(widened, updates, params)
    step, leaves, made = (state.step + 1) % period, fragments_lib.by_path(updates), []
    for p, pieces in enumerate(_layout(params, fragments)):
      before = _part(pieces, updates), state.masters[p], state.outer[p], _part(pieces, params)
      outer_step, stay = functools.partial(_outer_step, tx), lambda *before: before[:3]
      mine, *after = jax.lax.cond(step == offsets[p] % period, outer_step, stay, *before)
      made.append(after)
      for piece, rows in zip(pieces, jax.tree.leaves(mine), strict=True):
        fragments_lib.replace_rows(leaves, piece, rows)
    updates = jax.tree.unflatten(jax.tree.structure(updates), leaves.values())
    return updates, OuterState(inner_state, step, *zip(*made, strict=True))

  return optax.GradientTransformationExtraArgs(init, update)


def _outer_step(
  tx: optax.GradientTransformation, updates: PyTree, master: PyTree, state: PyTree, params: PyTree
) -> tuple[PyTree, PyTree, PyTree]:
  """(the updates to the new values, the master, the state of the outer optimizer) of a fragment."""
  theta = optax.apply_updates(params, updates)
  off = lambda wide, leaf: exchange.held(wide, leaf.dtype) - leaf.astype(wide.dtype)
  moves, state = tx.update(jax.tree.map(off, master, theta), state, master)
  master = optax.apply_updates(master, moves)
  to_new = lambda u, *both: off(*both).astype(u.dtype)
  return jax.tree.map(to_new, updates, master, params), master, state


def _wide(leaf: Any) -> jnp.dtype:
  return jnp.promote_types(leaf.dtype, jnp.float32)


def _layout(params: PyTree, count: int) -> tuple[exchange.Pieces, ...]:
  label = lambda path: 'body'
  return fragments_lib.make_layout(_USUAL.fragmentation, params, count, label).fragments


def _part(pieces: exchange.Pieces, tree: PyTree) -> PyTree:
  """A fragment of a tree, as in `OuterState.masters`: its leaves have the order of the pieces."""
  leaves = fragments_lib.by_path(tree)
  found: dict[str, Any] = dict.fromkeys(leaves)
  for one in pieces:
    leaf, before = leaves[one.path], found[one.path] or ()
    whole = one.shape == leaf.shape  # and keeps its sharding
    found[one.path] = leaf if whole else (*before, fragments_lib.rows(leaves, one))
  return jax.tree.unflatten(jax.tree.structure(tree), found.values())
