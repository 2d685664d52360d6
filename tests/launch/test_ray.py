"""Real runs on a Ray cluster of three machines, each a raylet of its own on this one."""

import functools
import json
import signal

import pytest

from tests import programs
from tests.runs.lib import ray_cluster

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

BACK_S = 60  # from the death of a learner's machine until it trains elsewhere
ENDLESS = '--config.train.steps=1000000'
OFTEN = '--config.train.checkpoint_every_steps=8', '--config.sync.checkpoint_every_syncs=40'
TWO = '--config.sync.learners=2', '--config.sync.quorum=1', *OFTEN
# Learners take a thousand steps alone while the syncer is away, and then what they send is large.
ALONE = '--config.sync.norm_factor=0'
# The machine of l1 has nothing else on it.
MACHINES = {'a': {'home': 2}, 'b': {'slice': 1}, 'c': {'slice': 1}}
APART = {'syncer': {'home': 1}, 'l0': {'home': 1}, 'l1': {'slice': 1}}

until = functools.partial(programs.until, deadline_s=ray_cluster.DEADLINE_S)


@pytest.fixture
def certs(tmp_path):
  return ray_cluster.certify(tmp_path / 'certs', 'l0', 'l1', 'l2')


@pytest.fixture
def store(tmp_path):
  return f'--config.train.store={tmp_path / "store"}'


def leaves_nothing(cluster: ray_cluster.Cluster) -> bool:
  return not any(cluster.processes(path.name, 'diloco_jax') for path in cluster.folder.iterdir())


def test_a_run_with_a_learner_of_two_hosts_trains_to_its_end(tmp_path, certs, store):
  """That learner is a part of the run of its own, since its mesh is another one."""
  common = '--config.sync.learners=3', '--config.sync.quorum=3', '--config.train.steps=200', store
  part = '--only=l2', '--config.mesh.data=2', '--config.mesh.hosts=2'
  slices = {'a': {'home': 1, 'slice': 1}, 'b': {'slice': 2}, 'c': {'slice': 1}}
  needs = {'syncer': {'home': 1}, 'learner': {'slice': 1}}
  with (
    ray_cluster.start(tmp_path / 'machines', slices) as cluster,
    ray_cluster.launch(cluster, certs, needs, '--only=syncer,l0,l1', *common, name='driver') as run,
  ):
    syncer = f'--syncer=file:{cluster.folder}/a/run/machine/syncer/address'
    with ray_cluster.launch(cluster, certs, needs, *part, syncer, *common, name='other') as l2:
      assert (run.end(), l2.end()) == (0, 0)
    for learner in ('l0', 'l1', 'l2'):
      assert run.merges(learner) > 0
    assert l2.said('[l2] [l2.1] ') and l2.facts('l2', 'adopted')
    assert (run.workdir / 'report' / 'report.txt').is_file()
    assert (tmp_path / 'store' / 'model').is_dir()
    assert leaves_nothing(cluster)


def test_with_too_few_machines_the_syncer_runs_and_who_waits_says_what_is_needed(tmp_path, certs):
  needs = {'syncer': {'home': 1}, 'learner': {'home': 1}}
  with (
    ray_cluster.start(tmp_path / 'machines', {'a': {'home': 2}}) as cluster,
    ray_cluster.launch(cluster, certs, needs, *TWO, ENDLESS, name='driver') as run,
  ):
    until(lambda: max(map(run.merges, ('l0', 'l1'))) >= 3, run)
    said = "the programs of the run take {'home': 3}, the cluster has {'home': 2.0}. Add machines"
    until(lambda: run.said(said), run)


