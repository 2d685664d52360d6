"""The syncer's end of the wire: a gRPC server behind a listener (listen.py).

The server starts first, as a `Door`: it may have to receive the model of the run, on which the
limits of a session depend.

Both streams of a session arrive as calls of their own. Control comes first: the server answers
with a random token in its initial metadata; Bulk must bring it back. When it does (and gets the
token for an answer, too), the session is open. Where the listener asks for certificates, both calls
must come with the same one, and the session ends when its certificate ends or is revoked. The
synchronous API is used throughout: for bulk, threads are a little faster than asyncio, and every
large copy and checksum runs without the GIL.

Seats. A session is a *stranger's* until the machine has answered it as it answers members only
(peer_limits.py), and must become a member's in time. There is a number of seats for members, and
another one for strangers. If all of those are taken, an arrival displaces a stranger that has had
`stay_s` to join: of those that have come least far with joining the oldest. Arrivals wait in line
for that, and come at no higher rate. A learner that has proved its name needs no seat among the
strangers, but its newest session displaces another one of it that has not joined. So processes that
occupy sessions keep neither a member nor a restarted learner out, which needs less time to join,
and connections that do not speak end after seconds. Followers have seats of their own
(syncer/followers.py).
"""

import collections
import contextlib
import dataclasses
import itertools
import resource
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Protocol

import grpc

from diloco_jax.certs import proofs
from diloco_jax.node import ports
from diloco_jax.protocol import events, messages
from diloco_jax.transport import (
  addresses,
  credentials,
  grpc_session,
  link,
  listen,
  peer_limits,
  sessions,
)

_LINE = 128  # arrivals that wait for a seat
_SPARE_CALLS = 16  # calls that are about to be refused, or to end
_WAITING_CALLS = 256  # calls that have no thread yet; gRPC refuses those beyond
_SPARE_DESCRIPTORS = 64  # for files
_AGAIN_S = 60.0  # between two lines of one kind
_REFUSED, _DISPLACED = 'refused sessions', 'displaced sessions'

_OPTIONS = grpc_session.COMMON_OPTIONS + (
  ('grpc.server_handshake_timeout_ms', 5_000),
  ('grpc.max_connection_idle_ms', 30_000),  # a connection with an open stream is not idle
  ('grpc.max_concurrent_streams', 4),  # of one connection; a session has two
  ('grpc.max_receive_message_length', 4 << 20),  # for the header of a model: a frame has less
  ('grpc.http2.min_ping_interval_without_data_ms', 5_000),
)


Proved = tuple[Callable[..., None], proofs.Proof]
"""A function that ends a call, with a reason, and the proof with which the call came."""


class Followers(Protocol):
  """Answers the calls of FOLLOW: see syncer/followers.py."""

  def serve(
    self, requests: Iterator[bytes], context: grpc.ServicerContext, proof: proofs.Proof | None
  ) -> Iterator[bytes]: ...

  def live(self) -> list[Proved]: ...

  def shutdown(self, grace_s: float) -> None: ...


