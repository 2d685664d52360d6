"""Keeps one learner of a single controller training: its lives, one after the other.

A life is what a process is elsewhere: an island, a machine, a transport and a tape, on threads of
their own. Errors of its devices end that life only, as a kill ends a process: the learner is built
again after a pause, with the limits of the supervisor (launch/supervisor.py), rejoins with the next
incarnation, and the other learners notice nothing. Every other error is one of code, settings or
files: it ends the run.

A thread that hangs cannot be killed. Its life is abandoned: its sessions are cut, its machine ends,
nobody reads its events, and its island has neither arrays nor functions nor a folder any more. When
the thread wakes it raises before it launches or writes anything. So it cannot launch on devices
that the next life uses: programs with collectives that two threads launch on the same devices in
different orders would wait for each other for ever.
"""

import gc
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax

from diloco_jax.launch import cli, supervisor
from diloco_jax.learner import work as learner_work
from diloco_jax.node import loop, ports
from diloco_jax.protocol import actions, events
from diloco_jax.report import facts
from diloco_jax.report import records as records_lib
from diloco_jax.train import island as island_lib

WATCHDOG_S = 120.0  # a piece of work is no hang before that
_USUAL_STEPS = 50  # nor before so many times the newest step
_BUILD = 10  # nor before so many times WATCHDOG_S where functions are compiled and files read
_POLL_S = 0.1
_KILLED = -9  # the exit code of a life that was ended from outside, as of a process
_SAFE = 'Merged contributions and the last checkpoint are safe; other steps of {} are lost'

AtStep = Callable[[str, int], None]


class IslandsFailed(RuntimeError):
  """Too few learners are left for an outer step; one line says why and what to do."""


class Ended(BaseException):
  """A life was ended from outside; raised on its threads."""


class Life(loop.EventQueue):
  """The events of one life of a learner, and what its threads share with the one that watches it.

  Attributes:
    number: of the life, from 1.
    busy: its step thread works, and does not wait for work. turn: how many times it got some.
    step_s: the time of its newest step.
    ended: its end.
  """

  def __init__(self, number: int):
    super().__init__()
    self.number = number
    self.busy, self.turn, self.step_s = True, 0, 0.0
    self.ended: futures.Future[actions.Exit] = futures.Future()
    self._ending: BaseException | None = None
    self._island: island_lib.Island | None = None
    self._transport: ports.Transport | None = None

  def post(self, event: events.Event) -> None:
    if isinstance(event, events.StepDone):
      self.step_s = event.step_ns / 1e9
    super().post(event)

  def take(self, timeout_s: float | None) -> events.Event:
    self.check()
    return super().take(timeout_s)

  def check(self) -> None:
    """Raises what has ended this life from outside. Each of its threads calls this before it
    launches or writes anything."""
    if self._ending is not None:
      raise self._ending

  def end(self, why: str) -> None:
    """Ends the life at its next piece of work, as a kill ends a process."""
    self._ending = self._ending or Ended(why)
    self.fail(self._ending)

  def abandon(self, why: str) -> None:
    """Ends the life although its step thread may hang (top of this file)."""
    self.end(why)
    self.cut()
    if self._island is not None:
      self._island.abandon()

  def cut(self) -> None:
    if self._transport is not None:
      self._transport.shutdown(0.0)

  def has(self, island: island_lib.Island) -> island_lib.Island:
    """Notes the island of this life. Raises as `check`."""
    self._island = island
    if self._ending is not None:
      island.abandon()
    self.check()
    return island

  def connect(self, make: ports.MakeTransport) -> ports.MakeTransport:
    def made(post: ports.Post, payloads: ports.Payloads) -> ports.Transport:
      self._transport = make(post, payloads)
      self.check()
      return self._transport

    return made

  def work(self, at_step: Callable[[int], None]) -> type[learner_work.LearnerWork]:
    """The work of this life, which tells when it is busy and calls `at_step` before each step."""
    life = self

    class Work(learner_work.LearnerWork):
      def _take(self) -> actions.Work | None:
        life.busy = False
        action = super()._take()
        life.turn, life.busy = life.turn + 1, True
        life.check()
        return action

      def _step(self, clock: int) -> None:
        at_step(clock)
        life.check()  # it may have blocked for long
        super()._step(clock)

    return Work


class Records:
  """The recorder of one life: its threads write nothing once it was ended."""

  def __init__(self, life: Life, recorder: records_lib.Recorder):
    self._life, self._recorder = life, recorder

  def __getattr__(self, name: str) -> Callable:
    method = getattr(self._recorder, name)

    def checked(*args, **kwargs):
      self._life.check()
      return method(*args, **kwargs)

    return checked


Live = Callable[[Life, Any], actions.Exit]


