"""Ids of a tokenizer instead of bytes: the same text comes back, each corpus is encoded once."""

import dataclasses
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import sentencepiece
import tokenizers

from diloco_jax.config import load, run_config
from diloco_jax.train import corpus_files, decoder, evaluate
from diloco_jax.train import data as data_lib
from diloco_jax.train import tokenizer as tokenizer_lib

BPE = 'bpe(size=400)'
DEADLINE_S = 60


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))


@pytest.fixture(name='text')
def _text(text, tmp_path_factory) -> pathlib.Path:
  return shutil.copytree(text, tmp_path_factory.mktemp('own') / 'text')


def _documents(ids: np.ndarray, tokenizer: tokenizer_lib.Tokenizer) -> list[str]:
  ends = np.flatnonzero(ids == tokenizer.end[0])
  return [tokenizer.decode(part[part != tokenizer.end[0]]) for part in np.split(ids, ends + 1)[:-1]]


def test_every_document_comes_back_whole_on_its_own_side(text, monkeypatch):
  (text / 'odd.txt').write_text('\tгде\r\n\n  0 \u20ac \U0001f600\n' * 30)
  monkeypatch.setattr(data_lib, '_PART_BYTES', 64)  # a document is many parts
  tokenizer = tokenizer_lib.load(BPE, str(text))
  corpus, as_bytes = data_lib.load_corpus(str(text), BPE), data_lib.load_corpus(str(text))
  assert isinstance(corpus.train_ids, np.memmap) and corpus.train_ids.dtype == np.uint16
  assert max(corpus.train_ids.max(), corpus.eval_ids.max()) < tokenizer.size == 400
  for ids, whole in ((corpus.train_ids, as_bytes.train_ids), (corpus.eval_ids, as_bytes.eval_ids)):
    assert _documents(ids, tokenizer) == whole.tobytes().decode().split('\0')[:-1]
    assert len(ids) < 0.6 * len(whole)


def test_two_machines_train_the_same_tokenizer_and_read_the_same_ids(text, monkeypatch, tmp_path):
  first = tokenizer_lib.file(BPE, str(text)).read_bytes()
  digest = data_lib.load_corpus(str(text), BPE).digest
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  assert tokenizer_lib.file(BPE, str(text)).read_bytes() == first
  assert data_lib.load_corpus(str(text), BPE).digest == digest


def test_ids_are_those_of_the_text_of_the_tokenizer_and_of_its_library(text, tmp_path, monkeypatch):
  """Names, sizes and times are those of the file before."""
  words = shutil.copy(tokenizer_lib.file(BPE, str(text)), tmp_path / 'words.json')
  path, folders, asked = tmp_path / 'a.txt', [], corpus_files.build_once
  monkeypatch.setattr(
    corpus_files, 'build_once', lambda *what: folders.append(asked(*what)) or folders[-1]
  )
  load_again = lambda: data_lib.load_corpus(str(path), str(words)).digest
  digests = set()
  for word in ('some', 'more', 'some'):
    path.write_text(f'{word} words\n' * 100)
    os.utime(path, (0, 0))
    digests.add(load_again())
  assert len(digests) == len(set(folders)) == 2
  usual = words.read_text('utf-8')
  words.write_text(usual.replace('"dropout":null', '"dropout": null') + '\n', 'utf-8')
  load_again()
  monkeypatch.setattr(tokenizer_lib.importlib.metadata, 'version', lambda package: '99')
  load_again()
  assert len(set(folders)) == 4


def test_ids_that_were_damaged_in_the_cache_are_made_again(text, monkeypatch):
  first = data_lib.load_corpus(str(text), BPE)
  path = pathlib.Path(first.train_ids.filename)
  path.write_bytes(b'\0' + path.read_bytes()[1:])
  again = data_lib.load_corpus(str(text), BPE)
  assert again.digest == first.digest and again.train_ids.tobytes()[0] != 0


_BUILDS = """
import os, pathlib, signal, sys
from diloco_jax.train import corpus_files
built, dies = sys.argv[1:]

def build(folder):
  with open(built, 'a') as file:
    file.write('built\\n')
  (folder / 'half').touch()
  if dies == 'dies':
    os.kill(os.getpid(), signal.SIGKILL)
  (folder / 'half').rename(folder / 'whole')

assert os.listdir(corpus_files.build_once('x', 'stdlib', build)) == ['whole']
"""


