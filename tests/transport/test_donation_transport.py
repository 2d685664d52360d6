"""A donation over gRPC: after all other payloads, at its rate, and whole."""

import queue
import time

import pytest

from diloco_jax.protocol import events, messages
from diloco_jax.transport import addresses, grpc_client, grpc_server, link, payloads
from tests.transport import answers

DEADLINE_S = 60
MIB = 1 << 20
RATE = 4 * MIB
ACCESS = addresses.Access(plaintext_loopback=True)
MOMENTS = bytes(range(256)) * (4 * MIB // 256)
FRAGMENT = b'a fragment'
LIMITS = link.Limits(
  contribution_bytes=(len(FRAGMENT), len(FRAGMENT)),
  publish_bytes=(40, 40),
  donation_bytes=len(MOMENTS),
  donation_bytes_per_s=RATE,
  drain_s=1.0,
)
JOIN = messages.Join(protocol=1, learner='l0', nonce=1, agreement='', host='', pid=1)


class End:
  """One end of the wire and its events."""

  def __init__(self, make):
    self.inbox, self.kept = queue.Queue(), payloads.PayloadStore()
    self.transport = make(self.inbox.put, self.kept)

  def hears(self):
    return self.inbox.get(timeout=DEADLINE_S)


@pytest.fixture(name='ends')
def _ends():
  """The syncer, a learner, and the syncer's number of their session."""
  syncer = End(
    lambda post, kept: grpc_server.GrpcSyncerTransport(
      '127.0.0.1:0', post, kept, LIMITS, access=ACCESS
    )
  )
  learner = End(
    lambda post, kept: grpc_client.GrpcLearnerTransport(
      lambda: f'127.0.0.1:{syncer.transport.port}', post, kept, LIMITS, access=ACCESS
    )
  )
  learner.transport.dial(1)
  assert isinstance(learner.hears(), events.Connected)
  session = syncer.hears().session
  learner.transport.send(1, JOIN)
  assert isinstance(syncer.hears().message, messages.Join)
  for asked in (
    messages.Donate(transfer=1, clock=0, versions=(0, 0)),
    messages.Pull(sync=2, fragment=0, now=True),
  ):
    syncer.transport.send(session, asked)
    assert learner.hears().message == asked
  yield syncer, learner, session
  learner.transport.shutdown(0.0)
  syncer.transport.shutdown(0.0)


DONATION = messages.Donation(
  transfer=1, donor='l0', clock=7, versions=(1, 2), digest=3, payload=answers.payload(MOMENTS)
)
CONTRIBUTION = answers.contribution(answers.payload(FRAGMENT), sync=2, version=1)


def test_a_contribution_overtakes_an_earlier_donation(ends):
  syncer, learner, _ = ends
  start_s = time.monotonic()
  learner.transport.send(1, DONATION, MOMENTS)
  learner.transport.send(1, CONTRIBUTION, FRAGMENT)
  first, last = syncer.hears(), syncer.hears()
  took_s = time.monotonic() - start_s
  assert (first.message, last.message) == (CONTRIBUTION, DONATION)
  assert bytes(syncer.kept.get(last.payload_id)) == MOMENTS
  # The last of four chunks may leave once three have had their time.
  assert took_s >= 3 * MIB / RATE, took_s


def test_the_syncer_relays_a_donation_unchanged(ends):
  syncer, learner, session = ends
  learner.transport.send(1, DONATION, MOMENTS)
  came = syncer.hears()
  syncer.transport.send(session, came.message, syncer.kept.get(came.payload_id))
  syncer.kept.drop(came.payload_id)
  relayed = learner.hears()
  assert relayed.message == DONATION and bytes(learner.kept.get(relayed.payload_id)) == MOMENTS


def test_a_disconnected_donor_leaves_no_partial_donation(ends):
  syncer, learner, session = ends
  learner.transport.send(1, DONATION, MOMENTS)
  learner.transport.close(1, 'it ends')
  assert isinstance(syncer.hears(), events.Disconnected)
  assert syncer.inbox.empty() and len(syncer.kept) == 0
