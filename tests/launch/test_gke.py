"""Manifests of the engine gke: golden texts, right by the schemas, and commands that are ours."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from diloco_jax.certs import check, names, proofs
from diloco_jax.launch import cli
from diloco_jax.launch.engines import google_cloud
from tests.certs import mint
from tests.launch.lib import command_line, rendered, schemas

LIMIT_S = 120


def job_sets(texts: dict[str, str]) -> list[dict]:
  found = [one for text in manifests(texts).values() for one in schemas.documents(text)]
  return [one for one in found if one['kind'] == 'JobSet']


def manifests(texts: dict[str, str]) -> dict[str, str]:
  return {name: text for name, text in texts.items() if name.endswith('.yaml')}


def test_the_manifests_of_a_run(tmp_path):
  """With every flag, through the command line."""
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'diloco_jax', 'launch', '--engine=gke', f'--out={tmp_path}'),
      *('--config=gemma:1b', '--config.sync.learners=1', f'--config.train.store={rendered.STORE}'),
      *('--name=Run 1', '--topology=v6e:4x4', '--tls=certs/', '--image=registry/diloco:1'),
      *('--spot', '--service_account=trainer', '--namespace=research', '--kueue_queue=tpu'),
      *('--syncer_cpus=4', '--syncer_memory_gib=20', '--disk_gib=100', '--config.train.drain_s=20'),
    ],
    cwd=command_line.ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  found = {path.name: path.read_text() for path in tmp_path.iterdir()}
  assert sorted(found) == ['run-1-l0.yaml', 'run-1-syncer.yaml', 'run-1.sh']
  rendered.require_golden('gke', found)
  assert [error for text in manifests(found).values() for error in schemas.errors(text)] == []


@pytest.mark.parametrize('topology, hosts', rendered.TOPOLOGIES.items())
def test_the_schemas_find_no_error(topology, hosts):
  for learners in (1, 2, 8):
    files = manifests(rendered.texts('gke', rendered.request(learners, topology, name='run')))
    ids = [f'l{number}' for number in range(learners)]
    assert list(files) == ['run-syncer.yaml', *(f'run-{one}.yaml' for one in ids)]
    syncer, l0, *others = files.values()
    assert schemas.errors(syncer) == schemas.errors(l0) == []
    # Learners differ by their names only, so what holds for one holds for all.
    assert others == [l0.replace('l0', one) for one in ids[1:]]
    # Each has a JobSet of its own with one job, which is its slice.
    (job,) = job_sets(files)[1]['spec']['replicatedJobs']
    assert job['replicas'] == 1
    assert job['template']['spec']['parallelism'] == hosts
    assert job['template']['spec']['completions'] == hosts


def test_a_learner_without_tpus():
  _, l0 = job_sets(rendered.texts('gke', rendered.request(1, '')))
  pod = l0['spec']['replicatedJobs'][0]['template']['spec']['template']['spec']
  assert 'nodeSelector' not in pod and pod['containers'][0]['resources'] == {}


@pytest.mark.parametrize(
  'right, wrong, error',
  [
    ('maxRestarts', 'maxRestart', "'maxRestart' was unexpected"),
    ('replicas: 1', 'replicas: one', "'one' is not of type 'integer'"),
    ('backoffLimit: 0', 'backoffLimits: 0', "'backoffLimits'"),
    ('defaultMode: 256', "defaultMode: '0400'", "'0400' is not of type 'integer'"),
    ('action: FailJobSet', 'action: Fail', "'Fail' is not one of"),
    ('containerName', 'container', "'container'"),
    ('ReadWriteOncePod', '{}', 'is not of type'),
    ('podSelector', 'selector', "'selector' was unexpected"),
    ('port: 7070', 'ports: 7070', "'ports'"),
  ],
)
def test_the_schemas_find_an_error(right, wrong, error):
  texts = manifests(rendered.texts('gke', rendered.request(1)))
  text = ''.join(texts.values())
  assert right in text
  found = schemas.errors(text.replace(right, wrong))
  assert any(error in one for one in found), found


def test_our_command_line_takes_the_commands():
  for topology in ('v5p:2x2x1', 'v6e:4x4'):
    sets = job_sets(rendered.texts('gke', rendered.request(2, topology, name='run')))
    pods = [one['spec']['replicatedJobs'][0]['template']['spec']['template'] for one in sets]
    containers = [pod['spec']['containers'][0] for pod in pods]
    assert all(one['command'] == ['sh', '-c', google_cloud.UNTIL_DONE] for one in containers)
    syncer, l0, l1 = command_line.read([one['args'] for one in containers])
    assert (syncer['listen'], syncer['tls']) == ('0.0.0.0:7070', '/certs/syncer')
    assert (l0['learner_id'], l1['learner_id']) == ('l0', 'l1')
    assert l0['syncer'] == 'run-syncer:7070'
    assert l0['hosts'] == ('auto' if topology == 'v6e:4x4' else '1')
    for found, container in zip((syncer, l0, l1), containers):
      assert found['config']['train']['store'] == rendered.STORE
      mounts = {one['name']: one['mountPath'] for one in container['volumeMounts']}
      assert mounts == {'workdir': found['workdir'], 'certs': found['tls']}


@pytest.mark.parametrize(
  'engine, asked, given, words',
  [
    ('gke', {'store': ''}, {}, ('--config.train.store=gs://', '--without_store')),
    ('gke', {'store': '/mnt/x'}, {}, ('--config.train.store=gs://', '--without_store')),
    ('gke', {'store': ''}, {'without_store': True}, ('--config.train.store=gs://', 'one host')),
    ('gke', {'tls': ''}, {}, ('--tls', 'diloco certs')),
    ('gke', {}, {'image': ''}, ('--image', 'launch.md')),
    ('queued', {'store': ''}, {}, ('--config.train.store=gs://', '--without_store')),
    ('queued', {'topology': ''}, {}, ('--topology',)),
    ('queued', {}, {'zone': ''}, ('--zone',)),
    ('queued', {}, {'project': ''}, ('--project',)),
  ],
)
def test_what_is_missing_is_named_in_one_line(engine, asked, given, words):
  with pytest.raises(ValueError) as refused:
    rendered.texts(engine, rendered.request(**asked), **given)
  text = cli.one_line(refused.value)
  assert all(word in text for word in words), text


@pytest.mark.parametrize('engine', ['gke', 'queued'])
def test_what_needs_no_store(engine):
  one_host = rendered.request(store='', topology='v6e:2x2')
  assert rendered.texts(engine, one_host, without_store=True)
  syncer = rendered.request(store='', topology='', only=['syncer'])
  assert rendered.texts(engine, syncer)


def test_hosts_without_tpus_are_refused():
  asked = rendered.request(topology='')
  asked.config.mesh.hosts = 2
  with pytest.raises(ValueError, match='mesh.hosts=2.*--topology.*--engine=ray'):
    rendered.texts('gke', asked)


PROGRAM = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print('ready', flush=True)
signal.pause()
"""


