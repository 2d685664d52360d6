"""Arrays as far as the protocol can see them: every value is a number that nothing else has.

A published value is one number, a pseudo-gradient is the range of tokens it really covers and its
norm, and a delta knows the value it was measured from. So the world sees what real arrays would
hide: a delta applied to another value, a token that counts twice, a merge of somebody else's bytes.

An outer step is a function, as with real arrays: the same payloads merged into the same value make
the same number, whoever does it (simulated_log.py does it again), and anything else makes another one.
"""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from diloco_jax.protocol import actions
from diloco_jax.protocol.syncer import screening

Batches = tuple[int, int, int]  # shard, first batch, the one behind the last
HUGE, NAN = 'huge', 'poison'  # what a faulty host makes of a pseudo-gradient behind its encoder


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
  """What a pseudo-gradient's bytes are: whose, which of its tokens they cover, and which batches it
  really read: (shard, first, end). `exact`: its process has one incarnation only, so all tokens
  count. `spoiled`: HUGE or NAN, its host is faulty. `overflows`: an outer step with it is not finite,
  as sound as each payload may be."""

  learner: str
  nonce: int
  start: int
  end: int
  steps: int
  exact: bool = True
  reads: tuple[Batches, ...] = ()
  spoiled: str = ''
  overflows: bool = False

  @property
  def norm(self) -> int:
    """In screening.UNIT. Of an honest one it is unequal, but for its steps never more than twice
    that of another: nobody may be refused for it."""
    if self.spoiled == NAN:
      return screening.NOT_FINITE
    honest = self.steps * (4 + value(self.nonce, self.start) % 5) * screening.UNIT
    return 1_000_000 * honest if self.spoiled else honest

  def encode(self) -> bytes:
    return json.dumps(dataclasses.astuple(self)).encode()

  @classmethod
  def decode(cls, data: memoryview | bytes) -> 'Gradient':
    *rest, reads, spoiled, overflows = json.loads(bytes(data))
    return cls(*rest, tuple(tuple(one) for one in reads), spoiled, overflows)


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


class Merged(NamedTuple):
  """What became of an outer step."""

  failed: str
  digest: int


class Theta:
  """The syncer's arrays, and the books of what was really merged into them.

  `ranges` are the token ranges merged per (process, fragment), in the process's own tokens;
  `batches` are those merged per (shard, fragment), whoever read them; `finite`: nothing that
  is not was merged.
  """

  def __init__(self, values: list[int]):
    self.values = list(values)
    self.versions = [0] * len(values)
    self.merged: dict[str, int] = {}
    self.ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}
    self.finite = True
    self.batches: dict[tuple[int, int], list[tuple[int, int]]] = {}

  def merge(
    self,
    p: int,
    participants: Sequence[actions.Participant],
    payloads: Sequence[memoryview | bytes],
    refused: Collection[str],
    width: int,
  ) -> Merged:
    """Carries out an outer step, as storage/outer_log.py asks for it."""
    names = [one.learner for one in participants]
    claim(names == sorted(set(names)), 'Participants are distinct, in the order of ids.', names)
    claim(width == len(payloads), 'Nobody is missing in the stack.', width, names)
    shares = [
      ((one.learner, one.incarnation, one.tokens, one.steps), Gradient.decode(payload))
      for one, payload in zip(participants, payloads, strict=True)
      if one.learner not in refused
    ]
    for (learner, _, tokens, steps), grad in shares:
      claim(learner == grad.learner, 'A payload counts for who sent it.', learner, grad)
      true_tokens, true_steps = grad.end - grad.start, grad.steps
      claim(
        (tokens, steps) == (true_tokens, true_steps)
        if grad.exact
        else tokens <= true_tokens and steps <= true_steps,
        'Weights are what was trained.',
        learner,
        tokens,
        steps,
        grad,
      )
    if not shares or any(grad.overflows for _, grad in shares):
      return Merged('not finite' if shares else 'every payload was rejected', self.values[p])
    for (_, _, tokens, _), grad in shares:
      self._count(grad, p, tokens)
      self.finite = self.finite and grad.spoiled != NAN
    self.versions[p] += 1
    self.values[p] = value(self.values[p], p, self.versions[p], shares)
    return Merged('', self.values[p])

  def _count(self, grad: Gradient, fragment: int, tokens: int) -> None:
    _add(
      self.ranges.setdefault((grad.nonce, fragment), []),
      grad.start,
      grad.end,
      'No token is merged twice.',
      grad,
    )
    for shard, first, end in grad.reads:
      _add(
        self.batches.setdefault((shard, fragment), []),
        first,
        end,
        'No batch is merged twice.',
        grad,
      )
    self.merged[grad.learner] = self.merged.get(grad.learner, 0) + tokens

  def saved(self) -> dict:
    """As JSON types."""
    ranges = [[*key, spans] for key, spans in self.ranges.items()]
    batches = [[*key, spans] for key, spans in self.batches.items()]
    return {
      'values': self.values,
      'versions': self.versions,
      'merged': self.merged,
      'ranges': ranges,
      'batches': batches,
      'finite': self.finite,
    }

  @classmethod
  def load(cls, saved: dict) -> 'Theta':
    theta = cls(saved['values'])
    theta.versions, theta.merged = saved['versions'], saved['merged']
    theta.finite = saved['finite']
    theta.ranges, theta.batches = (
      {(owner, p): [tuple(span) for span in spans] for owner, p, spans in saved[name]}
      for name in ('ranges', 'batches')
    )
    return theta


def _add(spans: list[tuple[int, int]], start: int, end: int, sentence: str, grad: Gradient) -> None:
  claim(all(end <= first or last <= start for first, last in spans), sentence, grad, spans)
  spans.append((start, end))


def value(*made_of: Any) -> int:
  """The number that stands for what is made of all this, and of nothing else."""
  return int.from_bytes(hashlib.sha256(repr(made_of).encode()).digest()[:6]) | 1


def initial(fragments: int) -> tuple[int, ...]:
  """Version 0 of all fragments."""
  return tuple(value(0, p, 0) for p in range(fragments))


def screened(
  participants: Sequence[actions.Participant], grads: Sequence[Gradient]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
  """The norms of what participants bring, and who of them is refused."""
  norms = tuple(grad.norm for grad in grads)
  refused = tuple(
    one.learner for one, norm in zip(participants, norms) if screening.refused(norm, one.limit)
  )
  for one, grad in zip(participants, grads):
    claim(grad.spoiled or one.learner not in refused, 'Nobody honest is refused.', one, grad)
  return norms, refused
