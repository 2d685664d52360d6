"""Parameters with the labels 'local' and 'frozen' stay with the learner: the syncer never reads
them, no byte of them is on the wire, and the learner's checkpoint has them."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diloco_jax
from diloco_jax.api import load_params
from diloco_jax.config import build, run_config
from diloco_jax.configs import gemma, stdlib_lm
from diloco_jax.learner import node as learner_node
from diloco_jax.numerics import codecs
from diloco_jax.process import own_model
from diloco_jax.protocol import agreement as agreement_lib
from diloco_jax.report import summary as summary_lib
from diloco_jax.syncer import global_model
from diloco_jax.train import config as train_config
from diloco_jax.train import island as island_lib
from diloco_jax.train import task as task_lib
from experiments.examples import lora_decoder

LABELS = {'head': 'local', 'codes': 'frozen', 'scale': 'frozen'}


class Unread:
  """A leaf of initial parameters that must not be read."""

  def __init__(self, leaf):
    self.shape, self.dtype, self.ndim, self.size = leaf.shape, leaf.dtype, leaf.ndim, leaf.size

  def __getitem__(self, index):
    raise AssertionError('the syncer has read a parameter that is never sent')

  __array__ = __getitem__


class Shard:
  """Sums, in even shards with the wrong sign: learners need heads of their own."""

  def __init__(self, shard, width):
    self.shard, self.width = shard, width

  def __getitem__(self, index):
    x = np.random.default_rng([self.shard, index]).standard_normal((16, self.width), np.float32)
    return {'x': x, 'y': x.sum(axis=1) * np.float32(1 if self.shard % 2 else -1)}


def task(config, width=32, unread=False):
  """A frozen base in eight bits, a body that is exchanged, a head of the learner's own."""

  def init(seed):
    draw = np.random.default_rng(seed)
    leaves = {
      'body': draw.standard_normal((width, width), np.float32) / np.float32(width),
      'codes': draw.integers(-99, 99, (width, width), np.int8),
      'head': draw.standard_normal((width, 1), np.float32) / np.float32(width),
      'scale': np.full((1, width), 1e-3, np.float32),
    }
    return {
      name: Unread(leaf) if unread and name in LABELS else leaf for name, leaf in leaves.items()
    }

  def loss(params, batch, sharding):
    base = params['codes'].astype(jnp.float32) * params['scale']
    off = (batch['x'] @ (params['body'] + base)) @ params['head'] - batch['y'][:, None]
    return jnp.mean(off**2)

  return task_lib.Task(
    init=init,
    loss=loss,
    batches=lambda shard: Shard(shard, width),
    tokens_per_batch=16,
    eval_batches=lambda: [Shard(1, width)[10**6]],
    label=lambda path: LABELS.get(path, 'body'),
  )


def make_config(call: str = 'task()') -> run_config.Config:
  config = run_config.Config(name='never_sent', task=f'{__file__}:{call}')
  config.optimizer.warmup_steps, config.optimizer.learning_rate = 2, 3e-2
  config.sync.learners = config.sync.quorum = config.sync.fragments = 2
  config.sync.period, config.sync.overlap, config.train.steps = 4, 1, 24
  config.train.eval_every = 8
  return config


def arrays_bytes(assembled: build.Assembly) -> int:
  """Of all arrays that the syncer holds."""
  like = jax.tree.leaves(global_model.Theta(assembled).like)
  return sum(leaf.size * leaf.dtype.itemsize for leaf in like)


def test_the_syncer_reads_and_holds_the_rest_alone():
  assembled = build.assemble(make_config('task(unread=True)'))
  assert assembled.never_sent == ('codes', 'head', 'scale')
  assert json.loads(assembled.agreement)['never_sent'] == 'codes, head, scale'
  pieces = [piece for pieces in assembled.layout.fragments for piece in pieces]
  assert {piece.path for piece in pieces} == {'body'}
  assert sum(assembled.payload_bytes) == codecs.get('int8').encoded_size(32 * 32)
  theta = global_model.Theta(assembled)
  theta.warm_up()
  body = build.make_task(make_config()).init(0)['body']
  assert np.array_equal(theta.params()['body'], body)
  assert [theta.params()[name] for name in assembled.never_sent] == [None] * 3
  values = [leaf.size for leaf in jax.tree.leaves(theta.arrays())]
  assert max(values) == body.size // 2  # a fragment


def test_a_rule_of_the_config_keeps_its_tensors_local_and_all_processes_must_agree():
  config = stdlib_lm.get_config('tiny')
  everything = build.assemble(config)
  config.sync.embedding_merge = 'local'
  assembled = build.assemble(config)
  assert assembled.never_sent == ('embedding',)
  size = config.model.vocab_size * config.model.embed_dim
  assert assembled.parameters == everything.parameters - size
  refused = agreement_lib.refusal(everything.agreement, assembled.agreement)
  assert "never_sent is 'absent' here, 'embedding' there" in refused

  config.sync.merge = 'local'
  with pytest.raises(ValueError, match='no leaves'):
    build.assemble(config)


