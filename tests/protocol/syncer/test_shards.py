"""Data shards: which learner reads which, from which position, and which batches count."""

import dataclasses

import pytest

from diloco_jax.protocol import actions, events, messages
from diloco_jax.protocol.syncer import shards as shards_lib
from diloco_jax.verification.sim import engine as engine_lib
from tests.protocol.recording import Recording
from tests.protocol.single import (
  connect,
  contents,
  contribution,
  joined,
  merge_done,
  new_learner,
  progress,
  received,
  train,
)

MS = engine_lib.MS
ShardPosition = messages.ShardPosition
TWO = {'learners': 2, 'fragments': 1, 'period': 2, 'overlap': 1, 'quorum': 1, 'shards': 2}


def books(count: int = 3, **committed: int) -> shards_lib.Shards:
  """Shards of which some are committed (v0=5: shard 0, its first five batches) for fragment 0."""
  made = shards_lib.Shards(count, fragments=2)
  for name, cursor in committed.items():
    move(made, int(name[1:]), cursor)
  return made


def said(shard: int, cursor: int, fragment: int = 0, steps: int = 1) -> messages.Contribution:
  return dataclasses.replace(
    contribution(shard=shard), cursor=cursor, fragment=fragment, steps=steps
  )


def move(made: shards_lib.Shards, shard: int, cursor: int, fragment: int = 0) -> None:
  made.merge(99, fragment, [('l0', said(shard, cursor, fragment))])
  made.end(99, (), made=True)


# --- Assignment -----------------------------------------------------------------------------------


def test_the_free_shard_that_is_committed_least_is_assigned_first():
  made = books(v0=5, v1=3, v2=3)
  assert made.assign('l0', None, None, {'l0'}) == ShardPosition(1, 3)
  assert made.assign('l1', None, None, {'l0', 'l1'}) == ShardPosition(2, 3)
  made.check()


def test_an_id_gets_its_own_shard_again_at_the_committed_cursor():
  made = books(v0=5)
  made.assign('l0', None, 0, {'l0'})
  move(made, 0, 8)
  assert made.assign('l0', None, 0, {'l0'}) == ShardPosition(0, 8)


def test_a_process_that_reconnects_continues_at_its_position():
  made = books()
  made.assign('l0', None, None, {'l0'})
  assert made.assign('l0', ShardPosition(0, 7), 0, {'l0'}, steps=7) == ShardPosition(0, 7)


def test_a_restarted_syncer_accepts_a_claim_on_an_unheld_shard():
  made, claim = books(v2=5), ShardPosition(2, 7)
  assert made.assign('l0', claim, None, {'l0'}, steps=2) == claim


def test_a_process_has_read_no_more_batches_than_it_made_steps():
  """Else a liar could skip the batches of a free shard, or all that there can be."""
  made = books(v2=5)
  assert made.assign('l0', ShardPosition(2, 2**53), None, {'l0'}, steps=2) == ShardPosition(0, 0)


@pytest.mark.parametrize(
  'claim',
  [ShardPosition(2, 4), ShardPosition(1, 9), ShardPosition(3, 9)],
  ids=['merged further since', 'read by another', 'there is no such shard'],
)
def test_a_claim_that_does_not_hold_is_not_kept(claim):
  made = books(v2=5)
  made.assign('l1', ShardPosition(1, 0), None, {'l1'})
  assert made.assign('l0', claim, None, {'l0', 'l1'}, steps=9) == ShardPosition(0, 0)


def test_a_disconnected_learner_keeps_its_shard_while_others_are_free():
  made = books(2)
  made.assign('l0', None, None, {'l0'})
  assert made.assign('l1', None, None, {'l1'}) == ShardPosition(1, 0)
  move(made, 1, 4)
  assert made.assign('l2', None, None, {'l2'}) == ShardPosition(
    0, 0
  )  # of the two disconnected ones, the least read
  assert made.assign('l3', None, None, {'l1', 'l2', 'l3'}) is None
  assert made.all_read({'l1', 'l2', 'l3'})


