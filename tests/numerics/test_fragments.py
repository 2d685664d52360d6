"""Layouts: every row of every leaf exactly once, evenly, and the same on every learner."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from diloco_jax.numerics import fragments
from tests.numerics import vectors

_QUICK = hypothesis.settings(deadline=None, max_examples=60, derandomize=True)


def _label(path):
  return 'avg' if 'embed' in path else 'rda'


def _decoder(num_layers=2, dim=32, vocab=256):
  layer = lambda: {
    'attn': {'q': jnp.zeros((dim, 2, dim // 2)), 'o': jnp.zeros((2, dim // 2, dim))},
    'mlp': {'w1': jnp.zeros((dim, 4 * dim)), 'w2': jnp.zeros((4 * dim, dim))},
    'norm': jnp.zeros(dim),
  }
  return {
    'embed': jnp.zeros((vocab, dim)),
    'layers': [layer() for _ in range(num_layers)],
    'final_norm': jnp.zeros(dim),
    'temperature': jnp.zeros(()),
  }


def _filled(tree, dtype=jnp.float32):
  """Every parameter a different number."""
  leaves, structure = jax.tree.flatten(tree)
  starts = np.cumsum([0] + [leaf.size for leaf in leaves])
  values = [
    jnp.asarray(np.arange(a + 1, b + 1).reshape(leaf.shape), dtype)
    for a, b, leaf in zip(starts, starts[1:], leaves)
  ]
  return jax.tree.unflatten(structure, values)


def _shapes():
  dim = st.integers(1, 40)
  shape = st.lists(dim, min_size=0, max_size=3).map(tuple)
  return st.lists(shape, min_size=1, max_size=12)


def _rows_seen(layout):
  rows = {}
  for fragment in layout.fragments:
    for piece in fragment:
      rows.setdefault(piece.path, []).extend(range(piece.start, piece.stop))
  return {path: sorted(seen) for path, seen in rows.items()}


@_QUICK
@hypothesis.given(_shapes(), st.integers(1, 6))
def test_every_row_of_every_leaf_exactly_once_and_balanced_within_four_thirds_of_the_mean(
  shapes, num_fragments
):
  tree = {f'layer_{i}': jax.ShapeDtypeStruct(s, jnp.float32) for i, s in enumerate(shapes)}
  try:
    layout = fragments.make_layout(tree, num_fragments, _label)
  except ValueError as error:
    assert 'use fewer' in str(error)
    return
  want = {k: list(range(s.shape[0] if s.shape else 1)) for k, s in tree.items()}
  assert _rows_seen(layout) == want
  assert layout.num_fragments == num_fragments
  total = sum(int(np.prod(s)) for s in shapes)
  assert sum(layout.parameters(p) for p in range(num_fragments)) == total
  sizes = [layout.size(p) for p in range(num_fragments)]
  assert all(size % 32 == 0 and size > 0 for size in sizes)
  assert 3 * num_fragments * max(sizes) <= 4 * sum(sizes)


@_QUICK
@hypothesis.given(
  st.lists(st.tuples(st.integers(300, 2000), st.integers(1, 64)), min_size=1, max_size=8),
  st.integers(1, 8),
)
def test_tensors_with_many_rows_can_always_be_balanced(shapes, num_fragments):
  tree = [jax.ShapeDtypeStruct((rows, 32 * cols), jnp.float32) for rows, cols in shapes]
  # Hypothesis may put one giant beside dwarfs: the giant is cut, the dwarfs stay whole.
  layout = fragments.make_layout(tree, num_fragments, _label)
  sizes = [layout.size(p) for p in range(num_fragments)]
  assert 3 * num_fragments * max(sizes) <= 4 * sum(sizes)


def test_balanced_keeps_tensors_whole_where_it_can():
  layout = fragments.make_layout(_decoder(num_layers=8), 4, _label)
  assert all(p.start == 0 and p.stop == (p.shape or (1,))[0] for f in layout.fragments for p in f)


def test_a_tensor_larger_than_a_fair_share_is_cut_by_rows():
  tree = _decoder(num_layers=2, vocab=4096)
  layout = fragments.make_layout(tree, 6, _label)
  cut = [p for f in layout.fragments for p in f if p.path == 'embed']
  assert len(cut) > 1 and sum(p.stop - p.start for p in cut) == 4096
  assert {p.label for p in cut} == {'avg'}


def _with_experts():
  shapes = {'gate': (4, 8, 8), 'down': (4, 8, 8)}
  layer = lambda: {
    'norm': jnp.zeros(8),
    'experts': {name: jnp.zeros(shape) for name, shape in shapes.items()},
  }
  return {'embed': jnp.zeros((16, 8)), 'layers': [layer(), layer()]}


def _expert_label(path):
  return fragments.EXPERT if 'experts' in path else 'rda'


def test_experts_are_cut_from_each_other():
  layout = fragments.make_layout(_with_experts(), 3, _expert_label)
  cut = [p for f in layout.fragments for p in f if p.label == fragments.EXPERT]
  assert sorted({(p.start, p.shape) for p in cut}) == [(e, (1, 8, 8)) for e in range(4)]
  assert len(cut) == 2 * 2 * 4


def test_a_tree_is_its_flat_vectors_and_their_pieces():
  tree = _filled(_decoder(vocab=512))
  layout = fragments.make_layout(tree, 3, _label)
  rebuilt = fragments.by_path(jax.tree.map(jnp.zeros_like, tree))
  for p, pieces in enumerate(layout.fragments):
    flat_N = vectors.gather(layout, p, tree)
    assert flat_N.shape == (layout.size(p),) and flat_N.dtype == jnp.float32
    assert int(jnp.sum(flat_N == 0)) == layout.size(p) - layout.parameters(p)
    values = fragments.split(layout, p, flat_N)
    np.testing.assert_array_equal(fragments.join(layout, p, values), flat_N)
    stacked = fragments.split(layout, p, jnp.stack([flat_N, flat_N]))
    for piece in pieces:
      assert stacked[piece.key].shape == (2, *piece.shape)
      fragments.replace_rows(rebuilt, piece, values[piece.key])
  jax.tree.map(np.testing.assert_array_equal, rebuilt, fragments.by_path(tree))


def test_replaced_rows_keep_the_dtype_and_the_other_rows():
  leaves = {'a': jnp.ones((8, 8), jnp.bfloat16)}
  fragments.replace_rows(leaves, fragments.Piece('a', 2, 4, (2, 8), 'rda'), jnp.zeros((2, 8)))
  assert leaves['a'].dtype == jnp.bfloat16
  np.testing.assert_array_equal(jnp.any(leaves['a'] == 0, axis=1), [n in (2, 3) for n in range(8)])


def test_the_digest_tells_layouts_apart():
  tree = _decoder()
  base = fragments.make_layout(tree, 3, _label)
  assert base == fragments.make_layout(tree, 3, _label)
  assert base.digest() == fragments.make_layout(tree, 3, _label).digest()
  others = [
    fragments.make_layout(tree, 4, _label),
    fragments.make_layout(tree, 3, lambda path: 'rda'),
    fragments.make_layout(_decoder(vocab=320), 3, _label),
  ]
  assert len({base.digest(), *(other.digest() for other in others)}) == 4


@pytest.mark.parametrize(
  'tree, count, message',
  [
    ({'a': jnp.zeros(8)}, 0, 'num_fragments is 0'),
    ({}, 1, 'no leaves'),
    ({'a': jnp.zeros((0, 4))}, 1, 'empty'),
    ({'a': jnp.zeros(4, jnp.int32)}, 1, 'int32'),
    ({'a': jnp.zeros(4)}, 5, '5 balanced fragments.* use fewer, sync.fragments=4'),
    ({'a': jnp.zeros((1, 1000)), 'b': jnp.zeros(32)}, 2, '32 to 1024 values'),
  ],
)
def test_impossible_layouts_say_why(tree, count, message):
  with pytest.raises(ValueError, match=message):
    fragments.make_layout(tree, count, _label)


def test_a_foreign_tree_or_vector_is_refused():
  layout = fragments.make_layout({'a': jnp.zeros((8, 8))}, 1, _label)
  with pytest.raises(ValueError, match='no leaf a;'):
    vectors.gather(layout, 0, {'b': jnp.zeros((8, 8))})
  with pytest.raises(ValueError, match=r'have shape \(8, 4\), the layout says \(8, 8\)'):
    vectors.gather(layout, 0, {'a': jnp.zeros((8, 4))})
  with pytest.raises(ValueError, match='has 64 values, the vector 32'):
    fragments.split(layout, 0, jnp.zeros(32))
