"""Which addresses are listened on and dialed, and Unix sockets of this user alone."""

import pathlib
import socket
import tempfile

import grpc
import pytest

from diloco_jax.certs import private
from diloco_jax.protocol import events
from diloco_jax.transport import addresses, link, listen
from tests.certs import mint
from tests.transport import ends

LIMITS = link.Limits(
  contribution_bytes=(0,), publish_bytes=(1 << 20,), handshake_s=20.0, drain_s=0.5
)
LOCAL, PLAIN = addresses.LOCAL, ends.PLAIN
TLS = addresses.Access(tls=pathlib.Path('certs'))

OTHERS = ['0.0.0.0:0', '[::]:0', 'localhost:0', '10.0.0.1:0', 'example.com:7', '[::ffff:7f00:1]:0']
LOOPBACK = ['127.0.0.1:0', '127.8.9.1:7070', '[::1]:0']
NO_ADDRESS = [
  '127.0.0.1',
  '127.0.0.1:',
  '127.0.0.1:x',
  '127.0.0.1:65536',
  '127.0.0.1:-1',
  ':0',
  ':::0',
  '::1:7070',
  '127.0.0.1]:0',
  '[127.0.0.1]:0',
  '127.0.0.1:\u0661',
  '127.0.0.1:1\n',
  'ipv4:127.0.0.1:1',
  'dns:example.com:1',
  'dns:///example.com:1',
  'xds:///x:1',
  'unix-abstract:x:1',
  '127.0.0.1:1,127.0.0.2:2',
  'a b:1',
  '-x:1',
]


@pytest.fixture
def tmp_path():
  """A short one: the kernel limits the length of a socket's path."""
  with tempfile.TemporaryDirectory() as folder:
    yield pathlib.Path(folder)


def reason_of_refusal(address, access):
  """The error of listening and of dialing, which is the same."""
  with pytest.raises(ValueError) as caught:
    ends.syncer(LIMITS, access, address)
  learner = ends.learner(address, LIMITS, access)
  reason = learner.hears().reason
  learner.transport.shutdown(0.0)
  assert str(caught.value) == reason and '\n' not in reason
  return reason


@pytest.mark.parametrize('access', [LOCAL, PLAIN], ids=['default', 'plaintext_loopback'])
@pytest.mark.parametrize('address', OTHERS)
def test_an_address_of_other_machines_needs_certificates(address, access):
  addresses.check(address, TLS)
  reason = reason_of_refusal(address, access)
  for way_out in ('give tls, a folder', 'Unix socket', 'plaintext_loopback'):
    assert way_out in reason


@pytest.mark.parametrize('address', LOOPBACK)
def test_plain_tcp_on_loopback_needs_its_flag_or_certificates(address):
  assert 'needs certificates' in reason_of_refusal(address, LOCAL)
  addresses.check(address, PLAIN)
  addresses.check(address, TLS)


@pytest.mark.parametrize('address', NO_ADDRESS)
@pytest.mark.parametrize('access', [PLAIN, TLS], ids=['plaintext_loopback', 'tls'])
def test_what_is_no_address_is_refused(address, access):
  with pytest.raises(ValueError, match='is not unix:PATH|is not a host'):
    addresses.check(address, access)


# --- Unix sockets ---------------------------------------------------------------------------------


def listen_at(address):
  return ends.syncer(LIMITS, LOCAL, address).transport


def connects(address):
  learner = ends.learner(address, LIMITS, LOCAL)
  event = learner.hears()
  learner.transport.shutdown(0.0)
  return isinstance(event, events.Connected)


def socket_of(workdir):
  return pathlib.Path(addresses.in_folder(workdir).removeprefix('unix:'))


@pytest.mark.parametrize('name', ['plain', 'with space', '100%25', 'gr\u00fcn@[x]#?'])
def test_the_socket_of_a_run_is_of_this_user_alone(tmp_path, name):
  workdir = tmp_path / name
  address = addresses.in_folder(workdir)
  syncer = listen_at(address)
  assert syncer.address == address == addresses.in_folder(workdir)
  path = socket_of(workdir)
  assert path.is_socket() and path.parent.stat().st_mode & 0o777 == 0o700
  assert path.is_relative_to(workdir)
  assert connects(address)
  syncer.shutdown(0.0)
  assert not path.exists()


