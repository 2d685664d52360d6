"""The warnings to a loop that ignores or undoes what `peer` has given it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.api import own_arrays
from diloco_jax.process import own_model

_UNDONE = (
  'the first step after the adoption of a merged value has gone back to about the value before it, '
  'and was more than twice as long as the step before. If each step of the loop reaches its goal '
  'at once, nothing is wrong. If the loop computes its parameters from a tree of its own, it '
  'undoes each merge: write what `peer.sync` returns into that tree (docs/your_model.md)'
)


class Advice:
  """What the loop has read of `peer`, and the lines that tell it of an error, each once.

  Args:
    params: of the loop.
    restored_step: of the checkpoint that the moments come from, None: there is none.

  Attributes:
    params_read: the loop has read `peer.params`.
    moved_copy: the copy of a parameter in the moments that has moved since the loop read them; ''.
  """

  def __init__(self, params: dict[str, jax.Array], restored_step: int | None):
    self.params_read = False
    self.moved_copy = ''
    self._restored_step = restored_step
    self._copy_warned = False
    counted = own_model.statistics(params)
    fits = lambda leaf: leaf.is_fully_addressable and leaf.size <= 1 << 16  # read here
    names = [name for name, leaf in params.items() if fits(leaf) and name not in counted]
    self._watched = max(names, key=lambda name: params[name].size, default=None)
    self._steps, self._begun, self._adoption = 0, None, ()

  def moments_read(self) -> None:
    """The loop has read the moments."""
    self.moved_copy, self._restored_step = '', None

  def of_step(self, params: dict[str, Any]) -> Iterator[str]:
    """What to print after a step of the loop, which has made these parameters."""
    if self._restored_step is not None:
      yield (
        f'opt_state: the moments of the checkpoint at step {self._restored_step} are not used, '
        'since the loop has begun with others: begin with `opt_state = peer.opt_state`'
      )
      self._restored_step = None
    name = self._undone(params)
    if name and not self._copy_warned:
      yield f'{name}: {_UNDONE}'

  def of_copies(self, arrays: own_arrays.OwnArrays) -> Iterator[str]:
    """What to print once the copies of parameters are known to be what the step has made."""
    if self.moved_copy and arrays.copies.moves(self.moved_copy) and not self._copy_warned:
      self._copy_warned = True
      yield (
        f'opt_state: {self.moved_copy} is a copy of a parameter, and has stayed where it was when '
        'a merged value was adopted: a step that computes from it undoes the merge. Nothing is '
        'lost: take `opt_state = peer.opt_state` after each sync (docs/your_model.md)'
      )

  @contextlib.contextmanager
  def boundary(self, arrays: own_arrays.OwnArrays) -> Iterator[None]:
    """Around the work of a boundary, which may consume the array that is watched."""
    trained = arrays.params.get(self._watched)
    before = None if trained is None else jnp.copy(trained)
    yield
    self._steps += 1
    if trained is not None:
      after = jnp.copy(arrays.params[self._watched])
      if arrays.params[self._watched] is not trained:
        # In fewer steps a merge moves no farther than a step, which may well go back.
        self._adoption = (self._begun, before, after) if self._steps >= 4 else ()
        self._steps = 0
      self._begun = after

  def _undone(self, params: dict[str, Any]) -> str:
    """The array whose first adoption this step, the first after it, has undone: it is far longer
    than the one before, and goes back; '': none. A loop that computes its parameters from a tree of
    its own undoes each. A step of usual length that goes back is none."""
    name, adoption, self._adoption = self._watched, self._adoption, ()
    if not adoption:
      return ''
    begun, before, adopted, now = (np.asarray(a, np.float32) for a in (*adoption, params[name]))
    self._watched = None if (before != adopted).any() else name
    short = max(map(np.linalg.norm, (now - before, before - begun)))
    return (name or 'params') if short < np.linalg.norm(now - adopted) / 2 else ''
