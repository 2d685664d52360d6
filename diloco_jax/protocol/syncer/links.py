"""Links: how fast the payloads of each learner travel, and what the syncer asks of it therefore.

A payload of an outer step is due every H / P inner steps. A link that cannot carry one in that time
builds a queue, and its payloads come later and later. So the syncer measures each link by what it
sees anyway, and asks less of a slow one::

    service      of a payload: its arrival - max(when it was due, arrival of the one before)
    narrow       the regular codec does not fit: the learner encodes with `sync.codec_up_slow`
    r, 1 to 16   the narrow one does not fit either: the learner is pulled for a fragment in one of
                 r periods only

A payload is due at the learner at the step boundary of its capture, and the learner reports that
step: a Contribution up to `tokens_to` was due when the Progress with these tokens came, or at the
Pull if that is later. So neither pauses of the learner nor an idle link count. The measure is the
median of three payloads in time per byte: one stall changes nothing, and two payloads are enough to
see a change. Payloads much smaller than usual, whose time is the latency, are not measured.

`r` grows at once, because each payload too many waits in the queue of all that follow, and shrinks
once the link would carry more with a margin. A learner that is pulled in few periods is still
pulled once in each period in which its last payload has arrived, or its recovery would show late.
The pulls of a learner are spread evenly over the r periods, so that they do not queue.
"""

import math
from collections.abc import Sequence

from diloco_jax.protocol import action_list, facts, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.syncer import gather as gather_lib
from diloco_jax.protocol.syncer import grace as grace_lib
from diloco_jax.protocol.syncer import members as members_lib

PERMILLE = config_lib.PERMILLE
KIB = 1_024
MOST_PERIODS = 16
SAMPLES = 3
MAX_MARKS = 4_096  # reported steps whose payloads may still come
TOO_FULL, FREE = 800, 600  # shares of a budget, in 1/1000: a narrow link uses more, a wide one less
MARGIN, WIDE_MARGIN = 1_250, 1_500  # of the time of a payload, in 1/1000: for r to grow, to shrink


