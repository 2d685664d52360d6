"""Fragments that are split over the devices of an island equal those of one device bit for bit: in
their bytes, their digests, and what is adopted."""

import itertools
import types

import jax
import numpy as np
import pytest

from diloco_jax.learner import on_device, split
from diloco_jax.node import payload as payload_lib
from diloco_jax.numerics import codecs, fragments
from diloco_jax.numerics import digest as digest_lib
from diloco_jax.train import config as train_config
from diloco_jax.train import decoder
from diloco_jax.train import mesh as mesh_lib
from diloco_jax.transport import payloads as payloads_lib
from tests.numerics import vectors

MESHES = (1, 8, 1), (2, 4, 1), (2, 2, 2)
CELLS = list(itertools.product(MESHES, codecs.CODECS))
SAMPLED = [((1, 8, 1), 'int8'), ((2, 2, 2), 'int4')]
P = jax.sharding.PartitionSpec


def _params() -> decoder.Params:
  """A decoder of one layer, without those of its tensors that are like others."""
  params = decoder.initial_params(
    train_config.ModelConfig(num_layers=1, embed_dim=128, num_heads=4, head_dim=24, hidden_dim=256),
    0,
  )
  params = jax.tree.map(np.asarray, params)
  kept = ('query', 'query_norm', 'out', 'gate', 'down', 'mlp_norm')
  return params | {'layers': [{name: params['layers'][0][name] for name in kept}]}


def _exchange(
  params, shardings, replicated, codec: str, layout: fragments.Layout, in_process: bool = False
) -> tuple[on_device.Exchange, types.SimpleNamespace]:
  island = types.SimpleNamespace(
    params=jax.tree.map(split.put, params, shardings),
    shardings=types.SimpleNamespace(params=shardings),
    replicated=replicated,
  )
  assembled = types.SimpleNamespace(
    layout=layout,
    codec_up=codecs.get(codec),
    codec_down=codecs.get(codec),
    protocol=types.SimpleNamespace(rebases=True),
  )
  return on_device.Exchange(assembled, island, in_process=in_process).begin(), island


def _on(mesh: jax.sharding.Mesh, params, codec: str, layout: fragments.Layout, **more):
  shardings = mesh_lib.tree_shardings(mesh, params, decoder.PARTITION)
  return _exchange(params, shardings, mesh_lib.replicated(mesh), codec, layout, **more)


def _same(tree, expected) -> None:
  for (path, a), b in zip(jax.tree.leaves_with_path(tree), jax.tree.leaves(expected), strict=True):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b), jax.tree_util.keystr(path))


def _trained(params, seed: int):
  draw = np.random.default_rng(seed)
  return jax.tree.map(
    lambda leaf: (leaf + 1e-3 * draw.standard_normal(leaf.shape)).astype(leaf.dtype), params
  )


def _sent(exchange: on_device.Exchange, p: int, data: jax.Array) -> bytes:
  """A payload; within a process it is an array."""
  payload = exchange.wire(p, data)
  assert payload_lib.is_on_devices(payload) != exchange._carrier.from_host
  return bytes(payloads_lib.to_host(payload))


def _given(exchange: on_device.Exchange, payload: bytes, dtype) -> payload_lib.Payload:
  """As it reaches the island, from a device of the syncer."""
  if exchange._carrier.from_host:
    return payload
  return jax.device_put(np.frombuffer(payload, dtype), jax.devices()[-1])


def _require_equal(params, *rigs) -> None:
  """Of each (exchange, island): trains, encodes, adopts and rewinds it as the others."""
  (first, expected), *others = rigs
  layout = first._layout

  def digests_are_equal() -> bool:
    return all(exchange.digests() == first.digests() for exchange, _ in others)

  def params_are_equal() -> None:
    for _, island in others:
      _same(island.params, expected.params)

  assert digests_are_equal()
  trained = _trained(params, 1)
  for _, island in rigs:
    island.params = jax.tree.map(split.put, trained, island.shardings.params)
  for p in range(layout.num_fragments):
    payloads, digests = [], set()
    for exchange, _ in rigs:
      data, ok = exchange.encode(p)
      assert ok
      payloads.append(_sent(exchange, p, data))
      given = _given(exchange, payloads[0], np.uint8)
      digests.add(digest_lib.as_int(exchange.adopt(p, given, False, p != 1, p % 2 == 0)))
    assert len(set(payloads)) == len(digests) == 1, p
  params_are_equal()
  whole = np.random.default_rng(2).standard_normal(layout.size(0), np.float32).tobytes()
  for keep in (False, True):
    digests = {
      digest_lib.as_int(exchange.adopt(0, _given(exchange, whole, np.float32), True, keep, False))
      for exchange, _ in rigs
    }
    assert digests == {first.digests()[0]}
  assert digests_are_equal()
  params_are_equal()
  for exchange, _ in rigs:
    exchange.rewind()
  params_are_equal()


