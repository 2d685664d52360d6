"""Simulated arrays: values as far as the protocol sees them, each a unique number.

A published value is one number, a pseudo-gradient is the range of tokens that it really covers and
its norm, and a delta has the value from which it was measured. So the world notices errors that
real arrays would hide: a delta applied to another value, a token that counts twice, a merge of
another learner's bytes.

An outer step is a function, as with real arrays: the same payloads merged into the same value give
the same number, also in a recovery (simulated_log.py); any other input gives another number. What
was trained, captured, merged and adopted is tracked here, independently of the machines.
"""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from diloco_jax.protocol import actions, events, messages
from diloco_jax.protocol.syncer import screening as screening_lib
from diloco_jax.storage import outer_log
from diloco_jax.verification.checks.invariants import invariant
from diloco_jax.verification.sim import network as network_lib

Span = tuple[int, int]
Answers = list[tuple[events.Event, Any]]
AGREEMENT = '{"model.width":8}'
PAYLOAD = messages.Payload(size_bytes=network_lib.PAYLOAD_BYTES, crc32=0)
NONE = memoryview(b'')
HUGE, NAN = 'huge', 'poison'  # how a faulty host spoils a pseudo-gradient behind its encoder


def require(holds: bool, sentence: str, *detail: Any) -> None:
  """Raises Violation if a statement that only the world can judge does not hold."""
  if not holds:
    raise invariant.Violation('claim', sentence, ' '.join(map(str, detail)))


@dataclasses.dataclass(frozen=True, slots=True)
class Gradient:
  """The bytes of a pseudo-gradient: its learner and process, and the range of its tokens. `exact`:
  its process has one incarnation only, so all tokens count.
  `spoiled`: HUGE or NAN if its host is faulty. `overflows`: an outer step with it is not finite,
  although each payload is."""

  learner: str
  nonce: int
  start: int
  end: int
  steps: int
  exact: bool = True
  spoiled: str = ''
  overflows: bool = False

  @property
  def norm(self) -> int:
    """In screening.UNIT. Honest norms vary, but per step by a factor of 2 at most, so the syncer
    must not refuse any for it."""
    if self.spoiled == NAN:
      return screening_lib.NOT_FINITE
    honest = self.steps * (4 + value(self.nonce, self.start) % 5) * screening_lib.UNIT
    return 1_000_000 * honest if self.spoiled else honest

  def encode(self) -> bytes:
    return json.dumps(dataclasses.astuple(self)).encode()

  @classmethod
  def decode(cls, data: memoryview | bytes) -> 'Gradient':
    return cls(*json.loads(bytes(data)))


@dataclasses.dataclass(frozen=True, slots=True)
class PublishedPayload:
  """The bytes of a published payload: its value, the base of the delta (None: whole), and by
  process the ranges of its tokens that the value contains."""

  base: int | None
  value: int
  merged: dict[int, tuple[Span, ...]]

  def claim_conserved(self, nonce: int, before: int, after: int, adopt: actions.Adopt) -> None:
    """A process adopts the value; until then its local - anchor contained its tokens from `before`
    on, and now those from `after` on. Each token is in one of the two, unless it was dropped."""
    merged = self.merged.get(nonce, ())
    require(
      all(end <= after for _, end in merged),
      'A learner carries on nothing that the adopted value contains.',
      adopt,
      merged,
      after,
    )
    require(
      not adopt.merged or union_of([(0, before), *merged])[0][1] >= after,
      'A learner gives up only what the adopted value contains.',
      adopt,
      merged,
      after,
    )


class Merged(NamedTuple):
  """The result of an outer step."""

  failed: str
  digest: int
  gradient: memoryview


