"""A learner that is alive and makes no step: it notices that itself, and its heartbeats carry it.

A step is *missing* once it takes longer than `patience_ns` and ten usual steps, with a save longer
than SAVE_NS. From then on the shell is asked once per heartbeat what the thread of the steps does
(actions.Examine): while it compiles, nothing is wrong.

Two things end a process without its step: the setting `sync.end_stuck_s`; and the end of the run
(or SIGTERM), half a lease later, if the learner reads a batch that nobody needs any more, or its
step is missing. A loop of the user's own that is busy with its step is never ended so: it may
evaluate the model.
"""

from diloco_jax.protocol import action_list, actions, events, facts, messages, rate_limited_log
from diloco_jax.protocol import config as config_lib

USUAL_STEPS = 10
SAVE_NS = 300 * config_lib.SECOND_NS
_SHIFT = 3  # a new step time has weight 1/8 in the usual one


class MissingStep:
  """Since when the learner makes no step, and why.

  Attributes:
    doing: what keeps it, of messages.DOING; '': no step is missing.
    over_ns: since when the learner is to end, and nobody needs its step; None: it is not.
    deadline_ns: when to call `look`.
  """

  def __init__(self, config: config_lib.ProtocolConfig, learner: str, out: action_list.ActionList):
    self._config, self._learner, self._out = config, learner, out
    self.doing = ''
    self._since_ns: int | None = None  # when the newest step began, ended, or the first event came
    self._steps = self._usual_ns = 0
    self.deadline_ns = self._say_ns = 0
    self.over_ns: int | None = None

  def asked(self, now_ns: int) -> None:
    """A step begins."""
    self._since_ns = now_ns
    self.deadline_ns = now_ns + self._config.heartbeat_ns

  def stepped(self, now_ns: int, step_ns: int) -> None:
    """A step is done."""
    if self.doing:
      self._out.say(f'the learner makes steps again, after {self._seconds(now_ns)} s without one.')
    self.asked(now_ns)
    self.doing, self._say_ns = '', 0
    self._steps += 1
    if step_ns and self._steps > 1:  # the first step of a loop compiles
      self._usual_ns += (step_ns - self._usual_ns) >> _SHIFT if self._usual_ns else step_ns

  def look(self, now_ns: int, running: bool) -> None:
    """Once per heartbeat without a step: records that the process lives, or asks what it does."""
    if self._since_ns is None:
      self.asked(now_ns)
    if now_ns < self.deadline_ns:
      return
    self.deadline_ns = now_ns + self._config.heartbeat_ns
    if running and (self.over_ns is not None or self._is_missing(now_ns)):
      self._out.do(actions.Examine())
    else:
      self._report(now_ns, '' if running else messages.WAITING)

  def examined(self, now_ns: int, event: events.Examined) -> actions.Exit | None:
    """The shell has examined the thread of the steps; returns the end of the process, if it ends
    without its step."""
    doing, config = event.doing, self._config
    self._report(now_ns, doing)
    missing = bool(doing) and self._is_missing(now_ns, doing)
    self.doing = doing if missing else ''
    if not missing and doing != messages.READING:
      return None
    what = f'no step for {self._seconds(now_ns)} s: the learner {messages.DOING[doing]}'
    over = self.over_ns is not None and now_ns >= self.over_ns + config.lease_ns // 2
    if over and doing not in (messages.LOOPING, messages.COMPILING):
      return actions.Exit(code=0, text=f'it ends without its step: {what}', abandons=True)
    if not missing or doing == messages.COMPILING:
      return None
    if now_ns >= self._say_ns:
      self._say_ns = now_ns + rate_limited_log.PAUSE_NS
      usual = f'; a usual step takes {self._usual_ns / 1e9:.3g} s' if self._usual_ns else ''
      self._out.say(f'{what} ({event.where}){usual}.')
    if not 0 < config.end_stuck_ns <= now_ns - self._since_ns:
      return None
    text = (
      f'{what} ({event.where}). sync.end_stuck_s ends it after {config.end_stuck_ns / 1e9:g} s. '
      'What was merged is safe: start the learner again.'
    )
    return actions.Exit(code=actions.NOT_IN_TIME, text=text, abandons=True)

  def heartbeat(self, now_ns: int) -> messages.Heartbeat:
    """The heartbeat of this moment."""
    return messages.Heartbeat(
      doing=self.doing, idle_ns=now_ns - self._since_ns if self.doing else 0
    )

  def _is_missing(self, now_ns: int, doing: str = '') -> bool:
    patience_ns = max(self._config.patience_ns, USUAL_STEPS * self._usual_ns)
    if doing == messages.SAVING:
      patience_ns = max(patience_ns, SAVE_NS)
    return now_ns >= self._since_ns + patience_ns

  def _report(self, now_ns: int, doing: str) -> None:
    idle_ns = now_ns - self._since_ns
    self._out.report(facts.NoStep(learner=self._learner, doing=doing, idle_ns=idle_ns))

  def _seconds(self, now_ns: int) -> int:
    return (now_ns - self._since_ns) // config_lib.SECOND_NS