def test_a_learner_whose_machine_dies_comes_back_on_another_one(tmp_path, certs, store):
  with (
    ray_cluster.start(tmp_path / 'machines', MACHINES) as cluster,
    ray_cluster.launch(cluster, certs, APART, *TWO, ENDLESS, store, name='driver') as run,
  ):
    until(lambda: min(map(run.merges, ('l0', 'l1'))) >= 10, run)
    died = cluster.where('l1')
    cluster.kill(died)
    before = run.merges('l0')
    until(lambda: run.joined('l1') == [1, 2], run, deadline_s=BACK_S)
    at = run.merges('l1')
    until(lambda: run.merges('l1') > at, run, deadline_s=BACK_S)
    assert run.merges('l0') > before
    assert run.said('l1 continues from its checkpoint at clock'), 'with its moments'
    assert cluster.where('l1') not in ('', died)
    assert run.said('the machine of l1 is lost')
    run.send(signal.SIGINT)
    assert run.end() == 130
    until(lambda: leaves_nothing(cluster), run)


def test_a_process_that_ray_has_lost_sight_of_keeps_its_id_while_it_lives(tmp_path, certs):
  """Ray takes the machine for lost, and the driver starts l1 on another one; only the syncer knows
  that the first one still trains. It lets no other process in under that id."""
  with (
    ray_cluster.start(tmp_path / 'machines', MACHINES) as cluster,
    ray_cluster.launch(cluster, certs, APART, *TWO, ENDLESS, name='driver') as run,
  ):
    until(lambda: run.merges('l1') >= 3, run)
    first = cluster.where('l1')
    [program] = cluster.programs(first, 'l1')
    raylet = cluster.raylet(first)
    raylet.suspend()
    until(lambda: run.said('Learner id "l1" is in use'), run)
    assert program.is_running() and run.joined('l1') == [1]
    at = run.merges('l1')
    until(lambda: run.merges('l1') > at, run)
    raylet.resume()  # it hears that it is taken for lost, and ends
    until(lambda: not cluster.programs(first, 'l1'), run)
    until(lambda: run.joined('l1') == [1, 2], run)
    at = run.merges('l1')
    until(lambda: run.merges('l1') > at, run)


def test_a_syncer_whose_machine_dies_continues_elsewhere_from_the_store(tmp_path, certs, store):
  machines = {'a': {'home': 1}, 'b': {'home': 1}, 'c': {'slice': 2}}
  needs = {'syncer': {'home': 1}, 'learner': {'slice': 1}}
  rarely = '--config.sync.checkpoint_every_syncs=300'  # the store hears of outer steps every 10 s
  flags = *TWO, rarely, ENDLESS, store, '--config.train.store_log=true', ALONE
  syncer = tmp_path / 'store' / 'syncer'

  def may_die() -> bool:
    """The store has a checkpoint, and has heard of outer steps behind it."""
    copies = [int(path.name.partition('-')[0]) for path in syncer.glob('ckpt/*.json')]
    choices = json.loads((syncer / 'claim').read_bytes())['content']['log'] if copies else 0
    return bool(copies) and choices > max(copies) > len(run.facts('syncer', 'synced')) - 200

  with (
    ray_cluster.start(tmp_path / 'machines', machines) as cluster,
    ray_cluster.launch(cluster, certs, needs, *flags, name='driver') as run,
  ):
    until(may_die, run)
    died = cluster.where('syncer')
    cluster.kill(died)
    recovered = until(lambda: run.facts('syncer', 'recovered'), run)
    at = {name: run.merges(name) for name in ('l0', 'l1')}
    until(lambda: all(run.merges(name) > at[name] for name in at), run)
    assert cluster.where('syncer') not in ('', died)
    run.send(signal.SIGINT)
    assert run.end() == 130
    until(lambda: leaves_nothing(cluster), run)
  lost = run.said('are gone: only the disk of')
  seen = [0] * 4  # by learners
  for learner in at:
    for fact in run.facts(learner, 'adopted'):
      if fact['time'] < recovered[0]['time']:
        seen[fact['fragment']] = max(seen[fact['fragment']], fact['version'])
  has = recovered[0]['versions']
  assert all(have >= saw for have, saw in zip(has, seen)) and not lost, (has, seen)
