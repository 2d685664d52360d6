"""Checkers pass on a small right story and fail on the same story with one thing wrong.

A story is what a tape holds: who begins, and the turns of each. Bugs that somebody could write are
the mutants' (mutants.py); here is what they do not reach, and what may be read of a log.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from diloco_jax.protocol import actions, events, facts, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.learner import connection
from diloco_jax.protocol.tape import observers
from diloco_jax.protocol.tape import tape as tape_lib
from diloco_jax.verification.checks import checkers as checkers_lib

MS = 1_000_000
AGREEMENT = '{}'
CONFIG = config_lib.ProtocolConfig(
  learners=1,
  fragments=1,
  period=2,
  overlap=1,
  quorum=1,
  total_steps=2,
  lease_ns=1000 * MS,
  strikes=1,
)
PAYLOAD = messages.Payload(size_bytes=64, crc32=0)
SYNCER = checkers_lib.ObservedProcess(
  1,
  tape_lib.Start(
    role='syncer',
    node='syncer',
    config=CONFIG,
    agreement=AGREEMENT,
    payload_bytes=(64,),
    digests=(100,),
  ),
)
LEARNER = checkers_lib.ObservedProcess(
  2,
  tape_lib.Start(
    role='learner',
    node='l0',
    config=CONFIG,
    digests=(100,),
    identity=connection.Identity(learner='l0', nonce=7, agreement=AGREEMENT, host='h', pid=1),
  ),
)
HELD = (messages.Held(version=0, digest=100),)


@dataclasses.dataclass(frozen=True)
class Turn:
  """One turn: the process, the time (ms), the event, the actions."""

  process: checkers_lib.ObservedProcess
  at: int
  event: events.Event
  out: tuple[actions.Action, ...] = ()


def got(
  message: messages.Message, session: int = 1, payload_id: int | None = None
) -> events.Received:
  return events.Received(session=session, message=message, payload_id=payload_id)


def say(message: messages.Message, session: int = 1, payload_id: int | None = None) -> actions.Send:
  return actions.Send(session=session, message=message, payload_id=payload_id)


def ledger(**changes: Any) -> actions.Report:
  values = {
    'fragments': 1,
    'trained': 20,
    'merged': 20,
    'discarded': {},
    'unsettled': 0,
    'learners': {'l0': {'incarnations': 1, 'steps': 2, 'tokens': 20, 'merged': 20, 'discarded': 0}},
    'synced': 1,
    'cancelled': 0,
    'repaired': 0,
    'skipped': 0,
    'sync': 2,
  }
  return actions.Report(fact=facts.Ledger(**{**values, **changes}))


def merging(**changes: Any) -> actions.Report:
  values = {
    'sync': 2,
    'fragment': 0,
    'version': 1,
    'participants': ('l0',),
    'late': (),
    'waited_ns': 3 * MS,
    'grace_ns': 0,
    'tokens': 20,
    'why': 'all 1 have answered',
    'staleness': 0,
  }
  return actions.Report(fact=facts.Merging(**{**values, **changes}))


JOIN = messages.Join(protocol=1, learner='l0', nonce=7, agreement=AGREEMENT, host='h', pid=1)
CONFIRM = messages.Confirm(
  nonce=7, incarnation=1, clock=0, steps=0, tokens=0, held=HELD, shard=None, cursor=0
)
JOINED = messages.Joined(incarnation=1, clock=0, shard=0, cursor=0, due=(), settled=(0,))
USE = actions.UseShard(shard=0, cursor=0, rewind=False)
PULL = messages.Pull(sync=2, fragment=0, now=True)
OPENED = actions.Report(fact=facts.Opened(sync=2, fragment=0))
CONTRIBUTION = messages.Contribution(
  sync=2,
  fragment=0,
  version=0,
  steps=2,
  tokens_from=0,
  tokens_to=20,
  shard=0,
  cursor=2,
  payload=PAYLOAD,
)
SNAPSHOT = {
  'merging': [],
  'versions': [1],
  'digests': [101],
  'last_sync': [2],
  'next': 4,
  'opened': 2,
  'counts': {'synced': 1, 'cancelled': 0, 'repaired': 0, 'skipped': 0},
  'members': [
    {
      'learner': 'l0',
      'nonce': 7,
      'incarnation': 1,
      'left': False,
      'spoiled': [],
    }
  ],
  'ledger': [['l0', 1, {'trained': 20, 'merged': 20, 'cursors': [20], 'discarded': {}}]],
  'data': {'holders': [[0, 'l0']], 'merged': [[0, [2]]], 'moves': []},
}
BOOKS = {
  **SNAPSHOT,
  'merging': [2],
  'versions': [0],
  'digests': [100],
  'last_sync': [0],
  'counts': {**SNAPSHOT['counts'], 'synced': 0},
  'data': {'holders': [[0, 'l0']], 'merged': [], 'moves': [[2, [['l0', 0, 0, 2]]]]},
}
MERGE = actions.Merge(
  sync=2,
  fragment=0,
  version=1,
  machine_state=BOOKS,
  participants=(
    actions.Participant(learner='l0', incarnation=1, payload_id=5, tokens=20, steps=2),
  ),
)
DONE = events.MergeDone(sync=2, fragment=0, payload_id=6, payload=PAYLOAD, digest=101, norms=(5,))
MERGED = messages.Settled(sync=2, fragment=0, merged=True, reason='')
PUBLISH = messages.Publish(
  sync=2,
  fragment=0,
  version=1,
  base_version=0,
  digest=101,
  settled_to=20,
  keep=True,
  payload=PAYLOAD,
)
ADOPTED = messages.Adopted(fragment=0, version=1, tokens=20, matched=True)
SAVE = actions.Save(clock=2, machine_state=SNAPSHOT)


def progress(step: int) -> messages.Progress:
  return messages.Progress(clock=step, steps=step, tokens=10 * step, step_ns=MS, finished=step >= 2)


STORY = {
  'dial': Turn(LEARNER, 0, events.Wake(), (actions.Dial(session=1),)),
  'accept': Turn(SYNCER, 1, events.Connected(session=1)),
  'connected': Turn(LEARNER, 1, events.Connected(session=1), (say(JOIN),)),
  'join': Turn(SYNCER, 2, got(JOIN), (say(messages.Offer(run='r0', incarnation=1)),)),
  'offer': Turn(LEARNER, 3, got(messages.Offer(run='r0', incarnation=1)), (say(CONFIRM),)),
  'confirm': Turn(SYNCER, 4, got(CONFIRM), (actions.Admit(session=1), say(JOINED))),
  'joined': Turn(LEARNER, 5, got(JOINED), (USE, actions.Step(clock=0))),
  'step 1': Turn(
    LEARNER, 6, events.StepDone(tokens=10, step_ns=MS), (say(progress(1)), actions.Step(clock=1))
  ),
  'progress 1': Turn(SYNCER, 7, got(progress(1))),
  'step 2': Turn(LEARNER, 8, events.StepDone(tokens=10, step_ns=MS), (say(progress(2)),)),
  'progress 2': Turn(SYNCER, 9, got(progress(2)), (say(PULL), OPENED)),
  'pull': Turn(LEARNER, 10, got(PULL), (actions.Encode(sync=2, fragment=0),)),
  'encoded': Turn(
    LEARNER,
    11,
    events.Encoded(sync=2, fragment=0, payload_id=3, payload=PAYLOAD),
    (say(CONTRIBUTION, payload_id=3), actions.Drop(payload_id=3)),
  ),
  'contribution': Turn(SYNCER, 12, got(CONTRIBUTION, payload_id=5), (MERGE, merging())),
  'merged': Turn(
    SYNCER, 13, DONE, (say(MERGED), say(PUBLISH, payload_id=6), actions.Drop(payload_id=6))
  ),
  'save': Turn(SYNCER, 14, events.Wake(), (ledger(), SAVE)),
  'publish': Turn(
    LEARNER,
    15,
    got(PUBLISH, payload_id=4),
    (actions.Adopt(fragment=0, version=1, payload_id=4, whole=False, keep=True, merged=True),),
  ),
  'adopted': Turn(
    LEARNER, 16, events.AdoptDone(fragment=0, version=1, digest=101), (say(ADOPTED),)
  ),
  'heard': Turn(SYNCER, 17, got(ADOPTED)),
  'saved': Turn(SYNCER, 18, events.SaveDone(clock=2)),
}


def watch(story: dict[str, Turn]) -> checkers_lib.Checkers:
  watcher = checkers_lib.Checkers(CONFIG)
  for process in (SYNCER, LEARNER):
    watcher.born(0, process)
  for turn in story.values():
    watcher.saw(turn.process, turn.at * MS, turn.event, turn.out)
  return watcher


def with_out(name: str, *out: actions.Action) -> Callable[[dict], None]:
  """The story with other actions in one turn."""

  def change(story):
    story[name] = dataclasses.replace(story[name], out=out)

  return change


def then(
  process: checkers_lib.ObservedProcess, event: events.Event, *out: actions.Action, at: int = 20
) -> Callable:
  """The story with an additional turn."""

  def change(story):
    story['then'] = Turn(process, at, event, out)

  return change


BROKEN = [  # what no mutant breaks before it breaks something else
  (
    'I4',
    then(
      LEARNER,
      got(dataclasses.replace(PUBLISH, version=0, base_version=None), payload_id=8),
      actions.Adopt(fragment=0, version=0, payload_id=8, whole=True, keep=True, merged=False),
    ),
  ),
  ('I19', with_out('join', say(messages.Finish()))),
  ('P2', then(SYNCER, events.Wake(), actions.Exit(code=0, text=''))),
]


def test_the_correct_story_breaks_no_invariant():
  watch(STORY).finished(30 * MS)


@pytest.mark.parametrize(
  'which', range(len(BROKEN)), ids=[f'{name}-{n}' for n, (name, _) in enumerate(BROKEN)]
)
def test_a_broken_story_is_noticed(which):
  name, change = BROKEN[which]
  story = dict(STORY)
  change(story)
  with pytest.raises(checkers_lib.Violation) as caught:
    watch(story)
  assert caught.value.invariant == name, caught.value


def test_a_violation_names_its_sentence():
  story = dict(STORY)
  with_out('step 1', say(progress(1)))(story)
  with pytest.raises(
    checkers_lib.Violation, match='L1: A learner takes every step .* no step runs'
  ):
    watch(story)


def again(number: int, machine_state: dict | None) -> checkers_lib.ObservedProcess:
  """The syncer starts again."""
  return checkers_lib.ObservedProcess(
    number, dataclasses.replace(SYNCER.start, state=machine_state)
  )


def until(name: str) -> dict[str, Turn]:
  """The story up to that turn."""
  return {turn: STORY[turn] for turn in list(STORY)[: list(STORY).index(name) + 1]}


def log(watcher: checkers_lib.Checkers, *notes: tuple) -> None:
  for kind, *values in notes:
    watcher.logged(40 * MS, observers.LogNote(kind, *values))


WRITTEN = ('appended', 1, 101)  # record 1: the outer step of the story
RECOVERED = {name: value for name, value in SNAPSHOT.items() if name != 'merging'}


def test_a_syncer_continues_after_the_last_record_or_from_a_checkpoint():
  for story in (STORY, until('merged')):
    watcher = watch(story)
    watcher.born(40 * MS, again(3, RECOVERED))
    assert watcher.run.syncer.lineage.versions == [1]
    log(watcher, ('recovered', 1))


def test_a_syncer_that_continues_from_a_wrong_state_is_noticed():
  watcher = watch(STORY)
  with pytest.raises(checkers_lib.Violation, match='I10.*opened: 1, it should be 2'):
    watcher.born(50 * MS, again(4, {**SNAPSHOT, 'opened': 1}))


def test_a_record_that_no_learner_was_told_of_may_count_or_not():
  """The record was written, and the syncer ended before it was durable."""
  for machine_state, number, versions in ((None, 0, [0]), (RECOVERED, 1, [1])):
    watcher = watch(until('contribution'))
    log(watcher, ('durable', 0), WRITTEN)
    watcher.born(40 * MS, again(3, machine_state))
    log(watcher, ('recovered', number), ('durable', number))
    assert watcher.run.syncer.lineage.versions == versions


def test_recovery_of_two_records_beyond_the_durable_ones_is_noticed():
  watcher = watch(until('contribution'))
  watcher.run.records.insert(0, watcher.run.records[0])
  log(watcher, ('durable', 0), ('appended', 2, 101))
  with pytest.raises(checkers_lib.Violation, match='I10: .*after record 2, 0 are durable'):
    watcher.born(40 * MS, again(3, RECOVERED))


def test_a_state_that_differs_from_the_log_is_noticed():
  watcher = watch(until('merged'))
  watcher.born(40 * MS, again(3, RECOVERED))
  with pytest.raises(checkers_lib.Violation, match='I10: .*the log ends with record 2'):
    log(watcher, ('recovered', 2))
  with pytest.raises(checkers_lib.Violation, match='I10: .*not JSON'):
    log(watcher, ('not recovered', 0, 0, '', 'not JSON'))


def test_the_loss_of_a_reported_outer_step_is_noticed():
  with pytest.raises(checkers_lib.Violation, match='I10: .*after record 0, 1 are durable'):
    watch(STORY).born(40 * MS, again(3, None))
  watcher = watch(until('contribution'))
  log(watcher, WRITTEN, ('durable', 1))  # no learner was told of it
  with pytest.raises(checkers_lib.Violation, match='I10: '):
    watcher.born(40 * MS, again(3, None))


def test_a_repair_of_an_undamaged_log_is_noticed():
  with pytest.raises(checkers_lib.Violation, match='I10: .*nothing has rotted'):
    log(watch(STORY), ('repaired', 0, 0, '', 'nothing has rotted'))


def test_versions_go_back_only_when_a_log_was_repaired():
  """A syncer that was rolled back has lost version 1: its holders may be sent version 0."""
  whole = dataclasses.replace(PUBLISH, version=0, base_version=None, digest=100)
  watcher = watch(STORY)
  log(watcher, ('repaired', 1))
  watcher.born(40 * MS, dataclasses.replace(SYNCER, number=3))
  watcher.saw(
    LEARNER,
    41 * MS,
    got(whole, payload_id=8),
    (actions.Adopt(fragment=0, version=0, payload_id=8, whole=True, keep=True, merged=False),),
  )


def test_a_process_that_never_joins_is_noticed():
  watcher = checkers_lib.Checkers(CONFIG)
  for process in (SYNCER, LEARNER):
    watcher.born(0, process)
  watcher.healed(0)
  with pytest.raises(checkers_lib.Violation, match='L3'):
    watcher.finished(9_000 * MS)


def test_every_invariant_has_its_own_id_and_sentence():
  everything = checkers_lib.INVARIANTS
  assert len({invariant.id for invariant in everything}) == len(
    {invariant.sentence for invariant in everything}
  )
  assert len({invariant.id for invariant in everything}) == len(everything)
  assert all(invariant.sentence.endswith('.') for invariant in everything)
