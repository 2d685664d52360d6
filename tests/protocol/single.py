"""One machine alone, fed message by message."""

from typing import Any

from diloco_jax.protocol import actions, events, messages
from diloco_jax.protocol.learner import machine as learner_machine
from diloco_jax.protocol.syncer import machine as syncer_machine
from diloco_jax.verification.sim import engine as engine_lib
from diloco_jax.verification.sim import network as network_lib
from diloco_jax.verification.sim import world as world_lib
from tests.protocol import transcript

MS = engine_lib.MS


# --- A syncer and the messages of its learners ----------------------------------------------------


def new_machine(**settings: Any) -> Any:
  usual = {'learners': 1, 'fragments': 1, 'period': 2, 'overlap': 1, 'total_steps': 8}
  config = transcript.make_config(**usual | settings)
  digests = (77,) * config.fragments
  sizes = (network_lib.PAYLOAD_BYTES,) * config.fragments
  return syncer_machine.SyncerMachine(
    config, world_lib.AGREEMENT, world_lib.RUN, digests, sizes, links_measured=True
  )


def received(session: int, message: Any, payload_id: int | None = None) -> events.Received:
  return events.Received(session=session, message=message, payload_id=payload_id)


def join(learner: str = 'l0', nonce: int = 7, incarnation: int = 0) -> messages.Join:
  return messages.Join(
    protocol=messages.PROTOCOL_VERSION,
    run='',
    learner=learner,
    nonce=nonce,
    incarnation=incarnation,
    agreement=world_lib.AGREEMENT,
    host='host',
    pid=1,
  )


def confirm(nonce: int = 7, fragments: int = 1, incarnation: int = 1) -> messages.Confirm:
  return messages.Confirm(
    nonce=nonce,
    incarnation=incarnation,
    clock=0,
    steps=0,
    tokens=0,
    held=(messages.Held(version=0, digest=77),) * fragments,
    shard=None,
    cursor=0,
  )


def progress(step: int) -> messages.Progress:
  return messages.Progress(clock=step, steps=step, tokens=10 * step, step_ns=1, finished=False)


def contribution(
  sync: int = 2,
  tokens_from: int = 0,
  tokens_to: int = 20,
  shard: int = 0,
) -> messages.Contribution:
  return messages.Contribution(
    sync=sync,
    fragment=0,
    version=0,
    steps=2,
    tokens_from=tokens_from,
    tokens_to=tokens_to,
    shard=shard,
    cursor=tokens_to // 10,
    payload=messages.Payload(size_bytes=network_lib.PAYLOAD_BYTES, crc32=0),
  )


def adopted() -> messages.Adopted:
  return messages.Adopted(fragment=0, version=0, tokens=0, matched=False)


def decline() -> messages.Decline:
  return messages.Decline(sync=2, fragment=0, reason='bad_value', tokens_to=10)


def merge_done(sync: int) -> events.MergeDone:
  return events.MergeDone(
    sync=sync,
    fragment=0,
    payload_id=50,
    digest=78,
    payload=messages.Payload(size_bytes=64, crc32=0),
  )


def whole(version: int) -> events.FragmentRead:
  """Fragment 0 is read whole, at version 0 or after `merge_done`."""
  payload = messages.Payload(size_bytes=64, crc32=0)
  return events.FragmentRead(
    fragment=0, version=version, payload_id=8, digest=77 + version, payload=payload
  )


# --- A learner and the messages of its syncer -----------------------------------------------------


def new_learner(**settings: Any) -> Any:
  usual = {'learners': 2, 'fragments': 2, 'period': 4, 'overlap': 1, 'quorum': 2, 'max_lag': 0}
  config = transcript.make_config(**usual | {'total_steps': 20} | settings)
  identity = learner_machine.Identity(
    learner='l0', nonce=1, agreement=world_lib.AGREEMENT, host='host', pid=1
  )
  return learner_machine.LearnerMachine(config, identity, (50, 51))


def connect(
  machine: Any,
  session: int,
  now_ms: int,
  clock: int = 0,
  due: tuple = (),
  settled: tuple = (0, 0),
) -> list:
  machine.handle(now_ms * MS, events.Wake())
  machine.handle(now_ms * MS, events.Connected(session=session))
  offer = messages.Offer(run=world_lib.RUN, incarnation=1)
  (confirm_sent,) = contents(
    machine.handle(now_ms * MS, received(session, offer)), messages.Confirm
  )
  return machine.handle(
    now_ms * MS,
    received(
      session,
      messages.Joined(
        incarnation=1,
        clock=clock,
        shard=0,
        cursor=confirm_sent.cursor,
        due=due,
        settled=settled,
      ),
    ),
  )


def train(machine: Any, now_ms: int) -> list:
  return machine.handle(now_ms * MS, events.StepDone(tokens=10, step_ns=MS))


def encoded(sync: int, fragment: int, payload_id: int) -> events.Encoded:
  return events.Encoded(
    sync=sync,
    fragment=fragment,
    payload_id=payload_id,
    payload=messages.Payload(size_bytes=64, crc32=0),
  )


def publish(
  sync: int, fragment: int, version: int, settled_to: int = 0, keep: bool = True
) -> messages.Publish:
  return messages.Publish(
    sync=sync,
    fragment=fragment,
    version=version,
    base_version=version - 1,
    digest=60,
    settled_to=settled_to,
    keep=keep,
    payload=messages.Payload(size_bytes=64, crc32=0),
  )


# --- What a machine does --------------------------------------------------------------------------


def of(out: list, kind: type) -> list:
  """The actions of this kind."""
  return [action for action in out if isinstance(action, kind)]


def contents(out: list, kind: type) -> list:
  """The messages of this kind that it sends."""
  return [send.message for send in of(out, actions.Send) if isinstance(send.message, kind)]
