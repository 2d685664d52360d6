"""The owner's commands and the check of a node's folder, on real files."""

import os
import pathlib
from concurrent import futures

import pytest
from cryptography.hazmat.primitives import serialization

from diloco_jax.certs import allowlist, authority, names, private, proofs
from diloco_jax.certs import check as check_lib
from tests.certs import mint
from tests.launch.lib import command_line

NOW = proofs.utc_now()


@pytest.fixture
def owner(tmp_path):
  return mint.owner(tmp_path / 'certs')


def diloco_certs(folder, *words):
  process = command_line.diloco('certs', *words, cwd=folder)
  assert process.stderr.count('\n') <= 1 and 'Traceback' not in process.stderr, process.stderr
  return process.returncode, process.stdout + process.stderr


def test_the_commands_from_the_authority_to_the_revocation(tmp_path):
  run = lambda *words: diloco_certs(tmp_path, *words)
  assert run('init', '--name=r')[0] == 0
  assert run('issue', 'l0', 'l1')[0] == 0
  assert run('csr', 'far')[0] == 0
  assert run('sign', 'far/request.pem', '--learner=l3')[0] == 0
  for name in (check_lib.AUTHORITY, check_lib.CERTIFICATE):
    (tmp_path / 'far' / name).write_bytes((tmp_path / 'certs' / 'l3' / name).read_bytes())
  assert 'diloco://r/learner/l3: in order' in run('check', 'far')[1]
  assert not (tmp_path / 'certs' / 'l3' / check_lib.KEY).exists()  # the key never left its machine
  assert run('revoke', 'l1')[0] == 0
  rows = {line.split()[0]: line.split()[2] for line in run('list')[1].splitlines()[1:]}
  assert rows == {'l0': 'accepted', 'l1': 'revoked', 'l3': 'accepted', 'syncer': 'accepted'}
  code, output = run('init', '--name=r')
  assert code == 42 and 'is not overwritten' in output
  assert run('issue', 'l0', 'syncer', '--renew')[0] == 0
  assert run('check', 'certs/syncer')[0] == 0


def test_a_write_that_was_cut_short_or_failed_hinders_no_other(tmp_path):
  path = tmp_path / 'cert.pem'
  partial = path.with_name(f'cert.pem.{os.getpid()}.new')
  partial.write_bytes(b'half')
  path.mkdir()
  with pytest.raises(OSError):
    private.replace(path, b'whole')
  assert not partial.exists()
  path.rmdir()
  partial.write_bytes(b'half')
  private.replace(path, b'whole')
  assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == b'whole'


def test_keys_and_folders_are_of_this_user_alone(owner, monkeypatch):
  before = os.umask(0)
  try:
    owner.issue('l2', NOW)
  finally:
    os.umask(before)
  for path in (owner.folder, *owner.folder.rglob('*')):
    assert path.stat().st_mode & 0o077 == 0, path


def test_a_renewal_keeps_the_certificate_before_until_its_end(owner):
  before = owner.allowlist().listed['l0']
  owner.issue('l0', NOW, renew=True)
  both = owner.allowlist().listed['l0']
  assert len(both) == 2 and before.items() <= both.items()
  later = max(both.values())
  owner.issue('l0', later, renew=True)
  assert len(owner.allowlist().listed['l0']) == 1  # those that have ended are gone


@pytest.mark.parametrize(
  'wrong', ['', 'X', 'a/b', '-a', 'a-', 'a.b', 'a' * 64, '..', 'a\n', '\u0661', 'a b']
)
def test_a_run_with_another_name_is_refused(wrong, tmp_path):
  with pytest.raises(ValueError, match='not the name of a run'):
    authority.init(tmp_path / 'new', wrong, NOW)
  assert not (tmp_path / 'new').exists()


@pytest.mark.parametrize(
  'uri',
  [
    'diloco://r/learner/',
    'diloco://r/owner/l0',
    'diloco://r/learner/l0/x',
    'diloco://r/learner/l0\n',
    'diloco://r/learner/L0',
    'diloco://r:1/learner/l0',
    'diloco://u@r/learner/l0',
    'diloco://r/learner/l0?x',
    'https://r/learner/l0',
    'diloco:///learner/l0',
  ],
)
def test_another_uri_is_no_name(uri):
  with pytest.raises(ValueError):
    names.parse(uri)


@pytest.mark.parametrize(
  'id, why',
  [
    ('supervisor', 'syncer and supervisor are taken'),
    ('../x', 'is not the id of a learner'),
    ('l0', 'is not overwritten'),
  ],
)
def test_an_id_that_is_wrong_or_used_already_is_refused(owner, id, why):
  with pytest.raises(ValueError, match=why):
    owner.issue(id, NOW)
  assert {path.name for path in owner.folder.parent.iterdir()} == {'certs'}


def test_a_key_with_a_password_is_refused(owner):
  secret = owner.key.private_bytes(
    serialization.Encoding.PEM,
    serialization.PrivateFormat.PKCS8,
    serialization.BestAvailableEncryption(b'password'),
  )
  (owner.folder / authority.AUTHORITY_KEY).write_bytes(secret)
  with pytest.raises(ValueError, match='ca.key is not an EC key in PEM without a password'):
    authority.load(owner.folder)


def _halve(name):
  return lambda folder: os.truncate(folder / name, 100)


def _copy(name, source, folder):
  (folder / name).write_bytes((source / name).read_bytes())


