"""The example of reinforcement learning: its algorithm, its queue of rollouts, and a real run."""

import contextlib
import pickle
import re
import tempfile
from collections.abc import Iterator

import grpc
import jax
import numpy as np
import pytest

import diloco_jax
from experiments.examples import reinforce
from tests import programs
from tests.certs import mint


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
  np.testing.assert_array_equal(right, written == np.array([f'{number:02}' for number in sums]))
  again, _ = reinforce.log_p(params, rollout['prompts'], rollout['completions'])
  np.testing.assert_allclose(again, rollout['log_p'], rtol=1e-5)


@pytest.fixture(name='socket')
def _socket() -> Iterator[str]:
  with tempfile.TemporaryDirectory() as folder:  # short, and of this user alone
    yield f'unix:{folder}/queue'


def test_the_parts_learn_in_one_process(socket):
  params, rng = reinforce.init(), np.random.default_rng(0)
  opt_state = reinforce.TX.init(params)
  assert float(reinforce.expected_reward(params)) < 0.02
  with (
    contextlib.closing(reinforce.Queue(socket)),
    jax.numpy_dtype_promotion('standard'),  # optax corrects its averages by float ** int
  ):
    client = reinforce.Client(socket)
    for version in range(80):
      assert client.put(reinforce.roll_out(params, version, rng))
      params, opt_state, metrics = reinforce.step(params, opt_state, client.take())
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


def test_each_rollout_goes_to_one_trainer_the_newest_first_and_no_stale_one(socket, monkeypatch):
  with contextlib.closing(reinforce.Queue(socket)):
    worker, first, other = (reinforce.Client(socket) for _ in range(3))
    for version in (9, 3, 10):
      assert worker.put(_rollout(version))
    for client, version in ((first, 10), (other, 9)):
      samples = client.take()
      assert samples.keys() == _rollout(version).keys()
      for name, values in _rollout(version).items():
        np.testing.assert_array_equal(samples[name], values)
    monkeypatch.setattr(reinforce, 'WAIT_S', 0.05)
    with pytest.raises(TimeoutError, match='no worker has put a rollout'):
      first.take()
    assert first.dropped == 1
    assert worker.put(_rollout(4)) and first.take()['version'] == 4  # as stale as allowed


def test_a_full_queue_makes_workers_wait_and_one_that_is_started_again_is_used(socket, monkeypatch):
  monkeypatch.setattr(reinforce, 'ANSWER_S', 0.1)
  worker, trainer = reinforce.Client(socket), reinforce.Client(socket)
  with contextlib.closing(reinforce.Queue(socket)):
    puts = [worker.put(_rollout(version)) for version in range(reinforce.PENDING + 1)]
    assert puts == [True] * reinforce.PENDING + [False]
    assert trainer.take()['version'] == reinforce.PENDING - 1 and worker.put(_rollout(9))
  with contextlib.closing(reinforce.Queue(socket)):
    programs.until(lambda: worker.put(_rollout(7)))
    assert trainer.take()['version'] == 7


def test_only_who_has_a_certificate_of_the_run_reaches_the_queue_over_tcp(tmp_path, monkeypatch):
  owner, stranger = mint.owner(tmp_path / 'certs'), mint.owner(tmp_path / 'other')
  with pytest.raises(ValueError, match='needs certificates'):
    reinforce.Queue('127.0.0.1:0')
  with contextlib.closing(reinforce.Queue('127.0.0.1:0', owner.folder / 'syncer')) as queue:
    client = reinforce.Client(queue.address, owner.folder / 'l1')
    assert client.put(_rollout(3)) and client.take()['version'] == 3
    for bad in (b'', pickle.dumps({'version': 3}), reinforce.packed({'version': np.array([None])})):
      with pytest.raises(grpc.RpcError):
        client._ask('put', bad)
    owner.revoke('l1')
    with pytest.raises(grpc.RpcError, match='learner l1 is not on the allowlist'):
      client.take()
    monkeypatch.setattr(reinforce, 'CALL_S', 1.0)
    other = reinforce.Client(queue.address, stranger.folder / 'l1')
    assert not other.put(_rollout(3))


@pytest.mark.full
def test_a_run_learns_while_a_trainer_and_a_worker_are_killed(tmp_path):
  with programs.starting() as start:
    program = start(reinforce.__file__, 'run', tmp_path, 'workers=2', 'steps=150')
    assert program.end() == 0, program
  rewards = [float(reward) for reward in re.findall(r'^\d+ s: reward (.*)$', program.text, re.M)]
  assert rewards[0] < 0.02 and rewards[-1] > 0.1, program
  for name in ('l1', 'w0'):
    assert f'{name} has ended with code -9: it is started again' in program.text
  facts = list(diloco_jax.records(tmp_path))
  measured = [fact for fact in facts if fact['name'] == 'metrics' and 'dropped' in fact['values']]
  assert {'reward', 'version'} < measured[-1]['values'].keys()
  assert measured[-1]['values']['version'] > 0
  in_facts = [fact['values']['reward'] for fact in facts if fact['name'] == 'metrics']
  assert max(in_facts) > 0.1
