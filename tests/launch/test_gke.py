"""Manifests of the engine gke: golden texts, right by the schemas, and commands that are ours."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from diloco_jax.certs import check as check_lib
from diloco_jax.certs import names, proofs
from diloco_jax.launch.engines import gke
from diloco_jax.process import exits
from tests.certs import mint
from tests.launch.lib import command_line, rendered, schemas

LIMIT_S = 120


def job_sets(texts: dict[str, str]) -> list[dict]:
  documents = [
    document for text in manifests(texts).values() for document in schemas.documents(text)
  ]
  return [document for document in documents if document['kind'] == 'JobSet']


def pod_of(job_set: dict) -> dict:
  return job_set['spec']['replicatedJobs'][0]['template']['spec']['template']['spec']


def manifests(texts: dict[str, str]) -> dict[str, str]:
  return {name: text for name, text in texts.items() if name.endswith('.yaml')}


def test_the_manifests_of_a_run(tmp_path):
  """With every flag, through the command line."""
  mint.owner(tmp_path / 'certs')
  done = command_line.diloco(
    *[
      *('launch', '--engine=gke', '--out=out'),
      *('--config=gemma:1b', '--config.sync.learners=1', f'--config.train.store={rendered.STORE}'),
      *('--name=Run 1', '--topology=v6e:4x4', '--tls=certs/', '--image=registry/diloco:1'),
      *('--spot', '--service_account=trainer', '--namespace=research', '--kueue_queue=tpu'),
      *('--syncer_cpus=4', '--syncer_memory_gib=20', '--disk_gib=100', '--config.train.drain_s=20'),
      '--metrics_port=9090',
    ],
    cwd=tmp_path,
  )
  assert done.returncode == 0, done.stderr
  files = {path.name: path.read_text() for path in (tmp_path / 'out').iterdir()}
  assert sorted(files) == ['run-1-l0.yaml', 'run-1-syncer.yaml', 'run-1.sh']
  rendered.require_golden(files, 'gke')
  assert [error for text in manifests(files).values() for error in schemas.errors(text)] == []


def test_texts_without_a_folder_are_printed_and_one_that_cannot_be_written_is_named(tmp_path):
  mint.owner(tmp_path / 'certs')
  words = ['--engine=gke', '--config=stdlib_lm:tiny', '--topology=cpu', '--without_store']
  words += ['--tls=certs', '--image=x', '--only=l0']
  done = command_line.diloco('launch', *words, cwd=tmp_path)
  assert done.returncode == 0 and done.stdout.startswith('# tiny-l0.yaml\n---\n'), done.stderr
  done = command_line.diloco('launch', *words, '--out=/dev/null/x', cwd=tmp_path)
  assert done.returncode == exits.NEVER_RETRY and done.stderr.count('\n') == 1
  assert 'error: cannot write /dev/null/x/tiny-l0.yaml' in done.stderr


def test_shellcheck_has_no_warning(tmp_path):
  texts = rendered.texts(rendered.request(1, tls="it's mine", name='run'))
  (tmp_path / 'run.sh').write_text(texts['run.sh'])
  rendered.require_no_warning(tmp_path / 'run.sh')


@pytest.mark.parametrize('topology, hosts', rendered.TOPOLOGIES.items())
def test_the_schemas_find_no_error(topology, hosts):
  for learners in (1, 2, 8):
    files = manifests(rendered.texts(rendered.request(learners, topology, name='run')))
    ids = [f'l{number}' for number in range(learners)]
    assert list(files) == ['run-syncer.yaml', *(f'run-{learner}.yaml' for learner in ids)]
    syncer, l0, *others = files.values()
    assert schemas.errors(syncer) == schemas.errors(l0) == []
    # Learners differ by their names only, so what holds for one holds for all.
    assert others == [l0.replace('l0', learner) for learner in ids[1:]]
    # Each has a JobSet of its own with one job, which is its slice.
    (job,) = job_sets(files)[1]['spec']['replicatedJobs']
    assert job['replicas'] == 1
    assert job['template']['spec']['parallelism'] == hosts
    assert job['template']['spec']['completions'] == hosts


def test_long_names_fit():
  """JobSet refuses one whose pods would have names of more than 63 characters."""
  asked = rendered.request(12, 'v5p:4x4x4', name='run-' * 20)
  for job_set in job_sets(rendered.texts(asked)):
    (job,) = job_set['spec']['replicatedJobs']
    index = job['template']['spec']['completions'] - 1
    assert len(f'{job_set["metadata"]["name"]}-{job["name"]}-0-{index}-abcde') <= 63


def test_a_learner_without_tpus():
  with pytest.raises(ValueError, match='--topology, .* as v6e:4x4 .* --topology=cpu'):
    rendered.texts(rendered.request(1, ''))
  _, pod = map(pod_of, job_sets(rendered.texts(rendered.request(1, 'cpu'))))
  assert 'nodeSelector' not in pod and pod['containers'][0]['resources'] == {}
  assert {'name': 'JAX_PLATFORMS', 'value': 'cpu'} in pod['containers'][0]['env']
  asked = rendered.request(topology='cpu')
  asked.config.mesh.hosts = 2
  with pytest.raises(ValueError, match='a slice, as the hosts of a learner .*--engine=ray'):
    rendered.texts(asked)


def test_a_loop_of_ones_own_is_a_learner_as_any():
  loop = 'python /app/my.py {learner} {syncer} {tls} {store} {workdir}'
  texts = rendered.texts(rendered.request(1, 'cpu', config='own_loop', name='run', loop=loop))
  _, pod = map(pod_of, job_sets(texts))
  given = ['l0', 'run-syncer:7070', '/certs/l0', rendered.STORE, '/diloco']
  assert pod['containers'][0]['args'] == ['python', '/app/my.py', *given]
  assert pod['containers'][0]['command'] == ['sh', '-c', gke.UNTIL_DONE]
  assert [error for text in manifests(texts).values() for error in schemas.errors(text)] == []


def test_our_command_line_takes_the_commands():
  for topology in ('v5p:2x2x1', 'v6e:4x4'):
    sets = job_sets(rendered.texts(rendered.request(2, topology, name='run')))
    containers = [pod_of(job_set)['containers'][0] for job_set in sets]
    assert all(part['command'] == ['sh', '-c', gke.UNTIL_DONE] for part in containers)
    syncer, l0, l1 = command_line.read([part['args'] for part in containers])
    assert (syncer['listen'], syncer['tls']) == ('0.0.0.0:7070', '/certs/syncer')
    assert (l0['learner'], l1['learner']) == ('l0', 'l1')
    assert l0['syncer'] == 'run-syncer:7070'
    assert l0['hosts'] == ('auto' if topology == 'v6e:4x4' else '1')
    for values, container in zip((syncer, l0, l1), containers):
      assert values['config']['train']['store'] == rendered.STORE
      mounts = {mount['name']: mount['mountPath'] for mount in container['volumeMounts']}
      assert mounts == {'workdir': values['workdir'], 'certs': values['tls']}


@pytest.mark.parametrize(
  'asked, given, words',
  [
    ({'store': ''}, {}, ('--config.train.store=gs://', '--without_store')),
    ({'store': '/mnt/x'}, {}, ('--config.train.store=gs://', '--without_store')),
    ({'store': ''}, {'without_store': True}, ('--config.train.store=gs://', 'one host')),
    ({'tls': ''}, {}, ('--tls', 'diloco certs')),
    ({}, {'image': ''}, ('--image', 'launch.md')),
    ({'topology': ''}, {}, ('--topology', 'v6e:4x4', '--topology=cpu')),
    ({}, {'metrics_port': 7070}, ('another --metrics_port than 7070',)),
    ({'init_from': 'm.safetensors'}, {}, ('--config.train.init_from=/..., the path of m.safe',)),
  ],
)
def test_what_is_missing_is_named_in_one_line(asked, given, words):
  one_host = rendered.request(store='', topology='v6e:2x2')
  assert rendered.texts(one_host, without_store=True)
  assert rendered.texts(rendered.request(store='', topology='', only=['syncer']))
  with pytest.raises(ValueError) as refused:
    rendered.texts(rendered.request(**asked), **given)
  text = exits.one_line(refused.value)
  assert all(word in text for word in words), text


PROGRAM = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # it cannot come before the wait
print('ready', flush=True)
sys.exit(signal.sigwait({signal.SIGTERM}) != signal.SIGTERM)
"""


