"""The transport of a syncer whose sessions are served by transport processes (child.py).

The sessions of a process that dies end: the machine receives their Disconnected, and the learners
dial again, which any process answers; another process replaces it. No outer step is lost, since
payloads that have arrived are in memory that this process has mapped.
"""

import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

from diloco_jax.node import payload as payload_lib
from diloco_jax.node import ports
from diloco_jax.protocol import events, messages
from diloco_jax.transport import addresses, grpc_session, link
from diloco_jax.transport import payloads as payloads_lib
from diloco_jax.transport.processes import blocks, child
from diloco_jax.transport.processes import channel as channel_lib

_START_S = 60.0  # for the start of a process
_AGAIN_S = 1.0  # at least between two starts under the same index
_PROGRAM = f'from {child.__name__} import main; main()'


class _Process:
  """A transport process, as the syncer's process sees it.

  Attributes:
    address: where it listens.
    live: its sessions that are open.
  """

  def __init__(self, start: child.Start, totals: int):
    """Raises OSError or ValueError: it cannot listen there."""
    ours, theirs = socket.socketpair()
    descriptors = [theirs.fileno(), totals]
    with theirs:
      self._popen = subprocess.Popen(
        [sys.executable, '-c', _PROGRAM, *map(str, descriptors)],
        env=os.environ | {'PYTHONPATH': os.pathsep.join(filter(None, sys.path))},
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
      )
    pipe = connection.Connection(ours.detach())
    self.channel = channel_lib.Channel(pipe)
    self.channel.send(start)
    self.live: set[int] = set()
    try:
      if not pipe.poll(_START_S):
        raise OSError(f'a transport process has not started within {_START_S:g} s')
      answer, _ = self.channel.receive()
    except EOFError:
      answer = OSError('a transport process has ended before it listened')
    except OSError as error:
      answer = error
    if isinstance(answer, Exception):
      self.end(0.0)
      raise answer
    self.address: str = answer

  def end(self, within_s: float) -> None:
    """Waits for the end of the process, and kills it after `within_s`."""
    try:
      self._popen.wait(within_s)
    except subprocess.TimeoutExpired:
      self._popen.kill()
      self._popen.wait()
    self.channel.close()


