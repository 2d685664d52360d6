"""Where the syncer is, and how a learner reaches it."""

import contextlib
import math
import os
import pathlib
import time
from collections.abc import Callable

from diloco_jax.certs import check as check_lib
from diloco_jax.certs import proofs
from diloco_jax.config import build, run_config
from diloco_jax.node import ports
from diloco_jax.protocol import messages
from diloco_jax.storage import claim as claim_lib
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import json_files
from diloco_jax.storage import store as store_lib
from diloco_jax.transport import addresses, grpc_client, link

FILE = 'file:'
SPARE_SESSIONS = 16
MAX_ADDRESS_BYTES = 4096
CLAIM_TRUSTED_S = 300.0  # after the start of a learner


def dialer(
  assembled: build.Assembly,
  resolve: Callable[[], str],
  access: addresses.Access,
) -> ports.MakeTransport:
  """Makes a learner's transport."""

  def make(post: ports.Post, payloads: ports.Payloads) -> ports.Transport:
    # A learner on a slow link may owe the syncer a contribution of each fragment.
    least = limits(assembled, sum(assembled.payload_bytes))
    return grpc_client.GrpcLearnerTransport(resolve, post, payloads, least, access=access)

  return make


def limits(assembled: build.Assembly, owed_bytes: int = 0) -> link.Limits:
  """The limits of a transport. Two whole fragments at once go to a learner, and so many bytes of
  deltas (protocol/syncer/published.py); `owed_bytes` go to the syncer. Payloads may arrive after
  their announcements, since the two use separate streams."""
  sync = assembled.config.sync
  wholes_bytes = messages.MAX_WHOLES * max(assembled.publish_bytes)
  deltas_bytes = messages.most_delta_bytes(assembled.payload_bytes)
  return link.Limits(
    contribution_bytes=assembled.payload_bytes,
    publish_bytes=assembled.publish_bytes,
    max_queued_bytes=max(link.Limits.max_queued_bytes, wholes_bytes + deltas_bytes, owed_bytes),
    max_announced=2 * sync.fragments + SPARE_SESSIONS,
    member_s=sync.lease_s + link.Limits.handshake_s,
    **seats(sync),
  )


def seats(sync: run_config.SyncConfig) -> dict[str, int]:
  """The seats of a syncer, as fields of Limits: after its restart all learners are strangers."""
  return {
    'max_members': 2 * sync.learners + SPARE_SESSIONS,
    'max_strangers': sync.learners + 2 * SPARE_SESSIONS,
  }


def require_own_certificate(access: addresses.Access, learner: str) -> None:
  """Raises ValueError if a learner was given the certificate of another one."""
  if access.tls:
    check_lib.require_learner(access.tls, learner, proofs.utc_now())


def describe(address: str) -> str:
  """The address as a message shows it: a file with its whole path, and whether it is there."""
  path = pathlib.Path(address.removeprefix(FILE)).absolute()
  if not address.startswith(FILE):
    return address
  return f'{FILE}{path}{"" if path.exists() else ", which is not there yet"}'


def resolver(address: str, access: addresses.Access, store: str = '') -> Callable[[], str]:
  """Returns a function that reads the syncer's address at each call: an address (addresses.py) or
  'file:PATH' of a file with one; it raises RunEnded if the file says so, or the claim in `store`.
  Raises ValueError if it is neither, the file is no regular one, or `access` is not enough."""
  if not isinstance(address, str):
    raise ValueError(f'syncer is {address!r}: give HOST:PORT, unix:PATH, or file:PATH of a file')
  # A syncer that continues a run that was over may start after its learners.
  trust_claim_s = time.monotonic() + CLAIM_TRUSTED_S if store else math.inf

  def dialled() -> str:
    if time.monotonic() >= trust_claim_s:
      with contextlib.suppress(store_lib.StoreError, claim_lib.Denied):
        content, _ = claim_lib.read(store_lib.Store(store, claim_lib.ANSWER_S))
        if content and content.over:
          raise addresses.RunEnded(f'{addresses.ENDED}: the claim in {store} says so')
    return address

  if not address.startswith(FILE):
    addresses.check(address, access)
    return dialled
  path = pathlib.Path(address.removeprefix(FILE))
  if path.exists():  # else the syncer starts later
    files_lib.require_file(path)

  def read() -> str:
    data = json_files.read_bytes(path.resolve(), MAX_ADDRESS_BYTES)
    text = os.fsdecode(data).strip()  # may be a path
    addresses.require_going_on(text, path)
    if text.startswith(messages.GONE):
      raise ConnectionError(text)
    return text

  return read
