"""The documents' commands for containers run as they stand, and what they write works with nothing
but the files of the image.

A section of a page is carried out in a folder of its own, up to the calls of kubectl and docker.
Those of kubectl are written down. The commands of the containers are then read by our programs
where no file is but those of scripts/Dockerfile.
"""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from diloco_jax.config import load
from tests.launch.lib import command_line, image, schemas

PAGES = [
  command_line.ROOT / 'docs' / name
  for name in ('accelerators.md', 'howto/launch.md', 'operating.md')
]
LIMIT_S = 120
ENGINE = '--engine=gke'
OURS = re.compile(r'diloco (certs|launch)\b|docker |bash ')
SECTIONS = {  # and how many programs each of them writes
  'accelerators: 2. Machines': 9,
  'launch: On GKE': 3,
  'launch: Elastic training on JobSet today': 9,
  'launch: Two regions': 5,
  'launch: On several clouds': 2,
}
KUBECTL = f"""#!{sys.executable}
import json, sys
if sys.argv[-1] == '--filename=-': sys.stdin.read()
with open('kubectl', 'a') as file: print(json.dumps(sys.argv[1:]), file=file)
"""
DILOCO = f'#!/bin/sh\nPYTHONPATH={command_line.ROOT} exec {sys.executable} -m diloco_jax "$@"\n'


def commands(text: str) -> list[str]:
  """Those of the indented blocks."""
  lines = re.findall(r'^    (?=\S)((?:.*\\\n)*.*)', text, re.M)
  return [re.sub(r'\\\n *', '', line) for line in lines]


def sections() -> dict[str, list[str]]:
  """The commands of the sections that write something for containers."""
  blocks = {}
  for page in PAGES:
    for section in page.read_text().split('\n## ')[1:]:
      said = commands(section)
      if any(ENGINE in command for command in said):
        blocks[f'{page.stem}: {section.partition(chr(10))[0]}'] = said
  return blocks


def carry_out(section: str, folder: pathlib.Path) -> None:
  """The section in a folder with the configs of a checkout, as its text asks for."""
  configs = folder / 'experiments' / 'configs'
  configs.parent.mkdir()
  configs.symlink_to(command_line.ROOT / 'experiments' / 'configs')
  said = [command for command in sections()[section] if OURS.match(command)]
  ours = [command for command in said if 'launch' not in command or ENGINE in command]
  (folder / 'bin').mkdir()
  for name, text in {'kubectl': KUBECTL, 'diloco': DILOCO, 'docker': '#!/bin/sh\n'}.items():
    (folder / 'bin' / name).write_text(text)
    (folder / 'bin' / name).chmod(0o755)
  path = {**os.environ, 'PATH': f'{folder / "bin"}:{os.environ["PATH"]}'}
  script = 'set -euo pipefail\n' + '\n'.join(ours)
  subprocess.run(['bash', '-c', script], cwd=folder, env=path, timeout=LIMIT_S, check=True)


def of_manifests(folder: pathlib.Path) -> list[list[str]]:
  """The commands of the containers in manifests."""
  argvs = []
  for path in sorted(folder.glob('manifests/*.yaml')):
    documents = schemas.documents(path.read_text())
    (spec,) = [document['spec'] for document in documents if document['kind'] == 'JobSet']
    pod = spec['replicatedJobs'][0]['template']['spec']['template']['spec']
    argvs.append(pod['containers'][0]['args'])
  return argvs


@pytest.fixture(scope='module', name='packages')
def _packages(tmp_path_factory) -> pathlib.Path:
  return image.build().install(tmp_path_factory.mktemp('image'))


def test_the_sections_are_known():
  assert list(sections()) == list(SECTIONS)


@pytest.mark.parametrize('section', SECTIONS)
def test_a_section_works_with_the_files_of_the_image(section, packages, tmp_path, monkeypatch):
  carry_out(section, tmp_path)
  (tmp_path / 'elsewhere').mkdir()
  read = command_line.read(of_manifests(tmp_path), packages, tmp_path / 'elsewhere')
  named = set(re.findall('--config=(\\S+)', '\n'.join(sections()[section])))
  monkeypatch.chdir(command_line.ROOT)
  assert {program['config']['name'] for program in read} == {load.load(name).name for name in named}
  assert len(read) == SECTIONS[section]
  if section.startswith('accelerators'):  # each kind of slice has a share of the batch of its own
    rows = [program['config']['data']['batch_rows'] for program in read if 'learner' in program]
    assert rows == [16] * 4 + [0] * 4

    calls = (tmp_path / 'kubectl').read_text()
    applied = re.findall(r'--filename=manifests/big-(\w+)\.yaml', calls)
    assert applied == ['syncer', *(f'l{number}' for number in range(8))]


def test_a_config_that_is_a_file_is_not_in_the_image(packages, tmp_path):
  """So nothing but the manifest can bring it."""
  named = '--config=experiments/configs/v5p_v6e.py:v5p'
  argv = ['diloco', 'syncer', named, '--workdir=/diloco']
  with pytest.raises(AssertionError, match='there is no config'):
    command_line.read([argv], packages, tmp_path)
  assert command_line.read([['diloco', 'syncer', '--config=gemma:1b', '--workdir=/x']], packages)


def test_the_image_has_the_package_and_nothing_else():
  built = image.build(EXTRAS='tpu,gcs')
  assert built.entrypoint == ['diloco']
  assert {path.parts[:3] for path in built.files} == {('/', 'site-packages', 'diloco_jax')}
  assert not [path for path in built.files if '__pycache__' in path.parts]
  with pytest.raises(AssertionError):
    image.build(EXTRAS='tpu,no-such-extra')


def test_docker_runs_what_the_image_has(packages, tmp_path):
  """The commands in the head of the Dockerfile and in the documents."""
  texts = [page.read_text() for page in PAGES]
  texts.append((command_line.ROOT / 'scripts' / 'Dockerfile').read_text())
  runs = [line for text in texts for line in re.findall(r'docker run (.+)', text)]
  argvs = [['diloco', *shlex.split(line)[1:]] for line in runs]
  (tmp_path / 'elsewhere').mkdir()
  assert argvs and len(command_line.read(argvs, packages, tmp_path / 'elsewhere')) == len(argvs)
  commands_ = [command for said in sections().values() for command in said]
  for build in (command for command in commands_ if command.startswith('docker build')):
    image.build(**dict(re.findall(r'--build-arg (\w+)=(\S+)', build)))
