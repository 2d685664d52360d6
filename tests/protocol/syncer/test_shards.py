"""Data shards: which learner reads which, from which position, and which batches count."""

import dataclasses

import pytest

from diloco_jax.protocol import actions, events, messages
from diloco_jax.protocol.syncer import shards as shards_lib
from diloco_jax.verification.sim import engine as engine_lib
from tests.protocol.recording import Recording
from tests.protocol.single import (
  connect,
  contribution,
  merge_done,
  new_learner,
  of,
  received,
  train,
)
from tests.protocol.talk import Talk

MS = engine_lib.MS
ShardPosition = messages.ShardPosition
TWO = {'learners': 2, 'fragments': 1, 'period': 2, 'overlap': 1, 'quorum': 1, 'shards': 2}


def books(count: int = 3, **committed: int) -> shards_lib.Shards:
  """Shards of which some are committed (v0=5: shard 0, its first five batches) for fragment 0."""
  shards = shards_lib.Shards(count, fragments=2)
  for name, cursor in committed.items():
    move(shards, int(name[1:]), cursor)
  return shards


def said(shard: int, cursor: int, fragment: int = 0, steps: int = 1) -> messages.Contribution:
  return dataclasses.replace(
    contribution(shard=shard), cursor=cursor, fragment=fragment, steps=steps
  )


def move(shards: shards_lib.Shards, shard: int, cursor: int, fragment: int = 0) -> None:
  shards.merge(99, fragment, [('l0', said(shard, cursor, fragment))])
  shards.end(99, (), failed=False)


# --- Assignment -----------------------------------------------------------------------------------


def test_the_free_shard_that_is_committed_least_is_assigned_first():
  shards = books(v0=5, v1=3, v2=3)
  assert shards.assign('l0', None, None, {'l0'}) == ShardPosition(1, 3)
  assert shards.assign('l1', None, None, {'l0', 'l1'}) == ShardPosition(2, 3)
  shards.check()


def test_an_id_gets_its_own_shard_again_at_the_committed_cursor():
  shards = books(v0=5)
  shards.assign('l0', None, 0, {'l0'})
  move(shards, 0, 8)
  assert shards.assign('l0', None, 0, {'l0'}) == ShardPosition(0, 8)


@pytest.mark.parametrize('restarted', [False, True])
def test_a_process_that_reconnects_continues_at_its_position(restarted):
  """A restarted syncer accepts a claim on a shard that nobody holds."""
  shards, claim = books(), ShardPosition(0, 7)
  if not restarted:
    shards.assign('l0', None, None, {'l0'})
  assert shards.assign('l0', claim, None if restarted else 0, {'l0'}, steps=7) == claim


# Of the last one: else a liar could skip the batches of a free shard, or all that there can be.
@pytest.mark.parametrize(
  'claim',
  [ShardPosition(2, 4), ShardPosition(1, 9), ShardPosition(3, 9), ShardPosition(2, 2**53)],
  ids=['merged further since', 'read by another', 'there is no such shard', 'more than its steps'],
)
def test_a_claim_that_does_not_hold_is_not_kept(claim):
  shards = books(v2=5)
  shards.assign('l1', ShardPosition(1, 0), None, {'l1'})
  assert shards.assign('l0', claim, None, {'l0', 'l1'}, steps=9) == ShardPosition(0, 0)


def test_a_disconnected_learner_keeps_its_shard_while_others_are_free():
  shards = books(2)
  shards.assign('l0', None, None, {'l0'})
  assert shards.assign('l1', None, None, {'l1'}) == ShardPosition(1, 0)
  move(shards, 1, 4)
  least_read = ShardPosition(0, 0)  # of the two that are disconnected
  assert shards.assign('l2', None, None, {'l2'}) == least_read
  assert shards.assign('l3', None, None, {'l1', 'l2', 'l3'}) is None
  assert shards.all_read({'l1', 'l2', 'l3'})


def test_a_shard_whose_cursor_may_move_gets_no_new_reader():
  shards = books(1)
  shards.assign('l0', None, None, {'l0'})
  shards.merge(4, 0, [('l0', said(0, 6))])
  same = ShardPosition(0, 7)  # of the same process
  assert shards.assign('l0', same, 0, {'l0'}, steps=7) == same
  shards.give_back('l0')
  assert shards.assign('l0', None, 0, {'l0'}) is None
  assert not shards.all_read({'l0'})
  shards.end(4, (), failed=False)
  assert shards.assign('l0', None, 0, {'l0'}) == ShardPosition(0, 6)


@pytest.mark.parametrize('failed, committed', [(False, (6, 0)), (True, (0, 0))])
def test_the_cursor_of_a_refused_participant_or_outer_step_does_not_move(failed, committed):
  shards = books(2)
  shards.merge(4, 0, [('l0', said(0, 6)), ('l1', said(1, 5))])
  shards.end(4, ('l1',), failed)
  assert (shards.committed(0), shards.committed(1)) == committed


# --- Cursors --------------------------------------------------------------------------------------


def test_a_batch_counts_once_for_each_fragment():
  shards = books(v0=5)
  shards.assign('l0', ShardPosition(0, 9), None, {'l0'}, steps=4)
  assert shards.counts('l0', said(0, 9, fragment=0, steps=4))
  assert not shards.counts('l0', said(0, 9, fragment=0, steps=5))
  assert shards.counts('l0', said(0, 9, fragment=1, steps=5))
  assert not shards.counts('l1', said(0, 9, fragment=1, steps=1)), 'it is not its shard'