def test_a_shard_whose_cursor_may_move_gets_no_new_reader():
  made = books(1)
  made.assign('l0', None, None, {'l0'})
  made.merge(4, 0, [('l0', said(0, 6))])
  same = ShardPosition(0, 7)  # of the same process
  assert made.assign('l0', same, 0, {'l0'}, steps=7) == same
  made.give_back('l0')
  assert made.assign('l0', None, 0, {'l0'}) is None
  assert not made.all_read({'l0'})
  made.end(4, (), made=True)
  assert made.assign('l0', None, 0, {'l0'}) == ShardPosition(0, 6)


def test_the_cursor_of_a_refused_outer_step_does_not_move():
  made = books(1)
  made.merge(4, 0, [('l0', said(0, 6))])
  made.end(4, (), made=False)
  assert made.assign('l0', None, 0, {'l0'}) == ShardPosition(0, 0)


def test_the_cursor_of_a_refused_participant_does_not_move():
  made = books(2)
  made.merge(4, 0, [('l0', said(0, 6)), ('l1', said(1, 5))])
  made.end(4, ('l1',), made=True)
  assert (made.committed(0), made.committed(1)) == (6, 0)


# --- Cursors --------------------------------------------------------------------------------------


def test_a_batch_counts_once_for_each_fragment():
  made = books(v0=5)
  made.assign('l0', ShardPosition(0, 9), None, {'l0'}, steps=4)
  assert made.counts('l0', said(0, 9, fragment=0, steps=4))
  assert not made.counts('l0', said(0, 9, fragment=0, steps=5))
  assert made.counts('l0', said(0, 9, fragment=1, steps=5))
  assert not made.counts('l1', said(0, 9, fragment=1, steps=1)), 'it is not its shard'


@pytest.mark.parametrize(
  'made, merged', [(False, [[1, [3, 0]]]), (True, [[0, [0, 6]], [1, [3, 0]]])]
)
def test_an_outer_step_under_way_ends_after_a_restart_too(made, merged):
  before = books(2, v1=3)
  before.merge(4, 1, [('l0', said(0, 6))])
  after = shards_lib.Shards(2, 2)
  after.load(before.state())
  after.end(4, (), made)
  assert after.state()['merged'] == merged and after.state()['moves'] == []


def test_a_contribution_of_batches_that_were_merged_is_a_duplicate():
  """Its tokens are new, its batches are not: a syncer that lost the readers may pull both."""
  machine, session = joined()
  machine.handle(2, received(session, progress(2)))
  machine.handle(3, received(session, contribution(), payload_id=1))
  machine.handle(4, merge_done(2))
  machine.handle(
    5, received(session, messages.Adopted(fragment=0, version=1, tokens=20, matched=True))
  )
  machine.handle(6, received(session, progress(4)))
  again = dataclasses.replace(
    contribution(sync=4, tokens_from=20, tokens_to=40), version=1, cursor=3
  )
  out = machine.handle(7, received(session, again, payload_id=2))
  assert actions.Drop(payload_id=2) in out
  assert 'duplicate' in [content.reason for content in contents(out, messages.Settled)]
  assert machine.state()['data']['merged'] == [[0, [2]]]
  machine.check()


# --- Data of their own ----------------------------------------------------------------------------


def test_each_learner_with_data_of_its_own_has_a_number_of_its_own_for_good():
  made = shards_lib.Shards(10**6, fragments=2, local=True)
  assert [made.assign(f'l{n}', None, None, {'l0'}).shard for n in range(40)] == [*range(40)]
  move(made, 1, 8)
  made.merge(4, 0, [('l2', said(2, 6))])
  for name in ('l1', 'l2', 'l3'):
    made.give_back(name)
  # That of l3, which nothing was merged of, is free; that of l1 waits for l1, however long.
  assert made.assign('new', None, None, set()) == ShardPosition(3, 0)
  assert made.assign('newer', ShardPosition(1, 8), None, set(), steps=9) == ShardPosition(40, 0)
  assert made.assign('l1', None, 1, set()) == ShardPosition(1, 8)
  assert made.assign('l2', None, 2, set()) is None, 'an outer step may move its cursor'
  made.end(4, (), made=True)
  assert made.assign('l2', None, 2, set()) == ShardPosition(2, 6)
  assert not made.all_read({f'l{n}' for n in range(40)})
  made.check()


