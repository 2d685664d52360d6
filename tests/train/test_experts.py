"""A Mixture of Experts computes what its equations say, spreads the tokens, and learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.train import decoder, experts

B, L, D, F, E = 2, 5, 4, 6, 3


@pytest.fixture(name='model')
def _model(model):
  model.num_experts, model.experts_per_token, model.hidden_dim = 4, 2, 16
  model.num_layers = 1
  return model


def _tokens(batch: int = 2, length: int = 13) -> jax.Array:
  return jnp.asarray(np.random.default_rng(0).integers(0, 256, (batch, length)), jnp.int32)


def _drawn(model):
  return jax.tree.map(jnp.asarray, decoder.initial_params(model, seed=0))


def _every_expert_for_every_token(x, weights, chosen, gate, up, down):
  hidden_BxLxExF = jax.nn.gelu(jnp.einsum('bld,edf->blef', x, gate))
  hidden_BxLxExF = hidden_BxLxExF * jnp.einsum('bld,edf->blef', x, up)
  y_BxLxExD = jnp.einsum('blef,efd->bled', hidden_BxLxExF, down)
  weights_BxLxE = jnp.einsum('blc,blce->ble', weights, jax.nn.one_hot(chosen, gate.shape[0]))
  return jnp.einsum('bled,ble->bld', y_BxLxExD, weights_BxLxE)


@pytest.mark.parametrize('unused', [None, 0, E - 1])
def test_the_rows_of_an_expert_are_multiplied_by_its_matrices(unused):
  """Values and gradients, compared with all experts computed for all tokens."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
  used = [e for e in range(E) if e != unused]
  chosen_BxLx2 = jnp.asarray([[rng.permutation(used)[:2] for _ in range(L)] for _ in range(B)])
  x, weights, gate, up, down = (
    draw(*shape) for shape in ((B, L, D), (B, L, 2), (E, D, F), (E, D, F), (E, F, D))
  )
  direction_BxLxD = draw(B, L, D)

  def value_and_gradients(mix):
    y_BxLxD, back = jax.vjp(
      lambda x, w, *m: mix(x, w, chosen_BxLx2, *m), x, weights, gate, up, down
    )
    return y_BxLxD, *back(direction_BxLxD)

  mixed = jax.jit(lambda: value_and_gradients(experts.mix))()
  expected = jax.jit(lambda: value_and_gradients(_every_expert_for_every_token))()
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), mixed, expected)


def test_balance_has_its_minimum_where_all_experts_are_used_alike():
  """Among routers that are sure of their choices."""
  certain = lambda chosen: experts.balance(jax.nn.one_hot(chosen, 4)[None], chosen[None, :, None])
  assert float(certain(jnp.arange(40) % 4)) == pytest.approx(1)
  assert float(certain(jnp.zeros(40, jnp.int32))) == pytest.approx(4)
  rng = np.random.default_rng(0)
  for _ in range(20):
    chosen_40 = jnp.asarray(rng.choice(4, 40, p=rng.dirichlet(np.ones(4))), jnp.int32)
    counts_4 = np.bincount(chosen_40, minlength=4)
    assert float(certain(chosen_40)) == pytest.approx(4 * np.sum((counts_4 / 40) ** 2), rel=1e-5)
    assert float(certain(chosen_40)) >= 1


@pytest.mark.parametrize('choices', [1, pytest.param(2, marks=pytest.mark.full)])
def test_router_and_experts_get_gradients_from_the_text_alone(model, choices, monkeypatch):
  monkeypatch.setattr(decoder, 'BALANCE_LOSS', 0.0)
  model.experts_per_token = choices
  params = _drawn(model)
  grads, _ = jax.jit(jax.grad(lambda p: decoder.loss(model, p, _tokens(4)), has_aux=True))(params)
  for path, grad in jax.tree_util.tree_leaves_with_path(grads):
    assert grad.dtype == jnp.float32 and float(jnp.max(jnp.abs(grad))) > 0, path
  for layer in grads['layers'].values():
    for name in ('gate', 'up', 'down'):
      assert np.all(np.max(np.abs(layer['experts'][name]), axis=(1, 2)) > 0)


def test_the_balance_loss_is_in_the_gradient_but_not_in_the_loss(model, monkeypatch):
  params = _drawn(model)

  def computed(weight):
    monkeypatch.setattr(decoder, 'BALANCE_LOSS', weight)
    loss = lambda p: decoder.loss(model, p, _tokens())[0]
    return jax.jit(jax.value_and_grad(loss))(params)

  (plain, plain_grads), (balanced, balanced_grads) = computed(0.0), computed(1.0)
  assert float(plain) == float(balanced)
  routers = [grads['layers'][0]['experts']['router'] for grads in (plain_grads, balanced_grads)]
  assert not np.allclose(*routers, atol=1e-4)


def test_a_token_changes_nothing_before_it(model):
  """Neither by attention nor by taking the place of another token at an expert."""
  params, tokens = _drawn(model), _tokens()
  apply = jax.jit(lambda p, t: decoder.apply(model, p, t))
  before, after = apply(params, tokens), apply(params, tokens.at[:, 7].add(1))
  np.testing.assert_allclose(before[:, :7], after[:, :7], atol=1e-5)
  assert not np.allclose(before[:, 7:], after[:, 7:], atol=1e-2)


def test_a_small_one_learns_and_reports_how_it_routes(make_island, model, data, text):
  data.corpus = str(text)
  island = make_island(decoder.task(model, data))
  before = island.evaluate()
  first, *_, last = [island.step(clock).metrics for clock in range(30)]
  assert first['router_entropy'] > 0.99 > last['router_entropy'] > 0
  assert 0.5 < last['load_entropy'] <= 1
  assert island.evaluate() < before - 2.0
