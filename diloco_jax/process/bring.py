"""How a user's loop sends its model to the syncer and gets the settings of the run.

The first learner sends the model before it joins, in one gRPC call (BRING). The syncer answers with
the settings that all share and with the names, shapes and labels that it has: each learner asks
first, by a call without arrays (api/admission.py).
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
import numpy as np

from diloco_jax.process import accelerators, own_model
from diloco_jax.protocol import printable
from diloco_jax.storage import states
from diloco_jax.transport import addresses, credentials, grpc_session, listen

_METHOD = f'/{grpc_session.SERVICE}/{grpc_session.BRING}'
_PART_BYTES = 1 << 20
_UPLOAD_S = 60.0
_UPLOAD_BYTES_PER_S = 1 << 20
_ANSWER_LIMIT = ('grpc.max_receive_message_length', 2 * own_model.MAX_HEADER_BYTES)
_DIAL_S = 0.2  # between two calls to a syncer that does not listen yet


def bring(
  model: own_model.ModelDescription,
  address: Callable[[], str],
  access: addresses.Access,
  wait_s: float,
  now_s: Callable[[], float] = time.monotonic,
) -> bytes:
  """Sends the model to the syncer, if it has none; waits until one listens. Returns the answer,
  `own_model.Terms`.

  Raises:
    RunEnded: there is no syncer any more.
    TimeoutError: no syncer has listened for `wait_s`. While another learner brings the model, the
      syncer listens.
    ValueError: the syncer refused the model, or would refuse it.
  """
  header = model.header().encode()
  if len(header) > own_model.MAX_HEADER_BYTES:
    raise ValueError(
      f'names and shapes of the model have {len(header)} bytes, a syncer takes '
      f'{own_model.MAX_HEADER_BYTES}; nothing was sent: use fewer or shorter names'
    )
  limit_s = wait_s + _size_bytes(model) / _UPLOAD_BYTES_PER_S
  deadline_s = now_s() + wait_s
  while True:
    try:
      with listen.dial(address(), access, (*grpc_session.COMMON_OPTIONS, _ANSWER_LIMIT)) as channel:
        return channel.stream_unary(_METHOD)(_parts(header, model), timeout=limit_s)
    except grpc.RpcError as error:
      if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
        raise ValueError(f'the syncer refused the model: {error.details()}') from None
      if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:  # it listens, to another learner
        deadline_s = now_s() + wait_s
      reason = f'{error.details()}{credentials.explain(error.details()) if access.tls else ""}'
    except addresses.RunEnded:
      raise
    except OSError as error:  # no address yet
      reason = str(error)
    if now_s() >= deadline_s:
      raise TimeoutError(f'no syncer answered within {wait_s:g} s: {reason}')
    threading.Event().wait(_DIAL_S)


def _size_bytes(model: own_model.ModelDescription) -> int:
  """The size of the values on the wire, as float32."""
  return sum(4 * leaf.size for leaf in model.shapes.values())


def _parts(header: bytes, model: own_model.ModelDescription) -> Iterator[bytes]:
  yield header
  values = model.values()
  for name in model.shapes:
    data = memoryview(np.ascontiguousarray(values[name])).cast('B')
    for start in range(0, len(data), _PART_BYTES):
      yield bytes(data[start : start + _PART_BYTES])


class Brought:
  """What answers the call at the syncer (transport/grpc_server.py `Door`), until a model has
  arrived. One learner at a time may bring one.

  Args:
    keep: stores the model, before the learner gets the answer, since a learner sends it once.
      Raises ValueError for a model that the syncer cannot use; it then waits for another one. The
      learner brings its model to the next syncer after any other error, which `wait` raises.
    answer: to each call (`own_model.Terms`).
    max_bytes: of the values; None: half of the memory that is free.
    upload_s: in which a learner must have brought its model, and another second for each
      _UPLOAD_BYTES_PER_S.
  """

  def __init__(
    self,
    keep: Callable[[own_model.ModelDescription], object],
    answer: bytes,
    max_bytes: int | None = None,
    upload_s: float = _UPLOAD_S,
  ):
    self._keep, self._answer, self._upload_s = keep, answer, upload_s
    self._max_bytes = accelerators.available_memory() // 2 if max_bytes is None else max_bytes
    self._arrived: futures.Future[None] = futures.Future()
    self._busy = threading.Lock()  # held for good once a model is kept

  def wait(self, stopped: threading.Event) -> None:
    """Waits until a model is kept, or `stopped` is set. Raises the error of `keep`."""
    while not stopped.is_set() and not futures.wait([self._arrived], _DIAL_S).done:
      pass
    if self._arrived.done():
      self._arrived.result()

  def __call__(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
    if not self._busy.acquire(blocking=False):
      context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, 'another learner brings the model')
    try:
      model = self._read(requests, context.cancel)
      if not model.shapes:  # a learner that asks
        self._busy.release()
        return self._answer
      self._keep(model)
    except ValueError as error:
      self._busy.release()
      text = printable.printable(str(error), grpc_session.REASON_CHARS)
      context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
    except (OSError, states.StateError) as error:
      self._arrived.set_exception(error)
      context.abort(grpc.StatusCode.UNAVAILABLE, 'the syncer could not keep the model')
    except BaseException:
      self._busy.release()
      raise
    self._arrived.set_result(None)
    return self._answer

  def _read(
    self, requests: Iterator[bytes], cancel: Callable[[], object]
  ) -> own_model.ModelDescription:
    """The model of a caller, whose call is cancelled if it takes too long."""
    with _in_time(self._upload_s, cancel):
      header = next(requests, b'')
    if len(header) > own_model.MAX_HEADER_BYTES:
      raise ValueError(f'the header has {len(header)} bytes, at most {own_model.MAX_HEADER_BYTES}')
    values: dict[str, np.ndarray] = {}
    model = own_model.from_header(header.decode(errors='replace'), lambda: values)
    total = _size_bytes(model)
    if total > self._max_bytes:
      raise ValueError(f'the model has {total} bytes, this syncer has memory for {self._max_bytes}')
    with _in_time(self._upload_s + total / _UPLOAD_BYTES_PER_S, cancel):
      for name, leaf in model.shapes.items():
        values[name] = _value(requests, name, leaf.shape, 4 * leaf.size)
    return model


@contextlib.contextmanager
def _in_time(seconds: float, cancel: Callable[[], object]) -> Iterator[None]:
  timer = grpc_session.start_timer(seconds, cancel)
  try:
    yield
  finally:
    timer.cancel()


def _value(requests: Iterator[bytes], name: str, shape: tuple[int, ...], size: int) -> np.ndarray:
  data = bytearray()
  while len(data) < size:
    part = next(requests, b'')
    if not part or len(data) + len(part) > size:
      raise ValueError(f'{name} has {len(data) + len(part)} bytes, {size} were announced')
    data += part
  value = np.frombuffer(data, np.float32).reshape(shape)
  own_model.require_finite(name, value)
  return value
