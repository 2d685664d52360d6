"""The example of reinforcement learning: its algorithm, its folder of rollouts, and a real run."""

import re

import jax
import numpy as np
import pytest

import diloco_jax
from experiments.examples import reinforce
from tests import programs


@pytest.fixture(name='no_wait', autouse=True)
def _no_wait(monkeypatch):
  monkeypatch.setattr(reinforce, 'VERIFY_S', 0.0)


def _rollout(version: int = 0) -> dict[str, np.ndarray]:
  return reinforce.roll_out(reinforce.init(), version, np.random.default_rng(version))


def test_the_verifier_accepts_the_two_digits_of_the_sum_and_log_probabilities_are_those_sampled():
  params, rollout = reinforce.init(), _rollout()
  right = rollout['rewards'] == 1
  assert 0 < right.mean() < 0.05
  sums = rollout['prompts'][:, 0] + rollout['prompts'][:, 2]
  written = np.array([f'{first}{second}' for first, second in rollout['completions']])
  np.testing.assert_array_equal(right, written == np.array([f'{one:02}' for one in sums]))
  again, _ = reinforce.log_p(params, rollout['prompts'], rollout['completions'])
  np.testing.assert_allclose(again, rollout['log_p'], rtol=1e-5)


def test_the_parts_learn_in_one_process(tmp_path):
  params, rng, inbox = reinforce.init(), np.random.default_rng(0), reinforce.Inbox(tmp_path)
  opt_state = reinforce.TX.init(params)
  assert float(reinforce.expected_reward(params)) < 0.02
  with jax.numpy_dtype_promotion('standard'):  # optax corrects its averages by float ** int
    for version in range(80):
      reinforce.put(tmp_path, 'w0', reinforce.roll_out(params, version, rng))
      params, opt_state, metrics = reinforce.step(params, opt_state, inbox.take())
  assert float(metrics['version']) == 79
  assert float(metrics['reward']) == 1 - float(metrics['loss']) > 0.05
  assert float(reinforce.expected_reward(params)) > 0.05


def test_a_ratio_beyond_the_clip_moves_nothing_further():
  """With advantages of 0, the group's rewards being equal, only the entropy is left; so it is where
  all ratios of good samples are above the clip and those of bad ones below it."""
  rollout, params = _rollout(), reinforce.init()
  opt_state = reinforce.TX.init(params)
  sign = np.where(rollout['rewards'] == 1, -1.0, 1.0).astype(np.float32)[:, None]
  with jax.numpy_dtype_promotion('standard'):
    moved = [
      reinforce.step(params, opt_state, rollout | changed)[0]
      for changed in (
        {'rewards': np.zeros_like(rollout['rewards'])},
        {'log_p': rollout['log_p'] + sign},
        {},
      )
    ]
  for name in params:
    np.testing.assert_array_equal(moved[0][name], moved[1][name])
    assert not np.array_equal(moved[0][name], moved[2][name])


def test_each_rollout_goes_to_one_trainer_the_newest_first_and_no_stale_one(tmp_path, monkeypatch):
  one, other = reinforce.Inbox(tmp_path), reinforce.Inbox(tmp_path)
  for version in (3, 9, 10):
    reinforce.put(tmp_path, 'w0', _rollout(version))
  (tmp_path / 'w1.part').write_bytes(b'PK')  # its worker was killed
  for inbox, version in ((one, 10), (other, 9)):
    taken = inbox.take()
    assert taken['version'] == version
    for name, values in _rollout(version).items():
      np.testing.assert_array_equal(taken[name], values)
  monkeypatch.setattr(reinforce, 'WAIT_S', 0.05)
  with pytest.raises(TimeoutError, match='no worker has written a rollout'):
    one.take()
  assert one.dropped == 1 and not list(tmp_path.glob('*.npz'))
  reinforce.put(tmp_path, 'w0', _rollout(4))
  assert one.take()['version'] == 4  # as stale as allowed


@pytest.mark.long
def test_a_run_learns_while_a_trainer_and_a_worker_are_killed(tmp_path):
  with programs.starting() as start:
    program = start(reinforce.__file__, 'run', tmp_path, '2', '2', '150')
    assert program.end() == 0, program
  rewards = [float(found) for found in re.findall(r'^\d+ s: reward (.*)$', program.text, re.M)]
  assert rewards[0] < 0.02 and rewards[-1] > 0.1, program
  for name in ('l1', 'w0'):
    assert f'{name} has ended with code -9: it is started again' in program.text
  facts = list(diloco_jax.records(tmp_path))
  measured = [one for one in facts if one['name'] == 'metrics' and 'dropped' in one['values']]
  assert {'reward', 'version'} < measured[-1]['values'].keys()
  assert measured[-1]['values']['version'] > 0
  told = [one['values']['reward'] for one in facts if one['name'] == 'metrics']
  assert max(told) > 0.1
