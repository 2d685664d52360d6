"""The connection of a follower: it dials the syncer, receives versions on a thread of its own, and
dials again when the connection breaks, until the run has ended."""

import threading
import time
from collections.abc import Callable

import grpc
import numpy as np

from diloco_jax.config import build
from diloco_jax.learner import replica as replica_lib
from diloco_jax.node import threads
from diloco_jax.protocol import messages
from diloco_jax.syncer import followers as followers_lib
from diloco_jax.transport import (
  addresses,
  chunks,
  control_crc,
  credentials,
  grpc_client,
  grpc_session,
  link,
  listen,
  translate,
)

_METHOD = f'/{grpc_session.SERVICE}/{grpc_session.FOLLOW}'
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0  # between two dials
_LOOK_S = 1.0  # a signal that another thread of the process has received wakes no wait
_REFUSALS = {  # dialing again would not help
  grpc.StatusCode.UNAUTHENTICATED: '',
  grpc.StatusCode.INVALID_ARGUMENT: '',
  grpc.StatusCode.UNIMPLEMENTED: (
    ' Nobody may follow this run: sync.follow_bytes_per_s is 0, or its syncer has '
    '--transport_processes'
  ),
}


class Follower:
  """Receives the newest versions of a run from construction to `close`.

  Args:
    address: returns where the syncer listens; called at every dial.
    wait_s: for how long no syncer may answer.
  """

  def __init__(
    self,
    assembled: build.Assembly,
    address: Callable[[], str],
    access: addresses.Access,
    wait_s: float,
  ):
    self._replica = replica_lib.Replica(assembled)
    self._layout, self._sizes = assembled.layout.digest(), assembled.publish_bytes
    self._address, self._access, self._wait_s = address, access, wait_s
    self._changed = threading.Condition()
    self._stopped = threading.Event()
    self._ended: BaseException | None = None
    self._seen: list[followers_lib.Held] = []
    self._call: grpc.Call | None = None
    self._deadline_s, self._pause_s = 0.0, _FIRST_PAUSE_S
    self._thread = threads.Thread(target=self._run, name='follower')
    self._thread.start()

  def newest(self) -> tuple[int, dict[str, np.ndarray]] | None:
    """Waits for a model that was not returned before: its version, and its arrays by name. None:
    the run has ended. Raises TimeoutError, ValueError."""
    with self._changed:
      while not (self._ended or self._new):
        self._changed.wait(_LOOK_S)
      if not self._new:
        if isinstance(self._ended, addresses.RunEnded):
          return None
        raise self._ended
      self._seen, values = list(self._replica.held), list(self._replica.values)
    return sum(version for version, _ in self._seen), self._replica.by_name(values)

  def close(self) -> None:
    self._stopped.set()
    with self._changed:
      if self._call is not None:
        self._call.cancel()
    self._thread.join()

  @property
  def _new(self) -> bool:
    return self._replica.whole and self._replica.held != self._seen

  def _run(self) -> None:
    self._answered()
    try:
      while not self._stopped.is_set():
        reason = self._dial()
        if time.monotonic() >= self._deadline_s:
          raise TimeoutError(f'no syncer has answered for {self._wait_s:g} s: {reason}')
        self._stopped.wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
    except BaseException as error:  # raised by `newest`
      with self._changed:
        self._ended = error
        self._changed.notify_all()

  def _answered(self) -> None:
    """There is a syncer, or was one until now."""
    self._deadline_s, self._pause_s = time.monotonic() + self._wait_s, _FIRST_PAUSE_S

  def _dial(self) -> str:
    """Receives versions until the connection breaks; returns why."""
    address = ''
    try:
      address = self._address()
      with listen.dial(address, self._access, grpc_client.OPTIONS) as channel:
        call = channel.unary_stream(_METHOD)(
          followers_lib.request(self._layout, self._replica.held)
        )
        with self._changed:
          self._call = call
          if self._stopped.is_set():
            call.cancel()
        self._receive(call)
    except grpc.RpcError as error:
      text = grpc_session.describe(error)
      text += credentials.explain(text) if self._access.tls else ''
      if (remedy := _REFUSALS.get(error.code())) is not None:
        raise ValueError(f'the syncer refuses this follower: {text}.{remedy}') from None
      if error.code() is grpc.StatusCode.CANCELLED:  # by the timer of _receive
        return f'no syncer answers at {address} within {link.Limits.handshake_s:g} s'
      return text
    except addresses.RunEnded:
      raise
    except (OSError, control_crc.WireError, link.LinkError, replica_lib.Differs) as error:
      return str(error)
    raise addresses.RunEnded(addresses.ENDED)

  def _receive(self, call: grpc.Call) -> None:
    """Adopts versions until the syncer ends the call in order."""
    timer = grpc_session.start_timer(link.Limits.handshake_s, call.cancel)
    accepted = grpc_session.FOLLOWS in dict(call.initial_metadata() or ())
    timer.cancel()
    try:
      self._adopt_all(call)
    finally:
      if accepted:
        self._answered()

  def _adopt_all(self, call: grpc.Call) -> None:
    seal, most = control_crc.Seal(), max(self._sizes)
    buffer, assembler = link.ReceiveBuffer(most, 1), chunks.Assembler(max_payload_bytes=most)
    for frame in call:
      if buffer.waits:
        transfer = assembler.add(frame)
        delivery = transfer and buffer.on_transfer(transfer.number, transfer.data, transfer.crc32)
      else:
        decoded = translate.SYNCER_TO_LEARNER.decode(seal.open(frame), len(self._sizes))
        delivery = buffer.on_message(*decoded)
      if delivery:
        self._adopt(*delivery)

  def _adopt(self, message: messages.Message, payload: link.Buffer | None) -> None:
    if not isinstance(message, messages.Publish) or message.fragment >= len(self._sizes):
      raise link.LinkError(f'{message} is no version of a fragment of this run')
    with self._changed:
      self._replica.adopt(message, payload)
      self._changed.notify_all()