def test_a_long_workdir_has_its_socket_elsewhere(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_RUNTIME_DIR', str(tmp_path))
  workdir = tmp_path / ('x' * 120)
  address, path = addresses.in_folder(workdir), socket_of(workdir)
  assert address == addresses.in_folder(workdir)
  assert address != addresses.in_folder(tmp_path / ('y' * 120))
  assert path.parent.parent == tmp_path and path.parent.stat().st_mode & 0o777 == 0o700
  syncer = listen_at(address)
  assert connects(address)
  syncer.shutdown(0.0)
  path.parent.chmod(0o777)  # as if another user had made it first
  other = socket_of(workdir)
  assert other != path
  other.parent.rmdir()


def test_a_workdir_with_a_comma_has_its_socket_elsewhere(tmp_path, monkeypatch):
  """As sweeps name folders. gRPC would take its path for two addresses."""
  monkeypatch.setenv('XDG_RUNTIME_DIR', str(tmp_path))
  workdir, link = tmp_path / 'lr=1e-3,wd=0.1', tmp_path / 'link'
  link.symlink_to(workdir)
  for folder in (workdir, link):
    address = addresses.in_folder(folder)
    assert ',' not in address and address == addresses.in_folder(folder)
    syncer = listen_at(address)
    assert connects(address)
    syncer.shutdown(0.0)


def test_a_socket_with_a_comma_in_its_path_is_refused(tmp_path):
  private.make_folder(tmp_path / 'a,b')
  (tmp_path / 'link').symlink_to('a,b')
  for name in ('a,b', 'link'):
    assert 'a comma' in reason_of_refusal(f'unix:{tmp_path}/{name}/socket', LOCAL)


@pytest.mark.parametrize('name, exists', [('of another user', False), ('with,comma', True)])
def test_a_runtime_folder_that_gRPC_cannot_use_is_not_used(tmp_path, monkeypatch, name, exists):
  runtime = tmp_path / name
  if exists:
    runtime.mkdir()
  monkeypatch.setenv('XDG_RUNTIME_DIR', str(runtime))
  path = socket_of(tmp_path / ('x' * 120))
  assert path.parent.is_relative_to(tempfile.gettempdir())
  assert not path.is_relative_to(runtime) and ',' not in str(path)
  path.parent.rmdir()


@pytest.mark.parametrize('mode', [0o755, 0o770, 0o701])
def test_a_socket_in_a_folder_of_others_is_refused(tmp_path, mode):
  (tmp_path / 'open').mkdir()
  (tmp_path / 'open').chmod(mode)
  assert 'chmod 700' in reason_of_refusal(f'unix:{tmp_path}/open/socket', LOCAL)


def test_a_relative_or_long_path_is_refused(tmp_path):
  assert 'must be absolute' in reason_of_refusal('unix:socket', LOCAL)
  assert 'at most 100 bytes' in reason_of_refusal(f'unix:{tmp_path}/{"x" * 100}', LOCAL)


def test_a_unix_socket_takes_no_certificates(tmp_path):
  owner = mint.owner(tmp_path / 'certs')
  access = addresses.Access(owner.folder / 'syncer')
  assert 'leave tls out' in reason_of_refusal(f'unix:{tmp_path}/socket', access)


def test_the_socket_of_a_killed_syncer_is_replaced_and_that_of_one_that_lives_is_not(tmp_path):
  address = addresses.in_folder(tmp_path)
  with socket.socket(socket.AF_UNIX) as killed:
    killed.bind(address.removeprefix('unix:'))
  syncer = listen_at(address)
  assert connects(address)
  with pytest.raises(OSError, match='another syncer listens there'):
    listen_at(address)
  syncer.shutdown(0.0)


@pytest.mark.parametrize('tls', [False, True])
def test_no_channel_goes_through_a_web_proxy(tmp_path, monkeypatch, tls):
  """A company's variables must not send a run elsewhere, nor the model that a loop brings."""
  owner = mint.owner(tmp_path / 'certs')
  access = lambda name: addresses.Access(owner.folder / name) if tls else PLAIN
  syncer = ends.syncer(LIMITS, access('syncer')).transport
  with socket.socket() as nowhere:
    nowhere.bind(('127.0.0.1', 0))  # and does not listen
    for variable in ('grpc_proxy', 'http_proxy', 'https_proxy'):
      monkeypatch.setenv(variable, f'http://127.0.0.1:{nowhere.getsockname()[1]}')
    for variable in ('no_proxy', 'no_grpc_proxy'):
      monkeypatch.delenv(variable, raising=False)
    with listen.dial(syncer.address, access('l0'), ()) as channel:
      with pytest.raises(grpc.RpcError) as answer:
        channel.unary_unary('/diloco.v1.OwnModel/Bring')(b'', timeout=ends.DEADLINE_S)
  syncer.shutdown(0.0)
  assert answer.value.code() is grpc.StatusCode.UNIMPLEMENTED, answer.value
