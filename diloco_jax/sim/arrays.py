"""Arrays as far as the protocol can see them: every value is a number that nothing else has.

A published value is one number, a pseudo-gradient is the range of tokens it really covers, and a
delta knows the value it was measured from. So the world sees what real arrays would hide: a delta
applied to another value, a token that counts twice, a merge of somebody else's bytes.

An outer step is a function, as with real arrays: the same payloads merged into the same value make
the same number, whoever does it (journal.py does it again), and anything else makes another one.
"""

import dataclasses
import hashlib
import json
from typing import Any, Sequence

from diloco_jax.protocol import actions

Share = tuple[str, int, int, int]  # learner, incarnation, tokens, steps


class Untrue(AssertionError):
  """A claim that does not hold: its sentence, and what was seen."""

  def __init__(self, sentence: str, detail: str):
    super().__init__(f'{sentence} {detail}')
    self.sentence, self.detail = sentence, detail


def claim(holds: bool, sentence: str, *detail: Any) -> None:
  """A statement that only the world can judge. Raises Untrue with what was seen."""
  if not holds:
    raise Untrue(sentence, ' '.join(map(str, detail)))


@dataclasses.dataclass(frozen=True, slots=True)
class Gradient:
  """What a pseudo-gradient's bytes are: whose, and which of its tokens they cover. `exact`: its
  process has one incarnation only, so all of them count."""

  learner: str
  nonce: int
  start: int
  end: int
  steps: int
  exact: bool = True

  def encode(self) -> bytes:
    return json.dumps(dataclasses.astuple(self)).encode()

  @classmethod
  def decode(cls, data: bytes) -> 'Gradient':
    return cls(*json.loads(data))


@dataclasses.dataclass(frozen=True, slots=True)
class Published:
  """What a published payload's bytes are: the value, and the one it is a delta to (None: whole)."""

  base: int | None
  value: int


@dataclasses.dataclass(frozen=True, slots=True)
class Moments:
  """What a donation's bytes are: whose moments, after how many of its steps, and their value."""

  learner: str
  steps: int
  value: int


class Theta:
  """The syncer's arrays, and the books of what was really merged into them.

  `ranges` are the token ranges merged per (process, fragment), in the process's own tokens.
  """

  def __init__(self, values: list[int]):
    self.values = list(values)
    self.versions = [0] * len(values)
    self.merged: dict[str, int] = {}
    self.ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}

  def outer_step(
    self, fragment: int, version: int, shares: Sequence[Share], grads: Sequence[Gradient],
  ) -> int:
    """The value that it makes; nothing is changed yet."""
    names = [learner for learner, *_ in shares]
    claim(names == sorted(set(names)), 'Participants are distinct, in the order of ids.', names)
    claim(version == self.versions[fragment] + 1, 'Versions are 1, 2, 3, ...', version,
          self.versions)
    for (learner, _, tokens, steps), grad in zip(shares, grads, strict=True):
      claim(learner == grad.learner, 'A payload counts for who sent it.', learner, grad)
      true_tokens, true_steps = grad.end - grad.start, grad.steps
      claim((tokens, steps) == (true_tokens, true_steps) if grad.exact else
            tokens <= true_tokens and steps <= true_steps, 'Weights are what was trained.',
            learner, tokens, steps, grad)
    return value(self.values[fragment], fragment, version, shares, grads)

  def take(
    self, fragment: int, version: int, shares: Sequence[Share], grads: Sequence[Gradient],
    result: int,
  ) -> None:
    """The outer step is done."""
    for (_, _, tokens, _), grad in zip(shares, grads):
      self._count(grad, fragment, tokens)
    self.versions[fragment], self.values[fragment] = version, result

  def _count(self, grad: Gradient, fragment: int, tokens: int) -> None:
    ranges = self.ranges.setdefault((grad.nonce, fragment), [])
    claim(all(grad.end <= start or end <= grad.start for start, end in ranges),
          'No token is merged twice.', grad, ranges)
    ranges.append((grad.start, grad.end))
    self.merged[grad.learner] = self.merged.get(grad.learner, 0) + tokens

  def saved(self) -> dict:
    """As JSON types."""
    ranges = [[*key, spans] for key, spans in self.ranges.items()]
    return {'values': self.values, 'versions': self.versions, 'merged': self.merged,
            'ranges': ranges}

  @classmethod
  def load(cls, saved: dict) -> 'Theta':
    theta = cls(saved['values'])
    theta.versions, theta.merged = saved['versions'], saved['merged']
    theta.ranges = {(nonce, p): [tuple(span) for span in spans]
                    for nonce, p, spans in saved['ranges']}
    return theta


def value(*made_of: Any) -> int:
  """The number that stands for what is made of all this, and of nothing else."""
  return int.from_bytes(hashlib.sha256(repr(made_of).encode()).digest()[:6]) | 1


def initial(fragments: int) -> tuple[int, ...]:
  """Version 0 of all fragments."""
  return tuple(value(0, p, 0) for p in range(fragments))


def shares(participants: Sequence[actions.Participant]) -> tuple[Share, ...]:
  return tuple((one.learner, one.incarnation, one.tokens, one.steps) for one in participants)