@pytest.mark.parametrize('devices', [pytest.param(1, marks=pytest.mark.long), 8])
def test_small_neighbours_are_one_piece_of_the_programs_and_no_bit_changes(devices, monkeypatch):
  """A program compiled for a tenth of a second for each leaf: 2,000 of 8 values never joined."""
  draw, shapes = np.random.default_rng(0), [(8,), (3, 5), (), (64,)]
  some = [draw.standard_normal(shapes[n % 4]).astype(np.float32) for n in range(8)]
  halves = [leaf.astype(jax.numpy.bfloat16) for leaf in some[:4]]
  params = {'a': some, 'b': halves, 'c': draw.standard_normal((256, 128), np.float32)}
  layout = fragments.make_layout(params, 2, lambda path: 'avg')
  at = mesh_lib.replicated(jax.make_mesh((devices,), ('d',), devices=jax.devices()[:devices]))
  shardings = jax.tree.map(lambda _: at, params)
  rigs = []
  for small in (fragments.SMALL, 0):
    monkeypatch.setattr(fragments, 'SMALL', small)
    rigs.append(_exchange(params, shardings, at, 'int8', layout))
  few, many = (sum(len(kind.pieces) for kind in exchange.kinds) for exchange, _ in rigs)
  assert few <= 6 and many == sum(map(len, layout.fragments)) >= 14
  _require_equal(params, *rigs)
  assert {leaf.sharding for leaf in jax.tree.leaves(rigs[0][1].params)} == {at}


@pytest.mark.parametrize(
  'shape, codec',
  [pytest.param(*cell, marks=[] if cell in SAMPLED else pytest.mark.full) for cell in CELLS],
)
def test_of_eight_devices_as_of_one(shape, codec):
  """Within a process the payloads of several devices are arrays in the order of the wire."""
  params = _params()
  layout = fragments.make_layout(params, 2, decoder.label)
  config = train_config.MeshConfig(**dict(zip(mesh_lib.AXES, shape)))
  ones = mesh_lib.make_mesh(train_config.MeshConfig(), jax.devices()[:1])
  mesh = mesh_lib.make_mesh(config, jax.devices())
  single, many = (_on(at, params, codec, layout) for at in (ones, mesh))
  rigs = [single, many]
  if shape == MESHES[-1]:
    rigs.append(_on(mesh, params, codec, layout, in_process=True))
  _require_equal(params, *rigs)
  single_bytes, many_bytes = (
    sum(anchor.addressable_shards[0].data.nbytes for anchor in exchange.anchors)
    for exchange, _ in (single, many)
  )
  assert many_bytes == pytest.approx(single_bytes / (shape[1] * shape[2]), rel=0.02)


def test_of_a_mesh_of_the_users_own_as_of_one_device():
  """With other names and explicit axes, and a leaf whose rows are split and cut."""
  mesh = jax.make_mesh((2, 2), ('x', 'y'), devices=jax.devices()[:4])
  assert set(mesh.axis_types) == {jax.sharding.AxisType.Explicit}
  specs = {'cut': P(None, 'y'), 'moved': P('x', 'y'), 'rows': P('x'), 'whole': P()}
  leaf = lambda *shape: np.random.default_rng(3).standard_normal(shape, np.float32)
  params = {'cut': leaf(128, 64), 'moved': leaf(64, 24), 'rows': leaf(96, 8), 'whole': leaf(5)}
  layout = fragments.make_layout(params, 3, lambda path: 'body')
  at = {name: jax.sharding.NamedSharding(mesh, spec) for name, spec in specs.items()}
  many = _exchange(params, at, at['whole'], 'int8', layout)
  single = _exchange(params, jax.tree.map(lambda _: None, params), None, 'int8', layout)
  _require_equal(params, single, many)
  assert {name: leaf.sharding for name, leaf in many[1].params.items()} == at
  assert {spec for kind in many[0].kinds for spec in kind.specs} == {
    P(None, 'y'),
    P(('x', 'y'), None),
    P('x', None),
    P(),
  }


def _compiled(depth: int) -> list[str]:
  """The names of the functions compiled for a stack of so many layers, one for each fragment."""
  draw, codec = np.random.default_rng(depth), codecs.get('int8')
  leaf = lambda *shape: draw.standard_normal((depth, *shape), np.float32)
  params = {'layers': {'a': leaf(8, 32), 'b': leaf(32)}}
  layout = fragments.make_layout(params, depth, lambda path: fragments.EXPERT)
  at = jax.tree.map(lambda _: None, params)
  exchange, island = _exchange(params, at, None, codec.name, layout)
  exchange.compile_all()
  trained = _trained(params, 1)
  island.params = jax.tree.map(jax.device_put, trained)
  for p in range(depth):
    anchor_N, moved_N = (vectors.gather(layout, p, tree) for tree in (params, trained))
    data, _ = exchange.encode(p)
    sent = exchange.wire(p, data)
    assert bytes(sent) == np.asarray(codec.encode(anchor_N - moved_N)[0]).tobytes()
    exchange.adopt(p, sent, whole=False, keep=False, merged=False)
    adopted_N = vectors.gather(layout, p, island.params)
    _same(adopted_N, anchor_N + codec.decode(np.asarray(data), anchor_N.size))
  return sorted(name for name, *_ in exchange._programs.compiled)


def test_of_a_deeper_stack_no_more_functions_are_compiled():
  names = _compiled(2)
  assert names == _compiled(6)
  assert len(names) == len(set(names))
