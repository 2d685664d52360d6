"""Only regular files are read, and links to them. A pipe, a device, a socket, a folder or a link to
nothing in the place of a file is named, and nobody waits for its other end."""

import os
import pathlib
import re
import socket
import subprocess
import sys

import numpy as np
import pytest

from diloco_jax.certs import check as check_lib
from diloco_jax.certs import names, proofs
from diloco_jax.config import load
from diloco_jax.process import dial
from diloco_jax.report import records as records_lib
from diloco_jax.storage import arrays, states, tapes
from diloco_jax.storage import files as files_lib
from diloco_jax.train import corpus_files
from diloco_jax.train import tokenizer as tokenizer_lib
from diloco_jax.transport import addresses
from tests.certs import mint
from tests.launch.lib import command_line

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(120)  # before, most of these waited for ever


def bind(path: pathlib.Path) -> None:
  with socket.socket(socket.AF_UNIX) as endpoint:
    endpoint.bind(str(path))


KINDS = {
  'a named pipe': os.mkfifo,
  'a socket': bind,
  'a folder': os.mkdir,
  'a link to a device': lambda path: path.symlink_to(os.devnull),
  'a link to nothing': lambda path: path.symlink_to(path.with_name('nowhere')),
}


READERS = {
  'config.py': lambda path: load.load(str(path)),
  'task.py': load.module,
  'own.json': lambda path: tokenizer_lib.load(str(path), 'stdlib'),
  'own.model': lambda path: tokenizer_lib.digest(str(path), 'stdlib'),
  'start.safetensors': lambda path: arrays.start(str(path), {}),
}


@pytest.fixture(autouse=True)
def _short_path(tmp_path, monkeypatch):
  """The kernel limits the path of a socket."""
  monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize('what', KINDS)
@pytest.mark.parametrize('name', READERS)
def test_what_a_user_names_is_a_regular_file(name: str, what: str, tmp_path):
  KINDS[what](pathlib.Path(name))
  with pytest.raises(ValueError, match=f'{name}.* is {what}'):
    READERS[name](tmp_path / name)


def test_a_link_to_a_regular_file_is_one(tmp_path):
  (tmp_path / 'there').write_text('text')
  (tmp_path / 'link').symlink_to('there')
  assert files_lib.kind(tmp_path / 'there') == files_lib.kind(tmp_path / 'link') == ''
  assert files_lib.kind(tmp_path / 'nowhere') == 'not there (No such file or directory)'
  assert files_lib.kind(tmp_path / 'there' / 'below') == 'not there (Not a directory)'


@pytest.mark.parametrize('source', ['corpus', 'corpus/*', 'corpus/**'])
def test_a_corpus_is_made_of_regular_files_and_the_rest_is_named_once(source: str, capfd):
  corpus = pathlib.Path('corpus')
  corpus.mkdir()
  (corpus / 'text.txt').write_text('a text of many letters ' * 100)
  (corpus / 'same.txt').symlink_to('text.txt')
  (corpus / 'twin.txt').hardlink_to(corpus / 'text.txt')
  for number, make in enumerate(KINDS.values()):
    make(corpus / f'{number}.txt')
  pathlib.Path('other').mkdir()
  pathlib.Path('other.txt').write_text('another text', 'utf-8')
  (corpus / 'link.txt').symlink_to('../other.txt')
  (corpus / 'away').symlink_to('../other')
  corpus_files.say_once.cache_clear()
  for _ in range(3):
    paths = [name for name, _ in corpus_files.list_files(source)]
  assert [pathlib.Path(path).name for path in paths] == ['link.txt', 'text.txt']
  assert len(list(corpus_files.documents(corpus_files.list_files(source)))) == 2
  said, links = capfd.readouterr().err.splitlines()  # once
  assert links == f'left out of the corpus {source!r}: 2 links to its other files'
  expected = {'a named pipe', 'a socket', 'a link to a device', 'a link to nothing'}
  expected |= {'a link to a folder'} if source == 'corpus' else set()
  assert set(re.findall(r'1 (.*?) \(', said)) == expected