class Theta:
  """The syncer's arrays, and a record of what was really merged into them.

  `ranges` are the token ranges merged per (learner, fragment), in the tokens of the learner's last
  process, which is named with them; `finite`: all merged payloads were finite.
  """

  def __init__(self, values: list[int]):
    self.values = list(values)
    self.versions = [0] * len(values)
    self.merged: dict[str, int] = {}
    self.ranges: dict[tuple[str, int], tuple[int, list[Span]]] = {}
    self.finite = True

  def merge(
    self,
    p: int,
    participants: Sequence[actions.Participant],
    payloads: Sequence[memoryview | bytes],
    refused: Collection[str],
  ) -> Merged:
    """Carries out an outer step."""
    shares = []
    for participant, payload in zip(participants, payloads, strict=True):
      grad = Gradient.decode(payload)
      if participant.learner not in refused:
        shares.append(
          (
            (participant.learner, participant.incarnation, participant.tokens, participant.steps),
            grad,
          )
        )
    for (learner, _, tokens, steps), grad in shares:
      require(
        learner == grad.learner, 'A payload counts for the learner that sent it.', learner, grad
      )
      true_tokens, true_steps = grad.end - grad.start, grad.steps
      require(
        (tokens, steps) == (true_tokens, true_steps)
        if grad.exact
        else tokens <= true_tokens and steps <= true_steps,
        'Weights are those of the trained tokens and steps.',
        learner,
        tokens,
        steps,
        grad,
      )
    if not shares or any(grad.overflows for _, grad in shares):
      return Merged('not finite' if shares else 'every payload was rejected', self.values[p], NONE)
    merged = [(*key, dataclasses.astuple(grad)) for key, grad in shares]
    return self.redo(p, participants, refused, memoryview(json.dumps(merged).encode()))

  def redo(
    self,
    p: int,
    participants: Sequence[actions.Participant],
    refused: Collection[str],
    gradient: memoryview,
  ) -> Merged:
    """Repeats an outer step from the outer gradient in its record (storage/outer_log.py): whose
    tokens it is made of."""
    if not gradient:
      return Merged('refused', self.values[p], NONE)
    shares = [
      ((learner, incarnation, tokens, steps), Gradient(*grad))
      for learner, incarnation, tokens, steps, grad in json.loads(bytes(gradient))
    ]
    for (_, _, tokens, _), grad in shares:
      self._count(grad, p, tokens)
      self.finite = self.finite and grad.spoiled != NAN
    self.versions[p] += 1
    self.values[p] = value(self.values[p], p, self.versions[p], shares)
    return Merged('', self.values[p], gradient)

  def _count(self, grad: Gradient, fragment: int, tokens: int) -> None:
    nonce, spans = self.ranges.get((grad.learner, fragment), (0, []))
    if nonce != grad.nonce:
      spans = []  # the process before it was replaced: no token of it is merged any more
    require(
      all(grad.end <= first or last <= grad.start for first, last in spans),
      'No token is merged twice.',
      grad,
      spans,
    )
    spans = union_of([*spans, (grad.start, grad.end)])
    self.ranges[grad.learner, fragment] = grad.nonce, spans
    self.merged[grad.learner] = self.merged.get(grad.learner, 0) + tokens

  def contents(self, p: int) -> dict[int, tuple[Span, ...]]:
    """By process: the ranges of its tokens that the value of a fragment contains."""
    return {nonce: tuple(spans) for (_, q), (nonce, spans) in self.ranges.items() if q == p}

  def saved(self) -> dict:
    """The ranges as JSON types."""
    ranges = [[*key, *merged] for key, merged in self.ranges.items()]
    return {
      'values': self.values,
      'versions': self.versions,
      'merged': self.merged,
      'ranges': ranges,
      'finite': self.finite,
    }

  @classmethod
  def load(cls, saved: dict) -> 'Theta':
    theta = cls(saved['values'])
    theta.versions, theta.merged = saved['versions'], saved['merged']
    theta.finite = saved['finite']
    theta.ranges = {
      (learner, p): (nonce, [tuple(span) for span in spans])
      for learner, p, nonce, spans in saved['ranges']
    }
    return theta


def union_of(spans: Iterable[Span]) -> list[Span]:
  """The same ranges in order, neighbours as one.

  >>> union_of([(4, 6), (0, 2), (2, 3)])
  [(0, 3), (4, 6)]
  """
  merged: list[Span] = []
  for start, end in sorted(spans):
    if merged and start <= merged[-1][1]:
      merged[-1] = merged[-1][0], max(end, merged[-1][1])
    else:
      merged.append((start, end))
  return merged


def value(*made_of: Any) -> int:
  """The unique number of a value that is made of these parts."""
  return int.from_bytes(hashlib.sha256(repr(made_of).encode()).digest()[:6]) | 1


def initial(fragments: int) -> tuple[int, ...]:
  """Version 0 of all fragments."""
  return tuple(value(0, p, 0) for p in range(fragments))


