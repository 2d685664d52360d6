"""A hostile client: sessions with a syncer that are made by hand, against the wire format.

It speaks gRPC with frames and checksums of its own (docs/wire_format.md), so it can break every
rule that the library's own client keeps. `Client` is a session, `Member` one that has joined.
"""

import dataclasses
import itertools
import pathlib
import queue
import random
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from diloco_jax.process import run_folder
from diloco_jax.protocol import messages
from diloco_jax.transport import (
  addresses,
  chunks,
  control_crc,
  grpc_session,
  listen,
  sync_pb2,
  translate,
)
from diloco_jax.verification.replay import tape_files

PATIENCE_S = 5.0
STEP_TOKENS = 4 * 32  # of `tiny`: batch_size * seq_len
_OPTIONS = (*grpc_session.COMMON_OPTIONS, ('grpc.use_local_subchannel_pool', 1))


@dataclasses.dataclass(frozen=True)
class Run:
  """What a hostile process knows of a run: where it is, and what a member is told; `learner`: the
  id under which it lies."""

  workdir: pathlib.Path
  agreement: str
  payload_bytes: tuple[int, ...]
  learner: str = 'x'

  @classmethod
  def of(cls, workdir: pathlib.Path) -> 'Run':
    """Reads it from the syncer's tape."""
    life = next(life for life in tape_files.find(workdir) if life.node == 'syncer')
    start = tape_files.read(life).header.start
    return cls(workdir, start.agreement, start.payload_bytes)

  @property
  def address(self) -> str:
    return (self.workdir / run_folder.ADDRESS).read_text().strip()

  def join(self, learner: str, **changes: Any) -> messages.Join:
    values = {
      'protocol': messages.PROTOCOL_VERSION,
      'run': '',
      'learner': learner,
      'nonce': random.getrandbits(64),
      'incarnation': 0,
      'agreement': self.agreement,
      'host': 'hostile',
      'pid': 1,
    }
    return messages.Join(**values | changes)


def encode(message: messages.FromLearner, transfer: int = 0) -> bytes:
  """The envelope of a message, of any values that the schema can hold."""
  envelope = sync_pb2.ControlRequest(transfer_id=transfer)
  body = getattr(envelope, re.sub(r'(?<!^)(?=[A-Z])', '_', type(message).__name__).lower())
  body.SetInParent()
  _fill(body, message)
  return envelope.SerializeToString()


def _fill(proto: Any, message: Any) -> None:
  for field in dataclasses.fields(message):
    value = getattr(message, field.name)
    if dataclasses.is_dataclass(value):
      getattr(proto, field.name).SetInParent()
      _fill(getattr(proto, field.name), value)
    elif isinstance(value, tuple):
      for item in value:
        if dataclasses.is_dataclass(item):
          _fill(getattr(proto, field.name).add(), item)
        else:
          getattr(proto, field.name).append(item)
    elif value is not None:
      setattr(proto, field.name, value)


class Refused(Exception):
  """The syncer refused or ended the session; the text says how."""


class Client:
  """A session. Raises Refused if it does not open.

  Attributes:
    heard: the syncer's messages that were not taken yet.
    ended: set once the syncer has ended the session; `why`: its words.
  """

  def __init__(self, address: str):
    self.heard: queue.SimpleQueue[messages.FromSyncer] = queue.SimpleQueue()
    self.ended, self.why = threading.Event(), ''
    self._transfers = itertools.count(1)
    self._sealed, self._opened = control_crc.Seal(), control_crc.Seal()
    self._lock = threading.Lock()
    self._out: dict[str, queue.Queue[bytes | None]] = {}
    self._channel = listen.dial(address, addresses.LOCAL, _OPTIONS)
    try:
      control = self._stream('Control', ())
      token = dict(control.initial_metadata()).get(grpc_session.TOKEN)
      if token is None:
        raise Refused(f'no token: {control.code()} {control.details()}')
      data = self._stream('Bulk', ((grpc_session.TOKEN, token),))
      data.initial_metadata()
      self._start(self._skip, data)
    except grpc.RpcError as error:
      self._channel.close()
      raise Refused(grpc_session.describe(error)) from error
    except Refused:
      self._channel.close()
      raise
    self._start(self._read, control)

  def __enter__(self) -> 'Client':
    return self

  def __exit__(self, *error: Any) -> None:
    self.close()

  def close(self) -> None:
    for out in self._out.values():
      out.put(None)
    self._channel.close()

  # --- Saying -------------------------------------------------------------------------------------

  def say(self, message: messages.FromLearner, payload: bytes | None = None) -> None:
    """Says a message as a learner does, with its payload."""
    transfer = 0
    if payload is not None:
      transfer = next(self._transfers)
      for frame in chunks.split(payload):
        self.frame(frame)
    self.word(encode(message, transfer))

  def word(self, envelope: bytes) -> None:
    """Says an envelope, whatever it is, with a right checksum."""
    with self._lock:
      self.control(self._sealed.close(envelope))

  def control(self, data: bytes) -> None:
    """Sends bytes on the Control stream as they are."""
    self._out['Control'].put(data)

  def frame(self, data: bytes) -> None:
    """Sends bytes on the Bulk stream as they are."""
    self._out['Bulk'].put(data)

  @property
  def waiting(self) -> int:
    """How many sent messages the connection has not taken yet."""
    return sum(out.qsize() for out in self._out.values())

  # --- Hearing ------------------------------------------------------------------------------------

  def hear(self, kind: type, patience_s: float = PATIENCE_S) -> Any:
    """The next message of a kind. Raises Refused at the end of the session, or after
    `patience_s`."""
    deadline_s = time.monotonic() + patience_s
    while (left_s := deadline_s - time.monotonic()) > 0:
      try:
        message = self.heard.get(timeout=min(left_s, 0.05))
      except queue.Empty:
        if self.ended.is_set() and self.heard.empty():
          raise Refused(self.why) from None
        continue
      if isinstance(message, kind):
        return message
      if isinstance(message, messages.Refused):
        raise Refused(f'{message.code}: {message.text}')
    raise Refused(f'no {kind.__name__} in {patience_s} s')

  def _stream(self, method: str, metadata: tuple) -> grpc.Call:
    out = self._out[method] = queue.Queue()
    stream = self._channel.stream_stream(f'/{grpc_session.SERVICE}/{method}')
    return stream(iter(out.get, None), metadata=metadata, timeout=None)

  def _start(self, target: Callable, *args: Any) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()

  def _read(self, control: Iterator[bytes]) -> None:
    try:
      for data in control:
        message, _ = translate.SYNCER_TO_LEARNER.decode(self._opened.open(data))
        self.on_message(message)
      self.why = 'closed by the syncer'
    except grpc.RpcError as error:
      self.why = grpc_session.describe(error)
    except control_crc.WireError as error:
      self.why = str(error)
    self.ended.set()

  def _skip(self, bulk: Iterator[bytes]) -> None:
    try:
      for _ in bulk:
        pass
    except grpc.RpcError:
      pass

  def on_message(self, message: messages.FromSyncer) -> None:
    self.heard.put(message)


