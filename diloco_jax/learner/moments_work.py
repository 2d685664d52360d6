"""A learner's work on moments: a donor reads its own while it trains; a joiner takes a donor's
before its first step.

Reading has a separate thread: the step thread only dispatches the copy on the device, and the
egress thread stays free for contributions, which are more urgent.
"""

import threading
from collections.abc import Callable

import jax

from diloco_jax.learner import island_port
from diloco_jax.node import ports
from diloco_jax.protocol import actions, events
from diloco_jax.report import records as records_lib
from diloco_jax.train import moments as moments_lib
from diloco_jax.transport import payloads as payloads_lib


class Moments:
  """ReadMoments and TakeMoments of one island; both are called on the step thread."""

  def __init__(
    self,
    island: island_port.IslandState,
    post: ports.Post,
    fail: Callable[[BaseException], None],
    payloads: ports.Payloads,
    records: records_lib.Recorder,
  ):
    """`fail` ends the node if a copy does not reach the host."""
    self._island = island
    self._post = post
    self._fail = fail
    self._payloads = payloads
    self._records = records
    self._snapshot = moments_lib.snapshot
    self._reading: threading.Thread | None = None  # a donation; the machine asks for one at a time

  def compile(self) -> None:
    """Compiles ahead of use: a donor that compiled on request would stop training and be late."""
    leaves, at = jax.tree.leaves(self._island.moments), self._island.replicated
    # On several devices an array that is committed to none of them moves with its first step.
    moves = at and len(at.device_set) > 1 and not all(leaf.committed for leaf in leaves)
    if self._snapshot is moments_lib.snapshot and leaves and not moves:
      self._snapshot = moments_lib.snapshot.lower(self._island.moments).compile()

  def read(self, transfer: int) -> None:
    """Copies the state as it is now; posts MomentsRead once the copy is on the host."""
    copied = self._snapshot(self._island.moments)
    self._reading = threading.Thread(
      target=self._await_read, args=(transfer, copied), name='donation', daemon=True
    )
    self._reading.start()

  def _await_read(self, transfer: int, copied: moments_lib.Snapshot) -> None:
    try:
      self._post_read(transfer, copied)
    except BaseException as error:  # raised again where the node runs
      self._fail(error)

  def _post_read(self, transfer: int, copied: moments_lib.Snapshot) -> None:
    if not bool(copied.finite):
      self._post(events.MomentsRead(transfer=transfer, payload_id=None, payload=None, digest=0))
      return
    payload_id, payload = payloads_lib.keep(self._payloads, moments_lib.to_bytes(copied.moments))
    self._post(
      events.MomentsRead(
        transfer=transfer,
        payload_id=payload_id,
        payload=payload,
        digest=moments_lib.digest(copied.digests),
      )
    )

  def close(self) -> None:
    """Waits for a copy that is being read."""
    if self._reading is not None:
      self._reading.join()

  def take(self, take: actions.TakeMoments) -> None:
    """Replaces the state with a donation if its digest on this device is that of the donor's and
    its values are finite, whatever the donor says."""
    data = self._payloads.get(take.payload_id)
    self._payloads.drop(take.payload_id)
    self._post(
      events.MomentsTaken(transfer=take.transfer, matched=self._replace(data, take.digest))
    )

  def _replace(self, data: memoryview | bytes, digest: int) -> bool:
    try:
      given = moments_lib.from_bytes(data, self._island.moments)
    except ValueError as error:
      self._records.say(f'donation refused: {error}. This learner keeps its own moments.')
      return False
    placed = jax.device_put(given, self._island.shardings.opt_state)
    taken = self._snapshot(placed)
    if moments_lib.digest(taken.digests) != digest or not bool(taken.finite):
      return False
    self._island.moments = placed
    return True
