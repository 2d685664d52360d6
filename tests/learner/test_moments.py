"""A process without a checkpoint takes the moments of another's, or says that they are fresh."""

import contextlib
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.config import build
from diloco_jax.configs import stdlib_lm
from diloco_jax.learner import moments as moments_lib
from diloco_jax.learner import node as learner_node
from diloco_jax.protocol import facts
from diloco_jax.report import facts as report_facts
from diloco_jax.report import records as records_lib
from diloco_jax.storage import checkpoint, json_files, states
from tests.train import small_task


def _moments(value: float):
  return {'count': jnp.int32(value), 'mu': jnp.full((8, 8), value)}


def _save(workdir, learner: str, *steps: int) -> None:
  checkpoints = checkpoint.Checkpoints(str(moments_lib.folder(workdir, learner)))
  for step in steps:
    state = {'params': jnp.ones((2, 8, 8)), 'opt_state': _moments(step)}
    checkpoints.save(step, state, 0, {'protocol': {'learner': learner}})
  checkpoints.close()


def test_the_newest_whole_checkpoint_of_any_other_learner_is_read(tmp_path):
  like = _moments(0)
  assert moments_lib.find(tmp_path, 'l2', like, print) is None
  none = moments_lib.describe(None, tmp_path, 'fresh moments')
  assert 'not exchanged, begins with fresh moments' in none
  _save(tmp_path, 'l0', 4, 9)
  _save(tmp_path, 'l1', 5, 7)
  saved = moments_lib.find(tmp_path, 'l2', like, print)
  assert (saved.learner, saved.step, saved.protocol) == ('l0', 9, {'learner': 'l0'})
  jax.tree.map(np.testing.assert_array_equal, saved.moments, _moments(9))
  assert moments_lib.find(tmp_path, 'l1', like, print).step == 7, 'its own first'

  path = moments_lib.folder(tmp_path, 'l0') / '9' / states.MANIFEST
  values = json_files.unseal(json.loads(path.read_text()))
  for row in values['manifest']['arrays']:
    row[-1] ^= row[0] == 'opt_state/mu'
  path.write_text(json.dumps(json_files.seal(values)))
  said = []
  assert moments_lib.find(tmp_path, 'l2', like, said.append)[:2] == ('l1', 7)
  assert 'l0/ckpt/9 does not read back: opt_state/mu has digest' in said[0] and len(said) == 1


@pytest.mark.parametrize(
  'like', [{'count': jnp.int32(0)}, _moments(0) | {'mu': jnp.ones((8, 9))}, {'nu': jnp.ones(8)}]
)
def test_moments_of_another_optimizer_or_model_are_none(tmp_path, like):
  _save(tmp_path, 'l0', 4)
  assert moments_lib.find(tmp_path, 'l1', _moments(0), print).step == 4
  assert moments_lib.find(tmp_path, 'l1', like, print) is None
  refused = r'ckpt/4 has another state of l0: opt_state/.* was saved as .* Nothing was changed'
  with pytest.raises(ValueError, match=refused):  # its next save would replace that one
    moments_lib.find(tmp_path, 'l0', like, print)


def test_a_learner_without_a_checkpoint_begins_with_anothers_moments(tmp_path):
  """In a real run: tests/runs/store/test_learner_store.py."""
  assembled = build.assemble(small_task.use(stdlib_lm.get_config('tiny')))
  make = lambda name: learner_node.make_island(assembled, tmp_path, name, jax.devices()[:1])
  with contextlib.closing(make('l0')) as donor:
    donor.step(0)
    donor.save(1)()
    expected = jax.tree.map(np.array, donor.moments)
  with contextlib.ExitStack() as stack:
    island = stack.enter_context(contextlib.closing(make('l1')))
    recorder = records_lib.Recorder(tmp_path, 'l1', tensorboard=False)
    stack.enter_context(contextlib.closing(recorder))
    restored, (saved, text) = learner_node._restore(assembled, island, tmp_path, 'l1', recorder)
    jax.tree.map(np.testing.assert_array_equal, island.moments, expected)
  assert restored is None and (saved.learner, saved.step) == ('l0', 1)
  assert text == 'the inner optimizer begins with the moments of l0 at step 1'


@pytest.mark.parametrize(
  'clock, learner, recorded', [(0, '', []), (30, '', []), (31, '', ['']), (1, 'l1', ['l1'])]
)
def test_fresh_moments_are_reported_once_they_cost_something(clock, learner, recorded):
  """A learner that joins a new run seconds after the others has missed nothing."""
  reported, said = [], []
  recorder = types.SimpleNamespace(say=said.append, report=reported.append)
  saved = moments_lib.SavedMoments(learner, 9, None, {}) if learner else None
  records = learner_node.LearnerRecords(recorder, (saved, 'text'), late=30)
  records.report(facts.State(state='joined', incarnation=1, clock=clock))
  assert [fact.of for fact in reported if isinstance(fact, report_facts.Moments)] == recorded
  assert said[1:] == ['text'] * len(recorded)