class Door(grpc.GenericRpcHandler):
  """Where learners reach a syncer: a gRPC server that listens from construction to `close`.

  Sessions begin once a `GrpcSyncerTransport` has opened the door. Before that a loop can bring the
  model of the run, and a learner that calls for a session must dial again.

  Args:
    address: where to listen (addresses.py); port 0 takes a free one, see `address`.
    seats: for so many sessions.
    say: prints lines for the operator: about certificates, and sessions that no learner used.
    bring: answers a loop that calls BRING (process/bring.py), until the door is opened.
    access: whether learners must prove their names.
    shared_port: other processes may listen on the port, too.

  Raises:
    ValueError: `access` is not enough for the address, or its files are wrong.
    OSError: the address cannot be bound, or the process may open too few files for the seats.
  """

  def __init__(
    self,
    address: str,
    seats: int,
    say: credentials.Say = print,
    bring: Callable[[Iterator[bytes], grpc.ServicerContext], bytes] = lambda requests, context: b'',
    *,
    access: addresses.Access = addresses.LOCAL,
    shared_port: bool = False,
  ):
    reserve_descriptors(seats)
    self.troubles = Troubles(say)
    self._calls = dict.fromkeys(('Control', 'Bulk', grpc_session.FOLLOW), _refuse_early)
    self._live: Callable[[], list[Proved]] = list
    self._bring = bring
    threads = 2 * seats + _LINE + _SPARE_CALLS
    self._pool = futures.ThreadPoolExecutor(threads, thread_name_prefix='syncer-grpc')
    # Without this option a second syncer would silently share the port.
    options = (*_OPTIONS, ('grpc.so_reuseport', int(shared_port)))
    self._server = grpc.server(
      self._pool, (self,), options=options, maximum_concurrent_rpcs=threads + _WAITING_CALLS
    )
    try:
      self._listener = listen.Listener(self._server, address, access, say)
    except (ValueError, OSError):
      self._pool.shutdown()
      raise
    self.address = self._listener.address
    self._ended = threading.Event()
    self._server.start()
    if self._listener.credentials:
      grpc_session.start_thread('certificates', self._watch_proofs)

  def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
    """Of gRPC: who answers a call."""
    method = handler_call_details.method.removeprefix(f'/{grpc_session.SERVICE}/')
    if method == grpc_session.BRING:
      return grpc.stream_unary_rpc_method_handler(self._receive_model)
    call = self._calls.get(method)
    return call and grpc.stream_stream_rpc_method_handler(call)

  def open(
    self,
    calls: dict[str, Callable[..., Iterator[bytes]]],
    about: bytes,
    live: Callable[[], list[Proved]],
  ) -> None:
    """Lets sessions begin. `calls`: of a session, by method. `about`: the answer to BRING from now
    on; no request is read, for which a caller could let the syncer wait. `live`: the calls that
    have proved a name."""
    self._bring, self._live, self._calls = (lambda *call: about), live, calls

  def close(self, grace_s: float | None = None) -> None:
    """Ends calls that have not ended after `grace_s`."""
    self._ended.set()
    self._server.stop(grace_s).wait()
    self._pool.shutdown()
    self._listener.close()

  def prove(self, context: grpc.ServicerContext) -> proofs.Proof | None:
    """The proof of a caller; None if this door needs none. Ends the call of a learner without."""
    judge = self._listener.credentials
    try:
      return judge and judge.prove(context)
    except proofs.Unproved as error:
      self.troubles.add(grpc_session.UNPROVED, str(error))
      context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))

  def _receive_model(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
    self.prove(context)
    return self._bring(requests, context)

  def _watch_proofs(self) -> None:
    """Ends the sessions whose certificate has ended or was revoked."""
    judge = self._listener.credentials
    while not self._ended.wait(credentials.WATCH_S):
      live = self._live()
      judge.refresh([proof for _, proof in live])
      for fail, proof in live:
        try:
          judge.require(proof)
        except proofs.Unproved as error:
          fail(str(error), trouble=grpc_session.UNPROVED)


class GrpcSyncerTransport(sessions.Sessions):
  """The port `node.ports.Transport` for the syncer, from construction to `shutdown`.

  Args:
    door: where learners arrive; closed by `shutdown`.
    limits: what each learner is granted.
    about: the settings and the model that a loop receives before it joins (process/own_model.py).
    numbers, traffic: of its sessions, where other processes have further ones
      (transport/processes/).
    followers: answer those who follow the run.
  """

  nonce = 0  # only learners are named

  def __init__(
    self,
    door: Door,
    post: ports.Post,
    payloads: ports.Payloads,
    limits: link.Limits,
    *,
    about: bytes = b'',
    numbers: Iterator[int] | None = None,
    traffic: link.Traffic | None = None,
    followers: Followers | None = None,
  ):
    super().__init__(lambda event: post(_with_public_nonce(event)), payloads, limits, traffic)
    self._door, self.address = door, door.address
    self._numbers = numbers or itertools.count(1)
    self._line: list[threading.Event] = []  # of arrivals; set: it is this one's turn
    self._arrivals = peer_limits.Rate(
      limits.max_strangers / max(limits.stay_s, 0.001), limits.max_strangers
    )
    self._room = threading.Condition(self._lock)  # a session has ended
    self._unclaimed: dict[str, grpc_session.Session] = {}  # by token, until Bulk has come
    self._closing = False
    self._followers = followers
    calls = {'Control': self._control, 'Bulk': self._bulk}
    if followers:
      calls[grpc_session.FOLLOW] = lambda requests, context: followers.serve(
        requests, context, door.prove(context)
      )
    door.open(calls, about, self._live)

  def dial(self, session: int) -> None:
    raise ValueError(f'a syncer listens, it never dials: session {session}')

  def shutdown(self, grace_s: float, reason: str = '') -> None:
    with self._lock:
      self._closing = True
      self._room.notify_all()
    deadline_s = time.monotonic() + grace_s
    self._close_all(reason or 'the syncer shut down', grace_s)
    if self._followers:
      self._followers.shutdown(max(0.0, deadline_s - time.monotonic()))
    self._door.close()

  def _live(self) -> list[Proved]:
    followers = self._followers.live() if self._followers else []
    with self._lock:
      learners = [(s.fail, s.proof) for s in self._sessions.values() if s.proof]
    return learners + followers

  # --- The two calls of a session, each on its own thread -----------------------------------------

  def _control(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    session = self._admit(context, self._door.prove(context))
    context.send_initial_metadata(((grpc_session.TOKEN, session.token),))
    if not session.wait_open(self._limits.handshake_s):
      session.fail(
        f'no Bulk stream within {self._limits.handshake_s} s', trouble=grpc_session.UNUSED
      )
    grpc_session.start_thread(f'control-{session.number}', session.read_control, requests)
    yield from session.control_frames()
    _conclude(session, context)

  def _bulk(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    token = dict(context.invocation_metadata()).get(grpc_session.TOKEN, '')
    proof = self._door.prove(context)
    with self._lock:
      session = self._unclaimed.get(token)
      if session is not None and session.proof != proof:
        session = None  # the token of another learner
      else:
        self._unclaimed.pop(token, None)
    if session is None:
      context.abort(
        grpc.StatusCode.FAILED_PRECONDITION, 'unknown session token: open Control first'
      )
    self._watch(session, context)
    context.send_initial_metadata(((grpc_session.TOKEN, token),))
    session.open()
    grpc_session.start_thread(f'bulk-{session.number}', session.read_bulk, requests)
    yield from session.bulk_frames()
    _conclude(session, context)

  def _admit(
    self, context: grpc.ServicerContext, proof: proofs.Proof | None
  ) -> grpc_session.Session:
    """The session of an arrival. Ends the call if there is no seat for it."""
    turn = threading.Event()
    with self._lock:
      self._line.append(turn)
      self._line[0].set()
      waits = len(self._line) <= _LINE
    try:
      if not waits or not turn.wait(self._limits.handshake_s):
        self._refuse(context, f'{_LINE} other sessions wait for a seat. Dial again')
      return self._enter(context, proof)
    finally:
      with self._lock:
        self._line.remove(turn)
        if self._line:
          self._line[0].set()

  def _enter(
    self, context: grpc.ServicerContext, proof: proofs.Proof | None
  ) -> grpc_session.Session:
    with self._lock:
      members, displaced = self._wait_for_room(proof)
      full = members >= self._limits.max_members
      if not self._closing and not full:
        session = self._add(next(self._numbers), dialed=False)
        session.proof = proof
        session.token = secrets.token_hex(16)
        self._unclaimed[session.token] = session
        self._watch(session, context)
    if self._closing:
      context.abort(grpc.StatusCode.UNAVAILABLE, 'the syncer shuts down')
    if full:
      self._refuse(
        context,
        f'{members} learners are connected, as many as the syncer has seats for. '
        'Restart it with more, or wait for a seat',
      )
    if displaced is not None:
      displaced.fail('displaced by a newer session before it had joined', _DISPLACED)
    return session

  def _wait_for_room(self, proof: proofs.Proof | None) -> tuple[int, grpc_session.Session | None]:
    """Waits for a seat for one more stranger, which a learner with a certificate is not; the
    caller holds the lock. Returns the number of members, who may have all seats, and the session
    to displace: a stranger's, or the one of the same learner that is no member's."""
    while True:
      sessions = self._sessions.values()
      members = sum(session.member for session in sessions)
      strangers = [session for session in sessions if session.stranger and not session.proof]
      if self._closing or members >= self._limits.max_members:
        return members, None
      if proof is not None:
        own = (s for s in sessions if s.stranger and s.proof and s.proof.name == proof.name)
        return members, next(own, None)
      now_s, stay_s = time.monotonic(), self._limits.stay_s
      wait_s = self._arrivals.wait_s(now_s)
      free = len(strangers) < self._limits.max_strangers
      stayed = [session for session in strangers if now_s >= session.since_s + stay_s]
      if not wait_s and (free or stayed):
        self._arrivals.spend(1, now_s)
        # Of equals the oldest.
        return members, None if free else min(stayed, key=lambda session: session.rules.stage)
      self._room.wait(wait_s or strangers[0].since_s + stay_s - now_s)

  def _refuse(self, context: grpc.ServicerContext, why: str) -> None:
    self._door.troubles.add(_REFUSED, why)
    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)

  def _watch(self, session: grpc_session.Session, context: grpc.ServicerContext) -> None:
    session.add_stream(context.cancel)
    if not context.add_callback(lambda: self._remove_stream(session)):
      # The call has ended already. In a thread, since the caller may hold the lock.
      grpc_session.start_thread(f'gone-{session.number}', self._remove_stream, session)

  def _remove_stream(self, session: grpc_session.Session) -> None:
    if not session.remove_stream():
      return
    if session.trouble:
      self._door.troubles.add(session.trouble, session.reason)
    with self._lock:
      self._sessions.pop(session.number, None)
      self._room.notify_all()
      self._unclaimed.pop(session.token, None)


class Troubles:
  """Prints at most one line a minute for each kind of trouble, with its count."""

  def __init__(self, say: Callable[[str], None], now_s: Callable[[], float] = time.monotonic):
    self._say = say
    self._now_s = now_s
    self._lock = threading.Lock()
    self._next_s: dict[str, float] = {}  # by kind: when its next line may be printed
    self._unsaid = collections.Counter()

  def add(self, kind: str, text: str) -> None:
    """Counts one trouble of this kind; `text` describes it."""
    with self._lock:
      self._unsaid[kind] += 1
      if self._now_s() < self._next_s.get(kind, 0.0):
        return
      self._next_s[kind] = self._now_s() + _AGAIN_S
      count = self._unsaid.pop(kind)
    self._say(f'{kind}: {count}, the last one: {text}')


def reserve_descriptors(seats: int) -> None:
  """Lets the process open as many files as it may. Raises OSError if that is too few for the
  sessions of `seats`: connections that do not speak would then shut learners out."""
  needed = 4 * seats + _SPARE_DESCRIPTORS
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  if soft != hard:
    with contextlib.suppress(OSError, ValueError):  # some systems allow less than they say
      resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
      soft = hard
  if soft != resource.RLIM_INFINITY and soft < needed:
    raise OSError(
      f'this process may open {soft} files, {seats} sessions need {needed}; nothing was started: '
      'raise the limit (ulimit -n) or lower sync.learners'
    )


def _refuse_early(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
  context.abort(grpc.StatusCode.UNAVAILABLE, 'the syncer has no model yet: dial again')


def _conclude(session: grpc_session.Session, context: grpc.ServicerContext) -> None:
  """Ends a stream of an ended session, with the reason for the learner."""
  if session.failed:
    unproved = session.trouble == grpc_session.UNPROVED
    code = grpc.StatusCode.UNAUTHENTICATED if unproved else grpc.StatusCode.ABORTED
    context.abort(code, session.reason)
  # An orderly end must have status OK (any other lets gRPC drop what was sent before), and gRPC
  # does not transport the details of an OK.
  context.set_trailing_metadata(((grpc_session.REASON, session.reason.encode()),))


def _with_public_nonce(event: events.Event) -> events.Event:
  match event:
    case events.Received(message=messages.Join() | messages.Confirm() as message):
      nonce = grpc_session.public_nonce(message.nonce)
      return dataclasses.replace(event, message=dataclasses.replace(message, nonce=nonce))
  return event
