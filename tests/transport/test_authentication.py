"""Which peers get in: every kind of client before every kind of door and service, impostors of the
syncer, and what happens to sessions that are open.

The tables below give the cells. A cell is one call of one client. `--all` runs all of them, the
default suite every client once, and all cells of five clients.
"""

import contextlib
import pathlib
import socket
import ssl
from concurrent import futures

import grpc
import pytest

from diloco_jax.certs import allowlist, authority, names, proofs
from diloco_jax.certs import check as check_lib
from diloco_jax.process import bring
from diloco_jax.protocol import events, messages
from diloco_jax.transport import addresses, credentials, grpc_server, grpc_session, link
from tests.certs import mint
from tests.transport import ends, samples

LIMITS = link.Limits(
  contribution_bytes=(0,), publish_bytes=(1 << 20,), handshake_s=20.0, drain_s=0.5
)


class World:
  """The owners of two runs, and the folders of nodes."""

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self.owner = mint.owner(folder / 'certs')
    self.other = mint.owner(folder / 'other')  # the same run, another authority
    self.syncer = self.owner.folder / names.SYNCER
    self._nodes = 0

  def of(self, learner: str) -> pathlib.Path:
    return self.owner.folder / learner

  def node(self, **changes) -> pathlib.Path:
    self._nodes += 1
    return mint.node(self.owner, self.folder / f'node-{self._nodes}', **changes)

  @property
  def proof(self) -> proofs.Proof:
    """What the certificate of learner l1 proves."""
    return check_lib.read(self.of('l1'), names.LEARNER, proofs.utc_now()).proof


@pytest.fixture(scope='module')
def world(tmp_path_factory):
  return World(tmp_path_factory.mktemp('authentication'))


@pytest.fixture
def closing():
  with contextlib.ExitStack() as stack:
    yield stack


def learner(address, access, closing):
  """A learner that dials session 1."""
  end = ends.learner(address, LIMITS, access)
  closing.callback(end.transport.shutdown, 0.0)
  return end


# --- The matrix -----------------------------------------------------------------------------------

# How a client comes: (the channel's credentials, what Control answers at a door of mutual TLS).
# None: the session opens. Every other text is in the error; SHUT: TLS refuses without a word.
SHUT = 'UNAVAILABLE'


def _raw(folder, authority=None):
  """Credentials of files that `check` would not let a learner use; `authority`: in that folder."""
  paths = (
    (authority or folder) / check_lib.AUTHORITY,
    folder / check_lib.KEY,
    folder / check_lib.CERTIFICATE,
  )
  return grpc.ssl_channel_credentials(*(path.read_bytes() for path in paths))


def _no_certificate(world):
  return grpc.ssl_channel_credentials((world.of('l0') / check_lib.AUTHORITY).read_bytes())


def _self_signed(world):
  own = authority.init(world.folder / 'self-signed', mint.RUN, proofs.utc_now())
  read = lambda name: (own.folder / name).read_bytes()
  return grpc.ssl_channel_credentials(
    (world.of('l0') / check_lib.AUTHORITY).read_bytes(),
    read(authority.AUTHORITY_KEY),
    read(check_lib.AUTHORITY),
  )


def _wrong(reason, **changes):
  return (lambda world: _raw(world.node(**changes)), reason)


def _uri(learner, run=mint.RUN, role=names.LEARNER):
  return f'diloco://{run}/{role}/{learner}'


