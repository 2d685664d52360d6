"""A decoder whose layers are one stack under a scan is the unrolled one; so are its saved forms."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.config import build
from diloco_jax.configs import gemma, stdlib_lm
from diloco_jax.numerics import fragments
from diloco_jax.train import config as train_config
from diloco_jax.train import decoder
from diloco_jax.train import optimizer as optimizer_lib

LAYERS = 2


@pytest.fixture(name='model', scope='module')
def _model():
  """Layer 2 sees everything, layer 1 three tokens."""
  return train_config.ModelConfig(
    num_layers=LAYERS,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden_dim=32,
    window=3,
    global_every=2,
  )


def _tokens(length: int = 17) -> jax.Array:
  return jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, length)).astype(np.uint8))


def _unrolled(model):
  return dataclasses.replace(model, scan=False, remat='none', loss_chunk=0)


def _stack(params):
  layers = [params['layers'][number] for number in range(LAYERS)]
  return {**params, 'layers': jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}


def _drawn(model, seed: int = 0):
  return jax.tree.map(jnp.asarray, decoder.initial_params(model, seed))


def _loss_and_gradient(model):
  params = _drawn(model)
  return jax.jit(jax.value_and_grad(lambda p: decoder.loss(model, p, _tokens())))(params)


@pytest.fixture(name='expected', scope='module')
def _expected(model):
  loss, gradient = _loss_and_gradient(_unrolled(model))
  return loss, _stack(gradient)


@pytest.mark.parametrize(
  'scan, remat, chunk',
  [
    (True, 'full', 4),
    pytest.param(True, 'none', 0, marks=pytest.mark.full),
    pytest.param(True, 'dots', 8, marks=pytest.mark.full),
    pytest.param(False, 'full', 4, marks=pytest.mark.full),
  ],
)
def test_a_scan_has_the_loss_and_the_gradient_of_the_unrolled_model(
  model, expected, scan, remat, chunk
):
  model = dataclasses.replace(model, scan=scan, remat=remat, loss_chunk=chunk)
  loss, gradient = _loss_and_gradient(model)
  computed = loss, gradient if scan else _stack(gradient)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), computed, expected)


def test_a_window_hides_what_is_before_it(model):
  """Of one layer with a window of three, a byte reaches itself and the two after it; with
  `global_every` 1 all after it."""

  def reached(model) -> list[int]:
    params = _drawn(model)
    logits = jax.jit(lambda tokens: decoder.apply(model, params, tokens))
    tokens = _tokens().astype(jnp.int32)
    changed = logits(tokens) != logits(tokens.at[:, 5].add(1))
    return np.flatnonzero(jnp.any(changed, axis=(0, 2))).tolist()

  model = dataclasses.replace(model, num_layers=1, global_every=0, scan=True)
  assert reached(model) == [5, 6, 7]
  assert reached(dataclasses.replace(model, global_every=1)) == list(range(5, 17))


def test_a_program_of_a_scan_does_not_grow_with_the_depth(model):
  def length(layers: int) -> int:
    deep = dataclasses.replace(model, num_layers=layers, scan=True)
    params = decoder.initial_params(deep, seed=0)
    lowered = jax.jit(lambda p: decoder.loss(deep, p, _tokens())).lower(
      jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    )
    return lowered.as_text().count('\n')

  assert length(4) == length(12)


def test_an_update_of_stacked_layers_is_that_of_each(model):
  """Muon orthogonalises each layer by itself; scales of norms are no matrices and do not decay,
  though they have two axes now."""

  def update(model):
    task = decoder.task(model, train_config.DataConfig())
    tx = optimizer_lib.make_optimizer(train_config.OptimizerConfig(name='muon'), task)
    params = jax.tree.map(lambda leaf: leaf + 1, _drawn(model))
    update = jax.jit(lambda grads, params: tx.update(grads, tx.init(params), params, rate=1.0)[0])
    return update(_drawn(model, seed=1), params)

  stacked, each = update(dataclasses.replace(model, scan=True)), _stack(update(model))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), stacked, each)


def test_fragments_are_cut_between_stacked_layers(model):
  """The same rows as those of unrolled layers; ties of their order are broken by path."""

  def rows(scan: bool) -> list[tuple[str | None, str]]:
    config = stdlib_lm.get_config('small')
    config.model = dataclasses.replace(model, scan=scan)
    config.sync.fragments = 4
    names = []
    for pieces in build.assemble(config, data=False).layout.fragments:
      for piece in pieces:
        *_, layer, name = ['', *piece.path.split('/')]
        if piece.label == fragments.LAYER:
          assert piece.stop == piece.start + 1
          layer = str(piece.start)
        names.append((layer, name))
    return sorted(names)

  assert rows(True) == rows(False)


@pytest.mark.parametrize(
  'variant, parameters', [('1b', 0.9998e9), ('4b', 3.880e9), ('12b', 11.765e9)]
)
def test_the_shapes_of_gemma_have_its_number_of_parameters(variant, parameters):
  """arXiv 2503.19786, table 1: 302M + 698M, 675M + 3,209M and 1,012M + 10,759M, with a vocabulary
  that it rounds up and two more norms in each layer."""
  config = gemma.get_config(variant)
  config.validate()
  assembled = build.assemble(config, data=False)
  assert assembled.parameters == pytest.approx(parameters, rel=1e-3)
  assert {str(leaf.dtype) for leaf in jax.tree.leaves(assembled.shapes)} == {'bfloat16'}
