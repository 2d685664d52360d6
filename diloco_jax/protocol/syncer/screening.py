"""Screening: which pseudo-gradients the syncer refuses before a merge, strikes and quarantine.

A learner with faulty hardware must ruin neither the model nor the work of other learners. Before
an outer step the shell, which has the arrays, looks at each payload by itself and leaves it out if

    its norm is not finite (NaN, Inf, or beyond float32), or
    its norm > factor * median norm * max(1, steps / median steps)

The medians are those of the fragment's last WINDOW commits, each of which counts with the median
of its participants; there is no limit before `norm_warmup` commits. A pseudo-gradient of more steps
than usual may be longer in proportion, because learners keep training while the syncer is down. One
of fewer steps has the usual limit.

The syncer merges the other payloads, tells the learner `bad_value`, discards its tokens and gives
it a *strike*; a merged contribution clears its strikes. With `strikes` of them in a row the learner
is in *quarantine*: the syncer closes its session and refuses its process for good. Another process
under the same id begins without strikes.

A norm is an integer, UNIT of them make 1.0: float32 is exact in it down to 2^-41, and what is below
2^-64 is 0.
"""

from collections.abc import Sequence

from diloco_jax.protocol import action_list, actions, events, facts, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.syncer import members as members_lib

UNIT = 1 << 64  # the integer norm of 1.0
NOT_FINITE = -1
WINDOW = config_lib.NORM_WINDOW

Window = list[list[int]]  # [norm, steps] of the last commits of a fragment


# --- Norms ----------------------------------------------------------------------------------------


def medians(pairs: Sequence[Sequence[int]]) -> list[int]:
  """The medians of norms and of steps, each the upper one of two.

  >>> medians([(9, 1), (5, 3), (7, 2)])
  [7, 2]
  """
  return [sorted(column)[len(pairs) // 2] for column in zip(*pairs)]


def append_commit(window: Window, merged: Sequence[tuple[int, int]]) -> Window:
  """The window after a commit that merged these (norm, steps)."""
  return [*window, medians(merged)][-WINDOW:]


def limit(window: Window, steps: int, config: config_lib.ProtocolConfig) -> int | None:
  """The largest norm allowed to a pseudo-gradient of `steps` steps; None: no limit."""
  if not config.norm_factor or len(window) < config.norm_warmup:
    return None
  norm, usual_steps = medians(window)
  if not norm:
    return None  # no parameter has moved yet: any norm would be above the limit
  return config.norm_factor * norm * max(steps, usual_steps) // usual_steps


def refused(norm: int, limit_: int | None) -> bool:
  """Whether the syncer leaves out a pseudo-gradient of this norm."""
  return norm == NOT_FINITE or (limit_ is not None and norm > limit_)


def describe(norm: int, window: Window) -> str:
  """Describes what is wrong with a norm.

  >>> describe(60 * UNIT, [[2 * UNIT, 4]]), describe(NOT_FINITE, [])
  ('norm 60, 30 times the median 2', 'NaN or Inf')
  """
  if norm == NOT_FINITE:
    return 'NaN or Inf'
  median = medians(window)[0]
  return f'norm {norm / UNIT:.3g}, {norm / median:.3g} times the median {median / UNIT:.3g}'


class Screening:
  """Keeps the norms of merged payloads, and the strikes of learners with refused ones."""

  def __init__(
    self,
    config: config_lib.ProtocolConfig,
    members: members_lib.Members,
    out: action_list.ActionList,
  ):
    self._config = config
    self._members = members
    self._out = out
    self.windows: list[Window] = [[] for _ in range(config.fragments)]
    self._said: dict[str, tuple[int, int]] = {}  # learner: its last line, and refusals since

  def limit(self, fragment: int, steps: int) -> int | None:
    """The largest norm allowed to a participant of the next outer step."""
    return limit(self.windows[fragment], steps, self._config)

  def after_merge(
    self, now_ns: int, participants: Sequence[actions.Participant], done: events.MergeDone
  ) -> list[members_lib.Member]:
    """An outer step has ended; returns the learners to be quarantined for their part in it."""
    quarantined, merged = [], []
    for one, norm in zip(participants, done.norms):
      member = self._members.by_id[one.learner]
      present = member.incarnation == one.incarnation
      if one.learner in done.refused:
        what = describe(norm, self.windows[done.fragment])
        self._out.report(
          facts.Refused(
            sync=done.sync,
            fragment=done.fragment,
            learner=one.learner,
            incarnation=one.incarnation,
            tokens=one.tokens,
            why=what,
          )
        )
        if present and self.strike(now_ns, member, done.fragment, what):
          quarantined.append(member)
      elif not done.failed:
        merged.append((norm, one.steps))
        if present:
          member.strikes = 0
    if merged:
      self.windows[done.fragment] = append_commit(self.windows[done.fragment], merged)
    return quarantined

  def strike(self, now_ns: int, member: members_lib.Member, fragment: int, what: str) -> bool:
    """Adds a strike to a learner; returns whether that puts it into quarantine."""
    before = self._members.quarantined(member)
    member.strikes += 1
    member.max_strikes = max(member.max_strikes, member.strikes)
    now = self._members.quarantined(member)
    self._say(now_ns, member, fragment, what, last=now and not before)
    return now and not before

  def _say(
    self, now_ns: int, member: members_lib.Member, fragment: int, what: str, last: bool
  ) -> None:
    """One line for each learner in `say_again_ns`; the last one before the quarantine always."""
    pause_ns = self._config.say_again_ns
    said_ns, more = self._said.get(member.learner, (now_ns - pause_ns, 0))
    if now_ns - said_ns < pause_ns and not last:
      self._said[member.learner] = said_ns, more + 1
      return
    self._said[member.learner] = now_ns, 0
    counted = f' ({more} more since the last such line)' if more else ''
    self._out.say(
      f'Learner {member.learner} on {member.host} sent {what} for fragment {fragment}{counted}; '
      'rejected before merging, and the learner gets a fresh fragment. Check that host for faulty '
      'hardware.'
    )
    if last:
      self._out.say(quarantine(member).text)

  def check(self) -> None:
    """Asserts that the windows are bounded and hold finite norms only."""
    for window in self.windows:
      assert len(window) <= WINDOW, window
      assert all(norm >= 0 and steps > 0 for norm, steps in window), window


def quarantine(member: members_lib.Member) -> messages.Refused:
  """The refusal of a process in quarantine, now and whenever it tries to join again."""
  return messages.Refused(
    code='QUARANTINED',
    text=f'Learner "{member.learner}" is in quarantine: {member.max_strikes} updates in a row '
    'were refused before merging (NaN, Inf, or a norm far above the median). The model contains '
    'none of them, earlier merged updates are safe, and the run continues. Check host '
    f'{member.host} (pid {member.pid}) for faulty hardware, then start the learner again, there or '
    'on another host.',
    retry_ns=None,
  )