CLIENTS = {
  'plaintext': (lambda world: None, SHUT),
  'no certificate': (_no_certificate, SHUT),
  'another authority': (lambda world: _raw(world.other.folder / 'l0', world.of('l0')), SHUT),
  'the certificate of an authority': (_self_signed, SHUT),
  'ended': _wrong(SHUT, ends_s=-5, listed='l0'),
  'not begun': _wrong(SHUT, begins_s=600, listed='l0'),
  'the purpose of a syncer': _wrong(SHUT, purposes=(mint.SERVER,), listed='l0'),
  "the syncer's certificate": (lambda world: _raw(world.syncer), SHUT),
  'the role of a syncer': _wrong(
    'is not that of a learner',
    uris=(_uri('l0', role='syncer'),),
    dns=(names.host(mint.RUN),),
    listed='l0',
  ),
  'another run': _wrong('this syncer serves run-x', uris=(_uri('l0', run='run-y'),), listed='l0'),
  'not listed': _wrong('learner l9 is not on the allowlist', uris=(_uri('l9'),)),
  'not this certificate': _wrong('this certificate of learner l0 is not on'),
  'listed for another': _wrong('this certificate of learner l0 is not on', listed='l1'),
  'right': (lambda world: _raw(world.of('l0')), None),
}
DOORS = ('mutual TLS', 'plaintext loopback')
SERVICES = ('Control', 'Bulk', 'model')

CELLS = [(client, door, service) for client in CLIENTS for door in DOORS for service in SERVICES]
_ALWAYS = {'plaintext', 'ended', 'another run', 'not listed', 'right'}


def _marks(client, door, service):
  first = service == 'Control' and door == DOORS[0]
  return () if first or client in _ALWAYS else (pytest.mark.full,)


@pytest.fixture(scope='module')
def shown(world):
  """The credentials of every client."""
  return {client: make(world) for client, (make, _) in CLIENTS.items()}


@pytest.fixture(scope='module')
def doors(world):
  """The syncer behind each door, and the address of one that waits for a model."""
  with contextlib.ExitStack() as stack:
    by_door = {}
    for door in DOORS:
      access = addresses.Access(world.syncer) if door == DOORS[0] else ends.PLAIN
      end = ends.syncer(LIMITS, access)
      stack.callback(end.transport.shutdown, 0.0)
      brought = bring.Brought(keep=lambda model: None, answer=b'')
      waits = grpc_server.Door('127.0.0.1:0', 8, print, brought, access=access)
      stack.callback(waits.close)
      by_door[door] = end, waits.address
    yield by_door


def _channel(address, client_credentials):
  if client_credentials is None:
    return ends.plain_channel(address)
  name = ('grpc.ssl_target_name_override', names.host(mint.RUN))
  return grpc.secure_channel(address, client_credentials, (ends.OWN_CONNECTION, name))


def _ask(channel, service):
  """Makes a call; its error, or None if it was let in."""
  try:
    match service:
      case 'Control':
        call = ends.call(channel, 'Control', timeout=ends.DEADLINE_S)
        if grpc_session.TOKEN not in dict(call.initial_metadata()):
          list(call)
        call.cancel()
      case 'Bulk':
        list(ends.call(channel, 'Bulk', timeout=ends.DEADLINE_S))
      case 'model':
        bring = channel.stream_unary(f'/{grpc_session.SERVICE}/{grpc_session.BRING}')
        bring(iter([b'no header']), timeout=ends.DEADLINE_S)
  except grpc.RpcError as error:
    return f'{error.code().name}: {error.details()}'
  return None


# What a service answers to a client that it lets in.
WELCOME = {
  'Control': None,
  'Bulk': 'unknown session token',
  'model': 'not the header of a model',
}


@pytest.mark.parametrize(
  'client, door, service', [pytest.param(*cell, marks=_marks(*cell)) for cell in CELLS]
)
def test_matrix(doors, shown, client, door, service):
  refused = CLIENTS[client][1]
  end, model_address = doors[door]
  address = model_address if service == 'model' else end.transport.address
  with _channel(address, shown[client]) as channel:
    answer = _ask(channel, service)
  if door == DOORS[1]:
    due = WELCOME[service] if shown[client] is None else SHUT
  else:
    due = WELCOME[service] if refused is None else refused
  assert (answer is None) if due is None else (answer is not None and due in answer), answer
  assert end.inbox.empty()  # no session has opened


# --- A learner and the syncer of its run ----------------------------------------------------------