def test_processes_that_start_together_build_once_also_after_one_that_died(tmp_path):
  built = tmp_path / 'built'
  start = lambda word: subprocess.Popen([sys.executable, '-c', _BUILDS, str(built), word])
  assert start('dies').wait(DEADLINE_S) == -signal.SIGKILL
  others = [start('lives') for _ in range(3)]
  assert [other.wait(DEADLINE_S) for other in others] == [0, 0, 0]
  assert built.read_text() == 'built\n' * 2


def test_a_cache_that_cannot_be_written_is_one_clear_line(text, monkeypatch, tmp_path):
  (tmp_path / 'file').touch()
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
  with pytest.raises(ValueError, match='Not a directory: .*; mend it, make space, or set XDG'):
    data_lib.load_corpus(str(text), BPE)


def test_letters_of_a_special_token_are_letters(text):
  tokenizer = tokenizer_lib.load(BPE, str(text))
  line = 'the mark <|endoftext|> ends a document'
  (ids,) = tokenizer.encode([line])
  assert not set(ids) & set(tokenizer.end)
  assert tokenizer.decode(ids) == line and tokenizer.num_bytes(ids) == len(line)


def _ending(folder: pathlib.Path, text: pathlib.Path, *ends: str) -> str:
  """A tokenizer of a corpus with these special tokens instead of its end."""
  settings = json.loads(tokenizer_lib.file(BPE, str(text)).read_text('utf-8'))
  del settings['added_tokens'], settings['model']['vocab']['<|endoftext|>']
  path = folder / 'tokenizer.json'
  path.write_text(json.dumps(settings | {'added_tokens': []}), 'utf-8')
  tokenizer = tokenizers.Tokenizer.from_file(str(path))
  tokenizer.add_special_tokens(list(ends))
  tokenizer.save(str(path))
  return str(path)


@pytest.mark.parametrize('end', ['[EOS]', '<|eos|>', '<｜end▁of▁sentence｜>', '<|im_end|>'])
def test_an_end_of_another_name_is_behind_each_document(text, tmp_path, end, capfd):
  name = _ending(tmp_path, text, end)
  tokenizer = tokenizer_lib.load(name, '')
  assert tokenizer.decode(tokenizer.end) in ('', end) and capfd.readouterr().err == ''
  corpus = data_lib.load_corpus(str(text), name)
  as_bytes = data_lib.load_corpus(str(text))
  whole = as_bytes.eval_ids.tobytes().decode().split('\0')[:-1]
  assert _documents(corpus.eval_ids, tokenizer) == whole


@pytest.mark.parametrize('said', ['<stop>', {'content': '<stop>', 'lstrip': False}])
@pytest.mark.parametrize('file', ['tokenizer_config.json', 'special_tokens_map.json'])
def test_the_end_is_that_of_the_file_beside_also_in_the_folder_of_a_run(text, tmp_path, said, file):
  name = _ending(tmp_path, text, '</s>', '<stop>')
  digests = [tokenizer_lib.digest(name, '')]
  (usual,) = tokenizer_lib.load(name, '').end
  (tmp_path / file).write_text(json.dumps({'eos_token': said}), 'utf-8')
  (end,) = tokenizer_lib.load(name, '').end
  digests.append(tokenizer_lib.digest(name, ''))
  assert end == usual + 1 and digests[0] != digests[1]

  config = run_config.Config(name='ends')
  config.data.corpus, config.data.tokenizer = str(text), name
  (tmp_path / 'run').mkdir()
  load.write(tmp_path / 'run', config)
  load.write(tmp_path / 'run', config)
  kept = load.read(tmp_path / 'run').data.tokenizer
  assert tokenizer_lib.load(kept, '').end == [end] and tokenizer_lib.digest(kept, '') == digests[1]
  (tmp_path / file).unlink()
  with pytest.raises(ValueError, match='is not the tokenizer of the run'):
    load.write(tmp_path / 'run', config)


def test_a_tokenizer_without_an_end_is_said(text, tmp_path, capfd):
  corpus_files.say_once.cache_clear()
  assert tokenizer_lib.load(_ending(tmp_path, text, '<pad>'), '').end == []
  assert 'has no end of a document that is known' in capfd.readouterr().err