class ProcessesTransport:
  """The port `node.ports.Transport` for the syncer, with `count` transport processes.

  Args: as of `Door` and `GrpcSyncerTransport`; each process has seats of its own.

  Raises:
    ValueError: this system cannot do it, the address is no HOST:PORT, or as `Door`.
    OSError: the address cannot be bound, or a process cannot start.
  """

  nonce = 0

  def __init__(
    self,
    count: int,
    address: str,
    post: ports.Post,
    payloads_port: ports.Payloads,
    limits: link.Limits,
    say: Callable[[str], None] = print,
    *,
    access: addresses.Access = addresses.LOCAL,
    about: bytes = b'',
  ):
    addresses.check(address, access)
    require_port(address)
    _require_free(address)
    self._count = count
    self._post = post
    self._payloads = payloads_port
    self._say = say
    self._start = limits, access, about
    payloads_lib.MEMORY.make = blocks.BLOCKS.make
    totals = blocks.BLOCKS.make(16 * count)  # here each process counts its bytes
    self._totals = blocks.BLOCKS.find(totals).descriptor
    self.traffic = link.Traffic(memoryview(totals).cast('q'))
    self.address = address
    self._closing = threading.Event()
    self._processes: list[_Process] = []
    try:
      for index in range(count):
        self._processes.append(self._begin(index, index + 1))
        self.address = self._processes[0].address  # with the port that the kernel chose
    except BaseException:
      for process in self._processes:
        process.end(0.0)
      raise
    self._readers = [
      grpc_session.start_thread(f'transport-process-{index}', self._serve, index)
      for index in range(count)
    ]

  def dial(self, session: int) -> None:
    raise ValueError(f'a syncer listens, it never dials: session {session}')

  def admit(self, session: int) -> None:
    self._call(session, 'admit')

  def send(
    self, session: int, message: messages.Message, payload: payload_lib.Payload | None = None
  ) -> None:
    self._call(session, 'send', message, payload=payload)

  def handled(self, session: int) -> None:
    self._call(session, 'handled')

  def close(self, session: int, reason: str) -> None:
    self._call(session, 'close', reason)

  def shutdown(self, grace_s: float, reason: str = '') -> None:
    self._closing.set()
    for process in self._processes:
      process.channel.send(('shutdown', grace_s, reason))
    for index, reader in enumerate(self._readers):
      reader.join(grace_s + ports.SHUTDOWN_S)
      if reader.is_alive():
        self._processes[index].end(0.0)
        reader.join()
      self._processes[index].end(ports.SHUTDOWN_S)

  def _call(self, session: int, name: str, *arguments: Any, payload: Any = None) -> None:
    process = self._processes[(session - 1) % self._count]
    process.channel.send((name, session, *arguments), payload)

  def _begin(self, index: int, first: int) -> _Process:
    start = child.Start(self.address, *self._start, first=first, every=self._count, index=index)
    return _Process(start, self._totals)

  def _serve(self, index: int) -> None:
    """Posts the events of the processes of one index, one process after the other."""
    last = index + 1  # session
    while True:
      started_s = time.monotonic()
      process = self._processes[index]
      last = max(last, self._receive(process))
      lost, process.live = sorted(process.live), set()
      for session in lost:
        self._post(events.Disconnected(session=session, reason='its transport process has ended'))
      if self._closing.is_set():
        return
      process.end(0.0)
      self._say(
        f'a transport process has ended; its {len(lost)} sessions dial again, and no outer step is '
        'lost. Another process starts'
      )
      last += self._count
      while not self._restart(index, last, started_s):
        started_s = time.monotonic()

  def _restart(self, index: int, first: int, started_s: float) -> bool:
    """Starts a process again, not too often. False: it has not started, and must be tried again."""
    if self._closing.wait(max(0.0, started_s + _AGAIN_S - time.monotonic())):
      return True
    try:
      self._processes[index] = self._begin(index, first)
    except (OSError, ValueError) as error:
      self._say(f'no transport process starts: {error}. The others go on; it is tried again')
      return False
    if self._closing.is_set():  # `shutdown` has not sent its call to this process
      self._processes[index].channel.send(('shutdown', 0.0))
    return True

  def _receive(self, process: _Process) -> int:
    """Posts the events of a process until it ends; returns the number of its last session."""
    last = 0
    try:
      while True:
        event, payload = process.channel.receive()
        match event:
          case str(line):
            self._say(line)
            continue
          case events.Connected(session=session):
            last = session
            process.live.add(session)
          case events.Disconnected(session=session):
            process.live.discard(session)
          case events.Received() if payload is not None:
            event = dataclasses.replace(event, payload_id=self._payloads.put(payload))
        self._post(event)
    except (EOFError, OSError):
      return last


def require_port(address: str) -> None:
  """Raises ValueError: no transport processes can serve this address, or this machine has none."""
  if address.startswith(addresses.UNIX) or not hasattr(os, 'memfd_create'):
    raise ValueError(
      f'address {address!r}: transport processes need HOST:PORT and Linux; nothing was started. '
      'Give --listen=HOST:PORT with --tls, or leave --transport_processes out'
    )


def _require_free(address: str) -> None:
  """Raises OSError if the port is in use: the processes of a user may share a port, so the kernel
  does not refuse a second syncer."""
  host, _, port = address.rpartition(':')
  for family, kind, number, _, at in socket.getaddrinfo(
    host.strip('[]'), int(port), type=socket.SOCK_STREAM
  ):
    with socket.socket(family, kind, number) as probe:
      probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for connections that are over
      probe.bind(at)
      probe.listen()