@pytest.mark.parametrize(
  'failed, merged', [(True, [[1, [3, 0]]]), (False, [[0, [0, 6]], [1, [3, 0]]])]
)
def test_an_outer_step_under_way_ends_after_a_restart_too(failed, merged):
  before = books(2, v1=3)
  before.merge(4, 1, [('l0', said(0, 6))])
  after = shards_lib.Shards(2, 2)
  after.load(before.state())
  after.end(4, (), failed)
  assert after.state()['merged'] == merged and after.state()['moves'] == []


def test_a_contribution_of_batches_that_were_merged_is_a_duplicate():
  """Its tokens are new, its batches are not: a syncer that lost the readers may pull both."""
  talk = Talk('l0')
  talk.steps('l0', to=2)
  talk.hears('l0', contribution(), 1)
  talk.turn(merge_done(2))
  talk.adopts('l0', version=1, tokens=20)
  talk.steps('l0', to=4)
  again = contribution(sync=4, tokens_from=20, tokens_to=40)
  talk.hears('l0', dataclasses.replace(again, version=1, cursor=3), 2)
  assert actions.Drop(payload_id=2) in talk.out
  assert 'duplicate' in [settled.reason for settled in talk.sent(messages.Settled)]
  assert talk.machine.state()['data']['merged'] == [[0, [2]]]


# --- Data of their own ----------------------------------------------------------------------------


def test_each_learner_with_data_of_its_own_has_a_number_of_its_own_for_good():
  shards = shards_lib.Shards(10**6, fragments=2, local=True)
  assert [shards.assign(f'l{n}', None, None, {'l0'}).shard for n in range(40)] == [*range(40)]
  move(shards, 1, 8)
  shards.merge(4, 0, [('l2', said(2, 6))])
  for name in ('l1', 'l2', 'l3'):
    shards.give_back(name)
  # That of l3, which nothing was merged of, is free; that of l1 waits for l1, however long.
  assert shards.assign('new', None, None, set()) == ShardPosition(3, 0)
  assert shards.assign('newer', ShardPosition(1, 8), None, set(), steps=9) == ShardPosition(40, 0)
  assert shards.assign('l1', None, 1, set()) == ShardPosition(1, 8)
  assert shards.assign('l2', None, 2, set()) is None, 'an outer step may move its cursor'
  shards.end(4, (), failed=False)
  assert shards.assign('l2', None, 2, set()) == ShardPosition(2, 6)
  assert not shards.all_read({f'l{n}' for n in range(40)})
  shards.check()


def test_nobody_waits_for_data_of_its_own():
  """More learners than shards, one of which is away for hours."""
  seen = Recording(**TWO, total_steps=60, local=1)
  seen.start('l0', 'l1').run(500)
  seen.start('l2').run(1000)
  assert [joined.shard for _, joined in seen.sent(messages.Joined)] == [0, 1, 2]
  assert not [entry for entry in seen.of(actions.Say) if 'waits' in entry[2].text]


# --- A learner moves ------------------------------------------------------------------------------


def test_a_learner_that_is_given_another_shard_undoes_its_steps():
  machine = new_learner(max_lag=None)
  connect(machine, 1, 0)
  train(machine, 10)
  machine.handle(11 * MS, events.Disconnected(session=1, reason='cut'))
  machine.handle(5000 * MS, events.Wake())
  machine.handle(5000 * MS, events.Connected(session=2))
  out = machine.handle(5000 * MS, received(2, messages.Offer(run='r0', incarnation=1)))
  confirms = [action.message for action in of(out, actions.Send)]
  assert (confirms[0].shard, confirms[0].cursor) == (0, 1)
  out = machine.handle(
    5001 * MS,
    received(
      2, messages.Joined(incarnation=1, clock=0, shard=5, cursor=30, due=(), settled=(0, 0))
    ),
  )
  assert not of(out, actions.UseShard), 'a step runs'
  machine.handle(5002 * MS, received(2, messages.Pull(sync=2, fragment=0, now=True)))
  out = train(machine, 5010)
  assert actions.UseShard(shard=5, cursor=30, rewind=True) in out
  assert not of(out, actions.Encode), 'there is nothing to give'
  out = train(machine, 5020)
  assert of(out, actions.Encode)
  _, covers = machine._encoding[0]
  assert (covers['shard'], covers['cursor'], covers['steps']) == (5, 31, 1)
  assert (covers['tokens_from'], covers['tokens_to']) == (20, 30)


# --- In a run -------------------------------------------------------------------------------------


def test_a_learner_without_a_free_shard_waits_for_one():
  seen = Recording(**TWO, total_steps=60)
  seen.start('l0', 'l1').run(500)
  seen.start('l2').run(1000)
  assert len(seen.sent(messages.Joined)) == 2
  ((_, _, line),) = [entry for entry in seen.of(actions.Say) if 'l2 waits' in entry[2].text]
  assert 'others read all 2 shards' in line.text and 'data.shards' in line.text
  seen.world.learners['l0'].stop('preempted')
  seen.run(2000)
  entered = seen.sent(messages.Joined)[-1][1]
  assert entered.shard == 0 and entered.cursor > 0
  assert any(name == 'l2' for _, name, _ in seen.of(actions.Step))