def screened(
  participants: Sequence[actions.Participant], grads: Sequence[Gradient], live: int, factor: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
  """The norms of the participants' payloads, and the learners that are refused."""
  norms = tuple(grad.norm for grad in grads)
  refused = screening_lib.left_out(participants, norms, live, factor)
  for participant, grad in zip(participants, grads):
    require(
      grad.spoiled or participant.apart or participant.learner not in refused,
      'Screening refuses no honest payload.',
      participant,
      grad,
    )
  return norms, refused


# --- The arrays of a run (processes.py) -----------------------------------------------------------


class Arrays:
  """The values of a run; each of its processes has its own."""

  agreement, durable = AGREEMENT, True

  def __init__(self, fragments: int):
    self.payload_bytes = (network_lib.PAYLOAD_BYTES,) * fragments
    self.digests = initial(fragments)

  def learner(self, process: Any) -> 'Learner':
    return Learner(process)

  def syncer(self, process: Any) -> 'Syncer':
    return Syncer(process)

  def forget(self, name: str) -> None:
    pass


class Learner:
  """The values of a learner's process."""

  def __init__(self, process: Any):
    self._process, start = process, process.observed.start
    digests = process.world.arrays.digests
    self._values = [-1] * len(digests) if start.state is not None else list(digests)
    # By fragment: (tokens, steps) up to which local - anchor contains nothing, and of the newest
    # capture.
    self._contains = [(0, 0)] * len(digests)
    self._captured: dict[int, tuple[int, int]] = {}

  @property
  def _now(self) -> tuple[int, int]:
    return self._process.tokens, self._process.steps

  def perform(self, action: actions.Work) -> Answers:
    match action:
      case actions.Encode(sync=sync, fragment=fragment):
        content = self._encode(fragment)
        given = content and PAYLOAD
        event = events.Encoded(sync=sync, fragment=fragment, payload_id=None, payload=given)
        return [(event, content)]
      case actions.Adopt(fragment=fragment, version=version):
        self._adopt(action)
        digest = abs(self._values[fragment])
        return [(events.AdoptDone(fragment=fragment, version=version, digest=digest), None)]
      case actions.UseShard(rewind=True):  # its parameters are the anchors
        self._contains = [self._now] * len(self._contains)
        self._captured.clear()
    return []

  def _encode(self, fragment: int) -> Gradient | None:
    """The bytes of a capture, None with a NaN in it."""
    process, (start, before) = self._process, self._contains[fragment]
    tokens, steps = self._captured[fragment] = self._now
    if fragment in process.nan:
      process.nan.discard(fragment)
      return None
    spoiled, more = process.spoiled.pop(fragment, ('', 0))
    if more > 1:
      process.spoiled[fragment] = spoiled, more - 1
    return Gradient(
      process.learner,
      process.nonce,
      start,
      tokens,
      steps - before,
      process.exact,
      spoiled,
    )

  def _adopt(self, adopt: actions.Adopt) -> None:
    process, fragment = self._process, adopt.fragment
    published, held = process.contents.pop(adopt.payload_id), self._values[fragment]
    require(adopt.whole == (published.base is None), 'Only a delta has a base.', adopt)
    fits = published.base in (None, held)
    require(
      fits or held < 0,
      'A learner applies a delta to the value from which it was measured.',
      process.name,
      adopt,
      published,
      held,
    )
    self._values[fragment] = published.value if fits else -1
    if fragment in process.flips:
      process.flips.discard(fragment)
      process.world.flipped += 1
      self._values[fragment] = -1
    before, _ = self._contains[fragment]
    if adopt.merged:
      self._contains[fragment] = self._captured.pop(fragment)
    elif not (adopt.keep and process.world.config.rebases):
      self._contains[fragment] = self._now
    published.claim_conserved(process.nonce, before, self._contains[fragment][0], adopt)


class Syncer:
  """The values of the syncer's process, its Theta."""

  def __init__(self, process: Any):
    self._process, self._theta = process, process.theta

  def perform(self, action: actions.Work) -> Answers:
    theta, p = self._theta, action.fragment
    if isinstance(action, actions.Merge):
      return [self._merge(action)]
    if isinstance(action, actions.Measure):
      return []
    event = events.FragmentRead(
      fragment=p,
      version=theta.versions[p],
      payload_id=0,
      digest=theta.values[p],
      payload=PAYLOAD,
    )
    return [(event, PublishedPayload(None, theta.values[p], theta.contents(p)))]

  def _merge(self, merge: actions.Merge) -> tuple[events.MergeDone, PublishedPayload | None]:
    process, theta, p = self._process, self._theta, merge.fragment
    grads = [process.contents.pop(participant.payload_id) for participant in merge.participants]
    norms, refused = screened(
      merge.participants, grads, len(merge.live), process.world.config.norm_factor
    )
    payloads = [dataclasses.replace(grad, overflows=process.not_finite).encode() for grad in grads]
    process.not_finite, base = False, theta.values[p]
    merged = theta.merge(p, merge.participants, payloads, refused)
    done = events.MergeDone(
      sync=merge.sync,
      fragment=p,
      payload_id=None,
      payload=None,
      digest=merged.digest,
      failed=merged.failed,
      norms=norms,
      refused=refused,
    )
    process.write(outer_log.OuterStep(merge, done, merged.gradient))
    if merged.failed:
      return done, None
    published = PublishedPayload(base, merged.digest, theta.contents(p))
    return dataclasses.replace(done, payload=PAYLOAD), published
