"""The model of a virtual run without arrays: all payloads are accepted, all digests agree.

The schedule of a run does not depend on its arrays, as long as no payload is refused: a machine
sees sizes, digests and norms only, and times are those of the world.
"""

from typing import Any

from diloco_jax.config import build
from diloco_jax.protocol import actions, events, messages
from diloco_jax.protocol.syncer import screening
from diloco_jax.verification.virtual import world

_DIGEST = 1


class Model:
  """Sizes of a run: of payloads to the syncer, of deltas and whole fragments from it, each by
  fragment."""

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
    self._saved: dict[str, dict[str, Any]] = {}

  def syncer(self, payloads: world.Contents) -> 'Syncer':
    return Syncer(self, payloads)

  def learner(self, name: str, restored: bool, payloads: world.Contents) -> 'Learner':
    return Learner(self, name, payloads)

  def save(self, name: str, machine_state: dict[str, Any]) -> None:
    self._saved[name] = machine_state

  def checkpoint(self, name: str) -> dict[str, Any] | None:
    return self._saved.get(name)

  def forget(self, name: str) -> None:
    self._saved.pop(name, None)


class Syncer:
  def __init__(self, model: Model, payloads: world.Contents):
    self._model, self._payloads = model, payloads
    self._versions = [0] * len(model.payload_bytes)

  def perform(self, action: actions.Work) -> list[events.Event]:
    match action:
      case actions.Merge(fragment=p, participants=participants):
        for one in participants:
          self._payloads.drop(one.payload_id)
        self._versions[p] += 1
        return [
          events.MergeDone(
            sync=action.sync,
            fragment=p,
            digest=_DIGEST,
            failed='',
            norms=tuple(one.steps * screening.UNIT for one in participants),
            refused=(),
            **self._content(self._model.delta_bytes[p]),
          )
        ]
      case actions.ReadFragment(fragment=p):
        content = self._content(self._model.whole_bytes[p])
        version = self._versions[p]
        return [events.FragmentRead(fragment=p, version=version, digest=_DIGEST, **content)]
      case actions.Save():
        return [saved(action)]
    raise TypeError(f'the syncer has no such work: {action}')

  def _content(self, size_bytes: int) -> dict[str, Any]:
    return content(self._payloads, size_bytes)


class Learner:
  def __init__(self, model: Model, name: str, payloads: world.Contents):
    self._model, self._name, self._payloads = model, name, payloads

  def step(self, clock: int) -> None:
    pass

  def perform(self, action: actions.Work) -> list[events.Event]:
    match action:
      case actions.Encode(sync=sync, fragment=p):
        given = content(self._payloads, self._model.payload_bytes[p])
        return [events.Encoded(sync=sync, fragment=p, **given)]
      case actions.Adopt(fragment=p, version=version, payload_id=payload_id):
        self._payloads.drop(payload_id)
        return [events.AdoptDone(fragment=p, version=version, digest=_DIGEST)]
      case actions.UseShard():
        return []
      case actions.Save():
        self._model.save(self._name, action.machine_state)
        return [saved(action)]
    raise TypeError(f'a learner has no such work: {action}')


def model_of(assembled: build.Assembly) -> Model:
  """The model of an assembled run."""
  layout = assembled.layout
  sizes = [layout.size(p) for p in range(layout.num_fragments)]
  return Model(
    assembled.agreement,
    assembled.payload_bytes,
    tuple(assembled.codec_down.encoded_size(size) for size in sizes),
    tuple(4 * size for size in sizes),
  )


def content(payloads: world.Contents, size_bytes: int) -> dict[str, Any]:
  """The fields of an event with a payload of this size."""
  payload = messages.Payload(size_bytes=size_bytes, crc32=0)
  return {'payload_id': payloads.put(b''), 'payload': payload}


def saved(save: actions.Save) -> events.SaveDone:
  """The answer to a save in memory."""
  return events.SaveDone(clock=save.clock)
