"""Real runs on a Ray cluster of three machines, each a raylet of its own on this one."""

import shutil
import signal

import pytest

from tests.runs.lib import ray_cluster
from tests.runs.lib.ray_cluster import until

pytestmark = pytest.mark.full

BACK_S = 60  # from the death of a learner's machine until it trains elsewhere
ENDLESS = '--config.train.steps=1000000'
APART = {'syncer': {'home': 1}, 'l0': {'home': 1}, 'l1': {'slice': 1}}
MACHINES = {'a': {'home': 2}, 'b': {'slice': 1}, 'c': {'slice': 1}}
TWO = ('--config.sync.learners=2', '--config.sync.quorum=1')


@pytest.fixture
def certs(tmp_path):
  return ray_cluster.certify(tmp_path / 'certs', 'l0', 'l1', 'l2')


def leaves_nothing(cluster: ray_cluster.Cluster, machines=MACHINES) -> bool:
  return not any(cluster.processes(machine, 'diloco_jax') for machine in machines)


def test_a_learner_whose_machine_dies_comes_back_on_another_one(tmp_path, certs):
  with (
    ray_cluster.start(tmp_path / 'machines', MACHINES) as cluster,
    ray_cluster.launch(cluster, certs, APART, *TWO, ENDLESS, name='driver') as run,
  ):
    until(lambda: run.merges('l1') >= 5 and run.merges('l0') >= 5, 'both learners contribute')
    died = cluster.where('l1')
    cluster.kill(died)
    before, outer_steps = run.merges('l0'), len(run.joined('l1'))
    until(lambda: run.joined('l1') == [1, 2], 'l1 joins again', BACK_S)
    at = run.merges('l1')
    until(lambda: run.merges('l1') > at, 'l1 contributes again', BACK_S)
    assert run.merges('l0') > before and outer_steps == 1
    assert cluster.where('l1') not in ('', died)
    assert run.said('the machine of l1 is lost')
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    until(lambda: leaves_nothing(cluster), 'nothing is left')


def test_a_process_that_ray_has_lost_sight_of_keeps_its_id_while_it_lives(tmp_path, certs):
  """Ray takes the machine for lost, and the driver starts l1 on another one; only the syncer knows
  that the first one still trains. It lets no other process in under that id."""
  with (
    ray_cluster.start(tmp_path / 'machines', MACHINES) as cluster,
    ray_cluster.launch(cluster, certs, APART, *TWO, ENDLESS, name='driver') as run,
  ):
    until(lambda: run.merges('l1') >= 3, 'l1 contributes')
    first = cluster.where('l1')
    [program] = cluster.programs(first, 'l1')
    raylet = cluster.raylet(first)
    raylet.suspend()
    until(lambda: run.said('Learner id "l1" is in use'), 'the second process is turned away')
    assert program.is_running() and run.joined('l1') == [1]
    at = run.merges('l1')
    until(lambda: run.merges('l1') > at, 'the first process contributes')
    raylet.resume()  # it hears that it is taken for lost, and ends
    until(lambda: not cluster.programs(first, 'l1'), 'the first process ends')
    until(lambda: run.joined('l1') == [1, 2], 'the second process joins')
    at = run.merges('l1')
    until(lambda: run.merges('l1') > at, 'the second process contributes')


def test_a_process_ends_with_its_raylet(tmp_path, certs):
  with (
    ray_cluster.start(tmp_path / 'machines', MACHINES) as cluster,
    ray_cluster.launch(cluster, certs, APART, *TWO, ENDLESS, name='driver') as run,
  ):
    until(lambda: run.merges('l1') >= 3, 'l1 contributes')
    first = cluster.where('l1')
    cluster.raylet(first).kill()
    until(lambda: not cluster.programs(first, 'l1'), 'the process of l1 ends')
    until(lambda: run.joined('l1') == [1, 2], 'l1 joins again', BACK_S)
    assert not run.said('in use')
    run.process.kill()  # the supervisor, by SIGKILL
    until(lambda: leaves_nothing(cluster), 'nothing is left')


def test_a_program_that_is_refused_is_not_started_again(tmp_path, certs):
  for file in ('cert.pem', 'key.pem'):
    shutil.copy(certs / 'l0' / file, certs / 'l1' / file)
  with (
    ray_cluster.start(tmp_path / 'machines', MACHINES) as cluster,
    ray_cluster.launch(
      cluster, certs, APART, *TWO, '--config.train.steps=60', name='driver'
    ) as run,
  ):
    assert run.end() == 0, 'l0 goes on'
    assert len(run.said('is that of l0, and this learner is l1')) == 1
    assert not run.said('[local] l1: restart')
    assert run.merges('l0') > 0 and not run.joined('l1')
