"""The model without arrays: all payloads are accepted, all digests agree.

The schedule of a run does not depend on its arrays, as long as no payload is refused: a machine
sees sizes, digests and norms only, and times are those of the world.
"""

from typing import Any

from diloco_jax.protocol import actions, events, messages
from diloco_jax.protocol.syncer import screening as screening_lib

_DIGEST = 1
Answers = list[tuple[events.Event, Any]]


class Arrays:
  """Sizes of a run: of payloads to the syncer, of deltas and whole fragments from it, each by
  fragment."""

  durable = False

  def __init__(
    self,
    agreement: str,
    payload_bytes: tuple[int, ...],
    delta_bytes: tuple[int, ...],
    whole_bytes: tuple[int, ...],
  ):
    self.agreement, self.payload_bytes = agreement, payload_bytes
    self.digests = (_DIGEST,) * len(payload_bytes)
    self.delta_bytes, self.whole_bytes = delta_bytes, whole_bytes

  def syncer(self, process: Any) -> 'Syncer':
    return Syncer(self, process)

  def learner(self, process: Any) -> 'Learner':
    return Learner(self, process)

  def forget(self, name: str) -> None:
    pass


def equal(fragments: int, size_bytes: int = 64) -> Arrays:
  """The model of a run whose payloads all have the same size."""
  sizes = (size_bytes,) * fragments
  return Arrays('{}', sizes, sizes, sizes)


class Syncer:
  def __init__(self, values: Arrays, process: Any):
    self._arrays, self._contents = values, process.contents
    state = process.observed.start.state or {}
    self._versions = list(state.get('versions', [0] * len(values.payload_bytes)))

  def perform(self, action: actions.Work) -> Answers:
    p = action.fragment
    if isinstance(action, actions.ReadFragment):
      size = _sized(self._arrays.whole_bytes[p])
      event = events.FragmentRead(fragment=p, version=self._versions[p], digest=_DIGEST, **size)
      return [(event, b'')]
    if isinstance(action, actions.Measure):
      return []
    for participant in action.participants:
      del self._contents[participant.payload_id]
    self._versions[p] += 1
    done = events.MergeDone(
      sync=action.sync,
      fragment=p,
      digest=_DIGEST,
      failed='',
      norms=tuple(participant.steps * screening_lib.UNIT for participant in action.participants),
      refused=(),
      **_sized(self._arrays.delta_bytes[p]),
    )
    return [(done, b'')]


class Learner:
  def __init__(self, values: Arrays, process: Any):
    self._arrays, self._contents = values, process.contents

  def perform(self, action: actions.Work) -> Answers:
    match action:
      case actions.Encode(sync=sync, fragment=p):
        size = _sized(self._arrays.payload_bytes[p])
        return [(events.Encoded(sync=sync, fragment=p, **size), b'')]
      case actions.Adopt(fragment=p, version=version, payload_id=payload_id):
        del self._contents[payload_id]
        return [(events.AdoptDone(fragment=p, version=version, digest=_DIGEST), None)]
    return []


def _sized(size_bytes: int) -> dict[str, Any]:
  """The fields of an event with a payload of this size."""
  return {'payload_id': 0, 'payload': messages.Payload(size_bytes=size_bytes, crc32=0)}
