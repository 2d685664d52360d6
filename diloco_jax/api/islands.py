"""Keeps one learner of a single controller training: its lives, one after the other.

A life is what a process is elsewhere: an island, a machine, a transport and a tape, on threads of
their own. Errors of its devices end that life only, as a kill ends a process: the learner is built
again, with the pauses and limits of the supervisor (launch/supervisor.py), and rejoins. Every other
error is one of code, settings or files, which another life would meet again: it ends the run.

A thread that hangs cannot be killed. Its life is abandoned: its machine ends, which cuts its
sessions, and its island gets no devices, functions or folder any more. When the thread wakes it
raises before it launches or writes anything: two threads that launch collectives on the same
devices in different orders would wait for each other for ever.
"""

import contextlib
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

WATCHDOG_S = 300.0  # an island that needs longer for one piece of work hangs
_BUILD = 10  # as many times as long until its first
_POLL_S = 0.1
_KILLED = -9  # the exit code of a life that was ended from outside, as of a process


class IslandsFailed(RuntimeError):
  """Too few learners are left for an outer step; one line says why and what to do."""


class Ended(BaseException):
  """A life was ended from outside; raised on its threads."""


class Life(loop.EventQueue):
  """The events of one life, and what its threads share with the one that watches it.

  Attributes:
    island: once it is built.
    busy: the step thread works, and does not wait for work; turn: how many times it got some.
    clock: of the newest step that was begun.
    down_s: the pause after it; None: that of the supervisor.
    still_s: for how long it made no progress before its end.
  """

  def __init__(self):
    super().__init__()
    self.island: island_lib.Island | None = None
    self.busy, self.turn, self.clock, self.watchdog_s = True, 0, 0, WATCHDOG_S
    self.down_s: float | None = None
    self.still_s = 0.0
    self._ending: Ended | None = None
    self._may_step = threading.Event()
    self._may_step.set()

  def take(self, timeout_s: float | None) -> events.Event:
    try:
      self.check()
      return super().take(timeout_s)
    except BaseException:  # the step thread may not get there
      self._transport.shutdown(0.0)
      raise

  def connect(self, make: ports.MakeTransport, *args: Any) -> ports.Transport:
    self._transport = make(*args)
    return self._transport

  def freeze(self) -> None:
    """No step begins until `thaw`."""
    self._may_step.clear()

  def thaw(self) -> None:
    self._may_step.set()

  def end(self, why: str, down_s: float | None = None) -> None:
    """Ends the life at its next piece of work, as a kill ends a process. See `down_s`."""
    if self._ending is None:
      self.down_s, self._ending = down_s, Ended(why)
      self.fail(self._ending)

  def abandon(self) -> None:
    """Ends the life although its step thread may hang."""
    self.end('abandoned')
    if self.island is not None:
      with contextlib.suppress(Exception):  # of a folder that cannot be closed
        self.island.abandon()

  def check(self) -> None:
    """Raises what has ended this life from outside."""
    if self._ending is not None:
      raise self._ending

  def work(self) -> type[learner_work.LearnerWork]:
    """The work of this life."""
    life = self

    class Work(learner_work.LearnerWork):
      def _take(self) -> actions.Work | None:
        life.busy = False
        action = super()._take()
        life.turn, life.busy = life.turn + 1, True
        life.check()
        return action

      def _step(self, clock: int) -> None:
        life.clock = clock
        life._may_step.wait()
        life.check()
        super()._step(clock)

    return Work


class Records:
  """The recorder of one life, which raises once that was ended."""

  def __init__(self, life: Life, recorder: records_lib.Recorder):
    self._life, self._recorder = life, recorder

  def __getattr__(self, name: str) -> Callable:
    self._life.check()
    return getattr(self._recorder, name)


class Keeper:
  """Keeps one learner alive: `run` on a thread of its own, all else from any.

  Attributes:
    life: the present one.
    given_up: why no other life follows, or ''.
    leaving: no other life follows.
    removed: the learner was asked to leave before the end of the run.
  """

  def __init__(self, name: str, live: Callable[[Life, Records], actions.Exit]):
    """`live` runs one life to its end and returns its Exit."""
    self.name, self.given_up, self.removed = name, '', False
    self._live, self.leaving = live, threading.Event()
    self.life: Life | None = None

  def stop(self, reason: str) -> None:
    """Asks the learner to end in order; no other life follows. Safe in a signal handler."""
    self.leaving.set()
    if life := self.life:
      life.post(events.Stop(reason=reason))

  def run(self, recorder: records_lib.Recorder) -> actions.Exit:
    """Runs lives until one ends in order, the learner is asked to leave or there were too many
    short ones. Raises errors that another life would meet, too."""

    def note(state: str, text: str, pid: int | None = None) -> None:
      """Writes a new state of the learner to the records and the console."""
      recorder.report(facts.Process(child=self.name, state=state, text=text, pid=pid))
      if text:
        recorder.say(text)

    failures, draw, text = 0, random.Random(), ''
    while True:
      self.life = life = Life()
      if self.leaving.is_set():  # since before it could be asked
        life.post(events.Stop(reason='the run ends'))
      began_s = time.monotonic()
      note('starting', text, os.getpid())
      end = self._one(life, recorder)
      recorder.ended(end.code)
      self.life, pause_s = None, life.down_s
      if cli.end(end.code) != cli.RETRY or self.leaving.is_set():
        return end
      lived_s = time.monotonic() - began_s - life.still_s
      failures = failures + 1 if lived_s < supervisor.SHORT_LIFE_S else 1
      if pause_s is not None:
        failures = 0
      elif failures >= supervisor.MAX_SHORT_LIVES:
        self.given_up = f'{end.text}. Given up after {failures} short lives in a row'
        note('failed', self.given_up)
        return end
      else:
        pause_s = supervisor.backoff_s(failures, draw)
      note(
        'down',
        f'{end.text}. Merged contributions and checkpoints are safe, its other steps are lost. It '
        f'is built again in {pause_s:.1f} s and rejoins; the other learners train on',
      )
      del life
      if self.leaving.wait(pause_s):
        return end
      text = 'is built again'

  def _one(self, life: Life, recorder: records_lib.Recorder) -> actions.Exit:
    """Runs a life to its end; raises errors that are not of its devices."""
    ended: futures.Future[actions.Exit] = futures.Future()

    def in_thread() -> None:
      try:
        ended.set_result(self._live(life, Records(life, recorder)))
      except BaseException as error:  # raised again where the life is watched
        ended.set_exception(error)

    # A daemon: the process can end while it hangs.
    threading.Thread(target=in_thread, name=f'{self.name} steps', daemon=True).start()
    turn = 0
    while futures.wait([ended], _POLL_S).not_done:
      # Counted, not measured: the whole process may stop for a while.
      life.still_s = life.still_s + _POLL_S if life.busy and life.turn == turn else 0.0
      turn = life.turn
      if life.still_s > life.watchdog_s * (1 if turn else _BUILD):
        life.abandon()
        text = f'no step has ended for {life.still_s:.1f} s: the devices hang'
        return actions.Exit(code=1, text=text)
    error = ended.exception()
    while error and not isinstance(error, jax.errors.JaxRuntimeError | Ended):
      error = error.__cause__ or error.__context__
    if error is None:
      return ended.result()  # or raises
    error.__traceback__ = None  # its frames hold the arrays, and a garbage collection stops all
    told = cli.one_line(error)[:300]
    if isinstance(error, Ended):
      return actions.Exit(code=_KILLED, text=told)
    return actions.Exit(code=1, text=f'the devices have failed ({told})')
