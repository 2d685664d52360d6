"""Joining with nothing but the address of the syncer, and with the whole state of a loop."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import diloco_jax
from diloco_jax.api import admission as admission_lib
from diloco_jax.node import loop
from diloco_jax.protocol import events, ids, messages
from diloco_jax.storage import arrays
from diloco_jax.storage import files as files_lib
from diloco_jax.transport import addresses
from tests.certs import mint

_DEADLINE_S = 240.0
_TX = optax.adamw(1e-2)


def _sync(**settings) -> diloco_jax.SyncConfig:
  settings = {'fragments': 1, 'period': 2, 'overlap': 1} | settings
  return diloco_jax.SyncConfig(learners=1, **settings)


def _ones(value: float = 1.0) -> dict[str, jax.Array]:
  return {'w': jnp.full((8, 8), value)}


def _batch(shard: int, index: int) -> np.ndarray:
  return np.random.default_rng([shard, index]).standard_normal((16, 8), np.float32)


# --- Which learner it is --------------------------------------------------------------------------


@pytest.fixture(name='choose')
def _choose(tmp_path):
  """Chooses an id in a folder, for a process that lives to the end of the test or of `live`."""
  with contextlib.ExitStack() as test:
    yield lambda live=test, access=addresses.LOCAL: admission_lib.choose(tmp_path, access, live)


def test_a_process_that_returns_is_the_same_learner_and_live_ones_are_others(choose):
  with contextlib.ExitStack() as first:
    names = [choose(first), choose(first)]
    names.append(choose())  # still lives below
  assert len(set(names)) == 3 and all(map(ids.is_learner, names))
  again = [choose(), choose()]
  assert sorted(again) == sorted(names[:2])
  assert choose() not in names


@pytest.mark.parametrize('host', ['Alpha.example.org', '_', 'syncer', 'x' * 300, 'Rechner-Ä'])
def test_an_id_is_one_whatever_the_host_is_called(choose, monkeypatch, host: str):
  monkeypatch.setattr(files_lib, 'host_name', lambda: host)
  assert ids.is_learner(choose())


def test_other_files_beside_the_names_are_no_learners(choose, tmp_path):
  (tmp_path / admission_lib.NAMES).mkdir()
  (tmp_path / admission_lib.NAMES / 'Notes.txt').write_text('x')
  assert choose() != 'Notes.txt' and ids.is_learner(choose())


def test_a_certificate_says_which_learner_it_is(choose, tmp_path):
  folder = mint.owner(tmp_path / 'certs').folder
  assert choose(access=addresses.Access(tls=folder / 'l1')) == 'l1'
  with pytest.raises(ValueError, match='there is no such folder'):
    choose(access=addresses.Access(tls=folder / 'l7'))


def test_a_wait_in_vain_ends_with_the_refusal_and_not_with_the_end_of_its_session():
  event_queue = loop.EventQueue()
  waits = admission_lib.Admission('l0', event_queue, 3600.0)
  post = waits.begin(event_queue.post)
  refused = messages.Refused(code='ID_IN_USE', text='l0 is in use by pod-7 pid 1', retry_ns=1)
  post(events.Received(session=2, message=refused))
  post(events.Disconnected(session=2, reason='the syncer has closed the session'))
  waits.cancel()
  waits._give_up()
  with pytest.raises(TimeoutError, match='within 3600 s: l0 is in use by pod-7 pid 1'):
    while True:
      event_queue.take(0.0)


def test_join_needs_nothing_but_the_address(tmp_path, capfd):
  """Two loops after each other: the second one is another learner without a folder, and the same
  one with it."""
  seen = []
  with diloco_jax.run_syncer(total_steps=1_000_000, sync=_sync()) as server:
    for workdir in (None, None, tmp_path, tmp_path):
      with diloco_jax.join(_ones(), syncer=server.address, workdir=workdir) as peer:
        params = peer.params
        for _, _ in zip(range(4), peer.steps()):
          params = peer.sync(params, tokens=1)
        assert peer.total_steps == 1_000_000
      seen.append(peer.learner)
  assert len(set(seen)) == 3 and seen[2] == seen[3]
  assert f'[{seen[0]}] waits for a syncer at ' in capfd.readouterr().out


# --- The first step -------------------------------------------------------------------------------


def test_a_first_step_on_the_parameters_that_join_was_given_does_not_count():
  """A loop joins a run that has other values than its own, and does not ask for them."""
  with diloco_jax.run_syncer(_ones(5.0), total_steps=12, sync=_sync()) as server:
    with diloco_jax.join(_ones(1.0), syncer=server.address) as peer:
      params, clocks, given = _ones(1.0), [], []
      for clock, batch in peer.steps(lambda shard, index: (shard, index)):
        clocks.append(clock)
        given.append(batch)
        params = jax.tree.map(lambda leaf: leaf - 0.125, params)
        params = peer.sync(params, tokens=1)
        if len(clocks) == 1:
          np.testing.assert_array_equal(params['w'], _ones(5.0)['w'])
    assert clocks[:3] == [0, 0, 1] and given[0] == given[1] != given[2]
    merged = server.wait(_DEADLINE_S)
  assert float(merged['w'].max()) < 5.0


def test_a_first_step_that_consumes_what_join_was_given_is_explained():
  step = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf - 1, params), donate_argnums=0)
  moments = {'m': jnp.ones(3)}
  with diloco_jax.run_syncer(_ones(), total_steps=12, sync=_sync()) as server:
    with pytest.raises(RuntimeError, match='donate_argnums.*begin with `params = peer.params`'):
      with diloco_jax.join(_ones(), syncer=server.address, opt_state=moments) as peer:
        next(peer.steps())
        peer.sync(_ones(), tokens=1, opt_state=step(moments))


def test_any_iterator_of_batches_goes_beside_the_steps():
  batches = (np.full(4, index) for index in range(100))
  with diloco_jax.run_syncer(_ones(), total_steps=8, sync=_sync()) as server:
    with diloco_jax.join(_ones(), syncer=server.address) as peer:
      params, seen = peer.params, []
      for clock, batch in zip(peer.steps(), batches):
        params = peer.sync(params, tokens=batch.size)
        seen.append((clock, int(batch[0])))
  assert seen[:3] == [(0, 0), (1, 1), (2, 2)] and seen[-1][0] >= 7


# --- Whole states ---------------------------------------------------------------------------------


class _Counted(train_state.TrainState):
  batch_stats: dict


@jax.jit
def _train(state, batch):
  def loss_of(params):
    return jnp.square(batch @ params['w'] - batch).mean()

  with jax.numpy_dtype_promotion('standard'):
    loss, grads = jax.value_and_grad(loss_of)(state.params)
    state = state.apply_gradients(grads=grads)
  if isinstance(state, _Counted):
    state = state.replace(batch_stats={'mean': batch.mean(axis=0)})
  return state, loss


def _plain() -> train_state.TrainState:
  return train_state.TrainState.create(apply_fn=None, params=_ones(0.1), tx=_TX)


def _counted() -> _Counted:
  counted = {'mean': jnp.zeros(8)}
  return _Counted.create(apply_fn=None, params=_ones(0.1), tx=_TX, batch_stats=counted)


@pytest.mark.parametrize(
  'make, names',
  [
    pytest.param(_plain, {'w'}, marks=pytest.mark.long),
    (_counted, {'params/w', 'batch_stats/mean'}),
  ],
)
def test_a_train_state_is_joined_as_a_whole(make, names, tmp_path, capfd):
  """Its parameters and statistics are the run's, and a second process has its optimizer's state."""
  in_turn = _sync(overlap=0)  # or 30 quick steps may end before one of them is merged
  with diloco_jax.run_syncer(total_steps=1_000_000, sync=in_turn) as server:
    losses = []
    for steps in (30, 2):
      state = make()
      with diloco_jax.join(state, syncer=server.address, workdir=tmp_path) as peer:
        for _, (_clock, batch) in zip(range(steps), peer.steps(_batch)):
          state, loss = _train(state, batch)
          state = peer.sync(state, tokens=16, metrics={'loss': loss})
          losses.append(float(loss))
      assert type(state) is type(make()) and state.step == state.opt_state[0].count
  assert int(state.step) == 29 + 1, 'the first step of each process does not count'
  assert max(losses[29], losses[31]) < 0.9 * losses[0]
  assert set(peer._arrays.params) == names
  said = capfd.readouterr().out
  assert re.search('continues with the moments of its checkpoint at step', said)


class _Model(nnx.Module):
  def __init__(self):
    rngs = nnx.Rngs(0)
    self.hidden = nnx.LoRALinear(8, 8, lora_rank=2, rngs=rngs)
    self.norm = nnx.BatchNorm(8, rngs=rngs)

  def __call__(self, x):
    return self.norm(self.hidden(x))


@nnx.jit
def _fit(model, optimizer, batch):
  def loss_of(model):
    return jnp.square(model(batch) - 1).mean()

  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    loss, grads = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, optimizer.wrt))(model)
    optimizer.update(model, grads)
  return loss


@pytest.mark.parametrize('kind, exchanged', [(nnx.Param, 8), (nnx.LoRAParam, 4)])
def test_an_nnx_optimizer_is_joined_with_its_model_and_both_stay_the_loops(
  kind, exchanged, tmp_path
):
  """What the optimizer does not train never leaves the learner. What is adopted as the loop is left
  is in the model, too."""
  with diloco_jax.run_syncer(total_steps=1_000_000, sync=_sync(fragments=2)) as server:
    for process in range(2):
      model = _Model()
      optimizer = nnx.Optimizer(model, _TX, wrt=kind)
      kernel = model.hidden.kernel
      with diloco_jax.join((model, optimizer), syncer=server.address, workdir=tmp_path) as peer:
        assert int(optimizer.step[...]) == 10 * process, 'as it was saved'
        for _, (_clock, batch) in zip(range(10), peer.steps(_batch)):
          loss = _fit(model, optimizer, batch)
          given = peer.sync((model, optimizer), tokens=16, metrics={'loss': loss})
        assert given == (model, optimizer) and model.hidden.kernel is kernel
        assert len(peer._arrays.params) == exchanged
      ends = arrays.by_name(nnx.state(model))
      for name, leaf in peer._arrays.params.items():
        np.testing.assert_array_equal(ends[name], leaf)
  assert int(optimizer.step[...]) == 20
  assert float(jnp.abs(model.norm.mean[...]).max()) > 0


class _Classifier(nnx.Module):
  def __init__(self):
    rngs = nnx.Rngs(0)
    self.hidden, self.norm = nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
    self.dropout, self.head = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

  def __call__(self, x):
    return self.head(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


@nnx.jit
def _classify(model, optimizer, batch):
  def loss_of(model):
    logits = model(batch)
    labels = batch.argmax(axis=1) % 4
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
  return loss


def test_a_loop_that_is_left_and_begun_again_makes_the_bits_of_one_that_was_not(tmp_path, capfd):
  """In lock step, left after a sync. Dropout has a stream of keys, the optimizer a schedule; the
  trained model goes back into the loop's own objects."""
  lossless = {'codec_up': 'float32', 'codec_down': 'float32', 'outer': 'sgd(learning_rate=1.0)'}
  sync = _sync(overlap=0, adopt='overwrite', merge='avg', embedding_merge='avg', **lossless)
  tx = optax.adamw(optax.cosine_decay_schedule(0.1, 8))

  def make():
    model = _Classifier()
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

  def run(folder, stops):
    losses = []
    with diloco_jax.run_syncer(total_steps=8, sync=sync, workdir=folder / 'run') as server:
      where = {'syncer': server.address, 'learner': 'l0', 'workdir': folder / 'l0'}
      for stop in stops:
        model, optimizer = make()
        with diloco_jax.join((model, optimizer), **where) as peer:
          for _, batch in peer.steps(_batch):
            losses.append(float(_classify(model, optimizer, batch)))
            peer.sync((model, optimizer), tokens=16)
            if peer.clock == stop:
              break
      server.wait(_DEADLINE_S)
    model, optimizer = diloco_jax.load_params(folder / 'run', into=make())
    model.eval()
    with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
      return losses, np.asarray(model(_batch(9, 9)))

  losses, logits = run(tmp_path / 'whole', [None])
  assert 'has a schedule by its own count of updates' in capfd.readouterr().out
  again, others = run(tmp_path / 'left', [4, None])
  assert losses == again and np.array_equal(logits, others)
  with pytest.raises(ValueError, match='left/run: w is absent, in `into`'):
    diloco_jax.load_params(tmp_path / 'left/run', into=_ones())


