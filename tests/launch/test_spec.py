"""The description of a run: golden values, and that its commands are ours."""

import dataclasses

from diloco_jax.config import load
from diloco_jax.launch import spec as spec_lib
from tests.launch.lib import command_line

_PLACES = spec_lib.Places(
  workdir='/run/diloco',
  syncer='r-syncer:7070',
  listen='0.0.0.0:7070',
  tls='/certs',
  meet=('--hosts=auto',),
)


def request(learners: int = 2, **more) -> spec_lib.Request:
  config = load.load('gemma:1b')
  config.sync.learners = learners
  flags = ['--config=gemma:1b', f'--config.sync.learners={learners}']
  return spec_lib.Request(config=config, config_flags=flags, disk_gib=200, **more)


def values(program: spec_lib.Program) -> dict:
  found = dataclasses.asdict(program)
  assert found.pop('environment') == spec_lib.ENVIRONMENT
  return found


def test_a_syncer_and_its_learners():
  described = spec_lib.make(request(topology='v6e:4x4'), _PLACES)
  assert described.name == 'gemma-1b'
  common = ['--config=gemma:1b', '--config.sync.learners=2', '--workdir=/run/diloco']
  syncer, l0, l1 = map(values, described.programs)
  assert syncer == {
    'name': 'syncer',
    'role': 'syncer',
    'argv': ['diloco', 'syncer', *common, '--tls=/certs/syncer', '--listen=0.0.0.0:7070'],
    'hosts': 1,
    'chips': 0,
    'topology': '',
    'disk_gib': 200,
    'secrets': ('ca.pem', 'cert.pem', 'key.pem', 'allowlist.json'),
    'restarts': 10**6,
  }
  assert l0 == {
    'name': 'l0',
    'role': 'learner',
    'argv': [
      *('diloco', 'learner', *common, '--tls=/certs/l0', '--learner_id=l0'),
      *('--syncer=r-syncer:7070', '--hosts=auto'),
    ],
    'hosts': 4,
    'chips': 4,
    'topology': 'v6e:4x4',
    'disk_gib': 0,
    'secrets': ('ca.pem', 'cert.pem', 'key.pem'),
    'restarts': 10**6,
  }
  assert l1 == {**l0, 'name': 'l1', 'argv': [word.replace('l0', 'l1') for word in l0['argv']]}


def test_our_command_line_takes_the_commands():
  described = spec_lib.make(request(topology='v6e:4x4'), _PLACES)
  syncer, l0, l1 = command_line.read([one.argv for one in described.programs])
  assert (syncer['listen'], syncer['tls']) == ('0.0.0.0:7070', '/certs/syncer')
  assert (l0['learner_id'], l0['syncer'], l0['hosts']) == ('l0', 'r-syncer:7070', 'auto')
  assert (l1['learner_id'], l1['tls']) == ('l1', '/certs/l1')
  assert all(one['config']['sync']['learners'] == 2 for one in (syncer, l0, l1))
