"""From a config to the functions of learner and syncer: a new rule needs only a registry entry."""

import dataclasses
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco_jax.config import build
from diloco_jax.configs import stdlib_lm
from diloco_jax.numerics import codecs, fragments, merge, outer
from diloco_jax.protocol import actions
from diloco_jax.protocol import agreement as agreement_lib
from diloco_jax.syncer import global_model
from diloco_jax.train import task as task_lib
from experiments.examples import digits_linen
from tests.numerics import vectors


def participants(count: int) -> tuple[actions.Participant, ...]:
  return tuple(
    actions.Participant(learner=f'l{m}', incarnation=1, payload_id=m, tokens=8, steps=1, limit=None)
    for m in range(count)
  )


def payloads_of(theta: global_model.Theta, *values: float) -> list[bytes]:
  """One payload for each learner, all of one value, for codec_up=float32."""
  return [np.full(theta.master(0).size, value, np.float32).tobytes() for value in values]


@pytest.fixture(name='config')
def _config():
  config = stdlib_lm.get_config('tiny')
  config.sync.fragments = config.sync.period = config.sync.learners = 2
  config.sync.overlap = 1
  return config


@pytest.mark.parametrize(
  'name, value, words',
  [
    ('codec_up', 'fp8', "sync.codec_up: 'fp8' is unknown; use one of: float32, bfloat16, int8"),
    ('codec_down', 'fp8', 'sync.codec_down: '),
    ('merge', 'mean', "sync.merge: 'mean' is unknown; use one of: avg, majority"),
    ('embedding_merge', 'rda(0.1)', "sync.embedding_merge: 'rda(0.1)' is neither"),
    ('outer', 'adam(lr=1.0)', "sync.outer: 'adam(lr=1.0)': "),
  ],
)
def test_a_wrong_spec_is_named_with_its_setting(config, name, value, words):
  setattr(config.sync, name, value)
  config.validate()
  with pytest.raises(ValueError) as caught:
    build.assemble(config)
  assert str(caught.value).startswith(words)


def test_a_config_can_choose_any_entry_of_a_registry(config, monkeypatch):
  """A toy rule, optimizer and codec, each with one entry, through an outer step of the syncer."""

  def largest(times: float) -> merge.MergeRule:
    return merge.MergeRule(
      lambda rows: rows.lengths_MxT == rows.lengths_MxT.max(axis=0),
      lambda rows, sums_T: np.full(sums_T.shape, times),
    )

  float32 = codecs.get('float32')
  monkeypatch.setitem(merge.RULES, 'largest', largest)
  monkeypatch.setitem(outer.OUTERS, 'plain', lambda rate: optax.sgd(rate))
  monkeypatch.setitem(codecs.CODECS, 'toy', float32._replace(name='toy'))
  sync = config.sync
  sync.codec_up, sync.outer = 'toy', 'plain(rate=0.5)'
  sync.merge = sync.embedding_merge = 'largest(times=2.0)'
  assembled = build.assemble(config)
  theta = global_model.Theta(assembled)

  before = theta.master(0)
  assert not theta.merge(0, participants(2), payloads_of(theta, 0.25, -1.0), ()).failed
  moved = theta.master(0) - before
  inside = moved != 0  # a fragment is padded with zeros
  np.testing.assert_allclose(moved[inside], 1.0, rtol=1e-5)
  assert inside.sum() == assembled.layout.parameters(0)


def test_an_outer_step_of_many_periods_moves_the_model_once_and_is_repeated_bit_for_bit(config):
  """Its momentum is that of as many steps of one period (docs/protocol.md)."""
  sync, mu, r = config.sync, 0.5, 5
  sync.codec_up, sync.outer = 'float32', f'nesterov(learning_rate=1.0, momentum={mu})'
  sync.merge = sync.embedding_merge = 'avg'
  assembled = build.assemble(config)

  def momentum(theta):
    return np.asarray(theta.arrays()['outer'][0][0].trace).max()

  long = tuple(
    dataclasses.replace(participant, steps=r * sync.period) for participant in participants(2)
  )
  momenta = []
  for given in (participants(2), long):
    theta, again = global_model.Theta(assembled), global_model.Theta(assembled)
    before = theta.master(0)
    done = theta.merge(0, given, payloads_of(theta, 0.5, 1.5), ())
    moved = theta.master(0) - before
    np.testing.assert_allclose(moved[moved != 0], -(1 + mu), rtol=1e-3)
    assert again.redo(0, given, (), done.gradient).digest == done.digest
    assert momentum(again) == momentum(theta)
    momenta.append(momentum(theta))
  np.testing.assert_allclose(momenta, [1, (1 - mu**r) / (1 - mu) / r], rtol=1e-3)


