"""What the other end of a session may send, and when. No sockets, no threads, no clocks.

A learner begins a session with a Join, once. It sends a payload only if the syncer has asked for it
on this session: one contribution of the asked size for every Pull. So a session that is not a
member's sends no payload at all, and memory is used only for bytes that the syncer awaits.

A learner rejects sizes that its layout does not allow.
"""

import collections
import dataclasses

from diloco_jax.protocol import messages
from diloco_jax.transport import link

MAX_ASKED = 4096  # payloads that one learner may owe; the oldest are forgotten
_Answer = tuple[int, int]  # sync, fragment


@dataclasses.dataclass(slots=True)
class Rate:
  """`per_s` units a second, and up to `burst` at once."""

  per_s: float
  burst: float
  _spent_until_s: float = 0.0

  def wait_s(self, now_s: float) -> float:
    """Seconds until more may be spent."""
    return max(0.0, self._spent_until_s - now_s - self.burst / self.per_s)

  def spend(self, amount: float, now_s: float) -> None:
    self._spent_until_s = max(self._spent_until_s, now_s) + amount / self.per_s


class LearnerRules:
  """The rules of one learner's session, kept by the syncer. Not thread-safe.

  Attributes:
    stage: 0, 1 with its Join, 2 with its Confirm.
    member: the syncer has admitted it.
  """

  def __init__(self, limits: link.Limits):
    self._limits = limits
    self.stage = 0
    self.member = False
    self._asked: dict[_Answer, int] = {}  # the answer that is awaited: bytes of its payload
    self._pulled: dict[int, int] = {}  # by fragment: its newest sync
    self._to_come: collections.Counter[int] = collections.Counter()  # of sizes, not yet begun

  def on_sent(self, message: messages.Message) -> None:
    """The syncer has sent this message."""
    match message:
      case messages.Pull(sync=sync, fragment=fragment) if sync > self._pulled.get(fragment, 0):
        self._pulled[fragment] = sync  # else it is asked again, for the same answer
        if len(self._asked) == MAX_ASKED:
          self._to_come[self._asked.pop(next(iter(self._asked)))] -= 1
        size = self._limits.contribution_bytes[fragment]
        self._asked[sync, fragment] = size
        self._to_come[size] += 1

  def on_transfer(self, size: int) -> None:
    """The transfer of a payload of `size` bytes begins. Raises LinkError if none is awaited."""
    if not self._to_come[size]:
      raise link.LinkError(f'a payload of {size} bytes comes that the syncer has not asked for')
    self._to_come[size] -= 1

  def on_received(self, message: messages.Message) -> None:
    """The learner has sent this message. Raises LinkError if it may not."""
    name = type(message).__name__
    if self.stage == 0 and not isinstance(message, messages.Join):
      raise link.LinkError(f'{name} before Join')
    match message:
      case messages.Join():
        self._reach(1, name)
      case messages.Confirm():
        self._reach(2, name)
      case messages.Contribution(sync=sync, fragment=fragment, payload=payload):
        self._answer(name, (sync, fragment), payload)
      case messages.Decline(sync=sync, fragment=fragment):
        self._answer(name, (sync, fragment), None)

  def _reach(self, stage: int, name: str) -> None:
    if self.stage >= stage:
      raise link.LinkError(f'a second {name}')
    self.stage = stage

  def _answer(self, name: str, answer: _Answer, payload: messages.Payload | None) -> None:
    size = self._asked.pop(answer, None)
    if size is None:
      raise link.LinkError(f'{name} for {answer}, for which the syncer has not asked')
    if payload is None:
      self.on_transfer(size)  # its bytes are awaited no more, and must not have begun
    elif payload.size_bytes != size:
      raise link.LinkError(f'{name} announces {payload.size_bytes} bytes, {size} were asked for')


class SyncerRules:
  """The rules of the syncer's end, kept by a learner."""

  stage, member = 2, True

  def __init__(self, limits: link.Limits):
    self._limits = limits

  def on_sent(self, message: messages.Message) -> None:
    pass

  def on_transfer(self, size: int) -> None:
    pass

  def on_received(self, message: messages.Message) -> None:
    """Raises LinkError for a payload of a size that the layout does not have."""
    if not isinstance(message, messages.Publish):
      return
    sizes = self._limits.publish_bytes
    allowed = sizes[message.fragment] if message.fragment < len(sizes) else 0
    size = message.payload.size_bytes
    if size > allowed:
      raise link.LinkError(f'Publish announces {size} bytes, the layout allows {allowed}')
