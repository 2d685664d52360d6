"""A fragment of a tree as one flat vector: learners encode and adopt tensor by tensor."""

from typing import Any

import jax

from diloco_jax.numerics import fragments


def gather(layout: fragments.Layout, p: int, tree: Any) -> jax.Array:
  """Fragment p of the tree, float32[N_p], zeros in the padding."""
  leaves = fragments.by_path(tree)
  pieces = layout.fragments[p]
  return fragments.join(layout, p, {piece.key: fragments.rows(leaves, piece) for piece in pieces})