class Links:
  """Measures the links of all members, and decides what is asked of them."""

  def __init__(
    self,
    config: config_lib.ProtocolConfig,
    members: members_lib.Members,
    payload_bytes: Sequence[int],
    narrow_bytes: Sequence[int],
    out: action_list.ActionList,
  ):
    """Begins with no link measured.

    Args:
      config: the protocol's settings.
      members: whose links they are.
      payload_bytes, narrow_bytes: sizes of each fragment's encoded pseudo-gradient with the regular
        and with the narrow codec.
    """
    self._config, self._members, self._out = config, members, out
    self._largest = max(payload_bytes)
    self._total, self._narrow_total = sum(payload_bytes), sum(narrow_bytes)
    # A link matters only where a learner trains on while its payload travels, and carries on what
    # was not merged.
    self._adapts = config.rebases and config.lag is None and not config.waits_for_live
    self._opened_ns: int | None = None
    self._budget_ns = 0  # from when a payload is due to when its sync ends; 0: not known yet
    self.slot_ns = grace_lib.Average()  # between two syncs

  # --- What happens -------------------------------------------------------------------------------

  def opened(self, now_ns: int, gather: gather_lib.Gather) -> None:
    """A sync opens. A pause of the whole run counts as four slots at most."""
    if self._config.closing(gather.sync):
      return
    if self._opened_ns is not None:
      time_ns, usual_ns = now_ns - self._opened_ns, self.slot_ns.value
      self.slot_ns.add(min(time_ns, 4 * usual_ns) if usual_ns else time_ns)
    self._opened_ns = now_ns
    ahead_ns = self._config.steps_ahead * self._members.step_ns
    self._budget_ns = gather.grace_ns and gather.grace_ns + ahead_ns

  def reported(self, now_ns: int, member: members_lib.Member, tokens: int) -> None:
    """The learner has done a step, so that the payloads up to these tokens are due."""
    marks = member.up.marks
    if not marks or tokens > marks[-1][0]:
      marks.append((tokens, now_ns))
      del marks[:-MAX_MARKS]

  def arrived(
    self, now_ns: int, member: members_lib.Member, message: messages.Contribution
  ) -> None:
    """A payload of the learner has arrived."""
    link, size = member.up, message.payload.size_bytes
    due_ns = next((time_ns for tokens, time_ns in link.marks if tokens >= message.tokens_to), None)
    link.marks = [mark for mark in link.marks if mark[0] >= message.tokens_to]
    last_ns, link.arrived_ns = link.arrived_ns, now_ns
    asked_ns = link.asked.get(self._number(message.sync))  # None: it is repeated
    usual = 4 * size * self._config.fragments >= self._narrow_total
    known = due_ns is not None and asked_ns is not None
    if known and usual and not self._config.closing(message.sync):
      time_ns = now_ns - max(due_ns, asked_ns, last_ns)
      link.samples = [*link.samples, time_ns * KIB // size][-SAMPLES:]
      self._judge(member)
    self.answered(member, message.sync)

  def answered(self, member: members_lib.Member, sync: int) -> None:
    """The learner has answered a pull of this sync, or its payload has arrived."""
    self._forget(member.up, self._number(sync))

  # --- What follows -------------------------------------------------------------------------------

  def _judge(self, member: members_lib.Member) -> None:
    """Changes what is asked of the learner, if its link says so."""
    link, slot_ns = member.up, self.slot_ns.value
    if len(link.samples) < SAMPLES or not slot_ns:
      return
    ns_per_kib, before = sorted(link.samples)[SAMPLES // 2], (link.narrow, link.periods)
    payload_ns = self._mean_ns(ns_per_kib, self._total)
    full = payload_ns * PERMILLE // slot_ns
    if self._budget_ns and self._config.lag is None:
      full = max(full, ns_per_kib * self._largest // KIB * PERMILLE // self._budget_ns)
    if self._narrow_total < self._total:
      link.narrow = full > (FREE if link.narrow else TOO_FULL)
    if self._adapts:
      total = self._narrow_total if link.narrow else self._total
      share = self._mean_ns(ns_per_kib, total) * PERMILLE // slot_ns
      link.periods = max(_periods(share, MARGIN), min(link.periods, _periods(share, WIDE_MARGIN)))
    if (link.narrow, link.periods) != before:
      self._out.report(
        facts.Link(
          learner=member.learner,
          narrow=link.narrow,
          periods=link.periods,
          payload_ns=payload_ns,
          slot_ns=slot_ns,
        )
      )

  def _mean_ns(self, ns_per_kib: int, total: int) -> int:
    """The time of a payload of mean size; `total`: of the fragments' sizes."""
    return ns_per_kib * total // (KIB * self._config.fragments)

  def narrow(self, member: members_lib.Member) -> bool:
    """Whether the learner is to encode with the narrow codec."""
    return member.up.narrow

  def r(self, member: members_lib.Member) -> int:
    """In one of how many periods the learner is pulled for a fragment, 1 to 16."""
    return member.up.periods

  def pulls(self, member: members_lib.Member, sync: int) -> bool:
    """Whether the learner is pulled for a sync."""
    link, number, fragments = member.up, self._number(sync), self._config.fragments
    if link.periods == 1:
      return True
    lost = number - 2 * max(fragments, 2 * link.periods)  # to older pulls no answer will come
    waiting = sum(one > lost for one in link.asked)
    if not waiting and number - link.asked_at >= fragments:
      return True
    few = waiting < 2 + self._config.lead // link.periods
    return few and in_turn(number, fragments, link.periods)

  def asked(self, now_ns: int, member: members_lib.Member, sync: int) -> None:
    """The learner is pulled."""
    self._forget(member.up, self._number(sync) - 4 * max(self._config.fragments, MOST_PERIODS))
    member.up.asked_at = self._number(sync)
    member.up.asked[member.up.asked_at] = now_ns

  def _forget(self, link: members_lib.Link, upto: int) -> None:
    link.asked = {number: at_ns for number, at_ns in link.asked.items() if number > upto}

  def _number(self, sync: int) -> int:
    """The place of a sync in the schedule of all syncs."""
    return -(-sync * self._config.fragments // self._config.period) - 1


def in_turn(number: int, fragments: int, r: int) -> bool:
  """Whether a learner of period factor r is pulled for the sync of this number, of which
  `number % fragments` is the fragment: each fragment in one of r periods, and one sync of about r.

  >>> [n for n in range(48) if in_turn(n, 12, 5)]
  [0, 5, 10, 15, 20, 25, 30, 35, 40, 45]
  >>> [(n % 4, n // 4) for n in range(32) if in_turn(n, 4, 4)]  # fragment, period
  [(0, 0), (3, 1), (2, 2), (1, 3), (0, 4), (3, 5), (2, 6), (1, 7)]
  """
  place = number % (r * fragments)
  turn = -(-place // r)
  return turn < fragments and place == turn * r - turn * math.gcd(r, fragments) // fragments


def _periods(share: int, margin: int) -> int:
  """The period factor for payloads that take this share of a slot, in 1/1000."""
  tight = share * margin <= MARGIN * PERMILLE
  return 1 if tight else min(MOST_PERIODS, -(-share * margin // (PERMILLE * PERMILLE)))