class Member(Client):
  """A session that joins. It adopts what is published and counts steps like an honest learner,
  but trains nothing.

  `answer`: called for every pull, by the thread that reads; None: pulls are not answered.
  """

  def __init__(
    self, run: Run, learner: str, answer: Callable[['Member', messages.Pull], None] | None = None
  ):
    self.run, self.learner, self._answer = run, learner, answer
    self.versions = [-1] * len(run.payload_bytes)
    self.anchors = [(0, 0)] * len(run.payload_bytes)  # (steps, tokens) at the adoption
    self.steps = self.tokens = self.clock = 0
    super().__init__(run.address)
    join = run.join(learner)
    self.say(join)
    offer = self.hear(messages.Offer)
    held = tuple(messages.Held(version=-1, digest=0) for _ in self.versions)
    self.say(
      messages.Confirm(
        nonce=join.nonce,
        incarnation=offer.incarnation,
        clock=0,
        steps=0,
        tokens=0,
        held=held,
        shard=None,
        cursor=0,
      )
    )
    self.joined = self.hear(messages.Joined)
    self.clock = self.joined.clock
    self.shard, self.cursor = self.joined.shard, self.joined.cursor
    deadline_s = time.monotonic() + PATIENCE_S
    while -1 in self.versions and time.monotonic() < deadline_s and not self.ended.is_set():
      time.sleep(0.005)

  def on_message(self, message: messages.FromSyncer) -> None:
    match message:
      case messages.Publish(fragment=fragment, version=version, sync=sync):
        self.versions[fragment] = version
        self.anchors[fragment] = self.steps, self.tokens
        self.clock = max(self.clock, sync)
        self.say(
          messages.Adopted(fragment=fragment, version=version, tokens=self.tokens, matched=True)
        )
      case messages.Pull() if self._answer is not None:
        self._answer(self, message)
      case _:
        super().on_message(message)

  def step(self) -> None:
    """Reports one more inner step."""
    self.steps += 1
    self.clock += 1
    self.cursor += 1
    self.tokens += STEP_TOKENS
    self.say(self.progress())

  def progress(self) -> messages.Progress:
    return messages.Progress(
      clock=self.clock, steps=self.steps, tokens=self.tokens, step_ns=20_000_000, finished=False
    )

  def contribution(self, pull: messages.Pull, payload: bytes) -> messages.Contribution:
    """The contribution that an honest learner would send now."""
    steps, tokens = self.anchors[pull.fragment]
    return messages.Contribution(
      sync=pull.sync,
      fragment=pull.fragment,
      version=self.versions[pull.fragment],
      steps=self.steps - steps,
      tokens_from=tokens,
      tokens_to=self.tokens,
      shard=self.shard,
      cursor=self.cursor,
      payload=messages.Payload(size_bytes=len(payload), crc32=zlib.crc32(payload)),
    )

  def train(self, seconds: float, pause_s: float) -> None:
    """Reports steps for a while, or until the session ends."""
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s and not self.ended.is_set():
      self.step()
      time.sleep(pause_s)


def gradient(run: Run, fragment: int, exponent: int) -> bytes:
  """The bytes of a pseudo-gradient (int8 codec): every value is 2^(exponent - 127)."""
  size = run.payload_bytes[fragment]
  blocks = size // 33
  return bytes([exponent]) * blocks + bytes([64]) * (size - blocks)