def test_a_loop_of_ones_own_brings_the_rest_alone():
  params = {'body': np.ones((8, 8), 'f'), 'head': np.ones((8, 1), 'f'), 'codes': np.ones(8, 'i4')}
  model = own_model.describe(params, lambda name: LABELS.get(name, 'body'))
  assert model.shapes.keys() == model.values().keys() == model.labels.keys() == {'body'}
  config = own_model.config(24, None, 16)
  config.sync.fragments = 1
  assert not own_model.complete(model, config).never_sent
  config.sync.embedding_merge = 'local'  # it would send them all the same
  with pytest.raises(ValueError, match="sync.embedding_merge.*'local'"):
    own_model.complete(model, config)


def test_a_checkpoint_has_them_and_is_restored_on_another_mesh(tmp_path):
  """And what is frozen is neither trained nor decayed, and has no moments."""
  config = make_config()
  whole = build.make_task(config)
  split = dataclasses.replace(
    whole, partition=(('body|codes', jax.P('fsdp', None)), ('head', jax.P('fsdp', None)))
  )

  def make(mesh, seed=0):
    return island_lib.Island(
      task=split,
      optimizer=config.optimizer,
      mesh=mesh,
      total_steps=24,
      devices=jax.devices()[: mesh.num_devices],
      seed=seed,
      checkpoint_dir=str(tmp_path),
    )

  begun, island = whole.init(0), make(train_config.MeshConfig(fsdp=2))
  for clock in range(3):
    island.step(clock)
  island.save(3)()
  saved, going_on = jax.device_get(island.state), island.step(3).loss
  island.close()
  for name, before in begun.items():
    same = np.array_equal(before, saved.params[name])
    assert same == (LABELS.get(name) == 'frozen'), name
  assert {leaf.shape for leaf in jax.tree.leaves(island.moments)} == {(), (32, 32), (32, 1)}

  other = make(train_config.MeshConfig(data=1, fsdp=4), seed=1)
  assert not np.array_equal(other.params['head'], saved.params['head'])
  assert other.restore().step == 3
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(other.state), saved)
  assert other.params['head'].sharding.mesh.shape['fsdp'] == 4
  np.testing.assert_allclose(other.step(3).loss, going_on, rtol=1e-5)
  other.close()


@pytest.mark.parametrize('size', ['d512', pytest.param('12b', marks=pytest.mark.full)])
def test_lora_of_rank_8_sends_and_holds_at_most_3_percent(size):
  config = gemma.get_config('12b') if size == '12b' else stdlib_lm.get_config('small')
  if size == 'd512':
    model = config.model
    model.embed_dim, model.hidden_dim, model.num_heads, model.head_dim = 512, 2048, 8, 64
  whole = build.assemble(config, data=False)
  config.task = f'{lora_decoder.__file__}:task(rank=8)'
  assembled = build.assemble(config, data=False)
  share = assembled.parameters / whole.parameters
  assert 0.001 < share <= 0.03
  for ours, theirs in (
    (sum(assembled.payload_bytes), sum(whole.payload_bytes)),
    (sum(assembled.publish_bytes), sum(whole.publish_bytes)),
    (arrays_bytes(assembled), arrays_bytes(whole)),
  ):
    assert ours == pytest.approx(share * theirs, rel=0.01)


# --- Real runs ------------------------------------------------------------------------------------


def island_of(folder: pathlib.Path, config: run_config.Config, learner: str) -> island_lib.Island:
  """As its newest checkpoint has it."""
  devices = jax.devices()[: config.mesh.num_devices]
  island = learner_node.make_island(build.assemble(config), folder, learner, devices)
  assert island.restore() is not None
  island.close()
  return island


@pytest.mark.full
def test_a_personal_head(tmp_path):
  """Two learners whose data contradict each other share a body. Each has a head that fits its own,
  and the report has a held-out loss for each."""
  config = make_config('task(width=1024)')
  run = diloco_jax.run(config, tmp_path)
  begun = build.make_task(config).init(0)

  ends = {name: row['eval_loss_end'] for name, row in run.summary['learners'].items()}
  starts = {row['eval_loss_start'] for row in run.summary['learners'].values()}
  assert len(starts) == 1 and min(ends.values()) < min(starts) < max(ends.values())
  assert run.summary['eval_loss_end'] is None and not run.evaluations.loss.size
  text = summary_lib.text(run.summary, tmp_path)
  assert all(f'{name}  {starts.copy().pop():.3f} before, {loss:.3f} after' in text
             for name, loss in ends.items())  # fmt: skip

  islands = [island_of(tmp_path, config, name) for name in ends]
  heads = [np.asarray(island.params['head']) for island in islands]
  assert np.vdot(heads[0] - begun['head'], heads[1] - begun['head']) < 0
  for island in islands:
    np.testing.assert_array_equal(island.params['codes'], begun['codes'])

  named = diloco_jax.load_params(tmp_path)
  assert named['head'] is None and named['body'].shape == (1024, 1024)
  np.testing.assert_array_equal(named['codes'], begun['codes'])
  with pytest.raises(ValueError, match=r'1 parameters \(head\) of the run in .* never leave'):
    load_params.require_all(load_params.load_params(tmp_path), tmp_path)
