"""Arrays as far as the protocol can see them: every value is a number that nothing else has.

A published value is one number, a pseudo-gradient is the range of tokens it really covers, and a
delta knows the value it was measured from. So the world sees what real arrays would hide: a delta
applied to another value, a token that counts twice, a merge of somebody else's bytes.
"""

import dataclasses
import itertools
from typing import Any

from diloco_jax.protocol import actions


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
  """What a pseudo-gradient's bytes are: whose, and which of its tokens they cover."""

  learner: str
  nonce: int
  start: int
  end: int
  steps: int


@dataclasses.dataclass(frozen=True, slots=True)
class Published:
  """What a published payload's bytes are: the value, and the one it is a delta to (None: whole)."""

  base: int | None
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

  def merge(self, merge: actions.Merge, grads: list[Gradient], value: int, exact: bool) -> None:
    """The outer step. `exact`: the books must know every process's tokens from its first on (a
    syncer that went back may not)."""
    p, names = merge.fragment, [one.learner for one in merge.participants]
    claim(names == sorted(set(names)), 'Participants are distinct, in the order of ids.', names)
    claim(merge.version == self.versions[p] + 1, 'Versions are 1, 2, 3, ...', merge, self.versions)
    for one, grad in zip(merge.participants, grads):
      claim(one.learner == grad.learner, 'A payload counts for who sent it.', one, grad)
      tokens, steps = grad.end - grad.start, grad.steps
      claim((one.tokens, one.steps) == (tokens, steps) if exact else
            one.tokens <= tokens and one.steps <= steps, 'Weights are what was trained.', one, grad)
      self._count(grad, p, one.tokens)
    self.versions[p] += 1
    self.values[p] = value

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


class Values:
  """Draws numbers that stand for the values of fragments."""

  def __init__(self):
    self._count = itertools.count(1)

  def new(self, fragment: int, version: int) -> int:
    return 1_000_000 * (version + 1) + 1_000 * fragment + next(self._count) % 1_000
