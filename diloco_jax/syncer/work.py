"""The work of the syncer: outer steps, whole fragments, saves and held-out loss, on the CPU.

One *work thread* changes Theta, first in first out, so a save or a whole fragment contains every
merge before it. It measures each payload that counts while others are on their way. An outer step
screens the payloads, leaves refused ones out (protocol/syncer/screening.py), and is committed to
the log before anything about it is posted. The *evaluation thread* works on copies, so no merge
waits for it.
"""

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from diloco_jax.config import build
from diloco_jax.node import payload as payload_lib
from diloco_jax.node import ports
from diloco_jax.protocol import actions, events, messages
from diloco_jax.report import facts as report_facts
from diloco_jax.report import records as records_lib
from diloco_jax.storage import checkpoint, outer_log, states
from diloco_jax.syncer import commit, global_model, outer_step, stored
from diloco_jax.syncer import evaluation as evaluation_lib
from diloco_jax.syncer import followers as followers_lib
from diloco_jax.transport import payloads as payloads_lib


class Measured(NamedTuple):
  """A payload near Theta, and the length of each of its tensors, float64[T]. These are NaN, so that
  it is refused, if it was lost with the devices of its learner."""

  near: payload_lib.Payload
  lengths_T: np.ndarray


class SyncerWork:
  """The Work port of the syncer (node.ports.Work)."""

  def __init__(
    self,
    assembled: build.Assembly,
    theta: global_model.Theta,
    post: ports.Post,
    fail: Callable[[BaseException], None],
    payloads: ports.Payloads,
    records: records_lib.Recorder,
    checkpoints: checkpoint.Checkpoints,
    log: commit.CommitLog,
    evaluation: evaluation_lib.Evaluation,
    store: stored.Stored | None = None,
    followers: followers_lib.Followers | None = None,
  ):
    """`fail` ends the node: without the work thread nothing is merged or saved. `store`: for a copy
    of each checkpoint."""
    self._assembled = assembled
    self._theta = theta
    self._post = post
    self._fail = fail
    self._payloads = payloads
    self._records = records
    self._checkpoints = checkpoints
    self._log = log
    self._evaluation = evaluation
    self._store = store
    self._followers = followers
    self._evaluated = self._due = 0  # the sync of the last evaluation, and since when one is due
    self._known: dict[int, Measured] = {}  # by payload id
    self._queue: queue.SimpleQueue[actions.Work | int | None] = queue.SimpleQueue()
    self._thread = threading.Thread(target=self._run, name='work', daemon=True)

  def start(self) -> None:
    """Compiles the outer steps, then starts to take work. So no sync waits for the compiler, and
    the grace window does not learn a time that no later sync needs."""
    self._theta.warm_up()
    self._thread.start()

  def submit(self, action: actions.Work) -> None:
    self._queue.put(action)

  def read_for_followers(self, fragment: int) -> None:
    """Asks for a copy of a fragment for the followers."""
    self._queue.put(fragment)

  def stop(self) -> None:
    """Ends the thread after all work submitted before."""
    self._queue.put(None)
    self._thread.join()

  def _run(self) -> None:
    try:
      with self._theta.use_own_device():
        while (action := self._queue.get()) is not None:
          self._perform(action)
    except BaseException as error:  # raised again where the node runs
      self._fail(error)

  def _perform(self, action: actions.Work | int) -> None:
    match action:
      case int(fragment):
        self._copy_for_followers(fragment)
      case actions.Measure(fragment=fragment, payload_id=payload_id):
        with contextlib.suppress(LookupError):  # dropped since, with its session
          self._measure(fragment, payload_id)
      case actions.Merge():
        self._merge(action)
      case actions.ReadFragment(fragment=fragment):
        self._read(fragment)
      case actions.Save():
        self._save(action)
      case _:
        raise TypeError(f'the syncer has no such work: {action}')

  def _merge(self, merge: actions.Merge) -> None:
    """Carries out an outer step, commits it, and only then posts anything about it."""
    p = merge.fragment
    payloads, lengths = zip(
      *(self._measure(p, participant.payload_id) for participant in merge.participants)
    )
    lengths_MxT = np.stack(lengths)
    screened = self._theta.screen(merge.participants, lengths_MxT, len(merge.live))
    merged = self._theta.merge(p, merge.participants, payloads, screened.refused, lengths_MxT)
    done = events.MergeDone(
      sync=merge.sync,
      fragment=p,
      payload_id=None,
      payload=None,
      digest=merged.digest,
      failed=merged.failed,
      norms=screened.norms,
      refused=screened.refused,
    )
    if not merged.failed:  # it is read for its checksum while the disk writes
      announced = outer_step.threads().submit(payloads_lib.keep, self._payloads, merged.delta)
    self._log.write(outer_log.OuterStep(merge, done, merged.gradient))
    for participant in merge.participants:
      self._payloads.drop(participant.payload_id)
      del self._known[participant.payload_id]
    if merged.failed:
      self._post(done)
      return
    payload_id, payload = announced.result()
    if self._followers:
      publish = self._publish(p, merge.sync, merged.digest, payload)
      self._followers.add_delta(publish, self._payloads.get(payload_id))
    self._post(dataclasses.replace(done, payload_id=payload_id, payload=payload))
    self._records.report(
      report_facts.Outer(
        sync=merge.sync,
        fragment=p,
        version=merge.version,
        norm=merged.norm,
        cosines=dict(merged.cosines),
      )
    )
    self._evaluate(merge)

  def _evaluate(self, merge: actions.Merge) -> None:
    """Evaluates once in so many steps. After an outage the model has the learners' new steps in
    some fragments only, and a higher loss than before or after: it waits for the others, for two
    periods at most."""
    config = self._assembled.config
    every, periods = config.train.eval_every, 2 * config.sync.period
    if not every or merge.sync // every <= self._evaluated // every:
      return
    self._due = self._due or merge.sync
    last = merge.machine_state['last_sync']
    oldest = min([merge.sync, *last[: merge.fragment], *last[merge.fragment + 1 :]])
    if merge.sync - oldest <= periods or merge.sync - self._due >= periods:
      self._evaluated, self._due = merge.sync, 0
      self._evaluation.submit(merge.sync)

  def _measure(self, p: int, payload_id: int) -> Measured:
    """A payload of fragment p, which is measured once. Raises LookupError: it was dropped."""
    if payload_id in self._known:
      return self._known[payload_id]
    payload = self._payloads.get(payload_id)
    self._forget_dropped()
    try:
      near = jax.block_until_ready(self._theta.near(p, payload))
      measured = Measured(near, self._theta.lengths(p, near))
    except jax.errors.JaxRuntimeError:
      tensors = len(self._assembled.layout.fragments[p])
      measured = Measured(b'', np.full(tensors, np.nan))
    self._known[payload_id] = measured
    return measured

  def _forget_dropped(self) -> None:
    """The machine has dropped payloads that were measured, with their sessions."""
    for payload_id in [*self._known]:
      try:
        self._payloads.get(payload_id)
      except LookupError:
        del self._known[payload_id]

  def _read(self, p: int) -> None:
    payload_id, payload = payloads_lib.keep(self._payloads, self._theta.published(p))
    self._post(
      events.FragmentRead(
        fragment=p,
        version=self._theta.versions[p],
        payload_id=payload_id,
        payload=payload,
        digest=self._theta.digest(p),
      )
    )

  def _copy_for_followers(self, p: int) -> None:
    assert self._followers
    payload_id, payload = payloads_lib.keep(self._payloads, self._theta.published(p))
    copy = self._payloads.get(payload_id)
    self._payloads.drop(payload_id)
    self._followers.add_whole(self._publish(p, 0, self._theta.digest(p), payload), copy)

  def _publish(self, p: int, sync: int, digest: int, payload: messages.Payload) -> messages.Publish:
    """The message to followers about a version: the delta that a sync has published, or (0) the
    whole fragment."""
    version = self._theta.versions[p]
    return messages.Publish(
      sync=sync,
      fragment=p,
      version=version,
      base_version=version - 1 if sync else None,
      digest=digest,
      settled_to=0,
      keep=True,
      payload=payload,
    )

  def _save(self, save: actions.Save) -> None:
    record = {**save.machine_state, **self._log.position}
    try:
      number = self._checkpoints.save(save.clock, self._theta.arrays(), 0, record)()
    except states.StateError as error:
      self._post(events.SaveDone(clock=save.clock, error=str(error)))
      return
    if self._store:
      self._store.copy(number)
    self._log.compact_behind(self._checkpoints)
    self._post(events.SaveDone(clock=save.clock))
