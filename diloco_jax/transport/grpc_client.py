"""A learner's end of the wire: a fresh gRPC channel per dial, no retries, no back-off of its own.

When to dial again is the learner machine's decision. A channel that failed remembers it and makes
the next call wait, therefore each session has a channel to itself, closed with it.
"""

import dataclasses
import secrets
from collections.abc import Callable, Iterator

import grpc

from diloco_jax.node import payload as payload_lib
from diloco_jax.node import ports
from diloco_jax.protocol import messages
from diloco_jax.transport import addresses, credentials, grpc_session, link, listen, sessions

OPTIONS = grpc_session.COMMON_OPTIONS + (
  ('grpc.use_local_subchannel_pool', 1),  # shared connections would share their back-off
  ('grpc.max_receive_message_length', 2 << 20),  # twice a frame
)


class GrpcLearnerTransport(sessions.Sessions):
  """The port `node.ports.Transport` for a learner.

  Args:
    address: returns where the syncer listens (addresses.py); called at every dial, because a
      restarted syncer may listen elsewhere. Its OSError or ValueError ends the session.
    limits: what the syncer is granted.
    access: how this learner proves its name; files are read at every dial.

  Attributes:
    nonce: names this process to the syncer.
  """

  def __init__(
    self,
    address: Callable[[], str],
    post: ports.Post,
    payloads: ports.Payloads,
    limits: link.Limits,
    *,
    access: addresses.Access = addresses.LOCAL,
  ):
    super().__init__(post, payloads, limits)
    self._address = address
    self._access = access
    self._secret = secrets.randbits(64)
    self.nonce = grpc_session.public_nonce(self._secret)

  def send(
    self, session: int, message: messages.Message, payload: payload_lib.Payload | None = None
  ) -> None:
    if isinstance(message, messages.Join | messages.Confirm):
      message = dataclasses.replace(message, nonce=self._secret)
    super().send(session, message, payload)

  def dial(self, session: int) -> None:
    with self._lock:
      if session in self._sessions:
        raise ValueError(f'session {session} was dialed before: a number is used once')
      dialed = self._add(session, dialed=True)
    grpc_session.start_thread(f'session-{session}', self._run, dialed)

  def shutdown(self, grace_s: float, reason: str = '') -> None:
    late = self._close_all('the learner shut down', grace_s)
    for session in late:
      session.cancel()
    for session in late:
      session.finished.wait(self._limits.drain_s)

  def _run(self, session: grpc_session.Session) -> None:
    """A session's whole life, on its own thread."""
    try:
      address = self._address()
      with listen.dial(address, self._access, OPTIONS) as channel:
        self._serve(session, channel, address)
    except grpc.RpcError as error:
      text = grpc_session.describe(error)
      explanation = credentials.explain(text) if self._access.tls else ''
      session.fail_after(error, f'{text}{explanation}')
    except (OSError, ValueError) as error:
      session.fail(str(error))
    finally:  # in every case the machine receives the end of the session
      with self._lock:
        del self._sessions[session.number]
      session.finish()

  def _serve(self, session: grpc_session.Session, channel: grpc.Channel, address: str) -> None:
    timer = grpc_session.start_timer(self._limits.handshake_s, self._give_up, session, address)
    try:
      control = _call(session, channel, 'Control', session.control_frames(), ())
      token = _token(control)
      bulk = _call(session, channel, 'Bulk', session.bulk_frames(), ((grpc_session.TOKEN, token),))
      _token(bulk)
      session.open()
    finally:
      timer.cancel()
    reader = grpc_session.start_thread(f'bulk-{session.number}', session.read_bulk, bulk)
    session.read_control(control)
    reader.join()

  def _give_up(self, session: grpc_session.Session, address: str) -> None:
    session.fail(f'unavailable: no syncer answers at {address} within {self._limits.handshake_s} s')
    session.cancel()


def _call(
  session: grpc_session.Session,
  channel: grpc.Channel,
  method: str,
  frames: Iterator[bytes],
  metadata: tuple[tuple[str, str], ...],
) -> grpc.Call:
  """Opens a stream of raw bytes; both ends serialise themselves."""
  stream = channel.stream_stream(f'/{grpc_session.SERVICE}/{method}')
  call = stream(frames, metadata=metadata, wait_for_ready=False)
  session.add_stream(call.cancel)
  return call


def _token(call: grpc.Call) -> str:
  """The session token in the syncer's initial metadata. Raises the call itself if it was refused,
  ConnectionError if it ended well without a token."""
  metadata = dict(call.initial_metadata())
  if grpc_session.TOKEN in metadata:
    return metadata[grpc_session.TOKEN]
  if call.code() is not grpc.StatusCode.OK:  # waits for its end; the handshake's timer sees to that
    raise call
  raise ConnectionError(
    f'what answers is no syncer: no {grpc_session.TOKEN} in its metadata {metadata}'
  )