def test_nobody_waits_for_data_of_its_own():
  """More learners than shards, one of which is away for hours."""
  seen = Recording(**TWO, total_steps=60, local=1)
  seen.start('l0', 'l1').run(500)
  seen.start('l2').run(1000)
  assert [joined.shard for _, joined in seen.sent(messages.Joined)] == [0, 1, 2]
  assert not [one for one in seen.of(actions.Say) if 'waits' in one[2].text]


# --- A learner moves ------------------------------------------------------------------------------


def test_a_learner_that_is_given_another_shard_undoes_its_steps():
  machine = new_learner(max_lag=None)
  connect(machine, 1, 0)
  train(machine, 10)
  machine.handle(11 * MS, events.Disconnected(session=1, reason='cut'))
  machine.handle(5000 * MS, events.Wake())
  machine.handle(5000 * MS, events.Connected(session=2))
  out = machine.handle(5000 * MS, received(2, messages.Offer(run='r0', incarnation=1)))
  told = [one.message for one in out if isinstance(one, actions.Send)]
  assert (told[0].shard, told[0].cursor) == (0, 1)
  out = machine.handle(
    5001 * MS,
    received(
      2, messages.Joined(incarnation=1, clock=0, shard=5, cursor=30, due=(), settled=(0, 0))
    ),
  )
  assert not any(isinstance(one, actions.UseShard) for one in out), 'a step runs'
  machine.handle(5002 * MS, received(2, messages.Pull(sync=2, fragment=0, now=True)))
  out = train(machine, 5010)
  assert actions.UseShard(shard=5, cursor=30, rewind=True) in out
  assert not any(isinstance(one, actions.Encode) for one in out), 'there is nothing to give'
  out = train(machine, 5020)
  assert any(isinstance(one, actions.Encode) for one in out)
  _, covers = machine._encoding[0]
  assert (covers['shard'], covers['cursor'], covers['steps']) == (5, 31, 1)
  assert (covers['tokens_from'], covers['tokens_to']) == (20, 30)


# --- In a run -------------------------------------------------------------------------------------


def test_a_learner_without_a_free_shard_waits_for_one():
  seen = Recording(**TWO, total_steps=60)
  seen.start('l0', 'l1').run(500)
  seen.start('l2').run(1000)
  assert len(seen.sent(messages.Joined)) == 2
  ((_, _, line),) = [one for one in seen.of(actions.Say) if 'l2 waits' in one[2].text]
  assert 'others read all 2 shards' in line.text and 'data.shards' in line.text
  seen.world.learners['l0'].stop('preempted')
  seen.run(2000)
  entered = seen.sent(messages.Joined)[-1][1]
  assert entered.shard == 0 and entered.cursor > 0
  assert any(name == 'l2' for _, name, _ in seen.of(actions.Step))


def test_a_disconnected_member_loses_its_shard_and_gets_another():
  """l1 reconnects while l2 reads its shard and l0 has left: l1 continues on l0's shard."""
  seen = Recording(**TWO, total_steps=80)
  seen.start('l0', 'l1').run(500)
  seen.world.link('l1').cut.update(('up', 'down'))
  seen.run(2000)
  seen.start('l2').run(2500)
  assert seen.sent(messages.Joined)[-1][1].shard == 1
  seen.world.learners['l0'].stop('preempted')
  seen.run(3000)
  seen.world.network.heal(seen.world.link('l1'))
  seen.run(6000)
  (moved,) = [
    action for _, name, action in seen.of(actions.UseShard) if name == 'l1' and action.rewind
  ]
  assert moved.shard == 0 and moved.cursor > 0
