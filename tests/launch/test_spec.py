"""The description of a run: golden values, refusals, and that our programs take its commands."""

import dataclasses
import json
import re

import pytest

from diloco_jax.config import load, run_config
from diloco_jax.launch import spec as spec_lib
from diloco_jax.launch.engines import local
from diloco_jax.process import exits
from tests.launch.lib import command_line

_KNOWN = spec_lib.Choices(
  workdir='/run/diloco',
  syncer='gemma-1b-syncer:7070',
  listen='0.0.0.0:7070',
  tls='/certs',
  host_flags=('--hosts=auto',),
)


def request(config: str = 'gemma:1b', learners: int = 2, chips: int = 16, **more):
  """Of a run of so many learners, each with so many accelerators."""
  loaded = load.load(config)
  loaded.sync.learners = learners
  loaded.mesh.data, loaded.mesh.fsdp, loaded.mesh.tensor = 1, chips, 1
  flags = [f'--config={config}', f'--config.sync.learners={learners}']
  return spec_lib.Request(config=loaded, config_flags=flags, **more)


def values(program: spec_lib.Program) -> dict:
  fields = dataclasses.asdict(program)
  assert fields.pop('environment') == spec_lib.ENVIRONMENT
  return fields


@pytest.mark.parametrize('learners', [1, 2, 8])
def test_a_syncer_and_its_learners(learners):
  described = spec_lib.make(request(learners=learners, topology='v6e:4x4', disk_gib=500), _KNOWN)
  common = ['--config=gemma:1b', f'--config.sync.learners={learners}', '--workdir=/run/diloco']
  syncer = {
    'name': 'syncer',
    'role': 'syncer',
    'argv': ['diloco', 'syncer', *common, '--tls=/certs/syncer', '--listen=0.0.0.0:7070'],
    'hosts': 1,
    'chips': 0,
    'topology': '',
    'disk_gib': 500,
  }
  learner = {'role': 'learner', 'hosts': 4, 'chips': 4, 'topology': 'v6e:4x4', 'disk_gib': 0}
  argv = lambda name: [
    *('diloco', 'learner', *common, f'--tls=/certs/{name}', f'--learner={name}'),
    *('--syncer=gemma-1b-syncer:7070', '--hosts=auto'),
  ]
  assert described.name == 'gemma-1b'
  assert [values(program) for program in described.programs] == [
    syncer,
    *({**learner, 'name': f'l{n}', 'argv': argv(f'l{n}')} for n in range(learners)),
  ]
  assert json.dumps(dataclasses.asdict(described)), 'an engine may send it elsewhere'
  read = command_line.read([program.argv for program in described.programs])
  assert (read[0]['listen'], read[0]['tls']) == ('0.0.0.0:7070', '/certs/syncer')
  for number, flags in enumerate(read[1:]):
    assert (flags['learner'], flags['tls']) == (f'l{number}', f'/certs/l{number}')
    assert (flags['syncer'], flags['hosts']) == (_KNOWN.syncer, 'auto')
  assert all(flags['config']['sync']['learners'] == learners for flags in read)


def test_on_one_machine_there_are_no_certificates_and_hosts_are_processes():
  choices = spec_lib.Choices(workdir='/w', syncer='file:/w/syncer/address')
  asked = request(chips=4)
  asked.config.mesh.hosts = 2
  syncer, learner, _ = spec_lib.make(asked, choices).programs
  assert list(syncer.argv[-1:]) == ['--workdir=/w']
  assert list(learner.argv[-2:]) == ['--learner=l0', '--syncer=file:/w/syncer/address']
  assert (learner.hosts, learner.chips) == (2, 2)


@pytest.mark.parametrize(
  'topology, hosts, chips',
  [('v6e:1x1', 1, 1), ('v6e:2x2', 1, 4), ('v6e:2x4', 2, 4), ('v5e:4x8', 8, 4), ('v5p:2x2x4', 4, 4)],
)
def test_a_slice_has_hosts_of_four_chips(topology, hosts, chips):
  asked = request(chips=hosts * chips, topology=topology)
  learner = spec_lib.make(asked, _KNOWN).programs[1]
  assert (learner.hosts, learner.chips, learner.topology) == (hosts, chips, topology)
  assert ('--hosts=auto' in learner.argv) == (hosts > 1)


