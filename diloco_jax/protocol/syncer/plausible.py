"""Judges whether a learner of this run could send a message, before the machine acts on it.

A message is *implausible* if no learner of this run would send it, however slow, late or repeated:
its numbers contradict each other, what the same learner has reported, what the syncer has
published, or the schedule. The syncer then closes the session, counts a strike (screening.py) and
changes nothing else. Every number of a peer is judged here first; behind this file the machine may
rely on them:

    clock      at most T + H + 1; grows with the learner's steps, or jumps to an open sync; before
               the first step of an incarnation any, its process may have made steps before
    steps      of this incarnation; at most the clock, since every step moves the clock, and what
               the time since earlier reports allows (pace.py)
    a past     none, of a process that this syncer does not know
    tokens     at least 1 and at most `max_step_tokens` for each step
    a range    [tokens_from, tokens_to) of reported tokens, of at most the reported steps
    cursor     at most as many batches after the assigned one as there were steps since
    versions   at most the published ones, for what a learner says it has adopted
    doing      of a learner whose step is missing, and for how long it is

A lie inside these limits is not noticed here. How fast a clock may run: pace.py; how much a merge
makes of the steps of one learner: screening.py, numerics/merge.py.
"""

from diloco_jax.protocol import messages
from diloco_jax.protocol.syncer import books as books_lib
from diloco_jax.protocol.syncer import members as members_lib
from diloco_jax.protocol.syncer import pace as pace_lib
from diloco_jax.protocol.syncer import published as published_lib

DECLINES = (*messages.Reason.ALL, 'empty')
_STUCK = {'', *messages.DOING} - {messages.WAITING}


class Plausibility:
  """Compares messages with the state of the syncer. Changes nothing."""

  def __init__(
    self, books: books_lib.Books, pace: pace_lib.Pace, published: published_lib.Published
  ):
    self._config = books.config
    self._ledger = books.ledger
    self._pace = pace
    self._published = published

  def fault(self, now_ns: int, member: members_lib.Member, message: messages.FromLearner) -> str:
    """Why no learner of this run would send this message; '' if it is plausible."""
    if isinstance(message, messages.Leave):
      return ''
    if isinstance(message, messages.Heartbeat):
      known = message.doing in _STUCK and bool(message.doing) == (message.idle_ns > 0)
      return '' if known else f'{message.doing!r} for {message.idle_ns} ns without a step'
    if not member.joined:
      return f'{type(message).__name__} before it has joined'
    fragment = getattr(message, 'fragment', 0)
    if fragment >= self._config.fragments:
      return f'fragment {fragment} of {self._config.fragments}'
    match message:
      case messages.Progress():
        return self._progress(now_ns, member, message)
      case messages.Contribution():
        return self._contribution(member, message)
      case messages.Decline():
        return self._decline(member, message)
      case messages.Adopted():
        return self._adopted(member, message)
    return ''

  def confirm_fault(
    self, now_ns: int, known: members_lib.Member | None, confirm: messages.Confirm
  ) -> str:
    """The same for a Confirm, whose sender is no member yet; `known`: its process has been one."""
    if known is None and (confirm.steps or confirm.tokens or confirm.shard is not None):
      return f'{confirm.steps} steps of a process that this syncer does not know'
    return (known and self._steps(now_ns, known, confirm.steps)) or self._totals(
      confirm.clock, confirm.steps, confirm.tokens
    )

  def _steps(self, now_ns: int, member: members_lib.Member, steps: int) -> str:
    most = self._pace.most_steps(now_ns, member)
    if most is None or steps <= most:
      return ''
    return f'{steps} steps, {most} are possible in the time since its earlier reports'

  def _totals(self, clock: int, steps: int, tokens: int) -> str:
    if clock > self._pace.last + 1:  # a step may have been running when the clock jumped
      return f'step {clock} of a run that ends at {self._pace.last}'
    if steps > clock:
      return f'{steps} steps at step {clock}'
    return self._tokens(tokens, steps)

  def _tokens(self, tokens: int, steps: int) -> str:
    most = steps * self._config.max_step_tokens
    return '' if steps <= tokens <= most else f'{tokens} tokens in {steps} steps, at most {most}'

  def _progress(self, now_ns: int, member: members_lib.Member, said: messages.Progress) -> str:
    steps = self._ledger.of(member).steps
    new_steps = max(0, said.steps - steps)
    began = said.steps or steps
    if began and said.clock > self._newest_clock(member) + new_steps:
      return f'step {said.clock} after step {member.claimed} and {new_steps} more steps'
    if said.finished and said.clock < self._config.total_steps:
      return f'finished at step {said.clock} of {self._config.total_steps}'
    fault = self._steps(now_ns, member, said.steps)
    return fault or self._totals(said.clock, said.steps, said.tokens)

  def _newest_clock(self, member: members_lib.Member) -> int:
    """The clock of the learner without a further step: adopting a version moves it to its sync,
    which a restarted syncer that opens closing syncs again may not have opened."""
    return max(member.claimed, self._pace.opening.last, self._published.last_sync)

  def _contribution(self, member: members_lib.Member, said: messages.Contribution) -> str:
    account = self._ledger.of(member)
    if said.sync > self._pace.last:
      return f'sync {said.sync} of a run that ends at {self._pace.last}'
    size = self._published.fragments[said.fragment].payload_bytes
    if said.payload.size_bytes != size:
      return f'{said.payload.size_bytes} bytes of a fragment of {size}'
    if not 1 <= said.steps <= account.steps:
      return f'a contribution of {said.steps} steps after {account.steps}'
    if not said.tokens_from < said.tokens_to <= account.trained:
      return f'tokens {said.tokens_from} to {said.tokens_to} of {account.trained}'
    if said.cursor < said.steps or (
      said.shard == member.shard and said.cursor > member.first_batch + account.steps
    ):
      return f'{said.steps} batches up to {said.cursor} of shard {said.shard}'
    return self._tokens(said.tokens_to - said.tokens_from, said.steps)

  def _decline(self, member: members_lib.Member, said: messages.Decline) -> str:
    if said.reason not in DECLINES:
      return f'reason {said.reason!r}'
    trained = self._ledger.of(member).trained
    return '' if said.tokens_to <= trained else f'token {said.tokens_to} of {trained}'

  def _adopted(self, member: members_lib.Member, said: messages.Adopted) -> str:
    trained = self._ledger.of(member).trained
    if said.tokens > trained:
      return f'token {said.tokens} of {trained}'
    if said.reason not in ('', *messages.Reason.ALL):
      return f'reason {said.reason!r}'
    newest = self._published.fragments[said.fragment].version
    if said.matched and said.version > newest:
      return f'version {said.version} of fragment {said.fragment}, not {newest}'
    return ''