def test_where_the_run_goes_on_from_one_learner_the_fragment_becomes_its_value(config):
  """No outer optimizer lengthens its way or adds a momentum, and a recovery repeats that."""
  config.sync.codec_up, config.sync.codec_down = 'float32', 'float32'
  assembled = build.assemble(config)
  theta, again = global_model.Theta(assembled), global_model.Theta(assembled)
  before = theta.master(0)
  payloads = payloads_of(theta, 0.25, 1.0)
  first, other = participants(2)
  given = first, dataclasses.replace(other, apart=True)
  lengths_MxT = np.stack([theta.lengths(0, payload) for payload in payloads])
  refused = theta.screen(given, lengths_MxT, live=2).refused
  assert refused == (other.learner,)
  done = theta.merge(0, given, payloads, refused)
  moved = theta.master(0) - before
  np.testing.assert_allclose(moved[moved != 0], -0.25, rtol=1e-2)  # int8 in the log
  assert again.redo(0, given, refused, done.gradient).digest == done.digest == theta.digest(0)


@pytest.mark.parametrize('slow', [False, True])
def test_a_payload_of_a_slow_link_that_missed_a_sync_counts_less(config, slow):
  sync = config.sync
  sync.codec_up, sync.outer = 'float32', 'sgd(learning_rate=1.0)'
  sync.merge = sync.embedding_merge = 'avg'
  assembled = build.assemble(config)
  theta = global_model.Theta(assembled)
  before = theta.master(0)
  fresh, old = participants(2)
  fresh = dataclasses.replace(fresh, steps=sync.period, tokens=100 * sync.period)
  old = dataclasses.replace(old, steps=2 * sync.period, tokens=200 * sync.period, slow=slow)
  assert not theta.merge(0, (fresh, old), payloads_of(theta, 1.0, -1.0), ()).failed
  moved = theta.master(0) - before
  # By tokens the weights are 1 and 2, and one period of age makes the second 2 / 2.
  second = 1.0 if slow else 2.0
  np.testing.assert_allclose(moved[: moved.size // 2], (second - 1) / (second + 1), atol=1e-4)


@pytest.mark.parametrize('text', ['adam(learning_rate=0.01)', 'sgd(learning_rate=1.0)'])
@jax.numpy_dtype_promotion('standard')  # optax's adam multiplies a float with an int
def test_an_optimizer_of_optax_is_an_outer_optimizer_and_its_state_survives(config, text):
  config.sync.outer = text
  assembled = build.assemble(config)
  theta, again = global_model.Theta(assembled), global_model.Theta(assembled)
  rng = np.random.default_rng(0)

  def merge_drawn(model: global_model.Theta) -> int:
    delta = jnp.asarray(rng.standard_normal(assembled.layout.size(1)), jnp.float32)
    payload = np.asarray(assembled.codec_up.encode(delta)[0]).tobytes()
    done = model.merge(1, participants(1), [payload], ())
    assert not done.failed
    return done.digest

  merge_drawn(theta)
  arrays = jax.tree.map(np.array, theta.arrays())
  again.restore(jax.tree.map(jnp.asarray, arrays), theta.versions)
  rng = np.random.default_rng(1)
  first = merge_drawn(theta)
  rng = np.random.default_rng(1)
  assert merge_drawn(again) == first


@pytest.mark.parametrize(
  'task, words',
  [
    ('mlp', "task is 'mlp'; use 'decoder', or 'FILE.py:FUNCTION'"),
    ('/nowhere/mlp.py:task', '/nowhere/mlp.py is not there'),
    ('nowhere.mlp:task', "No module named 'nowhere'"),
    (f'{digits_linen.__name__}:tusk', "no attribute 'tusk'"),
    (f'{digits_linen.__name__}:task(depth=2)', "unexpected keyword argument 'depth'"),
    (f'{digits_linen.__name__}:Digits', 'not a Task'),
    (f"{digits_linen.__name__}:task(path='a:b')", "unexpected keyword argument 'path'"),
  ],
)
def test_a_wrong_task_is_named(config, task, words):
  config.task = task
  with pytest.raises(ValueError) as caught:
    build.assemble(config)
  assert words in str(caught.value)


def _own_task(monkeypatch, **fields):
  """Builds read this Task, whatever the config names."""
  given = {'init': lambda seed: {'w': jnp.ones((4, 4))}, 'loss': None, 'batches': None}
  task = task_lib.Task(tokens_per_batch=1, **{**given, **fields})
  monkeypatch.setattr(build, 'make_task', lambda config: task)


def test_parameters_may_be_computed_on_the_host(config, monkeypatch):
  init = lambda seed: {name: np.asarray(jnp.full((4, 4), 1.0 + seed)) for name in 'vw'}
  _own_task(monkeypatch, init=init)
  assembled = build.assemble(config, data=False)
  assert {piece.size for pieces in assembled.layout.fragments for piece in pieces} == {16}
  np.testing.assert_array_equal(assembled.init()['w'], 1.0 + config.train.seed)


def test_a_label_without_a_merge_rule_is_refused(config, monkeypatch):
  config.sync.fragments = 1
  _own_task(monkeypatch, label=lambda path: 'kernel')
  with pytest.raises(ValueError, match=r"the labels \['kernel'\] have no merge rule: use \['body'"):
    build.assemble(config, data=False)


@pytest.mark.parametrize(
  'folder, call',
  [
    ('runs (copy)', 'task'),
    ('runs (copy)', 'task(width=8)'),
    ('a:b', "task(note='d.py:e(f)')"),
    ('.', "task(\n  note='a:b',\n)"),
  ],
)
def test_the_path_and_the_arguments_of_a_task_may_have_any_characters(
  config, tmp_path, monkeypatch, folder, call
):
  monkeypatch.chdir(tmp_path)
  file = pathlib.Path(folder) / 'mlp.py'
  file.parent.mkdir(exist_ok=True)
  file.write_text(
    'from diloco_jax.train import task as task_lib\n'
    "def task(config, width=0, note=''):\n"
    '  return task_lib.Task(init=None, loss=None, batches=None, tokens_per_batch=1)\n'
  )
  for where in (file, file.absolute()):
    config.task = f'{where}:{call}'
    assert build.make_task(config).tokens_per_batch == 1


def test_an_edited_task_is_the_one_that_is_built(config, tmp_path):
  file = tmp_path / 'mlp.py'
  config.task = f'{file}:task'
  for tokens in (1, 2):
    file.write_text(
      'from diloco_jax.train import task as task_lib\n'
      'def task(config):\n'
      f'  return task_lib.Task(init=None, loss=None, batches=None, tokens_per_batch={tokens})\n'
    )
    os.utime(file, ns=(0, tokens))  # written in the same second
    assert build.make_task(config).tokens_per_batch == tokens


def test_each_expert_is_merged_by_itself_and_the_router_has_its_own_merge_rule():
  """Of nearly orthogonal pseudo-gradients rda keeps the length, and avg does not."""
  config = stdlib_lm.get_config('moe')
  config.sync.fragments = 4
  config.sync.outer = 'sgd(learning_rate=1.0)'
  assembled = build.assemble(config)
  labels = [{piece.key: piece.label for piece in pieces} for pieces in assembled.layout.fragments]
  experts = [key for of in labels for key, label in of.items() if label == fragments.EXPERT]
  assert len(experts) == 2 * 4 * 3  # layers, experts, tensors of each
  rng, theta = np.random.default_rng(0), global_model.Theta(assembled)
  for p, label_of in enumerate(labels):
    split = lambda flat_N: fragments.split(assembled.layout, p, flat_N)
    drawn_2xN = rng.standard_normal((2, assembled.layout.size(p)), np.float32)
    ones = jax.tree.map(jnp.ones_like, assembled.shapes)
    drawn_2xN *= np.asarray(vectors.gather(assembled.layout, p, ones))[None]  # no padding
    payloads = [np.asarray(assembled.codec_up.encode(row_N)[0]).tobytes() for row_N in drawn_2xN]
    deltas, before_N = split(drawn_2xN), theta.master(p)
    merged = theta.merge(p, participants(2), payloads, ())
    moved = split(theta.master(p) - before_N)
    units = [
      {key: delta[m] / np.linalg.norm(delta[m]) for key, delta in deltas.items()} for m in (0, 1)
    ]
    for label, cosine in merged.cosines.items():
      at = [key for key, of in label_of.items() if of == label]
      expected = np.mean([np.vdot(*(unit[key] for unit in units)) for key in at])
      assert cosine == pytest.approx(expected, abs=1e-2)
    assert merged.cosines.keys() == set(label_of.values())
    for key, label in label_of.items():
      length = np.mean([np.linalg.norm(delta) for delta in deltas[key]])
      kept = np.linalg.norm(moved[key]) / length
      if label in (fragments.EXPERT, 'body'):
        assert kept == pytest.approx(1, rel=1e-2)  # the codec's error
      elif label == 'router':
        assert kept == pytest.approx(0.5**0.5, rel=0.2)


def test_learners_with_other_data_do_not_agree(config, tmp_path):
  """The path of the text may differ, the text may not."""
  for name in ('here', 'there', 'other'):
    (tmp_path / name).mkdir()
    for number in range(200):
      text = f'{number} {"other" if name == "other" else ""} words ' * 40
      (tmp_path / name / f'{number}.txt').write_text(text)
  agreements = {}
  for name in ('here', 'there', 'other'):
    config.data.corpus = str(tmp_path / name)
    agreements[name] = build.assemble(config).agreement
  assert agreements['here'] == agreements['there']
  differences = agreement_lib.differences(agreements['here'], agreements['other'])
  assert len(differences) == 1 and differences[0].startswith('data ')


def test_learners_with_files_of_their_own_agree_on_the_tokenizer_only(config, tmp_path):
  """The syncer has no file. A learner that has none is told so, by the name of its own folder."""
  for name in ('l0', 'l1'):
    (tmp_path / name).mkdir()
    (tmp_path / name / 'notes.txt').write_text(f'what {name} has written ' * 400)
  config.data.corpus, config.data.local = str(tmp_path / '{node}'), True
  config.data.batch_size = 4
  config.validate()
  syncer, l0, l1 = (build.assemble(config.of(node)) for node in ('syncer', 'l0', 'l1'))
  assert syncer.agreement == l0.agreement == l1.agreement
  assert syncer.task.eval_batches() == ()
  read = [np.sort(node.task.batches(shard)[0]).tobytes() for shard, node in enumerate((l0, l1))]
  assert read[0] != read[1]
  with pytest.raises(ValueError, match='l2'):
    build.assemble(config.of('l2')).task.batches(2)
  config.data.shards, config.data.seed = 1, 5
  assert build.assemble(config.of('l1')).agreement == l1.agreement
  config.data.tokenizer = str(tmp_path / 'a.json')
  (tmp_path / 'a.json').write_text('{}')  # only a learner that reads a text loads it
  (difference,) = agreement_lib.differences(build.assemble(config.of('l1')).agreement, l1.agreement)
  assert difference.startswith('tokenizer ')
  config.data.tokenizer = 'bpe(size=300)'
  with pytest.raises(ValueError, match='each learner would train its own'):
    config.validate()


def test_learners_of_one_run_may_train_on_unequal_shares_of_a_batch(config):
  """They agree, count other tokens, and none of them is more than the syncer believes."""
  syncer = build.assemble(config)
  config.data.batch_rows, config.model.remat, config.model.loss_chunk = 2, 'full', 16
  config.validate()
  learner = build.assemble(config)
  assert learner.agreement == syncer.agreement
  rows, seq_len = config.data.batch_size, config.data.seq_len
  assert learner.task.tokens_per_batch == 2 * seq_len < rows * seq_len
  assert syncer.task.tokens_per_batch == rows * seq_len
  # A syncer with the flag of a learner trusts the others, too.
  for node in (syncer, learner):
    assert node.protocol.max_step_tokens == rows * seq_len
