"""An anchor: the published value from which a learner measures its progress on one fragment.

With `adopt=rebase` a learner carries onto a new version what the syncer has not merged: with A_v
the anchor, theta the local value, and c the decoded capture that the syncer merged (else 0)::

    theta <- A_{v+1} + (theta - (A_v - c))

So local - anchor is at any time exactly what no merge and no discard has settled: the steps since
the capture, the rounding error of the codec (error feedback upward), or all steps since the last
capture that was merged. The ledger of the syncer, never the learner, decides what was merged:
`Publish.settled_to` and `Joined.settled`. The merge is that of LOSCAR-SGD (arXiv 2605.20866).

A learner that returns after more than MOST_VERSIONS versions drops its steps: the syncer would
refuse the norm of so many (protocol/syncer/screening.py), and the model learns more without them
(docs/studies/links.md).
"""

import dataclasses
from typing import Any

from diloco_jax.protocol import messages

# The value of a process that takes the fragment from the syncer.
UNKNOWN = messages.Held(version=-1, digest=0)

# A payload of 8 periods has at most 16 times the usual norm, if norms per step differ by a factor
# of 2: the syncer's limit, with its defaults.
MOST_VERSIONS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Capture:
  """What the learner gave to a sync, and its counts then."""

  sync: int
  steps: int
  tokens: int


@dataclasses.dataclass(slots=True)
class Anchor:
  """The published value of one fragment as this learner holds it.

  Attributes:
    version, digest: of the value.
    steps, tokens: the learner's counts up to which local - anchor contains nothing.
    adopted: the learner's steps at the adoption.
    capture: of this anchor, while the syncer may have merged it or may still do so.
    misses: captures in a row that came too late to be merged.
    reason: why the adoption discarded steps; '' if it discarded none.
    sound: False if the adopted bits differ from the published ones.
    next_due: the sync that this learner waits for in lock-step modes.
  """

  version: int
  digest: int
  steps: int = 0
  tokens: int = 0
  adopted: int = 0
  capture: Capture | None = None
  misses: int = 0
  reason: str = ''
  sound: bool = True
  next_due: int = 0

  def begin_incarnation(self) -> None:
    """An incarnation begins: its counts do."""
    self.steps = self.tokens = self.adopted = 0
    self.capture = None

  def covers(self, publish: messages.Publish) -> bool:
    """Whether the learner need not adopt this publish. The same version as a whole fragment is a
    fresh anchor that it must adopt."""
    whole = publish.base_version is None
    return publish.version < self.version or (publish.version == self.version and not whole)

  def give(self, sync: int, steps: int, tokens: int) -> dict[str, Any]:
    """Captures all that is not settled at these counts; returns what the contribution covers."""
    self.capture = Capture(sync, steps, tokens)
    return {
      'sync': sync,
      'version': self.version,
      'steps': steps - self.steps,
      'tokens_from': self.tokens,
      'tokens_to': tokens,
    }

  def rewind(self, steps: int, tokens: int) -> None:
    """The local value is the anchor again."""
    if tokens > self.tokens:
      self.reason = messages.Reason.UNDONE
    self.steps, self.tokens, self.capture = steps, tokens, None

  def settled(self, tokens: int) -> None:
    """A session begins, and the ledger has settled these tokens: a capture that is not among them
    was dropped with the last session."""
    if self.capture is not None and tokens != self.capture.tokens:
      self.capture = None

  def rejected(self, sync: int, missed: bool) -> None:
    """The capture for this sync was not merged and will not be; `missed`: it came too late."""
    if self.capture is not None and self.capture.sync == sync:
      self.capture = None
      self.misses += missed

  def adopt(
    self, publish: messages.Publish, steps: int, tokens: int, max_misses: int | None
  ) -> tuple['Anchor', bool, bool]:
    """The anchor after the adoption of `publish` at these counts.

    Args:
      publish: a version of this fragment.
      steps, tokens: the counts of the learner now.
      max_misses: of the config; None: the learner keeps nothing, because it does not rebase.

    Returns:
      (the new anchor, whether the steps that are not merged are kept, whether the capture is among
      those that are merged).
    """
    new = Anchor(publish.version, publish.digest, steps, tokens, adopted=steps)
    new.next_due = self.next_due
    capture = self.capture
    if max_misses is None:
      new.reason = messages.Reason.OVERWRITTEN
    elif not publish.keep or self.version < 0:
      new.reason = messages.Reason.UNDONE
    elif publish.version - self.version > MOST_VERSIONS:
      new.reason = messages.Reason.LATE
    elif capture is not None and publish.settled_to == capture.tokens:
      new.steps, new.tokens = capture.steps, capture.tokens
      return new, True, True
    elif publish.settled_to <= self.tokens:
      if self.misses <= max_misses:
        new.misses, new.steps, new.tokens = self.misses, self.steps, self.tokens
        new.reason = self.reason
        new.capture = capture  # for a later sync, or late: it may still be merged
        return new, True, False
      new.reason = messages.Reason.LATE
    else:
      new.reason = messages.Reason.UNDONE
    return new, False, False
