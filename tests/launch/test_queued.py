"""Scripts of the engine queued: golden texts, shellcheck, and the scripts themselves.

They run for real, with a `gcloud` whose hosts are folders of this machine.
"""

import pathlib
import subprocess
import sys

import pytest

from diloco_jax.launch.engines import google_cloud
from tests.launch.lib import command_line, rendered
from tests.launch.lib.cloud import Cloud

BIN = pathlib.Path(sys.executable).parent


def cloud_of(root: pathlib.Path, codes: list[list[int]]) -> Cloud:
  for name in ('syncer', 'l0'):
    (root / 'certs' / name).mkdir(parents=True)
    (root / 'certs' / name / 'key.pem').write_text('')
  return Cloud(root, codes)


def scripts(**more) -> dict[str, str]:
  return rendered.texts('queued', rendered.request(1, name='run', **more))


def test_the_scripts_of_a_run():
  asked = rendered.request(1, 'v5p:2x2x4', name='run')
  given = {'spot': True, 'service_account': 'trainer@p.iam', 'syncer_zone': 'us-central1-a'}
  found = rendered.texts('queued', asked, **given)
  rendered.require_golden('queued', found)


@pytest.mark.parametrize('engine', ['gke', 'queued'])
def test_shellcheck_has_no_warning(tmp_path, engine):
  asked = rendered.request(1, name='run', tls="it's mine")
  for name, text in rendered.texts(engine, asked).items():
    if name.endswith('.sh'):
      (tmp_path / name).write_text(text)
  scripts = sorted([*tmp_path.iterdir(), *(rendered.GOLDEN / engine).glob('*.sh')])
  done = subprocess.run([BIN / 'shellcheck', *scripts], capture_output=True, text=True)
  assert done.returncode == 0, done.stdout


def test_a_program_is_started_until_it_must_not_be_or_is_done(tmp_path):
  cloud = cloud_of(tmp_path, [[1, 75, 42, 137, 0]])
  script = scripts()['run-l0.sh']
  assert cloud.run(script) == 42
  assert len(cloud.started(0)) == 3
  assert cloud.state == 'ACTIVE'  # for the person who has to decide
  assert cloud.run(script) == 0
  assert len(cloud.started(0)) == 5
  assert cloud.state == ''
  assert cloud.verbs == ['create', 'delete']


def test_42_of_any_host_is_final(tmp_path):
  cloud = cloud_of(tmp_path, [[75, 75, 0], [1, 75, 0], [75, 42, 0]])
  assert cloud.run(scripts()['run-l0.sh']) == 42
  assert [len(cloud.started(host)) for host in range(3)] == [2, 2, 2]


def test_a_slice_that_was_taken_back_is_asked_for_again(tmp_path):
  cloud = cloud_of(tmp_path, [[0]])
  cloud.set_state('ACTIVE SUSPENDING SUSPENDED')
  # The program never starts on the slice that is going.
  (tmp_path / 'host0' / 'codes').write_text('255 0')
  assert cloud.run(scripts()['run-l0.sh']) == 0
  assert cloud.verbs == ['delete', 'create', 'delete']


def test_the_syncer_keeps_its_machine(tmp_path):
  cloud = cloud_of(tmp_path, [[1, 0]])
  assert cloud.run(scripts()['run-syncer.sh']) == 0
  assert len(cloud.started(0)) == 2
  assert cloud.state  # it is stopped, and its disk has the folder of the run


def test_our_command_line_takes_the_commands(tmp_path):
  commands = []
  for number, text in enumerate(scripts().values()):
    (tmp_path / str(number)).mkdir()
    cloud = cloud_of(tmp_path / str(number), [[0]])
    assert cloud.run(text) == 0
    (words,) = cloud.started(0)
    begin = words.index('diloco')
    assert words[begin - 4 : begin] == [
      *('--entrypoint=sh', 'registry/diloco:1', '-c', google_cloud.UNTIL_DONE)
    ]
    commands.append(words[begin:])
  syncer, l0 = command_line.read(commands)
  assert (syncer['listen'], syncer['tls']) == ('0.0.0.0:7070', '/certs/syncer')
  assert (l0['tls'], l0['hosts']) == ('/certs/l0', 'auto')
  assert l0['syncer'] == 'run-syncer.us-east5-b.c.p.internal:7070'
