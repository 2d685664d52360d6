"""Screening: which pseudo-gradients the syncer refuses before a merge, strikes and quarantine.

A learner with faulty hardware must ruin neither the model nor the work of other learners. Before
an outer step the shell, which has the arrays, looks at each payload by itself and leaves it out if

    its norm is not finite (NaN, Inf, or beyond float32), or
    its norm > factor * usual norm * growth        growth = steps / usual steps, from 1 to 32, and
                                                   to LONGER times that of the other participants
    its norm < 2^-20 * usual norm * share          share = steps / usual steps, at most 1
    its norm is 0, and the fragment has moved before

What is usual follows from the last merged norms of each learner for this fragment: of each learner
that was merged VOTES_AFTER times or more the median, and of these the median. So each learner has
one vote, however often it contributes, and no learner alone moves the limits far: of two in the
middle the larger one is usual for the upper limit, the smaller one for the lower, and a single vote
makes no norm but 0 too small, not even the voter's: its first norms may have been wrong ones. There
are no other limits before `norm_warmup` commits. A pseudo-gradient of more steps than usual may be
longer in proportion, because learners keep training while the syncer is down; but then all of them
do, so the steps that count are at most LONGER times the largest of the usual steps, the period and
the steps that the participants share: the lower median of what payloads and clocks show since the
last outer step of the fragment, of the participants, or, if there is only one, of all live
learners; without those that joined later, who cannot know how long the others were kept waiting.

A norm is not too large if it is `common`: if more than half of the live learners have such norms in
this outer step, then all have grown.

The syncer merges the other payloads, sends the learner the verdict `bad_value`, discards its tokens
and counts a *strike*; a merged contribution clears its strikes. With `strikes` of them in a row the
learner is in *quarantine*: the syncer closes its session and refuses its process for good. Another
process under the same id begins without strikes. If the norms of more than half of the live
learners are refused, then not they but the usual norms are wrong: the syncer forgets these and the
strikes.

Until it knows that, a norm alone leads to quarantine only if a payload of another learner was
merged since the first of the strikes, or after `strikes` for each of the P fragments: where the
norms of all learners have grown, nothing is merged, and each fragment is doubted by itself.

A norm of exactly 0 shows that the learner trained nothing in these steps, as between two updates of
an optimizer that accumulates gradients: if it is refused, as it is once there is a vote, that is no
strike and no doubt about the usual norm, and if it is merged, it has no vote.

Learners that have trained apart for more than APART periods of twelve steps or more, as after an
outage, are so far from each other that a mean of them is worse than each
(docs/studies/results.md). The run goes on from one of them, whose value the fragment becomes:
the outer step leaves out the payloads of the others, and discards their tokens as `apart`. That is
no strike.

A norm is an integer, UNIT of them make 1.0: float32 is exact in it down to 2^-41, and what is below
2^-64 is 0.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from diloco_jax.protocol import actions, events, facts, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.syncer import books as books_lib
from diloco_jax.protocol.syncer import members as members_lib
from diloco_jax.protocol.syncer import sync as sync_lib

UNIT = 1 << 64  # the integer norm of 1.0
NOT_FINITE = -1
KEPT = config_lib.NORM_WINDOW  # norms of a fragment, of all learners together
VOTES_AFTER = 2
GROWTH = 32
LONGER = 4
LEAST_SHIFT = 20
APART, SHORTEST = 200, 12  # periods, and the steps of one at least


# --- Norms ----------------------------------------------------------------------------------------


def medians(pairs: Sequence[Sequence[int]], lower: bool = False) -> list[int]:
  """The medians of norms and of steps, each the upper one of two, or the lower one.

  >>> medians([(9, 1), (5, 3), (7, 2)])
  [7, 2]
  >>> medians([(9, 1), (5, 3)]), medians([(9, 1), (5, 3)], lower=True)
  ([9, 3], [5, 1])
  """
  return [sorted(column)[(len(pairs) - lower) // 2] for column in zip(*pairs)]


@dataclasses.dataclass(slots=True)
class Usual:
  """The last merged norms of one fragment, with their steps, by learner.

  Attributes:
    commits: outer steps since the beginning, or since the norms were forgotten.
    doubted: learners whose last norm was refused.
  """

  commits: int = 0
  doubted: set[str] = dataclasses.field(default_factory=set)
  pairs: dict[str, list[list[int]]] = dataclasses.field(default_factory=dict)
  _state: list[Any] | None = dataclasses.field(default=None, compare=False, repr=False)

  def merged(self, norms: dict[str, tuple[int, int]]) -> None:
    """An outer step merged these (norm, steps)."""
    self._state = None
    self.commits += 1
    for learner, pair in norms.items():
      if pair[0]:
        self.pairs.setdefault(learner, []).append(list(pair))
      self.doubted.discard(learner)
    kept = max(VOTES_AFTER, KEPT // max(1, len(self.pairs)))
    self.pairs = {learner: pairs[-kept:] for learner, pairs in self.pairs.items()}

  def doubt(self, learner: str) -> None:
    """The last norm of a learner was refused."""
    self._state = None
    self.doubted.add(learner)

  def forget(self, learner: str) -> None:
    self._state = None
    self.pairs.pop(learner, None)
    self.doubted.discard(learner)

  def votes(self, lower: bool = False) -> list[list[int]]:
    """The median norm and steps of each learner that has a vote."""
    return [medians(pairs, lower) for pairs in self.pairs.values() if len(pairs) >= VOTES_AFTER]

  def limits(
    self, steps: int, config: config_lib.ProtocolConfig, shared_steps: int = 0
  ) -> tuple[int, int | None]:
    """The least and the greatest norm allowed to a pseudo-gradient of `steps` steps, where the
    participants share `shared_steps`; None: any."""
    votes = self.votes()
    least = 1 if votes else 0  # a norm of 0 has no update, whatever is usual
    if not config.norm_factor or self.commits < config.norm_warmup or not votes:
      return least, None
    if len(votes) > 1:
      norm, usual_steps = medians(self.votes(lower=True), lower=True)
      least = max(least, norm * min(steps, usual_steps) // usual_steps >> LEAST_SHIFT)
    norm, usual_steps = medians(votes)
    shared_steps = max(usual_steps, shared_steps, config.period)
    longer = min(steps, LONGER * shared_steps, GROWTH * usual_steps)
    longer = max(longer, usual_steps)
    return least, config.norm_factor * norm * longer // usual_steps

  def state(self) -> list[Any]:
    """JSON types, not to be changed. Made once, since one outer step changes one fragment's."""
    if self._state is None:
      pairs = [[learner, [list(pair) for pair in kept]] for learner, kept in self.pairs.items()]
      self._state = [self.commits, sorted(self.doubted), sorted(pairs)]
    return self._state

  @classmethod
  def load(cls, state: list[Any]) -> 'Usual':
    commits, doubted, pairs = state
    return cls(commits, set(doubted), dict(pairs))