def test_a_folder_of_parameters_has_nothing_else_in_it(tmp_path):
  states.save(tmp_path / 'model', 'model', {'a': np.zeros(3, np.float32)}, {})
  os.mkfifo(tmp_path / 'model' / 'pipe')
  with pytest.raises(ValueError, match='model/pipe is no plain file'):
    arrays.start(str(tmp_path / 'model'), {})
  (tmp_path / 'model' / states.MANIFEST).unlink()  # a folder of another program
  with pytest.raises(ValueError, match='model/pipe is a named pipe'):
    arrays.start(str(tmp_path / 'model'), {})


def test_an_export_replaces_no_device(tmp_path):
  pytest.importorskip('safetensors')
  os.mkfifo(tmp_path / 'out')
  (tmp_path / 'null').symlink_to(os.devnull)
  for name in ('out', 'null'):
    with pytest.raises(ValueError, match=f'{name} is a '):
      arrays.export(tmp_path / name, {}, {})
  assert (tmp_path / 'out').is_fifo() and (tmp_path / 'null').is_symlink()


def test_certificates_and_lists_are_regular_files(tmp_path):
  folder = mint.owner(tmp_path / 'certs').folder / names.SYNCER
  for file in check_lib.FILES:
    aside = (folder / file).rename(tmp_path / file)
    os.mkfifo(folder / file, 0o600)
    problems = check_lib.problems(folder, names.SYNCER, proofs.utc_now())
    assert problems == [f'{folder / file} is no regular file']
    aside.replace(folder / file)
  (folder / 'allowlist.json').unlink()
  os.mkfifo(folder / 'allowlist.json', 0o600)
  done = command_line.diloco('certs', 'check', str(folder))
  assert done.returncode == 42 and 'allowlist.json is no regular file' in done.stderr


def test_the_address_of_a_syncer_is_in_a_regular_file_or_behind_a_link(tmp_path):
  os.mkfifo(tmp_path / 'pipe')
  with pytest.raises(ValueError, match='pipe is a named pipe'):
    dial.resolver(f'file:{tmp_path}/pipe', addresses.LOCAL)
  read = dial.resolver(f'file:{tmp_path}/link', addresses.LOCAL)  # the syncer starts later
  (tmp_path / 'link').symlink_to('address')
  with pytest.raises(OSError):
    read()
  (tmp_path / 'address').write_text('unix:/x/socket')
  assert read() == 'unix:/x/socket'
  (tmp_path / 'address').unlink()
  os.mkfifo(tmp_path / 'address')
  with pytest.raises(ValueError, match='not a regular file'):
    read()


def test_pipes_beside_records_and_tapes_are_no_records_and_tapes(tmp_path):
  for name, file in (('records', 'l0.jsonl'), ('tapes', 'l0.1.0.jsonl')):
    (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / name / file)
  assert records_lib.TailAll(tmp_path).read() == []
  assert tapes.process_tapes(tmp_path / 'tapes') == []


@pytest.mark.parametrize('word', ['--config=PIPE', '--flagfile=PIPE', '--config=/dev/fd/NUMBER'])
def test_a_command_names_it_in_one_line(word: str, tmp_path):
  """What a shell makes of `--config=<(...)`, too: every process of a run reads the config."""
  os.mkfifo('pipe.py')
  reader, writer = os.pipe()
  word = word.replace('PIPE', f'{tmp_path}/pipe.py').replace('NUMBER', str(reader))
  command = [sys.executable, '-m', 'diloco_jax', 'train', word]
  done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, pass_fds=(reader,))
  os.close(reader), os.close(writer)
  assert done.returncode == 42 and done.stderr.count('\n') == 1, done.stderr
  assert 'is a named pipe' in done.stderr or 'is a link to a named pipe' in done.stderr
