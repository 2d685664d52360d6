"""Warns the operator when nothing from this learner is merged, once per NOTICE_NS.

The learner trains on in every such case, so its loss does not show that the model lacks its work.
"""

from diloco_jax.protocol import action_list, messages
from diloco_jax.protocol import config as config_lib

NOTICE_NS = 60 * config_lib.SECOND_NS


class Standing:
  """The verdicts on the learner's contributions since the last merged one, and its last session."""

  def __init__(self, out: action_list.ActionList):
    self._out = out
    self._next_ns: int | None = None  # of the next line, unless something is merged before
    self._reasons: dict[str, int] = {}
    self._failure = ''  # why there is no session
    self._unproved = ''  # the line if that is because of a refused certificate

  def joined(self, now_ns: int) -> None:
    self._failure = self._unproved = ''
    self._next_ns = now_ns + NOTICE_NS

  def disconnected(self, now_ns: int, reason: str) -> None:
    """Notes why there is no session. If there never was one, the first line is due at once."""
    if self._next_ns is None:
      self._next_ns = now_ns
    self._failure, self._unproved = reason, ''

  def unproved(self, now_ns: int, line: str) -> None:
    """Notes that the syncer refuses the certificate. The first line is due at once."""
    if not self._unproved:
      self._next_ns = now_ns
    self._unproved = line

  def refused(self, now_ns: int) -> None:
    """Notes that the operator has read the syncer's refusal, so that no other line follows."""
    self._next_ns = now_ns + NOTICE_NS

  def settled(self, now_ns: int, settled: messages.Settled) -> None:
    if settled.merged:
      self._reasons.clear()
      self._next_ns = now_ns + NOTICE_NS
    elif settled.reason != messages.CANCELLED:
      self._reasons[settled.reason] = self._reasons.get(settled.reason, 0) + 1

  def say_if_due(self, now_ns: int) -> None:
    """Prints the line that is due, if one is."""
    if self._next_ns is None or now_ns < self._next_ns:
      return
    self._next_ns = now_ns + NOTICE_NS
    if self._unproved:
      self._out.say(self._unproved)
    elif self._failure:
      self._out.say(
        f'this learner is not connected: {self._failure}. It keeps dialing; after it has joined it '
        'sends what it has trained.'
      )
    elif self._reasons:
      counts = ', '.join(f'{reason}: {count}' for reason, count in sorted(self._reasons.items()))
      self._out.say(
        f'nothing of this learner was merged in the last {NOTICE_NS // config_lib.SECOND_NS} s '
        f'({counts}). If its payloads are late, its link is too slow for sync.ahead and '
        'sync.overlap.'
      )