class Keeper:
  """Keeps one learner alive. `run` on a thread of its own, all else from any thread.

  Attributes:
    watchdog_s: see SingleController. given_up: why no other life follows; '': there is no reason.
    removed: the learner was asked to leave while the run goes on.
  """

  def __init__(self, name: str, live: Live, watchdog_s: float, again: bool):
    """`live` runs one life to its end; `again`: another life follows one that has failed."""
    self.name, self.watchdog_s = name, watchdog_s
    self.given_up, self.removed = '', False
    self._live, self._again = live, again
    self._lock = threading.RLock()  # a signal handler may call `stop`
    self._leaving = threading.Event()
    self._life: Life | None = None
    self._down_s: float | None = None

  def stop(self, reason: str) -> None:
    """Asks the learner to end in order; no other life follows."""
    with self._lock:
      self._leaving.set()
      if self._life is not None:
        self._life.post(events.Stop(reason=reason))

  def bring_down(self, down_s: float, why: str) -> bool:
    """Ends the present life; the next one begins `down_s` later. False: there is none to end."""
    with self._lock:
      life = self._life
      if life is None or self._leaving.is_set():
        return False
      self._down_s = down_s
    life.end(why)
    return True

  def run(self, recorder: records_lib.Recorder) -> actions.Exit:
    """Runs lives until one ends in order, the learner is asked to leave or there were too many
    short ones. Raises errors that another life would meet, too."""
    failures, number, draw, why = 0, 0, random.Random(), ''
    while True:
      with self._lock:
        if self._leaving.is_set():
          return actions.Exit(code=int(bool(why)), text=why or 'stopped before it began')
        number += 1
        self._life, self._down_s = Life(number), None
      began_s = time.monotonic()
      again = f'built again (life {number})' if number > 1 else ''
      self._note(recorder, 'starting', again, os.getpid())
      try:
        exit_, code, why = self._one(self._life, recorder)
      except BaseException:
        recorder.ended(1)
        raise
      recorder.ended(code)
      with self._lock:
        life, self._life = self._life, None
        down_s = self._down_s
      if exit_ is not None or self._leaving.is_set():
        if exit_ is None:
          self._note(recorder, 'down', why)
        return exit_ or actions.Exit(code=1, text=why)
      failures = failures + 1 if time.monotonic() - began_s < supervisor.SHORT_LIFE_S else 1
      safe = _SAFE.format(self.name)
      if down_s is not None:
        failures = 0
      elif failures >= supervisor.MAX_SHORT_LIVES:
        self.given_up = f'{why}; given up after {failures} short lives in a row'
        self._note(recorder, 'failed', f'{self.given_up}. {safe}; the other learners train on')
        return actions.Exit(code=1, text=self.given_up)
      else:
        down_s = supervisor.backoff_s(failures, draw)
      self._note(
        recorder,
        'down',
        f'{why}. {safe}. It is built again in {down_s:.1f} s; the other learners train on',
      )
      gc.collect()  # the arrays of the failed life
      self._leaving.wait(down_s)
      life.cut()  # its machine may have dialled while it ended

  def _one(
    self, life: Life, recorder: records_lib.Recorder
  ) -> tuple[actions.Exit | None, int, str]:
    """Runs a life; returns its Exit, None if its devices have failed; an exit code; and why."""
    # A daemon: the process can end while it hangs.
    thread = threading.Thread(
      target=self._in_thread,
      args=(life, Records(life, recorder)),
      name=f'{self.name}.{life.number}',
      daemon=True,
    )
    thread.start()
    if not self._watch(life):
      why = f'no step of {self.name} has ended for {self._patience_s(life):.0f} s: its devices hang'
      life.abandon(why)
      return None, 1, why
    error = life.ended.exception()
    if error is None:
      return life.ended.result(), 0, ''
    thread.join()
    if not self._again or not (failed := _of_devices(error)):
      raise error
    told = cli.one_line(failed)[:300]
    if isinstance(failed, Ended):
      return None, _KILLED, told
    return None, 1, f'the devices of {self.name} have failed ({told})'

  def _in_thread(self, life: Life, records: Records) -> None:
    try:
      life.ended.set_result(self._live(life, records))
    except BaseException as error:  # raised again on the thread that watches
      life.ended.set_exception(error)

  def _watch(self, life: Life) -> bool:
    """Waits for the end of a life; False: it hangs. Counts looks, not seconds: the whole process
    may have been stopped for a while."""
    looks, turn = 0, -1
    while futures.wait([life.ended], _POLL_S).not_done:
      looks = looks + 1 if life.busy and life.turn == turn else 0
      turn = life.turn
      if looks * _POLL_S > self._patience_s(life):
        return False
    return True

  def _patience_s(self, life: Life) -> float:
    return max(self.watchdog_s * (1 if life.turn else _BUILD), _USUAL_STEPS * life.step_s)

  def _note(
    self, recorder: records_lib.Recorder, state: str, text: str, pid: int | None = None
  ) -> None:
    """Writes a new state of the learner to the records and the console, as the supervisor does."""
    recorder.report(facts.Process(child=self.name, state=state, text=text, pid=pid))
    if text:
      recorder.say(text)


def _of_devices(error: BaseException | None) -> BaseException | None:
  """The error that another life may be spared, among an error and those that led to it."""
  while error is not None and not isinstance(error, jax.errors.JaxRuntimeError | Ended):
    error = error.__cause__ or error.__context__
  return error
