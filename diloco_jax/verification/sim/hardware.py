"""The hardware of an island: the duration of its steps, their tokens, and failures of its chips.

An inner step is *work* of some nanoseconds at full speed. What happens to the island while a step
runs stretches it: a fault makes the island *slow* or *shrinks* it (it lost devices: longer steps,
fewer tokens), chips fail, and the island pauses and goes on without them. Work ends with its
process. Step times vary: a part of every step is random.

Chips are never objects. They fail, pause and return in slices, and an island costs by its failures,
so months of millions of chips take seconds without processes (experiments/goodput/islands.py). The
rules of failures are those of the paper's chaos engineering (section 7); it does not publish its
times, so the defaults of `Slices` were fitted to its table of goodput.
"""

import dataclasses
import random
from collections.abc import Callable

from diloco_jax.verification import random_streams
from diloco_jax.verification.sim import engine as engine_lib

MS, SECOND = engine_lib.MS, engine_lib.SECOND
YEAR_S = 365.25 * 86_400
SLICE = 1_024  # chips


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
  """The slices of an island and how they fail.

  Failures are Poisson. A failed slice leaves; its island pauses `downscale_s`, then goes on with
  the others. The slice is healthy again some time after its failure. Healthy slices join at the end
  of any pause of their island; the first of them waits at most `hold_off_s` for one, then the
  island pauses `upscale_s`, and all healthy slices join. A paused island has no further failure. An
  island that has lost all its slices goes on once a slice has joined.

  Attributes:
    chips: of the island.
    count: slices of the island.
    mtbi_s: mean time between failures of one chip.
    downscale_s, upscale_s, hold_off_s: see above.
    recovery_s: mean of the exponential time from a failure until the slice is healthy.
    rigid: any failure stops the island until the slice is healthy and then for `upscale_s`; it is
      spared further failures for the first `spared_s` of training.
  """

  chips: float
  count: int
  mtbi_s: float = YEAR_S
  downscale_s: float = 20.0
  upscale_s: float = 20.0
  hold_off_s: float = 75.0
  recovery_s: float = 65.0
  rigid: bool = False
  spared_s: float = 5.0

  def recovery_ns(self, draw: random.Random) -> int:
    """Draws the time from a failure until the slice is healthy."""
    return round(draw.expovariate(1 / self.recovery_s) * SECOND)


def of_chips(chips: float, **more) -> Slices:
  """Slices of about SLICE chips; `more`: other fields of Slices."""
  return Slices(chips=chips, count=max(1, round(chips / SLICE)), **more)


