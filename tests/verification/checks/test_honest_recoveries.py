"""What an honest syncer does after odd peers, full disks and its own death is no violation."""

import itertools
from typing import Any

import pytest

from diloco_jax.protocol import messages
from diloco_jax.protocol.learner import machine as learner_machine
from diloco_jax.verification.checks import checkers as checkers_lib
from diloco_jax.verification.checks import judge_tapes
from diloco_jax.verification.replay import tape_files
from diloco_jax.verification.sim import arrays
from diloco_jax.verification.sim import tapes as sim_tapes
from diloco_jax.verification.sim import world as world_lib
from tests.protocol import transcript

MS = transcript.MS


def watched(**settings) -> world_lib.World:
  config = transcript.make_config(
    **{'learners': 1, 'quorum': 1, 'fragments': 1, 'period': 8, 'overlap': 2, 'shards': 4}
    | settings
  )
  world = world_lib.World(config, watchers=[checkers_lib.Checkers(config)])
  start(world, 'l0')
  world.run(3_000 * MS)
  return world


def start(world, name):
  process = world.start(name)
  process.island.step_ns = 100 * MS
  return process


class Stranger:
  """A process without a machine: it dials, says a word, and hears nothing."""

  alive, frozen, name = True, False, 'stranger'

  def __init__(self, world: world_lib.World):
    self._world = world
    self._numbers = itertools.count(1)

  def post(self, event: Any, content: Any = None) -> None:
    pass

  def say(self, *words: Any) -> None:
    """Says these words on a new session."""
    number, world = next(self._numbers), self._world
    world.network.dial(self, world.link(self.name), number)
    world.run(world.now_ns + 20 * MS)
    for word in words:
      content = 'bytes' if getattr(word, 'payload', None) else None
      world.network.send(self, number, word, content)
    world.run(world.now_ns + 20 * MS)


PROGRESS = messages.Progress(clock=1, steps=1, tokens=10, step_ns=100 * MS, finished=False)


@pytest.mark.parametrize(
  'word',
  [
    messages.Progress(clock=1, steps=9, tokens=90, step_ns=100 * MS, finished=False),
    messages.Adopted(fragment=0, version=9, tokens=0, matched=True),
    messages.Decline(sync=8, fragment=0, reason='bored', tokens_to=10),
    messages.Contribution(
      sync=8,
      fragment=0,
      version=0,
      steps=1,
      tokens_from=0,
      tokens_to=10,
      shard=1,
      cursor=99,
      payload=arrays.PAYLOAD,
    ),
  ],
)
def test_sessions_that_are_closed_as_implausible(word):
  """A liar without a tape is closed, and in quarantine after some strikes."""
  world = watched(strikes=2)
  liar = Stranger(world)
  join = messages.Join(
    protocol=messages.PROTOCOL_VERSION,
    learner='x',
    nonce=99,
    agreement=world_lib.AGREEMENT,
    host='bad',
    pid=1,
    run=world_lib.RUN,
  )
  held = (messages.Held(version=-1, digest=0),)
  confirm = messages.Confirm(
    nonce=99, incarnation=1, clock=0, steps=0, tokens=0, held=held, shard=None, cursor=0
  )
  for _ in range(3):
    liar.say(join, confirm, PROGRESS, word)
    merged = world.ledger().learners['l0']['merged']
    world.run(world.now_ns + 3_000 * MS)
    assert world.ledger().learners['l0']['merged'] > merged
  member = world.syncer.machine._members.by_id['x']
  assert member.max_strikes == 2 and not member.live


@pytest.mark.parametrize('trains_ms', [0, 250])
def test_ids_that_the_syncer_forgets(trains_ms):
  world = watched()
  for number in range(12):
    stranger = start(world, f's{number * 7 % 12}')
    world.run(world.now_ns + (60 + trains_ms) * MS)
    world.end(stranger)
    world.run(world.now_ns + 300 * MS)
    if number == 6:
      world.end(world.syncer)
      world.run(world.now_ns + 100 * MS)
      world.start_syncer()
      world.run(world.now_ns + 2_000 * MS)
  rows = world.ledger().learners
  assert ('(forgotten)' in rows) == (trains_ms > 0) and len(rows) < 8
  merged = rows['l0']['merged']
  world.run(world.now_ns + 3_000 * MS)
  assert world.ledger().learners['l0']['merged'] > merged


def test_a_tape_that_ended_before_its_syncer_is_judged_up_to_its_end(tmp_path):
  """Its disk was full; the syncer was killed later, and the next one continues after it."""
  config = transcript.make_config(
    learners=2, quorum=2, fragments=1, period=8, overlap=2, total_steps=60
  )
  world = world_lib.World(config, watchers=[sim_tapes.Tapes(tmp_path)])
  for name in ('l0', 'l1'):
    start(world, name)
  world.run(3_000 * MS)
  world.end(world.syncer)
  world.run(world.now_ns + 300 * MS)
  world.start_syncer()
  world.run(60_000 * MS, lambda: world.finished)
  assert judge(tmp_path).broken is None and not judge(tmp_path).unread
  path = tmp_path / 'syncer.1.0.jsonl'
  lines = path.read_bytes().splitlines(keepends=True)
  unread = []
  for kept in range(1, len(lines), 9):
    path.write_bytes(b''.join(lines[:kept]))
    verdict = judge(tmp_path)
    assert verdict.broken is None, (kept, verdict.text())
    assert ('Only up to here' in verdict.text()) == bool(verdict.unread)
    unread.append(bool(verdict.unread))
  assert all(unread[: len(unread) // 2]) and not unread[-1]
  path.unlink()
  assert judge(tmp_path).broken is None and judge(tmp_path).unread


def judge(folder):
  read = [tape_files.read(process_tape) for process_tape in tape_files.find(folder)]
  return judge_tapes.judge(
    [judge_tapes.Tape(reader.header.node, reader.header.start, reader) for reader in read]
  )


@pytest.mark.parametrize('tells', [True, False])
def test_wrong_bits_are_told_on_the_next_session(monkeypatch, tells):
  """The session breaks while l0 adopts; a learner that keeps silent then is noticed (I7b)."""
  world = watched()
  learner = world.learners['l0']
  learner.island.adopt_ns = 200 * MS
  learner.flips.add(0)
  world.run(world.now_ns + 10_000 * MS, lambda: bool(learner.machine._adopting))
  world.network.reset(learner)
  if not tells:
    renew = learner_machine.LearnerMachine._renew

    def silent(self, fragment, anchor, clock):
      sound, anchor.sound = anchor.sound, True
      renew(self, fragment, anchor, clock)
      anchor.sound = sound

    monkeypatch.setattr(learner_machine.LearnerMachine, '_renew', silent)
  world.link('l0').cut.update(('up', 'down'))
  world.run(world.now_ns + 400 * MS)
  assert not learner.machine._anchors[0].sound
  world.network.heal(world.link('l0'))
  if tells:
    world.run(world.now_ns + 3_000 * MS)
    assert learner.machine._anchors[0].sound
  else:
    with pytest.raises(checkers_lib.Violation, match='I7b'):
      world.run(world.now_ns + 3_000 * MS)
