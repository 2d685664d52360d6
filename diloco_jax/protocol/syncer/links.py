"""Links: how fast the payloads of each learner travel, and what the syncer asks of it therefore.

A payload of an outer step is due every H / P inner steps. A link that cannot carry one in that time
builds a queue, and its payloads come later and later. So the syncer measures each link by what it
sees anyway, and asks less of a slow one::

    service      of a payload: its arrival - max(when it was due, arrival of the one before)
    r, 1 to 16   its payloads do not fit: the learner is pulled for a fragment in one of r periods
                 only, with all its steps, which count less (numerics/contrib/aged.py)

A payload is due at the learner at the step boundary of its capture, and the learner reports that
step: a Contribution up to `tokens_to` was due an inner step after the Progress with these tokens
came (the capture follows the step that its devices have in hand), or a round trip after the Pull if
that is later. So neither pauses of the learner nor an idle link count. The measure is the
median of three payloads in time per byte: one stall changes nothing, and two payloads are enough to
see a change. Payloads much smaller than usual, whose time is the latency, are not measured.

`r` grows at once, because each payload too many waits in the queue of all that follow, and shrinks
once the link would carry more with a margin. A learner that is pulled in few periods is still
pulled once in each period in which its last payload has arrived, or its recovery would show late.
The pulls of a learner are spread evenly over the r periods, so that they do not queue.
"""

from collections.abc import Callable, Sequence

from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import facts, messages
from diloco_jax.protocol import schedule as schedule_lib
from diloco_jax.protocol import tempo as tempo_lib
from diloco_jax.protocol.syncer import books as books_lib
from diloco_jax.protocol.syncer import grace
from diloco_jax.protocol.syncer import members as members_lib
from diloco_jax.protocol.syncer import pace as pace_lib
from diloco_jax.protocol.syncer import sync as sync_lib

PERMILLE = config_lib.PERMILLE
KIB = 1_024
MOST_PERIODS = 16
SAMPLES = 3
DOWN_SAMPLES = 8
SLOTS = 8  # between the first syncs of a run, before anything is asked of its links
MAX_MARKS = 4_096  # reported steps whose payloads may still come