@pytest.mark.parametrize('code', [0, 42, 75])
def test_a_container_ends_with_the_exit_code_of_its_program(code):
  words = ['sh', '-c', f'exit {code}']
  done = subprocess.run(['sh', '-c', gke.UNTIL_DONE, *words], timeout=LIMIT_S)
  assert done.returncode == code


def test_a_program_that_sigterm_has_ended_is_not_done():
  words = [sys.executable, '-c', PROGRAM]
  with subprocess.Popen(
    ['sh', '-c', gke.UNTIL_DONE, *words], stdout=subprocess.PIPE, text=True
  ) as started:
    assert started.stdout.readline() == 'ready\n'
    started.send_signal(signal.SIGTERM)
    assert started.wait(LIMIT_S) == 128 + signal.SIGTERM


def mount_secret(source: pathlib.Path, mounted: pathlib.Path) -> pathlib.Path:
  data = mounted / '..2026_11_25'
  data.mkdir(parents=True)
  mounted.chmod(0o1777)
  for path in source.iterdir():
    shutil.copy(path, data / path.name)
    (data / path.name).chmod(0o400)
    (mounted / path.name).symlink_to(pathlib.Path('..data') / path.name)
  (mounted / '..data').symlink_to(data.name)
  return mounted


def test_a_mounted_secret_is_a_folder_of_certificates(tmp_path):
  """Kubernetes mounts links to links, in folders that all may read."""
  source = mint.owner(tmp_path / 'certs').folder / 'l0'
  mounted = mount_secret(source, tmp_path / 'mounted')
  assert check_lib.problems(mounted, names.LEARNER, proofs.utc_now()) == []


