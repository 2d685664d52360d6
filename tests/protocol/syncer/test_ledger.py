"""Every token is merged or discarded with a reason, once.

Each test opens with the sentence that it checks and its source.
"""

import dataclasses

import pytest

from diloco_jax.protocol import actions, events, messages
from diloco_jax.protocol.syncer import ledger as ledger_lib
from tests.protocol.recording import Recording, discarded
from tests.protocol.single import (
  adopted,
  advance,
  contribution,
  decline,
  joined,
  received,
  two_learners,
)


def test_the_ledger_settles_ranges_once():
  """Every token that was trained is merged, or discarded with a reason."""
  account = ledger_lib.Ledger(2).open('l0', 1)
  account.train(10, 100)
  assert account.settle(0, 20, 50, '', gap='overwritten')
  account.check()
  assert (account.merged, account.discarded) == (30, {'overwritten': 20})
  assert not account.settle(0, 40, 60, '', gap='overwritten'), 'it overlaps what is settled'
  assert account.merged == 30 and account.discarded['duplicate'] == 10
  account.close('left')
  account.check()
  assert account.merged + sum(account.discarded.values()) == 2 * 100


def test_tokens_that_a_merge_refuses_are_found_in_the_account_of_a_replaced_process():
  """The ledger adds up, also if another process took the id while the merge was under way."""
  book = ledger_lib.Ledger(1)
  account = book.open('l0', 1)
  account.train(10, 100)
  assert account.settle(0, 0, 60, '', gap='undone')
  book.fold('l0', 1)
  book.revoke('l0', 1, 60, 'bad_value')
  book.check()
  assert book.totals()['discarded'] == {'bad_value': 60, 'lost_with_process': 40}
  assert book.totals()['trained'] == 100 and not book.totals()['merged']


def test_what_a_learner_drops_it_has_trained_and_the_steps_of_a_replaced_process_stay():
  book = ledger_lib.Ledger(1)
  account = book.open('l0', 1)
  account.train(3, 30)
  account.drop(0, 40, 'undone')  # its report of the last step is still on the way
  book.check()
  assert (account.trained, account.discarded) == (40, {'undone': 40})
  book.fold('l0', 1)
  book.open('l0', 2).train(4, 50)
  assert book.trained('l0') == (7, 90) and book.learners()['l0']['steps'] == 7


def test_tokens_of_a_killed_process_are_lost_with_it():
  # Reliability fault 1: "counted lost_with_process".
  seen = Recording(learners=1, fragments=1, period=10, overlap=1, quorum=1, total_steps=40)
  seen.start('l0').run(450)
  seen.world.end(seen.world.learners['l0'])
  seen.start('l0').run(900)
  assert discarded(seen) == {'lost_with_process': 40}


def test_a_repeated_contribution_counts_once():
  # Reliability I1: each contribution at most once.
  machine = two_learners(quorum=2)
  machine.handle(3, received(1, contribution(), payload_id=1))
  again = machine.handle(3, received(1, contribution(), payload_id=2))
  assert again == [actions.Drop(payload_id=2)]
  out = machine.handle(3, received(2, contribution(shard=1), payload_id=3))
  (merge,) = [a for a in out if isinstance(a, actions.Merge)]
  assert [participant.payload_id for participant in merge.participants] == [1, 3]


def test_tokens_of_a_cancelled_sync_can_be_sent_again():
  # messages.Settled: a cancelled sync makes no version, so no publish replaces the anchor.
  machine, session = joined()
  advance(machine, session, step=2)
  machine.handle(
    3, received(session, messages.Decline(sync=2, fragment=0, reason='empty', tokens_to=20))
  )
  machine.handle(4, received(session, contribution(sync=2), payload_id=1))  # it was in flight
  advance(machine, session, step=4)
  out = machine.handle(5, received(session, contribution(sync=4, tokens_to=40), payload_id=2))
  (merge,) = [a for a in out if isinstance(a, actions.Merge)]
  assert merge.participants[0].tokens == 40
  machine.check()


def test_a_range_that_overlaps_is_refused_and_the_learner_gets_a_fresh_anchor():
  # Ledger: ranges never overlap, so no token counts twice; and the refusals must end.
  machine, session = joined()
  advance(machine, session, step=2)
  machine.handle(
    2, received(session, messages.Decline(sync=2, fragment=0, reason='bad_value', tokens_to=20))
  )
  machine.handle(
    3,
    events.FragmentRead(
      fragment=0,
      version=0,
      payload_id=8,
      digest=77,
      payload=messages.Payload(size_bytes=4, crc32=0),
    ),
  )
  advance(machine, session, step=4)
  out = machine.handle(4, received(session, contribution(sync=4, tokens_to=40), payload_id=2))
  assert actions.ReadFragment(fragment=0) in out and actions.Drop(payload_id=2) in out
  assert not any(isinstance(a, actions.Merge) for a in out)
  machine.check()


def test_a_process_that_outlives_the_end_of_a_run_is_counted_in_the_next():
  """The ledger adds up across a restart of a finished run, too."""
  seen = Recording(learners=1, fragments=1, period=2, overlap=1, quorum=1, total_steps=4)
  seen.start('l0').run(250)
  seen.world.link('l0').cut.update(('up', 'down'))
  process = seen.world.learners['l0']
  seen.world.syncer.machine.finished = True  # a run that was closed without this learner
  seen.world.syncer.machine._linger_ns = seen.world.now_ns
  seen.run(2000)
  assert seen.world.syncer.exit is not None
  seen.world.start_syncer()
  seen.world.network.heal(seen.world.link('l0'))
  seen.run(20_000)
  assert process.exit is not None and seen.world.syncer.exit is not None
  assert seen.world.ledger().trained == 40


@pytest.mark.parametrize(
  'word', [dataclasses.replace(adopted(), tokens=30, matched=True), decline()], ids=type
)
def test_a_payload_whose_tokens_are_disowned_is_withdrawn(
  word: messages.Adopted | messages.Decline,
):
  # Ledger: tokens trained before an adoption are overwritten, so they cannot be merged too.
  machine = two_learners(quorum=2)
  machine.handle(3, received(1, contribution(), payload_id=1))
  out = machine.handle(3, received(1, word))
  assert actions.Drop(payload_id=1) in out
  out = machine.handle(3, received(2, contribution(shard=1), payload_id=3))
  assert not any(isinstance(a, actions.Merge) for a in out)
  machine.check()
