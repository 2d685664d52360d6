"""The loop of every node: one machine, one event queue, and the ports to the outside.

Only simulation and replay call `machine.handle`, too. The loop runs on one thread; transport and
work post events into the queue from their own threads.

The loop writes every turn to the tape before it carries out the turn's first action, so a replay
can reproduce all visible actions of a machine, also after a kill at any moment. A machine that
raises ends its process: its state is no longer reliable, and the tape is the bug report.
"""

import queue
import time
from typing import Protocol

from diloco_jax.node import ports
from diloco_jax.protocol import actions, events


class Machine(Protocol):
  """The interface of both machines."""

  deadline_ns: int | None

  def handle(self, now_ns: int, event: events.Event) -> list[actions.Action]: ...


class Monotonic:
  """Monotonic time of this host; jumps of the wall clock do not change it."""

  def now_ns(self) -> int:
    return time.monotonic_ns()


class MachineCrash(Exception):
  """A machine raised an exception; the text names the event and the tape that reproduces it."""


class EventQueue:
  """The events that wait for a machine, first in, first out. `post` is thread-safe."""

  def __init__(self):
    self._queue: queue.SimpleQueue[events.Event | BaseException] = queue.SimpleQueue()

  def post(self, event: events.Event) -> None:
    self._queue.put(event)

  def fail(self, error: BaseException) -> None:
    """Ends the node after the failure of one of its ports. Thread-safe."""
    self._queue.put(error)

  def take(self, timeout_s: float | None) -> events.Event:
    """Returns the next event, or Wake after `timeout_s`. Raises the error given to `fail`."""
    try:
      event = self._queue.get(timeout=timeout_s)
    except queue.Empty:
      return events.Wake()
    if isinstance(event, BaseException):
      raise event
    return event


class Node:
  """Feeds a machine its events and carries out its actions until it exits."""

  def __init__(
    self,
    machine: Machine,
    event_queue: EventQueue,
    clock: ports.Clock,
    transport: ports.Transport,
    work: ports.Work,
    payloads: ports.Payloads,
    records: ports.Records,
    tape: ports.Tape | None = None,
  ):
    self._machine = machine
    self._event_queue = event_queue
    self._clock = clock
    self._transport = transport
    self._work = work
    self._payloads = payloads
    self._records = records
    self._tape = tape

  def run(self) -> actions.Exit:
    """Runs until the machine's Exit and returns it.

    Raises:
      MachineCrash: the machine raised; the exception is its cause.
      BaseException: the error given to `EventQueue.fail`.
    """
    while True:
      event = self._event_queue.take(self._timeout_s())
      for action in self._turn(self._clock.now_ns(), event):
        if isinstance(action, actions.Exit):
          return action
        self._perform(action)
      if isinstance(event, events.Received):
        self._transport.handled(event.session)

  def _turn(self, now_ns: int, event: events.Event) -> list[actions.Action]:
    try:
      asked = self._machine.handle(now_ns, event)
    except Exception as error:
      where = self._tape.crash(now_ns, event, error) if self._tape else 'There is no tape.'
      raise MachineCrash(
        f'the machine raised {type(error).__name__}: {error}, on {event}. {where}'
      ) from error
    if self._tape is not None:
      self._tape.record(now_ns, event, asked)
    return asked

  def _timeout_s(self) -> float | None:
    deadline_ns = self._machine.deadline_ns
    if deadline_ns is None:
      return None
    return max(0, deadline_ns - self._clock.now_ns()) / 1e9

  def _perform(self, action: actions.Action) -> None:
    match action:
      case actions.Send(session=session, message=message, payload_id=payload_id):
        payload = None if payload_id is None else self._payloads.get(payload_id)
        self._transport.send(session, message, payload)
      case actions.Admit(session=session):
        self._transport.admit(session)
      case actions.Dial(session=session):
        self._transport.dial(session)
      case actions.Close(session=session, reason=reason):
        self._transport.close(session, reason)
      case actions.Drop(payload_id=payload_id):
        self._payloads.drop(payload_id)
      case actions.Report(fact=fact):
        self._records.report(fact)
      case actions.Say(text=text):
        self._records.say(text)
      case _:
        self._work.submit(action)