def _reason(end):
  """Why the first dial of a learner failed."""
  event = end.hears()
  if isinstance(event, events.Received):  # its machine hears first that it is refused
    assert isinstance(event.message, messages.Refused), event
    event = end.hears()
  assert isinstance(event, events.Disconnected), event
  return event.reason


def test_a_learner_proves_its_id(world, closing):
  syncer = ends.syncer(LIMITS, addresses.Access(world.syncer))
  closing.callback(syncer.transport.shutdown, 0.0)
  end = learner(syncer.transport.address, addresses.Access(world.of('l1')), closing)
  assert end.hears() == events.Connected(session=1)
  assert syncer.hears() == events.Connected(session=1, learner='l1')
  end.transport.send(1, samples.join('l1'))
  assert syncer.message().nonce == end.transport.nonce != end.transport._secret


SYNCERS = {
  'another authority': lambda world: mint.syncer_node(world.other, world.folder / 's1'),
  'ended': lambda world: mint.syncer_node(world.owner, world.folder / 's2', ends_s=-5),
  'another run': lambda world: mint.syncer_node(
    world.owner, world.folder / 's3', dns=(names.host('run-y'),), uris=(_uri('s', 'run-y'),)
  ),
  "a learner's certificate": lambda world: world.of('l1'),
  'without the DNS name': lambda world: mint.syncer_node(world.owner, world.folder / 's4', dns=()),
  'plaintext': lambda world: None,
  'right': lambda world: world.syncer,
}


@pytest.mark.parametrize('syncer', SYNCERS)
def test_a_learner_believes_no_syncer_but_that_of_its_run(world, closing, syncer):
  """An impostor at the port of a dead syncer cannot end a learner with a Refused."""
  folder = SYNCERS[syncer](world)
  server = grpc.server(closing.enter_context(futures.ThreadPoolExecutor(4)))
  called = []

  def control(requests, context):
    called.append(context.peer())
    context.send_initial_metadata(((grpc_session.TOKEN, '0'),))
    yield from ()

  handlers = {name: grpc.stream_stream_rpc_method_handler(control) for name in ('Control', 'Bulk')}
  server.add_generic_rpc_handlers(
    (grpc.method_handlers_generic_handler(grpc_session.SERVICE, handlers),)
  )
  if folder is None:
    port = server.add_insecure_port('127.0.0.1:0')
  else:
    read = lambda name: (folder / name).read_bytes()
    pair = read(check_lib.KEY), read(check_lib.CERTIFICATE)
    port = server.add_secure_port('127.0.0.1:0', grpc.ssl_server_credentials([pair]))
  server.start()
  closing.callback(lambda: server.stop(None).wait())
  end = learner(f'127.0.0.1:{port}', addresses.Access(world.of('l0')), closing)
  if syncer == 'right':
    assert end.hears() == events.Connected(session=1) and called
  else:
    assert 'nothing was sent' in _reason(end) and not called


def test_a_learner_does_not_dial_with_wrong_files(world, closing):
  """And says which: the syncer could only close the connection without a word."""
  folder = world.node(listed='l0')
  (folder / check_lib.KEY).chmod(0o644)
  with socket.create_server(('127.0.0.1', 0)) as unused:
    address = f'127.0.0.1:{unused.getsockname()[1]}'
    end = learner(address, addresses.Access(folder), closing)
    assert f'chmod 600 {folder / check_lib.KEY}' in _reason(end)
    unused.settimeout(0.0)
    with pytest.raises(BlockingIOError):
      unused.accept()


# --- Sessions that are open -----------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, closing):
  """A run of its own: its world, its syncer, and a joined learner l0."""
  world = World(tmp_path)
  lines = []
  syncer = ends.syncer(LIMITS, addresses.Access(world.syncer), said=lines.append)
  closing.callback(syncer.transport.shutdown, 0.0)
  syncer.lines = lines
  l0 = learner(syncer.transport.address, addresses.Access(world.of('l0')), closing)
  assert ends.join(syncer, l0) == 1
  return world, syncer, l0