def test_the_size_is_beyond_the_largest_id_even_if_ids_have_gaps(text, tmp_path):
  settings = json.loads(tokenizer_lib.file(BPE, str(text)).read_text('utf-8'))
  vocab = settings['model']['vocab']
  for token, number in vocab.items():
    vocab[token] = number + 70_000 * (number >= 390)
  (tmp_path / 'gap.json').write_text(json.dumps(settings), 'utf-8')
  tokenizer = tokenizer_lib.load(str(tmp_path / 'gap.json'), '')
  assert (tokenizer.size, tokenizer.dtype) == (70_400, 'uint32')


def test_sentencepiece(text, tmp_path):
  path = tmp_path / 'small.model'
  with open(path, 'wb') as file:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(path.read_text() for path in text.iterdir()),
      model_writer=file,
      vocab_size=90,
      minloglevel=2,
    )
  tokenizer = tokenizer_lib.load(str(path), '')
  line = 'file 7: the quick brown fox'
  assert tokenizer.decode(tokenizer.encode([line])[0]) == line
  corpus = data_lib.load_corpus(str(text), str(path))
  assert tokenizer.size == 90 and _documents(corpus.eval_ids, tokenizer)[0].startswith('file ')


@pytest.mark.parametrize(
  'name, match',
  [
    ('none.json', "tokenizer 'none.json' is not there"),
    ('bad.json', "tokenizer '.*bad.json': "),
    ('bad.model', "tokenizer '.*bad.model': "),
    ('gpt2', "'gpt2' is unknown; use one of: bpe; or name a file of tokenizers"),
    ('bpe(size=100)', r'100 is not in range; it is bpe\(size=2048\)'),
    ('bpe(vocab=1)', 'unexpected keyword'),
  ],
)
def test_a_tokenizer_that_is_none_is_one_clear_line(text, tmp_path, name, match):
  if name.startswith('bad'):
    name = str(tmp_path / name)
    pathlib.Path(name).write_text('not one', encoding='utf-8')
  with pytest.raises(ValueError, match=match):
    data_lib.load_corpus(str(text), name)


@pytest.mark.parametrize('package', ['tokenizers', 'sentencepiece'])
def test_a_package_that_is_not_installed_is_named(text, tmp_path, monkeypatch, package):
  monkeypatch.setitem(sys.modules, package, None)
  (tmp_path / 'x.model').touch()
  tokenizer = {'tokenizers': BPE, 'sentencepiece': str(tmp_path / 'x.model')}[package]
  with pytest.raises(ValueError, match=rf"the package {package}: pip install 'diloco-jax\[data\]'"):
    data_lib.load_corpus(str(text), tokenizer)


def test_a_vocabulary_that_is_too_small_is_refused(model, data, text):
  data.corpus, data.tokenizer = str(text), BPE
  task = decoder.task(model, data)
  for read in (task.data_digest, task.eval_batches, lambda: task.batches(0), lambda: task.suite(9)):
    with pytest.raises(ValueError, match='has 400 ids, model.vocab_size is 256: raise it'):
      read()
  task = decoder.task(dataclasses.replace(model, vocab_size=400), data)
  assert task.data_digest() and len(task.eval_batches()) == data.eval_batches


def test_bits_per_byte_do_not_depend_on_the_tokenizer(model, data, text):
  """A uniform model of bytes needs 8 bits for each; a loss per id counts for the bytes in it."""
  data.corpus = str(text)
  as_bytes = decoder.task(model, data)
  wider = dataclasses.replace(model, vocab_size=400)
  as_ids = decoder.task(wider, dataclasses.replace(data, tokenizer=BPE))
  of = lambda task: evaluate.bits_per_byte(task, task.eval_batches())
  assert of(as_bytes)(math.log(256)) == pytest.approx(8.0)
  targets = [row[1:] for batch in as_ids.eval_batches() for row in batch]
  bytes_per_id = sum(map(as_ids.tokenizer().num_bytes, targets)) / sum(map(len, targets))
  assert bytes_per_id > 1.5
  assert of(as_ids)(bytes_per_id * math.log(256)) == pytest.approx(8.0)


def test_a_character_that_a_window_cuts_counts_for_the_bytes_that_are_in_it(tmp_path):
  (tmp_path / 'a.txt').write_text('abc ' * 100)
  tokenizer = tokenizer_lib.load('bpe(size=257)', str(tmp_path))  # the bytes, and the end
  ids = tokenizer.encode(['a\U0001f600b'])[0]
  assert [tokenizer.num_bytes(ids[cut:]) for cut in range(4)] == [6, 5, 4, 3]