class Links:
  """Measures the links of all members, and decides what is asked of them."""

  def __init__(self, books: books_lib.Books, payload_bytes: Sequence[int], measured: bool):
    """Begins with no link measured.

    Args:
      books: of the syncer.
      payload_bytes: sizes of each fragment's encoded pseudo-gradient.
      measured: whether their time is that of the link; else nothing less is asked of any.
    """
    self._config = config = books.config
    self._schedule = books.schedule
    self._tempo = books.tempo
    self._members = books.members
    self._out = books.out
    self._total = sum(payload_bytes)
    # A link matters only where a learner trains on while its payload travels, and carries on what
    # was not merged.
    self._goes_on = config.rebases and config.lag is None
    self._adapts = measured and self._goes_on
    self.now_ns = 0  # of the present turn
    self._opened_ns: int | None = None
    self._delta_bytes: dict[int, int] = {}  # of the newest version of each fragment
    self.slot_ns = grace.Average()  # between two syncs

  # --- What happens -------------------------------------------------------------------------------

  def opened(self, sync: sync_lib.Sync) -> None:
    """A sync opens. A pause of the whole run counts as four slots at most."""
    if self._config.closing(sync.t):
      return
    if self._opened_ns is not None:
      time_ns = (self.now_ns - self._opened_ns) // self._tempo.factor
      usual_ns = self.slot_ns.value
      self.slot_ns.add(min(time_ns, 4 * usual_ns) if usual_ns else time_ns)
    self._opened_ns = self.now_ns

  def reported(self, member: members_lib.Member, tokens: int) -> None:
    """The learner has done a step, so that the payloads up to these tokens are due."""
    marks = member.up.marks
    if not marks or tokens > marks[-1][0]:
      marks.append((tokens, self.now_ns))
      del marks[:-MAX_MARKS]

  def arrived(self, member: members_lib.Member, message: messages.Contribution) -> None:
    """A payload of the learner has arrived."""
    link, size = member.up, message.payload.size_bytes
    due_ns = next((time_ns for tokens, time_ns in link.marks if tokens >= message.tokens_to), None)
    link.marks = [mark for mark in link.marks if mark[0] >= message.tokens_to]
    last_ns, link.arrived_ns = link.arrived_ns, self.now_ns
    asked_ns = link.asked.get(self._schedule.number(message.sync))  # None: it is repeated
    usual = 4 * size * self._config.fragments >= self._total
    known = due_ns is not None and asked_ns is not None
    if known and usual and not self._config.closing(message.sync):
      captured_ns = due_ns + member.inner_step_ns  # complete behind the step that is dispatched
      began_ns = max(captured_ns, asked_ns + self._round_trip_ns(member), last_ns)
      time_ns = max(0, self.now_ns - began_ns)
      link.samples = [*link.samples, time_ns * KIB // size][-SAMPLES:]
      self._judge(member)
    self.answered(member, message.sync)

  def answered(self, member: members_lib.Member, sync: int) -> None:
    """The learner has answered a pull of this sync, or its payload has arrived."""
    self._forget(member.up, self._schedule.number(sync))

  def sent(self, member: members_lib.Member, publish: messages.Publish) -> None:
    """A version is sent to the learner."""
    p, size = publish.fragment, publish.payload.size_bytes
    member.down.sent.append((p, publish.version, self.now_ns, size))
    if publish.base_version is not None:
      self._delta_bytes[p] = size

  def adopted(self, member: members_lib.Member, fragment: int, version: int) -> None:
    """The learner reports an adoption, which may have waited for a step boundary: on a link that
    had nothing else to carry, a step does not count."""
    down = member.down
    names = [sent[:2] for sent in down.sent]
    if (fragment, version) not in names:
      return
    count = names.index((fragment, version)) + 1
    arrived, down.sent = down.sent[:count], down.sent[count:]
    _, _, sent_ns, _ = arrived[0]
    down.delays = [*down.delays, self.now_ns - arrived[-1][2]][-DOWN_SAMPLES:]
    way_ns = member.inner_step_ns + self._round_trip_ns(member)
    time_ns = self.now_ns - max(sent_ns + way_ns, down.arrived_ns)
    down.arrived_ns = self.now_ns
    size = sum(size for _, _, _, size in arrived)
    down.samples = [*down.samples, (max(0, time_ns), size)][-DOWN_SAMPLES:]
    self._judge(member)

  # --- What follows -------------------------------------------------------------------------------

  def _judge(self, member: members_lib.Member) -> None:
    """Changes what is asked of the learner, if the measures of its link require it."""
    up, before, factor = member.up, member.up.periods, self._tempo.factor
    known = self.slot_ns.samples >= min(SLOTS, self._config.fragments) and self.slot_ns.value > 0
    if not (self._adapts and known and len(up.samples) == SAMPLES):
      return
    if before > 1 or self._median(self._up_share) <= PERMILLE * factor:
      share = self._up_share(member) // factor
      up.periods = tempo_lib.factor(share, before, MOST_PERIODS, tempo_lib.ONE_LINK)
    if up.periods != before:
      up_ns, slot_ns = self._payload_ns(up), self.slot_ns.value
      link = facts.Link(learner=member.learner, periods=up.periods, up_ns=up_ns, slot_ns=slot_ns)
      self._out.report(link)
      if before == 1:
        self._say(member)

  def _up_share(self, member: members_lib.Member) -> int:
    return self._payload_ns(member.up) * PERMILLE // self.slot_ns.value

  def _median(self, share: Callable[[members_lib.Member], int]) -> int:
    """The lower median of all links. Where most of them do not carry everything, the settings are
    wrong, and asking less of them all would leave nothing to merge."""
    return pace_lib.lower_median([share(member) for member in self._members.by_session.values()])

  def _say(self, member: members_lib.Member) -> None:
    slot_s = self.slot_ns.value / config_lib.SECOND_NS
    payload_s = self._payload_ns(member.up) / config_lib.SECOND_NS
    self._out.notices.say(
      self.now_ns,
      f'slow link {member.learner}',
      f'{member.learner} has a slow link: a payload takes {payload_s:.3g} s from it, one is due '
      f'every {slot_s:.3g} s, so it is asked in one of {member.up.periods} periods, and its steps '
      'count less. What was merged is safe, the others do not wait for it, and it takes part again '
      'once its link is faster. A longer sync.period or a smaller sync.codec_up asks less of the '
      'link.',
    )

  def _payload_ns(self, up: members_lib.Uplink) -> int:
    """The time of a payload of mean size."""
    if len(up.samples) < SAMPLES:
      return 0
    return sorted(up.samples)[SAMPLES // 2] * self._total // (KIB * self._config.fragments)

  def _delta_ns(self, down: members_lib.Downlink) -> int:
    """The time of a delta of mean size. One stall changes nothing."""
    kept = sorted(down.samples)[:-1]  # without the slowest
    time_ns = sum(time_ns for time_ns, _ in kept)
    size = 1 + sum(size for _, size in kept)  # never 0
    return time_ns * self._mean_delta // size

  @property
  def _mean_delta(self) -> int:
    """Bytes of a delta of mean size; 0: none was sent."""
    return sum(self._delta_bytes.values()) // max(1, len(self._delta_bytes))

  def pulls(self, member: members_lib.Member, sync: int) -> bool:
    """Whether the learner is pulled for a sync that has its quorum without it."""
    link, number, fragments = member.up, self._schedule.number(sync), self._config.fragments
    if link.periods == 1 or self._config.closing(sync):
      return True
    factor = self._tempo.factor
    period, spacing = factor * fragments, factor * link.periods  # in syncs; of the learner's pulls
    # A pull that is older than two periods and than four spacings will have no answer. One payload
    # may travel and one wait behind it, beside those of syncs that are announced and not open yet.
    lost = number - max(2 * period, 4 * spacing)
    waiting = sum(pulled > lost for pulled in link.asked)
    if not waiting and number - link.asked_at >= period:
      return True
    few = waiting < 2 + self._config.lead // link.periods
    turn = self._schedule.turn(sync, factor)
    return few and turn is not None and schedule_lib.turn(turn, fragments, link.periods) is not None

  def asked(self, member: members_lib.Member, sync: int) -> None:
    """The learner is pulled."""
    number = self._schedule.number(sync)
    oldest = 4 * self._tempo.factor * max(self._config.fragments, MOST_PERIODS)
    self._forget(member.up, number - oldest)
    member.up.asked_at = number
    member.up.asked[number] = self.now_ns

  def _forget(self, link: members_lib.Uplink, upto: int) -> None:
    link.asked = {number: at_ns for number, at_ns in link.asked.items() if number > upto}

  def retime(self) -> bool:
    """Changes the period of the run if the links of most learners ask for it; whether it did."""
    if not self._goes_on or not (step_ns := self._pace_ns()):
      return False
    slot_ns = step_ns * self._config.period // self._config.fragments
    share = self._median(lambda member: self._longest_ns(member) * PERMILLE // slot_ns)
    if not self._adapts:  # so small payloads measure no link
      share = 0
    delay_ns = self._median(self._round_trip_ns)
    delay = delay_ns // step_ns if delay_ns >= tempo_lib.LEAST_DELAY_NS else 0
    if not self._tempo.adapt(share, delay):
      return False
    self._out.notices.say(
      self.now_ns,
      'tempo',
      f'each fragment is exchanged every {self._tempo.period} inner steps now (sync.period is '
      f'{self._config.period}): a payload of most learners takes {share / PERMILLE:.1f} times as '
      f'long as there is until the next one is due, and an answer {delay} steps. Nothing is lost. '
      'A longer period costs some quality; faster links, a smaller sync.codec_up or a larger batch '
      'shorten it.',
    )
    return True

  def _pace_ns(self) -> int:
    """The time of an inner step of the run: the time of the K-th fastest learner, and at least the
    lower median, so that no learner alone shortens it; 0: not known."""
    steps_ns = [member.inner_step_ns for member in self._members.live()]
    times = sorted(step_ns for step_ns in steps_ns if step_ns)
    index = max(self._config.quorum - 1, (len(times) - 1) // 2)
    return times[index] if index < len(times) else 0

  def _round_trip_ns(self, member: members_lib.Member) -> int:
    """For a message without a payload. A process that was busy when it joined took longer to
    confirm than a version takes now."""
    return min([member.round_trip_ns, *member.down.delays])

  def _longest_ns(self, member: members_lib.Member) -> int:
    """The time of a payload or of a delta of mean size, whichever is longer. Until the down-link is
    measured, a byte takes as long on it as on the up-link."""
    up_ns, down = self._payload_ns(member.up), member.down
    if len(down.samples) > SAMPLES:
      return max(up_ns, self._delta_ns(down))
    return max(up_ns, up_ns * self._mean_delta * self._config.fragments // self._total)