def _judge(syncer) -> credentials.SyncerCredentials:
  return syncer.transport._door._listener.credentials


def _lives(syncer, l0):
  l0.transport.send(1, messages.Heartbeat())
  assert syncer.hears() == events.Received(session=1, message=messages.Heartbeat())


def test_a_revocation_ends_the_session_within_5_s_and_keeps_the_learner_out(run):
  world, syncer, l0 = run
  assert credentials.WATCH_S < 5 / 2  # between two looks at the allowlist
  world.owner.revoke('l0')
  for session in (1, 2):  # the open l0, and that of the next dial
    refused = l0.hears()
    assert refused.session == session and refused.message.code == 'UNPROVED'
    assert 'learner l0 is not on the allowlist' in refused.message.text
    assert 'learner l0 is not on the allowlist' in _reason(l0)
    if session == 1:
      l0.transport.dial(2)
  (line,) = [line for line in syncer.lines if line.startswith('refused certificates: 1, ')]
  assert 'learner l0' in line
  world.owner.issue('l0', proofs.utc_now(), renew=True)
  _judge(syncer).refresh([])
  l0.transport.dial(3)
  assert l0.hears() == events.Connected(session=3)


def _passes(syncer, seconds):
  """Sets the clock of a syncer forward, by less than a jump that it does not trust."""
  _judge(syncer)._date._wall = lambda: proofs.utc_now() + mint.seconds(seconds)


def test_a_session_ends_with_its_certificate(run, closing, monkeypatch):
  world, syncer, l0 = run
  folder = world.node(uris=(_uri('l1'),), ends_s=300, listed='l1')
  _judge(syncer).refresh([])
  two = learner(syncer.transport.address, addresses.Access(folder), closing)
  assert two.hears() == events.Connected(session=1)
  assert syncer.hears() == events.Connected(session=2, learner='l1')
  _passes(syncer, 301)
  assert 'has ended at' in _reason(two)
  later = proofs.utc_now() + mint.seconds(301)
  monkeypatch.setattr(proofs, 'utc_now', lambda: later)
  two.transport.dial(2)
  assert 'has ended at' in _reason(two)  # of its own check: nothing was dialed
  assert syncer.hears().session == 2  # Disconnected
  _lives(syncer, l0)


def test_certificates_are_renewed_while_a_session_goes_on(run, closing):
  world, syncer, l0 = run
  now = proofs.utc_now()
  world.owner.issue('syncer', now, renew=True)
  world.owner.issue('l0', now, renew=True)
  _judge(syncer).refresh([])
  _lives(syncer, l0)
  l0.transport.close(1, 'done')
  l0.transport.dial(2)
  assert [l0.hears(), l0.hears()][1] == events.Connected(session=2)
  assert any("the syncer's new certificate is in use" in line for line in syncer.lines)


def test_half_written_files_leave_those_before_in_force(run, closing):
  world, syncer, l0 = run
  for name in (check_lib.CERTIFICATE, allowlist.FILE):
    (world.syncer / name).write_bytes((world.syncer / name).read_bytes()[:100])
  _judge(syncer).refresh([])
  two = learner(syncer.transport.address, addresses.Access(world.of('l1')), closing)
  assert two.hears() == events.Connected(session=1)
  assert syncer.hears().learner == 'l1'
  _lives(syncer, l0)
  lines = ' '.join(syncer.lines)
  assert 'the allowlist before stays in force' in lines
  assert "the syncer's certificate before stays in force" in lines


def test_the_token_of_a_session_serves_its_own_certificate_only(run):
  """Neither another learner nor another certificate of the same one opens Bulk with it."""
  world, syncer, l0 = run
  again = world.node(listed='l0')
  _judge(syncer).refresh([])
  address = syncer.transport.address
  with _channel(address, _raw(world.of('l0'))) as first:
    control = ends.call(first, 'Control')
    token = ends.token_of(control)
    for folder in (world.of('l1'), again):
      with _channel(address, _raw(folder)) as other:
        with pytest.raises(grpc.RpcError) as error:
          list(ends.call(other, 'Bulk', token=token))
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    bulk = ends.call(first, 'Bulk', token=token)
    assert ends.token_of(bulk) == token
    assert syncer.hears() == events.Connected(session=2, learner='l0')


