"""Layouts: every row of every leaf exactly once, evenly, and the same on every learner."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from diloco_jax.numerics import fragments

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


def test_scatter_of_gather_is_the_identity():
  tree = _filled(_decoder(vocab=512))
  layout = fragments.make_layout(tree, 3, _label)
  rebuilt = jax.tree.map(jnp.zeros_like, tree)
  for p in range(3):
    flat_N = jax.jit(fragments.gather, static_argnums=(0, 1))(layout, p, tree)
    assert flat_N.shape == (layout.size(p),) and flat_N.dtype == jnp.float32
    assert int(jnp.sum(flat_N == 0)) == layout.size(p) - layout.parameters(p)
    rebuilt = jax.jit(fragments.scatter, static_argnums=(0, 1))(layout, p, rebuilt, flat_N)
  jax.tree.map(np.testing.assert_array_equal, rebuilt, tree)


def test_scatter_touches_only_its_fragment_and_keeps_dtypes():
  tree = _filled({'a': jnp.zeros((8, 8)), 'b': jnp.zeros((8, 8))}, jnp.bfloat16)
  layout = fragments.make_layout(tree, 2, _label)
  new = fragments.scatter(layout, 0, tree, jnp.zeros(layout.size(0)))
  assert new['a'].dtype == jnp.bfloat16 and not new['a'].any()
  np.testing.assert_array_equal(new['b'], tree['b'])


def test_join_of_split_is_the_identity_and_keys_are_the_labels_keys():
  tree = _filled(_decoder(vocab=2048))
  layout = fragments.make_layout(tree, 2, _label)
  for p in range(2):
    flat_N = fragments.gather(layout, p, tree)
    pieces = fragments.split(layout, p, flat_N)
    assert pieces.keys() == fragments.labels(layout, p).keys()
    np.testing.assert_array_equal(fragments.join(layout, p, pieces), flat_N)
    stacked = fragments.split(layout, p, jnp.stack([flat_N, flat_N]))
    assert all(stacked[key].shape == (2, *piece.shape) for key, piece in pieces.items())
  union = {k for p in range(2) for k in fragments.labels(layout, p)}
  assert union == fragments.labels(layout).keys()


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


def test_gather_and_scatter_of_sharded_parameters():
  mesh = jax.make_mesh((2, 4), ('x', 'y'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  tree = _filled(_decoder(vocab=512))
  specs = {1: jax.P(), 2: jax.P('x', 'y'), 3: jax.P('x')}
  shard = lambda leaf: jax.device_put(
    leaf, jax.sharding.NamedSharding(mesh, specs.get(leaf.ndim, jax.P()))
  )
  sharded = jax.tree.map(shard, tree)
  layout = fragments.make_layout(tree, 2, _label)
  for p in range(2):
    flat_N = jax.jit(fragments.gather, static_argnums=(0, 1))(layout, p, sharded)
    np.testing.assert_array_equal(flat_N, fragments.gather(layout, p, tree))
    new = jax.jit(fragments.scatter, static_argnums=(0, 1))(layout, p, sharded, -flat_N)
    jax.tree.map(np.testing.assert_array_equal, new, fragments.scatter(layout, p, tree, -flat_N))


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
    fragments.gather(layout, 0, {'b': jnp.zeros((8, 8))})
  with pytest.raises(ValueError, match=r'have shape \(8, 4\), the layout says \(8, 8\)'):
    fragments.scatter(layout, 0, {'a': jnp.zeros((8, 4))}, jnp.zeros(64))
  with pytest.raises(ValueError, match='has 64 values, the vector 32'):
    fragments.split(layout, 0, jnp.zeros(32))