class _Averaged(train_state.TrainState):
  average: dict
  key: jax.Array
  name: object


def test_all_else_of_a_state_is_saved_and_what_is_not_is_named(tmp_path, capfd):
  first = jax.random.key(0, impl='rbg')
  make = lambda: _Averaged.create(
    apply_fn=None, params=_ones(), tx=_TX, average=_ones(), key=first, name='run 7'
  )
  with diloco_jax.run_syncer(total_steps=1_000_000, sync=_sync()) as server:
    for process in range(2):
      with diloco_jax.join(make(), syncer=server.address, workdir=tmp_path) as peer:
        state = peer.params
        assert type(state.step) is int and state.step == 5 * process
        assert float(state.average['w'][0, 0]) == 1 + 5 * process
        with pytest.raises(ValueError, match='give it the whole state, as join got it'):
          peer.sync(state.params, tokens=1)
        for _, _ in zip(range(5), peer.steps()):
          average = {'w': state.average['w'] + 1}
          key = jax.random.split(state.key)[0]
          state = peer.sync(state.replace(step=state.step + 1, average=average, key=key), tokens=1)
      assert float(state.params['w'][0, 0]) == float(state.params['w'][0, 0]), 'still readable'
      assert state.name == 'run 7' and type(state.step) is int
  expected = first
  for _ in range(10):
    expected = jax.random.split(expected)[0]
  assert jnp.array_equal(jax.random.key_data(state.key), jax.random.key_data(expected))
  assert '1 leaves of the state are neither exchanged nor saved: name' in capfd.readouterr().out


@pytest.mark.parametrize(
  'pair',
  [lambda model, tx: tx, lambda model, tx: (tx, model), lambda model, tx: (model, model, tx)],
  ids=['the optimizer alone', 'in the other order', 'two models'],
)
def test_other_parts_of_an_nnx_loop_are_refused(pair):
  model = _Model()
  given = pair(model, nnx.Optimizer(model, _TX, wrt=nnx.Param))
  with pytest.raises(ValueError, match=re.escape('give (model, optimizer)')):
    with diloco_jax.join(given, syncer='unix:/nowhere'):
      pass


def test_a_state_that_has_its_optimizers_state_takes_no_other():
  with pytest.raises(ValueError, match='opt_state is part of the state'):
    with diloco_jax.join(_plain(), syncer='unix:/nowhere', opt_state={}):
      pass