def test_a_learner_has_one_session_at_most_that_is_not_joined(run, closing):
  """Else one certificate could hold all threads of the syncer."""
  world, syncer, l0 = run
  access = addresses.Access(world.of('l1'))
  first = learner(syncer.transport.address, access, closing)
  assert first.hears() == events.Connected(session=1)
  second = learner(syncer.transport.address, access, closing)
  assert second.hears() == events.Connected(session=1)
  assert 'displaced by a newer session' in _reason(first)
  assert second.inbox.empty()


class Clocks:
  """A wall clock that can be set, and a monotonic one; the syncer looks at both at every change."""

  def __init__(self, world):
    self.lines = []
    self._passed_s, self._set = 0.0, mint.seconds(0)
    self._began = proofs.utc_now()
    self.judge = credentials.SyncerCredentials(
      world.syncer, self.lines.append, self.wall, lambda: self._passed_s
    )

  def count(self, text):
    return sum(text in line for line in self.lines)

  def wall(self):
    return self._began + mint.seconds(self._passed_s) + self._set

  def set_to(self, when):
    self._set += when - self.wall()
    self.judge.refresh([])

  def shift(self, seconds):
    self.set_to(self.wall() + mint.seconds(seconds))

  def passes(self, seconds):
    for _ in range(10):
      self._passed_s += seconds / 10
      self.judge.refresh([])


def test_a_clock_set_back_revives_no_certificate(world):
  clocks = Clocks(world)
  proof = world.proof
  clocks.judge.require(proof)
  clocks.passes((proof.not_after - clocks.wall()).total_seconds())
  clocks.set_to(proof.not_before)
  with pytest.raises(proofs.Unproved, match='has ended'):
    clocks.judge.require(proof)
  clocks.passes(1000)
  assert clocks.count('restart the syncer') == 1


def test_a_clock_that_wavers_ten_minutes_behind_makes_one_line(world):
  clocks = Clocks(world)
  clocks.shift(-601)
  for _ in range(5):
    for seconds in (2, -2):
      clocks.passes(10)
      clocks.shift(seconds)
  assert clocks.count('restart the syncer') == 1


def test_a_clock_that_jumps_ahead_for_a_moment_ends_no_certificate(world):
  clocks = Clocks(world)
  proof = world.proof
  for _ in range(3):
    for days in (40, -40):
      clocks.shift(days * 86400)
      clocks.passes(240)
      clocks.judge.require(proof)
  assert len(clocks.lines) == clocks.count('has jumped ahead to') == 3


def test_a_clock_that_stays_ahead_is_trusted_after_minutes(world):
  """The machine slept, and the monotonic clock with it."""
  clocks = Clocks(world)
  proof = world.proof
  clocks.shift(40 * 86400)
  clocks.passes(290)
  clocks.judge.require(proof)
  clocks.passes(20)
  with pytest.raises(proofs.Unproved, match='has ended'):
    clocks.judge.require(proof)


def test_changed_files_that_cannot_be_read_are_read_again(tmp_path, monkeypatch):
  """What was in the way, such as their owner, may go away without a trace in the files."""
  world, lines = World(tmp_path), []
  judge = credentials.SyncerCredentials(world.syncer, lines.append)
  proof = world.proof

  def refuse(folder):
    raise ValueError('permission denied')

  world.owner.revoke('l1')
  monkeypatch.setattr(allowlist, 'read', refuse)
  judge.refresh([])
  judge.refresh([])
  judge.require(proof)
  assert lines == ['the allowlist before stays in force: permission denied']
  monkeypatch.undo()
  judge.refresh([])
  with pytest.raises(proofs.Unproved, match='learner l1 is not on the allowlist'):
    judge.require(proof)