@pytest.mark.parametrize('code', [0, 42, 75])
def test_a_container_ends_with_the_exit_code_of_its_program(code):
  words = ['sh', '-c', f'exit {code}']
  done = subprocess.run(['sh', '-c', google_cloud.UNTIL_DONE, *words], timeout=LIMIT_S)
  assert done.returncode == code


def test_a_program_that_sigterm_has_ended_is_not_done():
  words = [sys.executable, '-c', PROGRAM]
  with subprocess.Popen(
    ['sh', '-c', google_cloud.UNTIL_DONE, *words], stdout=subprocess.PIPE, text=True
  ) as started:
    assert started.stdout.readline() == 'ready\n'
    started.send_signal(signal.SIGTERM)
    assert started.wait(LIMIT_S) == 128 + signal.SIGTERM


def test_a_mounted_secret_is_a_folder_of_certificates(tmp_path):
  """Kubernetes mounts links to links, in folders that all may read."""
  source = mint.owner(tmp_path / 'certs').folder / 'l0'
  mounted = tmp_path / 'mounted'
  data = mounted / '..2026_11_25'
  data.mkdir(parents=True)
  mounted.chmod(0o1777)
  for path in source.iterdir():
    shutil.copy(path, data / path.name)
    (data / path.name).chmod(0o400)
    (mounted / path.name).symlink_to(pathlib.Path('..data') / path.name)
  (mounted / '..data').symlink_to(data.name)
  assert check.problems(mounted, names.LEARNER, proofs.utc_now()) == []


def test_the_script_makes_the_secrets_and_then_starts_the_programs(tmp_path):
  kubectl = tmp_path / 'kubectl'
  kubectl.write_text(f'#!{sys.executable}\n{KUBECTL}')
  kubectl.chmod(0o755)
  texts = rendered.texts('gke', rendered.request(1, name='run'), namespace='research')
  for name, text in texts.items():
    (tmp_path / name).write_text(text)
  calls = tmp_path / 'calls'
  subprocess.run(
    ['bash', tmp_path / 'run.sh'],
    check=True,
    env={**os.environ, 'PATH': f'{tmp_path}:{os.environ["PATH"]}', 'CALLS': str(calls)},
    timeout=LIMIT_S,
  )
  found = [json.loads(line) for line in calls.read_text().splitlines()]
  assert all(call[0] == '--namespace=research' for call in found)
  assert [call[1:] for call in found] == [
    *started(tmp_path, 'l0'),
    *started(tmp_path, 'syncer'),
    ['get', 'jobsets,pods', '--selector=diloco.run=run'],
  ]


def started(folder: pathlib.Path, name: str) -> list[list[str]]:
  source = ['--from-file=certs/' + name, '--dry-run=client', '--output=yaml']
  return [
    ['create', 'secret', 'generic', f'run-{name}', *source],
    ['apply', '--server-side', '--filename=-'],
    ['apply', f'--filename={folder}/run-{name}.yaml'],
  ]


KUBECTL = """
import json, os, sys
with open(os.environ['CALLS'], 'a') as file: print(json.dumps(sys.argv[1:]), file=file)
if sys.argv[-1] == '--filename=-': sys.stdin.read()
"""
