"""Payloads of two codecs on one learner: each capture is subtracted as the syncer decodes it."""

import itertools
import types

import jax
import numpy as np
import pytest

from diloco_jax.learner import on_device
from diloco_jax.numerics import codecs, fragments

UP, SLOW = codecs.get('int8'), codecs.get('int4')


def _exchange() -> tuple[on_device.Exchange, types.SimpleNamespace, fragments.Layout]:
  draw = np.random.default_rng(0)
  params = {name: draw.standard_normal((96, 8), np.float32) for name in 'ab'}
  layout = fragments.make_layout('balanced', params, 2, lambda path: 'body')
  island = types.SimpleNamespace(
    params=jax.tree.map(jax.device_put, params),
    shardings=types.SimpleNamespace(params=jax.tree.map(lambda _: None, params)),
    replicated=None,
  )
  assembled = types.SimpleNamespace(
    layout=layout,
    codec_up=UP,
    codec_up_slow=SLOW,
    codec_down=UP,
    protocol=types.SimpleNamespace(rebases=True),
  )
  return on_device.Exchange(assembled, island).begin(), island, layout


def _train(island: types.SimpleNamespace, seed: int) -> None:
  draw = np.random.default_rng(seed)
  more = lambda leaf: leaf + np.float32(1e-2) * draw.standard_normal(leaf.shape, np.float32)
  island.params = jax.tree.map(lambda leaf: jax.device_put(more(np.asarray(leaf))), island.params)


@pytest.mark.parametrize('late', [False, True])
def test_what_a_version_does_not_contain_is_carried_on_exactly(late):
  """Also when the capture is late, so that other versions come before the one that contains it, and
  whatever the codec of the capture before was: local - anchor is then what this one lost."""
  exchange, island, layout = _exchange()
  local = lambda p: np.asarray(fragments.gather(layout, p, island.params))
  for turn, (narrow, p) in enumerate(itertools.product((False, True, True, False), (0, 1))):
    codec, n = (UP, SLOW)[narrow], layout.size(p)
    _train(island, turn)
    data, ok = exchange.encode(p, narrow)
    sent = np.frombuffer(exchange.wire(p, data), np.uint8)
    given_N = np.asarray(codec.decode(sent, n))
    assert ok and sent.size == codec.encoded_size(n)
    delta = np.asarray(UP.encode(np.float32(1e-3) * np.ones(n, np.float32))[0])
    if late:
      exchange.adopt(p, bytes(delta), whole=False, keep=True, merged=False)
    _train(island, 100 + turn)
    anchor_N, before_N = np.asarray(exchange.anchors[p]), local(p)
    exchange.adopt(p, bytes(delta), whole=False, keep=True, merged=True)
    carried_N = before_N - (anchor_N - given_N)
    np.testing.assert_array_equal(local(p), np.asarray(exchange.anchors[p]) + carried_N)
  assert len({key for key in exchange._compiled if key[0] in ('lower_encode', 'lower_adopt')}) == 4


def test_the_functions_of_both_codecs_are_compiled_ahead():
  exchange, island, layout = _exchange()
  for narrow in (False, True):
    exchange.compile_all(narrow=narrow)
  known = set(exchange._compiled)
  for p, narrow in itertools.product(range(layout.num_fragments), (False, True)):
    _train(island, p)
    exchange.encode(p, narrow)
    no_delta = bytes(UP.encoded_size(layout.size(p)))
    exchange.adopt(p, no_delta, whole=False, keep=True, merged=True)
  assert {key for key in exchange._compiled if key[0] != '_lower_gather'} <= known