def test_a_revocation_while_the_syncer_reads_its_files_is_noticed(tmp_path, monkeypatch):
  world, read = World(tmp_path), allowlist.read

  def read_just_before(folder):
    listed = read(folder)
    monkeypatch.undo()
    world.owner.revoke('l1')
    return listed

  proof = world.proof
  monkeypatch.setattr(allowlist, 'read', read_just_before)
  judge = credentials.SyncerCredentials(world.syncer, print)
  judge.refresh([])
  with pytest.raises(proofs.Unproved, match='learner l1 is not on the allowlist'):
    judge.require(proof)


def test_the_syncer_warns_once_a_day_of_certificates_that_end_soon(world):
  clocks = Clocks(world)
  judge = clocks.judge
  proof = world.proof
  judge.refresh([proof])
  assert not clocks.lines
  clocks.passes((proof.not_after - clocks.wall()).total_seconds() - 6 * 86400)
  for _ in range(3):
    judge.refresh([proof])
  assert clocks.count('learner/l1 ends at') == 1
  clocks.passes(86401)
  judge.refresh([proof])
  assert clocks.count('learner/l1 ends at') == 2


# --- Resumed TLS sessions -------------------------------------------------------------------------


def _frame(kind, flags, data):
  return len(data).to_bytes(3, 'big') + bytes([kind, flags]) + (kind != 4).to_bytes(4, 'big') + data


def _header(name, value):
  return b'\0' + bytes([len(name)]) + name + bytes([len(value)]) + value


def _control_over_http2():
  """The bytes of a call of Control; it waits for no more."""
  fields = (
    (b':method', b'POST'),
    (b':scheme', b'https'),
    (b':path', f'/{grpc_session.SERVICE}/Control'.encode()),
    (b':authority', names.host(mint.RUN).encode()),
    (b'te', b'trailers'),
    (b'content-type', b'application/grpc'),
  )
  head = b''.join(_header(*field) for field in fields)
  return b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + _frame(4, 0, b'') + _frame(1, 4, head)


def _call_over_tls(context, address, session=None):
  """Calls Control; (whether the TLS session was resumed, the answer, the session)."""
  host, port = address.split(':')
  with socket.create_connection((host, int(port)), ends.DEADLINE_S) as plain:
    with context.wrap_socket(
      plain, server_hostname=names.host(mint.RUN), session=session
    ) as secure:
      secure.sendall(_control_over_http2())
      answer = b''
      while grpc_session.TOKEN.encode() not in answer and b'grpc-message' not in answer:
        piece = secure.recv(4096)
        assert piece, answer
        answer += piece
      return secure.session_reused, answer, secure.session


@pytest.mark.parametrize('version', [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize('how', ['ended', 'revoked'])
def test_a_resumed_tls_session_is_judged_anew(run, version, how):
  """TLS takes a ticket after the end of the certificate that it was given for."""
  world, syncer, _ = run
  folder = world.node(uris=(_uri('l1'),), ends_s=300, listed='l1')
  _judge(syncer).refresh([])
  context = ssl.create_default_context(cadata=(folder / check_lib.AUTHORITY).read_text())
  context.load_cert_chain(folder / check_lib.CERTIFICATE, folder / check_lib.KEY)
  context.set_alpn_protocols(['h2'])
  context.minimum_version = context.maximum_version = version
  reused, answer, ticket = _call_over_tls(context, syncer.transport.address)
  assert not reused and grpc_session.TOKEN.encode() in answer
  if how == 'revoked':
    world.owner.revoke('l1')
    _judge(syncer).refresh([])
  else:
    _passes(syncer, 301)
  reused, answer, _ = _call_over_tls(context, syncer.transport.address, ticket)
  assert reused and b'grpc-message' in answer
  assert (b'has ended' if how == 'ended' else b'allowlist') in answer
