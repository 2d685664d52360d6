"""What each file of a corpus is, and which documents are in it."""

import gzip
import json
import os
import pathlib
import subprocess
import sys

import pytest
from array_record.python import array_record_module

from diloco_jax.train import config as train_config
from diloco_jax.train import corpus_files
from diloco_jax.train import data as data_lib
from diloco_jax.train import tokenizer as tokenizer_lib

pa = pytest.importorskip('pyarrow')
ROOT = pathlib.Path(__file__).parents[2]
BOTH = {'text': 'one', 'content': 'two'}


@pytest.fixture(autouse=True)
def _fresh(tmp_path_factory, monkeypatch):
  """Nothing is cached, and no warning printed yet."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))
  corpus_files.say_once.cache_clear()


def _texts(source: pathlib.Path, field: str = 'text') -> list[str]:
  documents = corpus_files.documents(corpus_files.list_files(str(source)), field)
  return sorted(text.decode() for _, text in documents)


def _write_parquet(path: pathlib.Path, **columns: object) -> None:
  import pyarrow.parquet

  pyarrow.parquet.write_table(pa.table(columns), path)


def _write_records(path: pathlib.Path, *records: bytes) -> None:
  writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')
  for record in records:
    writer.write(record)
  writer.close()


# --- Files ----------------------------------------------------------------------------------------


def test_an_unreadable_corpus_is_one_clear_line(tmp_path):
  with pytest.raises(ValueError, match='has no text, only no files: use .stdlib., or'):
    data_lib.load_corpus(str(tmp_path))
  with pytest.raises(ValueError, match='has no text, only (no files|1 a link to nothing .gone)'):
    data_lib.load_corpus(str(tmp_path / 'nowhere' / '*.txt'))
  (tmp_path / 'gone.txt').symlink_to(tmp_path / 'nowhere')
  with pytest.raises(ValueError, match='has no text, only (no files|1 a link to nothing .gone)'):
    data_lib.load_corpus(str(tmp_path))
  gone = corpus_files.documents([('gone.txt', str(tmp_path / 'gone.txt'))])
  with pytest.raises(ValueError, match='cannot read .*gone.txt: No such file.* nothing was chang'):
    list(gone)


NO_TEXT = {
  'more.txt.gz': (gzip.compress(b'more'), 'gzip'),
  'renamed.txt': (b'\x28\xb5\x2f\xfd...', 'zstd'),
  'packed.lz4': (b'\x04\x22\x4d\x18 letters only', 'lz4'),
  'paper.pdf': (b'%PDF-1.4 letters only', 'PDF'),
  'UPPER.TXT': (b'\xff\xfea\x00', 'UTF16'),
  'pointer.txt': (b'version https://git-lfs.github.com/spec/v1\n', 'LFS_pointer'),
  'picture.png': (b'\x89PNG letters only', 'binary'),
  'early.txt': (b'zero \0', 'binary'),
  'late': (b'letters ' * 300_000 + b'\0', 'binary'),
  'late.c': (b'letters ' * 300_000 + 'é'.encode('latin-1'), 'binary'),
  'cut.py': ('an é'.encode()[:-1], 'binary'),
  'table.CSV': (b'text,id\na,1\n', '.csv'),
  'rows.json': (b'[{"text": "a"}]', '.json'),
}


@pytest.mark.parametrize('name', NO_TEXT)
def test_what_is_no_text_is_refused_with_the_remedy_if_a_user_names_it(name, tmp_path):
  content, what = NO_TEXT[name]
  (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError, match=f"{name}' has no text, only {what}: use 'stdlib', or files"):
    _texts(tmp_path / name)
  for source in (tmp_path, tmp_path / '*'):
    with pytest.raises(
      ValueError, match=rf'has no text, only 1 {what} .{name}.: use .stdlib., or files'
    ):
      _texts(source)


def test_what_is_no_text_in_a_folder_is_left_out_and_said_once_with_counts(tmp_path, capsys):
  (tmp_path / 'book.txt').write_text('a book', 'utf-8')
  (tmp_path / 'Kniha.TXT').write_bytes('kní'.encode('latin-1'))
  (tmp_path / 'code.c').write_text('int é;', 'utf-8')
  (tmp_path / 'README').write_text('read me', 'utf-8')
  others = {name: content for name, (content, _) in NO_TEXT.items()}
  others |= {'.git/HEAD': b'ref', '.DS_Store': b'Bud1', 'book.txt~': b'old', 'b.BAK': b'old'}
  for name, content in others.items():
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
  for source in (tmp_path, tmp_path / '*', tmp_path):
    listed = corpus_files.list_files(str(source))
    assert [name for name, _ in listed] == ['Kniha.TXT', 'README', 'book.txt', 'code.c']
  said = capsys.readouterr().err
  counts = ('2 hidden (', '2 a copy (b.BAK)', '1 gzip', '1 zstd (renamed.txt)', '1 lz4', '1 PDF')
  counts += ('1 UTF16', '1 .csv (table.CSV)', '1 .json', '5 binary (cut.py)', '1 LFS_pointer')
  for words in counts:
    assert words in said, said
  assert said.count('5 binary') == said.count('left out') == 2, 'a folder and a glob, once each'
  assert _texts(tmp_path / '.DS_Store') == ['Bud1']  # named alone


# --- What is held out -----------------------------------------------------------------------------


def _held_out(source: pathlib.Path) -> set[bytes]:
  """The texts that are held out, all of them on one side."""
  sides = [set(), set()]
  for side, text in corpus_files.documents(corpus_files.list_files(str(source))):
    sides[side].add(text.strip())
  assert not sides[0] & sides[1] and len(sides[0]) > len(sides[1]) > 1
  return sides[1]


def test_whether_a_text_is_held_out_is_a_question_of_the_text_alone(tmp_path, capsys):
  """Not of names, formats, copies, the order of rows and how many there are."""
  texts = [f'{number} words' for number in range(200)]
  rows = [json.dumps({'text': text}) for text in texts]
  null, more = json.dumps({'text': None}), json.dumps({'text': 'x'})
  for name, lines in {'a': rows, 'b': [null, *rows], 'c': [more, *reversed(rows), *rows]}.items():
    (tmp_path / f'{name}.jsonl').write_text('\n'.join(lines))
  _write_parquet(tmp_path / 'd.parquet', text=[None, *texts])
  _write_records(tmp_path / 'e.array_record', *(text.encode() for text in texts))
  for folder in ('site', 'mirror'):
    (tmp_path / folder).mkdir()
    for number, text in enumerate(texts):
      (tmp_path / folder / f'{number}.txt').write_text(f'{text}\n' if folder == 'site' else text)
  held_out = [_held_out(tmp_path / name) for name in ('a.jsonl', 'b.jsonl', 'c.jsonl', 'd.parquet')]
  held_out += [_held_out(tmp_path / name) for name in ('e.array_record', 'site', '.', 'mirror')]
  assert all(texts == held_out[0] for texts in held_out)
  said = capsys.readouterr().err
  assert '200 documents are copies of others: none is held out without its orig' in said  # c
  assert '1,400 documents are copies' in said and said.count('are copies') == 2


@pytest.mark.parametrize('tokenizer', ['', 'bpe(size=300)'])
def test_of_a_few_documents_the_end_is_held_out_without_copies(tokenizer, tmp_path):
  text = ' '.join(map(str, range(2000)))
  (tmp_path / 'a.jsonl').write_text((json.dumps({'text': text}) + '\n') * 3)
  corpus = data_lib.load_corpus(str(tmp_path / 'a.jsonl'), tokenizer)
  words = tokenizer_lib.load(tokenizer, str(tmp_path / 'a.jsonl'))
  train, held_out = (words.decode(ids) for ids in (corpus.train_ids, corpus.eval_ids))
  assert (train + held_out).startswith(text) and held_out[:40] and held_out[:40] not in train


# --- Documents ------------------------------------------------------------------------------------


def test_each_line_of_jsonl_is_a_document(tmp_path, capsys):
  rows = '{"text": "a \\"quote\\" \\u00e9", "id": 1}\n\n{"text": null}\n{"text": ""}\n'
  (tmp_path / 'a.JSONL').write_text(rows, 'utf-8')
  assert _texts(tmp_path) == ['', 'a "quote" é']
  assert 'a.JSONL: 1 of 3 documents are left out, as they have no text (null)' in (
    capsys.readouterr().err
  )


def test_a_document_with_an_end_or_half_a_character_in_it_is_left_out_and_counted(tmp_path, capsys):
  """Without a tokenizer a zero byte is the end of a document."""
  texts = ['one', 'a\0b', 'half \ud83d', 'half \udc80', '\U0001f600']
  (tmp_path / 'a.jsonl').write_text(''.join(json.dumps({'text': t}) + '\n' for t in texts))
  _write_parquet(tmp_path / 'b.parquet', text=['two', 'a\0b'])
  _write_records(tmp_path / 'c.array_record', b'three', b'a\0b')
  (tmp_path / 'd.txt').write_bytes(b'letters ' * 2000 + b'\0 and more')
  assert _texts(tmp_path) == ['one', 'three', 'two', '\U0001f600']
  said = capsys.readouterr().err
  for words in ('a.jsonl: 3 of 5', 'b.parquet: 1 of 2', 'c.array_record: 1 of 2', 'd.txt: 1 of 1'):
    assert f'{words} documents are left out' in said
  ids = data_lib.load_corpus(str(tmp_path))
  assert (ids.train_ids == 0).sum() + (ids.eval_ids == 0).sum() == 4


@pytest.mark.parametrize('tokenizer', ['', 'bpe(size=300)'])
def test_documents_that_are_not_utf8_are_kept_and_said_once(tokenizer, tmp_path, capsys):
  corpus = tmp_path / 'corpus'
  corpus.mkdir()
  for name in ('b.txt', 'c.MD', 'd.txt'):
    (corpus / name).write_bytes(f'Mädchen grüßt {name}'.encode('latin-1'))
  (corpus / 'a.txt').write_text('Mädchen grüßt', 'utf-8')
  for _ in range(2):
    ids = data_lib.load_corpus(str(corpus), tokenizer)
  words = tokenizer_lib.load(tokenizer, str(corpus))
  assert words.decode([*ids.train_ids, *ids.eval_ids]).count('dchen gr') == 4
  said = capsys.readouterr().err
  assert said.count('not UTF-8') == 1, said
  assert f'3 documents are not UTF-8 (the first: {corpus / "b.txt"})' in said


def _field(tag: int, content: bytes) -> bytes:
  """A field of a protocol buffer."""
  size, length = len(content), b''
  while size > 127:
    size, length = size >> 7, length + bytes([size & 127 | 128])
  return bytes([tag << 3 | 2]) + length + bytes([size]) + content


def _example(text: bytes) -> bytes:
  """A tf.train.Example with a feature `text`, as TensorFlow Datasets writes it."""
  entry = _field(1, b'text') + _field(2, _field(1, _field(1, text)))
  return _field(1, _field(1, entry))


NOT_TEXT = {'short': _example(b'A sentence.'), 'empty': _example(b''), 'zero': _example(b'a\0b')}
NOT_TEXT |= {f'long {n}': _example(b'letters ' * n) for n in (13, 14, 16, 99, 3000, 300_000)}
NOT_TEXT['latin-1'] = 'grüßt'.encode('latin-1')


@pytest.mark.parametrize('record', NOT_TEXT)
def test_a_record_that_is_not_text_is_refused(record, tmp_path):
  _write_records(tmp_path / 'a.array_record', b'whole', b'\n', b'\n' * 12, NOT_TEXT[record])
  with pytest.raises(ValueError, match='record 4 is not text in UTF-8, but perhaps .* tf.train.Ex'):
    _texts(tmp_path)


@pytest.mark.parametrize('tokenizer', ['', 'bpe(size=300)'])
def test_a_corpus_without_any_text_is_refused(tokenizer, tmp_path):
  (tmp_path / 'a.jsonl').write_text('{"text": null}\n' * 9)
  with pytest.raises(ValueError, match='a.jsonl.: no document in its files has a text: use files'):
    data_lib.load_corpus(str(tmp_path / 'a.jsonl'), tokenizer)


@pytest.mark.parametrize(
  'line, why',
  [
    ('{"text": 3}', 'the text of row 1 is int, write a string there'),
    ('{"text": ["a"]}', 'the text of row 1 is list, write'),
    ('{"prompt": "a"}', "line 1 has no object with the key 'text'"),
    ('["a"]', "line 1 has no object with the key 'text'"),
    ('{"text": ', "line 1 has no object with the key 'text'"),
    ('[' * 100_000, "line 1 has no object with the key 'text'"),
    ('\xff', "line 1 has no object with the key 'text'"),
  ],
)
def test_a_row_without_a_text_is_refused(tmp_path, line, why):
  (tmp_path / 'a.jsonl').write_text(line + '\n', 'latin-1')
  with pytest.raises(ValueError, match=f'cannot read .*a.jsonl: {why}.*: mend the file, or leave'):
    _texts(tmp_path)


@pytest.mark.parametrize('name', ['a.parquet', 'a.array_record'])
@pytest.mark.parametrize('content', [b'', b'no such file ' * 99])
def test_a_damaged_file_is_one_clear_line(name, content, tmp_path):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError, match=f'cannot read .*{name}: .*: mend the file, or leave it out'):
    _texts(tmp_path)


PARQUET = {
  'string': pa.array(['a', None, 'b']),
  'large_string': pa.array(['a', None, 'b'], pa.large_string()),
  'dictionary': pa.array(['a', None, 'b']).dictionary_encode(),
}


@pytest.mark.parametrize('kind', PARQUET)
def test_each_row_of_parquet_is_a_document(kind, tmp_path, capsys):
  _write_parquet(tmp_path / 'a.Parquet', text=PARQUET[kind], id=[1, 2, 3])
  assert _texts(tmp_path) == ['a', 'b']
  assert 'a.Parquet: 1 of 3 documents are left out' in capsys.readouterr().err


@pytest.mark.parametrize('values', [[b'a'], [['a', 'b']], [1], [1.5], [{'text': 'a'}]], ids=repr)
def test_a_column_of_parquet_that_is_no_text_is_refused(values, tmp_path):
  _write_parquet(tmp_path / 'a.parquet', text=pa.array([None, *values]))
  kind = type(values[0]).__name__
  with pytest.raises(ValueError, match=f'the text of row 2 is {kind}, write a string there'):
    _texts(tmp_path)


def test_parquet_without_pyarrow_is_refused_with_the_command_before_anything_is_read(
  tmp_path, monkeypatch
):
  (tmp_path / 'a.PARQUET').touch()
  monkeypatch.setitem(sys.modules, 'pyarrow', None)
  with pytest.raises(ValueError, match='need the package pyarrow: pip install pyarrow'):
    corpus_files.list_files(str(tmp_path))


# --- The field ------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['a.jsonl', 'a.parquet'])
@pytest.mark.parametrize('tokenizer', ['', 'bpe(size=300)'])
def test_the_field_is_read_that_the_config_names(name, tokenizer, tmp_path):
  path = tmp_path / name
  if name == 'a.jsonl':
    path.write_text((json.dumps(BOTH) + '\n') * 40)
  else:
    _write_parquet(path, **{key: [value] * 40 for key, value in BOTH.items()})
  assert set(_texts(path)) == {'one'} and set(_texts(path, 'content')) == {'two'}
  for field, text in BOTH.items():
    corpus = data_lib.load_corpus(str(path), tokenizer, field)
    words = tokenizer_lib.load(tokenizer, str(path), field)
    assert set(words.decode(corpus.train_ids)) - {'\0'} == set(text)
  if tokenizer:
    digests = {tokenizer_lib.digest(tokenizer, str(path), field) for field in BOTH}
    file = str(tokenizer_lib.file(tokenizer, str(path)))
    digests |= {data_lib.load_corpus(str(path), file, field).digest for field in BOTH}
    assert len(digests) == 4, 'each field has a tokenizer and ids of its own'
  with pytest.raises(ValueError, match=r"(key|column) 'body'.* set data.field to"):
    data_lib.load_corpus(str(path), tokenizer, 'body')


def test_an_empty_field_is_refused():
  with pytest.raises(ValueError, match='data.field is empty: name the field of the text'):
    train_config.DataConfig(field='').validate()


# --- Every reader ---------------------------------------------------------------------------------

_READS = """
import sys, zlib
from diloco_jax.train import corpus_files, data, tokenizer
path, name = sys.argv[1:]
print(corpus_files.list_files(path))
print(list(corpus_files.documents(corpus_files.list_files(path))))
print(data.load_corpus(path).digest, data.load_corpus(path, name).digest)
print(tokenizer.digest(name, path), tokenizer.load(name, path).encode(['some words']))
"""


def test_every_reader_reads_the_same_whatever_the_order_of_a_set(tmp_path):
  corpus = tmp_path / 'corpus'
  for folder in 'abcdef':
    (corpus / folder).mkdir(parents=True)
    (corpus / folder / 'a.txt').write_text(f'some words of {folder}\n' * 20)
    (corpus / folder / 'b.jsonl').write_text(json.dumps({'text': f'a line of {folder}'}) + '\n')
    (corpus / folder / 'c.csv').touch()
    _write_parquet(corpus / folder / 'd.parquet', text=[f'rows of {folder}'] * 3, id=[1, 2, 3])
    _write_records(corpus / folder / 'e.array_record', f'records of {folder}'.encode())
  outputs = set()
  for seed in '12':
    done = subprocess.run(
      [sys.executable, '-c', _READS, corpus, 'bpe(size=300)'],
      env={
        **os.environ,
        'PYTHONHASHSEED': seed,
        'PYTHONPATH': str(ROOT),
        'XDG_CACHE_HOME': str(tmp_path / seed),
      },
      capture_output=True,
      text=True,
      check=True,
    )
    outputs.add((done.stdout, done.stderr))
  assert len(outputs) == 1 and '6 .csv (c.csv)' in outputs.pop()[1]