def names(asked: spec_lib.Request) -> list[str]:
  return [program.name for program in spec_lib.make(asked, _KNOWN).programs]


def test_a_part_of_a_run():
  assert names(request(only=['l1', 'syncer'])) == ['syncer', 'l1']
  elsewhere = request(learners=12, syncer='far:7070')
  assert names(elsewhere) == run_config.learner_ids(12)
  assert '--syncer=far:7070' in spec_lib.make(elsewhere, _KNOWN).programs[3].argv
  alone = request(learners=12, syncer=spec_lib.ALONE)
  (lone,) = spec_lib.make(alone, _KNOWN).programs
  assert lone.name == 'l0' and '--syncer=none' in lone.argv


def test_loops_of_the_users_own_have_a_syncer_to_start_and_no_learners():
  assert names(request('own_loop')) == ['syncer']


@pytest.mark.parametrize(
  'name, part', {'v5p_v6e': 'v5p-v6e', '7. A run: no. 7!': 'a-run-no-7', 'x' * 90: 'x' * 40}.items()
)
def test_a_run_has_a_name_that_dns_takes(name, part):
  assert request(name=name).run == part


@pytest.mark.parametrize(
  'more, words',
  [
    ({'only': ['l0', 'l2']}, '--only=l2: there is no such program; use some of syncer, l0, l1'),
    ({'only': ['syncer'], 'syncer': 'far:7070'}, '--only=syncer: .* use some of l0, l1'),
    ({'topology': 'v6e-16'}, "--topology is 'v6e-16': name one, for example v6e:4x4"),
    ({'topology': 'v5p:4x4'}, 'name one, .* v5p:2x2x1'),
    ({'topology': 'v4:2x2x2'}, 'name one'),
    ({'topology': 'v6e:3x3'}, '9 chips are no whole hosts of 4'),
    ({'topology': 'v6e:8x8'}, '64 chips, the mesh .* 16 devices: .* --config.mesh.fsdp=64'),
    ({'config': 'own_loop', 'syncer': 'far:7070'}, 'diloco_jax.join connects to --syncer=far:7070'),
    ({'name': '7!'}, "the name of the run, '7!', has no letter: give --name"),
  ],
)
def test_what_cannot_be_started_is_one_line_with_a_remedy(more, words):
  with pytest.raises(ValueError, match=words) as refusal:
    spec_lib.make(request(**more), _KNOWN)
  assert '\n' not in str(refusal.value)


@pytest.mark.parametrize(
  'more, words',
  [
    ({'topology': 'v6e:4x4'}, 'learners on this machine take the accelerators that it has'),
    ({'tls': 'certs'}, 'leave it out, or give --listen=HOST:PORT'),
  ],
)
def test_what_this_machine_cannot_give(more, words):
  with pytest.raises(ValueError, match=words):
    local.choose(request(**more))


@pytest.mark.parametrize(
  'words, error',
  [
    (['--engine=lsf', '--config=gemma:1b'], 'value should be one of <.*local'),
    (['--only=l9', '--config=stdlib_lm:tiny'], 'error: --only=l9: there is no such program'),
    (
      ['--config=stdlib_lm:tiny', '--tls=certs/l0', '--only=l0', '--syncer=HOST:7070'],
      r'tls=certs/l0/l0: there is no such folder \(diloco certs --help\). Nothing was written',
    ),
    ([], 'no --config given; for example --config=stdlib_lm:cpu'),
    (
      ['--config=stdlib_lm:tiny', '--image=x'],
      '--image applies to --engine=gke only, and this is --engine=local',
    ),
    (
      ['--config=stdlib_lm:tiny', '--out=x'],
      r'--out applies to --engine=gke\|slurm\|systemd only, and this is --engine=local',
    ),
    (
      ['--config=stdlib_lm:tiny', '--port=7070', '--engine=systemd'],
      '--port applies to --engine=slurm only, and this is --engine=systemd',
    ),
  ],
)
def test_the_command_refuses_in_one_line(words, error, tmp_path):
  done = command_line.diloco('launch', f'--workdir={tmp_path}/run', *words)
  assert (done.returncode, done.stdout) == (exits.NEVER_RETRY, '')
  assert done.stderr.count('\n') == 1
  assert re.search(error, done.stderr), done.stderr
  assert not (tmp_path / 'run').exists()