WRONG_FILES = {
  'mode 0644': (lambda folder: (folder / check_lib.KEY).chmod(0o644), 'chmod 600'),
  **{
    f'no {name}': (lambda folder, name=name: (folder / name).unlink(), f'{name} cannot be read')
    for name in check_lib.FILES
  },
  **{
    f'half {name}': (_halve(name), f'{name} is not a {what}')
    for name, what in zip(check_lib.FILES, ('certificate', 'certificate', 'private key'))
  },
  'a large certificate': (
    lambda folder: (folder / check_lib.CERTIFICATE).write_bytes(b'-' * (1 << 21)),
    'cert.pem has more than 1048576 bytes',
  ),
  'the key of another': (
    lambda folder: _copy(check_lib.KEY, folder.parent / 'l1', folder),
    'key.pem is not the key of cert.pem',
  ),
  'another authority': (
    lambda folder: _copy(
      check_lib.AUTHORITY, mint.owner(folder.parents[1] / 'other').folder, folder
    ),
    'is not signed by ca.pem',
  ),
}


@pytest.mark.parametrize('case', WRONG_FILES)
def test_check_shows_what_is_wrong_with_files(owner, case):
  spoil, problem = WRONG_FILES[case]
  assert check_lib.problems(owner.folder / 'l0', names.LEARNER, NOW) == []
  spoil(owner.folder / 'l0')
  problems = check_lib.problems(owner.folder / 'l0', names.LEARNER, NOW)
  assert any(problem in text for text in problems), problems


WRONG_CERTIFICATES = {
  'ended': ({'ends_s': -1}, 'has ended'),
  'not begun': ({'begins_s': 600}, 'begins at'),
  'of a server': ({'purposes': (mint.SERVER,)}, 'purpose'),
  'of both purposes': ({'purposes': (mint.CLIENT, mint.SERVER)}, 'purpose'),
  'two URIs': (
    {'uris': (f'diloco://{mint.RUN}/learner/l0', f'diloco://{mint.RUN}/learner/l1')},
    '2 URIs',
  ),
  'no URI': ({'uris': (), 'dns': (f'diloco://{mint.RUN}/learner/l0',)}, '0 URIs'),
  'a DNS name too': ({'dns': (names.host(mint.RUN),)}, 'a learner has none'),
  'a syncer': ({'uris': (f'diloco://{mint.RUN}/syncer/syncer',)}, 'must have'),
  'another URI': ({'uris': ('https://example.org/l0',)}, 'is not diloco://'),
}


@pytest.mark.parametrize('case', WRONG_CERTIFICATES)
def test_check_shows_what_is_wrong_with_a_certificate(owner, tmp_path, case):
  changes, text = WRONG_CERTIFICATES[case]
  folder = mint.node(owner, tmp_path / 'node', **changes)
  (problem,) = check_lib.problems(folder, names.LEARNER, proofs.utc_now())
  assert text in problem


def test_a_warning_comes_a_week_before_the_end_of_a_certificate(owner):
  proof = check_lib.read(owner.folder / 'l0', names.LEARNER, NOW).proof
  assert not check_lib.warning(proof, NOW)
  warning = check_lib.warning(proof, proof.not_after - mint.seconds(6 * 86400))
  assert 'in 6.0 days' in warning and 'issue l0 --renew' in warning


def test_no_certificate_outlives_its_authority(owner):
  ends = owner.certificate.not_valid_after_utc
  proof = owner.issue('l0', ends - mint.seconds(86400), renew=True)
  assert proof.not_after == ends
  with pytest.raises(ValueError, match='the authority of run .* has ended at'):
    owner.issue('l0', ends, renew=True)


def test_a_renewal_that_cannot_be_listed_changes_nothing(owner):
  key = (owner.folder / 'l0' / check_lib.KEY).read_bytes()
  (owner.folder / names.SYNCER / allowlist.FILE).chmod(0o664)
  with pytest.raises(ValueError, match='other users may write it'):
    owner.issue('l0', NOW, renew=True)
  with pytest.raises(ValueError, match='other users may write it'):
    owner.issue('l9', NOW)
  assert (owner.folder / 'l0' / check_lib.KEY).read_bytes() == key
  assert not (owner.folder / 'l9').exists()


def test_owners_commands_at_the_same_time_lose_nothing(owner):
  """Each reads the allowlist and writes it."""
  ids = [f'n{number}' for number in range(8)]
  with futures.ThreadPoolExecutor(8) as pool:
    list(pool.map(lambda id: owner.issue(id, NOW), ids))
  assert set(ids) <= owner.allowlist().listed.keys()


@pytest.mark.parametrize(
  'text',
  [
    '',
    '[]',
    '{"format": 1, "run": "run-x"}',
    '{"format": 1, "run": "run-x", "learners": {"../x": []}}',
    '{"format": 1, "run": "run-x", "learners": {"l0": [{"sha256": "0f"}]}}',
    '{"format": 1, "run": "run-x", "learners": {"l0": [{"sha256": "0f", "until": "soon"}]}}',
    '{"format": 1, "run": "run-x", "learners": {"l0": 1}}',
    '[' * 100_000,
  ],
)
def test_an_allowlist_that_is_not_whole_is_refused(tmp_path, text):
  (tmp_path / allowlist.FILE).write_text(text)
  (tmp_path / allowlist.FILE).chmod(0o600)
  with pytest.raises(ValueError, match='is not a whole allowlist'):
    allowlist.read(tmp_path)


def test_no_key_is_part_of_the_project():
  root = pathlib.Path(__file__).resolve().parents[2]
  folders = ('diloco_jax', 'docs', 'experiments', 'scripts', 'tests')
  for path in (path for folder in folders for path in (root / folder).rglob('*')):
    assert not path.is_file() or b'PRIVATE ' + b'KEY-----' not in path.read_bytes(), path