@dataclasses.dataclass(eq=False, kw_only=True)
class Island:
  """One learner's accelerators.

  Attributes:
    step_ns: an inner step without noise, at full speed: slower for an older generation of chips.
    encode_ns, adopt_ns: time to encode a fragment, to adopt one.
    noise: largest random addition to a step, per mille.
    lognormal: sigma of a factor of every step whose mean is 1.
    gaussian: standard deviation of such a factor, which is at least a tenth.
    tokens: of an inner step on all devices.
    slow, shrink: factors of the faults, 1: no fault; `fault` sets them.
    slices: None: nothing fails.
    changed: called when the island begins to run (True) or ceases to (False).
    up_ns: time in which it ran.
    able, busy: time in which it ran, and in which it worked, times the slices that took part.
  """

  engine: engine_lib.Engine
  draw: random.Random
  trace: random.Random | None = None  # of its failures
  step_ns: int = 100 * MS
  encode_ns: int = 2 * MS
  adopt_ns: int = MS
  noise: int = 0
  lognormal: float = 0.0
  gaussian: float = 0.0
  tokens: int = 10
  slow: int = 1
  shrink: int = 1
  slices: Slices | None = None
  changed: Callable[[bool], None] = lambda running: None
  up_ns: int = 0
  able: int = 0
  busy: int = 0

  def __post_init__(self):
    self.count = self.live = self.slices.count if self.slices else 1
    self._paused_to: int | None = None
    self._healthy = self._waiting = 0  # slices that may join; number of the hold-off
    self._spared_to = 0
    self._since_ns = self.engine.now_ns
    self._left = 0  # of the work, in ns of one slice
    self._done: Callable[[], None] | None = None
    self._plan = 0  # number of the newest end of the work
    if self.slices:
      self._next_failure()

  @property
  def running(self) -> bool:
    return self._paused_to is None and self.live > 0

  # --- Work ---------------------------------------------------------------------------------------

  def draw_step(self) -> tuple[int, int]:
    """Work in ns and tokens of the step that begins now."""
    time_ns = self.step_ns
    if self.noise:
      time_ns += time_ns * self.draw.randrange(self.noise) // 1000
    if self.lognormal:
      time_ns *= self.draw.lognormvariate(-(self.lognormal**2) / 2, self.lognormal)
    if self.gaussian:
      time_ns *= max(0.1, self.draw.gauss(1, self.gaussian))
    return round(time_ns), max(1, self.tokens // self.shrink)

  def begin(self, work_ns: int, done: Callable[[], None]) -> None:
    """Begins work, and calls `done` when it is finished."""
    self.settle()
    self._left, self._done = work_ns * self.count, done
    self._plan_end()

  def stop(self) -> None:
    """The process has ended, and its work with it."""
    self.settle()
    self._done = None

  def fault(self, kind: str, factor: int) -> None:
    """A fault 'slow' or 'shrink' begins, or ends (factor 1)."""
    self.settle()
    setattr(self, kind, factor)
    self._plan_end()

  def settle(self) -> None:
    """Brings the accounts and the work up to the present."""
    elapsed_ns = self.engine.now_ns - self._since_ns
    self._since_ns = self.engine.now_ns
    if elapsed_ns and self._paused_to is None and self.live:
      self.up_ns += elapsed_ns
      self.able += elapsed_ns * self.live
      if self._done is not None:
        self.busy += elapsed_ns * self.live
        self._left -= elapsed_ns * self.live // (self.slow * self.shrink)

  def _plan_end(self) -> None:
    if self._done is None:
      return
    self._plan += 1
    if self.running:
      plan, left = self._plan, self._left * self.slow * self.shrink
      self.engine.after(-(-left // self.live), lambda: self._end(plan))

  def _end(self, plan: int) -> None:
    if plan == self._plan and self._done is not None:
      self.settle()
      done, self._done = self._done, None
      done()

  # --- Failures -----------------------------------------------------------------------------------

  def _next_failure(self) -> None:
    """Draws when a slice would fail if all ran; the slice's state changes no later draw."""
    slices, trace = self.slices, self.trace
    gap_s = trace.expovariate(slices.chips / slices.mtbi_s)
    which = trace.randrange(self.count)
    recovery_ns = slices.recovery_ns(trace)
    self.engine.after(round(gap_s * SECOND), lambda: self._candidate(which, recovery_ns))

  def _candidate(self, which: int, recovery_ns: int) -> None:
    if which < self.live and self._paused_to is None and self.engine.now_ns >= self._spared_to:
      self._fail(recovery_ns)
    self._next_failure()

  def _fail(self, recovery_ns: int) -> None:
    slices = self.slices
    if slices.rigid:
      self._pause(recovery_ns + round(slices.upscale_s * SECOND))
      return
    self._pause(round(slices.downscale_s * SECOND), lost=1)
    self.engine.after(recovery_ns, self._recover)

  def _pause(self, time_ns: int, lost: int = 0) -> None:
    """Pauses, perhaps longer than until the end of a pause that has begun."""
    was = self.running
    self.settle()
    self.live -= lost
    end_ns = self._paused_to = max(self.engine.now_ns + time_ns, self._paused_to or 0)
    self._plan += 1  # no end of the work is planned
    self._waiting += 1  # healthy slices join at the end of this pause
    self.engine.at(end_ns, lambda: self._resume(end_ns))
    if was:
      self.changed(False)

  def _resume(self, end_ns: int) -> None:
    if end_ns != self._paused_to:
      return
    self.settle()
    self._paused_to = None
    self.live, self._healthy = self.live + self._healthy, 0
    if self.slices.rigid:
      self._spared_to = end_ns + round(self.slices.spared_s * SECOND)
    if self.live:
      self.changed(True)
      self._plan_end()

  def _recover(self) -> None:
    self._healthy += 1
    if self._paused_to is None and self._healthy == 1:  # the first that waits
      self._waiting += 1
      number = self._waiting
      wait_ns = round(self.slices.hold_off_s * SECOND) if self.live else 0
      self.engine.after(wait_ns, lambda: self._upscale(number))

  def _upscale(self, number: int) -> None:
    if number == self._waiting:
      self._pause(round(self.slices.upscale_s * SECOND))


def island(engine: engine_lib.Engine, seed: int, name: str, slices: Slices | None = None) -> Island:
  """The island of a host, with random streams of its own."""
  draw, trace = (random_streams.random_stream(seed, of, name) for of in ('hardware', 'failures'))
  return Island(engine=engine, draw=draw, trace=trace, slices=slices)