def refused(norm: int, least: int, limit: int | None) -> bool:
  """Whether the syncer leaves out a pseudo-gradient of this norm."""
  return norm == NOT_FINITE or norm < least or (limit is not None and norm > limit)


def left_out(
  participants: Sequence[actions.Participant], norms: Sequence[int], live: int, factor: int
) -> tuple[str, ...]:
  """The participants that an outer step leaves out, of so many `live` learners. `factor`: of the
  config."""
  limit = factor * common(norms, live)
  names = []
  for participant, norm in zip(participants, norms, strict=True):
    most = None if participant.limit is None else max(participant.limit, limit)
    if participant.apart or refused(norm, participant.least, most):
      names.append(participant.learner)
  return tuple(names)


def too_far(steps: Sequence[int], period: int) -> bool:
  """Whether more than half of the learners have trained apart for so many steps, or more, that no
  mean of them is merged.

  >>> too_far([2_401, 2_401, 9], 12), too_far([2_401, 9, 9], 12), too_far([9_000, 9_000], 500)
  (True, False, False)
  """
  return sorted(steps)[(len(steps) - 1) // 2] > APART * max(period, SHORTEST)


def run_goes_on_from_one(participants: Sequence[actions.Participant]) -> bool:
  """Whether the run goes on from one of them, because they have trained apart for long."""
  return any(participant.apart for participant in participants)


def reason(participant: actions.Participant) -> str:
  """The reason of the verdict on a participant that an outer step has left out."""
  return messages.Reason.APART if participant.apart else messages.Reason.BAD_VALUE


def common(norms: Sequence[int], live: int) -> int:
  """The greatest norm that no half of the live learners, and no single one, has made up: if all
  have grown, as after a change of the learning rate, that is no fault. 0: there is none.

  >>> common([5, 60, 70, 90], 4), common([5, 60], 2), common([60], 4)
  (60, 5, 0)
  """
  ordered = sorted(norms)
  index = len(norms) - 1 - max(1, live // 2)
  return max(0, ordered[index]) if index >= 0 else 0


def describe(norm: int, votes: list[list[int]]) -> str:
  """Describes what is wrong with a norm.

  >>> describe(60 * UNIT, [[2 * UNIT, 4]]), describe(0, [[2, 4]]), describe(NOT_FINITE, [])
  ('norm 60, usual is 2', 'norm 0', 'NaN or Inf')
  """
  if norm == 0:
    return 'norm 0'
  if norm == NOT_FINITE or not votes:
    return 'NaN or Inf'
  return f'norm {norm / UNIT:.3g}, usual is {medians(votes)[0] / UNIT:.3g}'


class Screening:
  """Keeps the norms of merged payloads, and the strikes of learners with refused ones."""

  def __init__(self, books: books_lib.Books):
    self._config = books.config
    self._members = books.members
    self._out = books.out
    self._successor = ''  # the learner from which the run goes on, if it is one alone
    self.usual = [Usual() for _ in range(books.config.fragments)]

  def goes_on_from(
    self, now_ns: int, given: Sequence[tuple[str, messages.Contribution]], merged: Sequence[int]
  ) -> str:
    """The learner from which the run goes on, if more than half of those that have sent a payload
    have trained apart for too long; '': a mean of all is merged.

    It is the same for all fragments: the one that was chosen last, else (also after a restart in
    between) the one with the most `merged` fragment-tokens."""
    steps = [message.steps for _, message in given]
    if len(given) < 2 or not too_far(steps, self._config.period):
      self._successor = ''
      return ''
    keys = ((name == self._successor, count, name) for (name, _), count in zip(given, merged))
    *_, self._successor = max(keys)
    self._out.notices.say(
      now_ns,
      'apart',
      f'The learners have trained apart for {max(steps)} steps, too many for a mean of them. The '
      f'run goes on from {self._successor}; what the others have trained in these steps is lost. '
      'Keep the syncer up.',
    )
    return self._successor

  def after_merge(
    self, now_ns: int, sync: sync_lib.Sync, done: events.MergeDone
  ) -> list[members_lib.Member]:
    """An outer step has ended; returns the learners to be quarantined for their part in it."""
    usual, quarantined = self.usual[done.fragment], []
    merged = {
      participant.learner: (norm, participant.steps)
      for participant, norm in zip(sync.participants, done.norms)
      if not done.failed and participant.learner not in done.refused
    }
    for participant, norm in zip(sync.participants, done.norms):
      member = self._members.by_id[participant.learner]
      present = member.incarnation == participant.incarnation
      if participant.apart:
        continue
      if participant.learner in merged and present:
        member.strikes, member.others_merged = 0, False
      if participant.learner not in done.refused:
        continue
      what = describe(norm, usual.votes())
      self._out.report(
        facts.Refused(
          sync=done.sync,
          fragment=done.fragment,
          learner=participant.learner,
          incarnation=participant.incarnation,
          tokens=participant.tokens,
          why=what,
        )
      )
      if not norm:
        self._say_nothing_trained(now_ns, member, done.fragment)
        continue
      if norm > 0:
        usual.doubt(participant.learner)
      if present:
        member.others_merged |= bool(merged)
        sure = norm == NOT_FINITE or member.others_merged
        if self.strike(now_ns, member, done.fragment, what, sure):
          quarantined.append(member)
    for member in self._members.by_id.values():
      member.others_merged |= member.strikes > 0 and bool(merged.keys() - {member.learner})
    if merged:
      usual.merged(merged)
      self._say_if_zero(now_ns, done, merged)
    self._forget_if_wrong(done.fragment, sync.live)
    return [member for member in quarantined if self._members.quarantined(member)]

  def _say_nothing_trained(self, now_ns: int, member: members_lib.Member, fragment: int) -> None:
    self._out.notices.say(
      now_ns,
      f'nothing {member.learner}',
      f'Learner {member.learner} trained nothing in these steps (gradient accumulation?): nothing '
      f'to merge for fragment {fragment}. One such line after a start is no fault. If more come, '
      'sync after each update, or accumulate over fewer steps than sync.period; or its learning '
      'rate or gradients are 0.',
    )

  def _say_if_zero(self, now_ns: int, done: events.MergeDone, merged: dict[str, Any]) -> None:
    # A warm-up from 0 with accumulated gradients begins with steps that move nothing.
    begins = self.usual[done.fragment].commits <= self._config.norm_warmup
    if not begins and not any(norm for norm, _ in merged.values()):
      self._out.notices.say(
        now_ns,
        'zero',
        f'outer step {done.sync} merged only zeros: fragment {done.fragment} does not move. '
        'Check learning rate, gradients and data.',
      )

  def _forget_if_wrong(self, fragment: int, live: Sequence[str]) -> None:
    """Forgets the usual norms of a fragment, and the strikes, if they are wrong. `live`: the
    learners at the decision, so that a syncer that recovers comes to the same."""
    doubted = [learner for learner in live if learner in self.usual[fragment].doubted]
    if 2 * len(doubted) <= len(live):
      return
    for member in map(self._members.by_id.__getitem__, doubted):
      member.strikes = member.max_strikes = 0
      member.others_merged = False
    self.usual[fragment] = Usual()
    names = ', '.join(doubted)
    self._out.say(
      f'The norms of {names}, more than half of the live learners, are far from the usual ones of '
      f'fragment {fragment}: these are forgotten, and the next {self._config.norm_warmup} outer '
      'steps of the fragment have no limit. The refused updates are lost, earlier ones are safe.'
    )

  def strike(
    self, now_ns: int, member: members_lib.Member, fragment: int, what: str, sure: bool = True
  ) -> bool:
    """Adds a strike for an update; returns whether that puts the learner into quarantine."""
    quarantined = self.add_strike(member, what, sure)
    self._out.notices.say(
      now_ns,
      f'update {member.learner}',
      f'Learner {member.learner} on {member.host} sent {what} for fragment {fragment}; rejected '
      'before merging, and the learner gets a fresh fragment. Check that host for faulty hardware.',
      always=quarantined,
    )
    return quarantined

  def add_strike(self, member: members_lib.Member, what: str, sure: bool = True) -> bool:
    """Adds a strike to a learner; returns whether that puts it into quarantine. One that is not
    `sure` may be of a wrong usual norm."""
    before, member.fault = self._members.quarantined(member), what
    member.strikes += 1
    if sure or member.strikes >= self._config.strikes * self._config.fragments:
      member.max_strikes = max(member.max_strikes, member.strikes)
    return self._members.quarantined(member) and not before

  def forget(self, learner: str) -> None:
    """Forgets the norms of a learner id."""
    for usual in self.usual:
      usual.forget(learner)

  def check(self) -> None:
    """Asserts that the norms are bounded in number, and the newest of each learner finite."""
    for usual in self.usual:
      kept = usual.pairs.values()
      assert sum(map(len, kept)) <= max(KEPT, VOTES_AFTER * len(kept)), usual
      assert all(norm >= 0 and steps > 0 for *_, (norm, steps) in kept), usual


def quarantine(member: members_lib.Member) -> messages.Refused:
  """The refusal of a process in quarantine, now and whenever it tries to join again."""
  return messages.Refused(
    code='QUARANTINED',
    text=f'Learner {member.learner} is in quarantine: {member.max_strikes} updates in a row '
    'were refused (NaN, Inf, a norm far from the usual one, or impossible numbers). The model '
    'contains none of them, earlier merged updates are safe, and the run continues. Check host '
    f'{member.host} (pid {member.pid}) for faulty hardware, then start the learner again, there or '
    'on another host.',
  )