def run_script(texts: dict[str, str], folder: pathlib.Path, kubectl: str) -> tuple[int, list]:
  """The exit code of the script, and the calls of what is in the place of kubectl."""
  (folder / 'kubectl').write_text(f'#!{sys.executable}\n{kubectl}')
  (folder / 'kubectl').chmod(0o755)
  for name, text in texts.items():
    (folder / name).write_text(text)
  calls = folder / 'calls'
  environment = {'PATH': f'{folder}:{os.environ["PATH"]}', 'CALLS': str(calls)}
  words = ['bash', folder / 'run.sh']
  done = subprocess.run(words, cwd=folder, env={**os.environ, **environment}, timeout=LIMIT_S)
  return done.returncode, [json.loads(line) for line in calls.read_text().splitlines()]


def test_the_script_makes_the_secrets_and_then_starts_the_programs(tmp_path):
  texts = rendered.texts(rendered.request(1, name='run'), namespace='research')
  code, given = run_script(texts, tmp_path, KUBECTL)
  assert code == 0
  assert all(call[0] == '--namespace=research' for call in given)
  assert [call[1:] for call in given] == [
    *(call for name in ('syncer', 'l0') for call in secret(name)),
    *(['apply', f'--filename={tmp_path}/run-{name}.yaml'] for name in ('syncer', 'l0')),
    ['get', 'jobsets,pods', '--selector=diloco.run=run'],
  ]


def secret(name: str) -> list[list[str]]:
  source = ['--from-file=certs/' + name, '--dry-run=client', '--output=yaml']
  return [
    ['create', 'secret', 'generic', f'run-{name}', *source],
    ['apply', '--server-side', '--filename=-'],
  ]


def test_the_script_starts_nothing_without_all_certificates(tmp_path):
  for name in ('syncer', 'l0'):
    (tmp_path / 'certs' / name).mkdir(parents=True)
  texts = rendered.texts(rendered.request(2, name='run'))
  code, given = run_script(texts, tmp_path, WITHOUT + KUBECTL)
  assert code and given and not any('.yaml' in word for call in given for word in call)


def test_one_error_names_all_that_is_missing_and_nothing_is_written(tmp_path):
  owner = mint.owner(tmp_path / 'certs')
  certs = owner.folder
  mint.node(owner, certs / 'l2', uris=('diloco://run-x/learner/l2',), ends_s=-1)
  (certs / 'l1').rename(certs / 'l3')  # l1 has none, l3 that of l1
  owner.revoke('l0')
  words = ['--config=gemma:1b', '--config.sync.learners=4', '--config.data.corpus=texts/*.txt']
  words = ['--engine=gke', '--tls=certs', '--out=out', *words]
  done = command_line.diloco('launch', *words, cwd=tmp_path)
  assert done.returncode == exits.NEVER_RETRY and done.stderr.count('\n') == 1
  for named in (
    *('--image', '--topology', '--config.train.store=gs://', '--config.data.corpus=/...'),
    *('l0 is not on the allowlist of run run-x', 'tls=certs/l1: there is no such folder'),
    *('l2 has ended', 'certs/l3 is that of l1, and this learner is l3', 'Nothing was written'),
  ):
    assert named in done.stderr, done.stderr
  assert [path.name for path in tmp_path.iterdir()] == ['certs']


WITHOUT = """
import pathlib, sys
sources = [one.partition('=')[2] for one in sys.argv if one.startswith('--from-file=')]
if not all(pathlib.Path(one).is_dir() for one in sources): sys.exit('no such folder')
"""
KUBECTL = """
import json, os, sys
if sys.argv[-1] == '--filename=-': sys.stdin.read()  # so the one that writes it comes first
with open(os.environ['CALLS'], 'a') as file: print(json.dumps(sys.argv[1:]), file=file)
"""
