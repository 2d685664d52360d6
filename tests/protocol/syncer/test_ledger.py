"""Every token is merged or discarded with a reason, once.

Each test opens with the sentence that it checks and its source.
"""

import dataclasses

import pytest

from diloco_jax.protocol import actions, messages
from diloco_jax.protocol.syncer import ledger as ledger_lib
from tests.protocol.recording import Recording
from tests.protocol.single import adopted, contribution, decline, whole
from tests.protocol.talk import Talk


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


def test_tokens_of_a_cancelled_sync_can_be_sent_again():
  # messages.Settled: a cancelled sync makes no version, so no publish replaces the anchor.
  talk = Talk('l0')
  talk.steps('l0', to=2)
  talk.hears('l0', messages.Decline(sync=2, fragment=0, reason='empty', tokens_to=20))
  talk.hears('l0', contribution(sync=2), 1)  # it was in flight
  talk.steps('l0', to=4)
  talk.hears('l0', contribution(sync=4, tokens_to=40), 2)
  (merge,) = talk.merges
  assert merge.participants[0].tokens == 40


def test_a_range_that_overlaps_is_refused_and_the_learner_gets_a_fresh_anchor():
  # Ledger: ranges never overlap, so no token counts twice; and the refusals must end.
  talk = Talk('l0')
  talk.steps('l0', to=2)
  talk.hears('l0', messages.Decline(sync=2, fragment=0, reason='bad_value', tokens_to=20))
  talk.turn(whole(0))
  talk.steps('l0', to=4)
  talk.hears('l0', contribution(sync=4, tokens_to=40), 2)
  assert actions.ReadFragment(fragment=0) in talk.out and actions.Drop(payload_id=2) in talk.out
  assert not talk.merges


@pytest.mark.parametrize(
  'message', [dataclasses.replace(adopted(), tokens=30, matched=True), decline()], ids=type
)
def test_a_payload_whose_tokens_are_disowned_is_withdrawn(message):
  # Ledger: tokens trained before an adoption are overwritten, so they cannot be merged too.
  talk = Talk('l0', 'l1', quorum=2)
  talk.steps('l0', 'l1', to=3)
  talk.hears('l0', contribution(), 1)
  talk.hears('l0', message)
  assert actions.Drop(payload_id=1) in talk.out
  talk.hears('l1', contribution(shard=1), 3)
  assert not talk.merges
