"""The checkers of donations pass on a right story and fail on the same one with one thing wrong.

The story is a calm run of the simulated world: l0 and l1 train, l2 joins, and the furthest of them
gives it its moments. An edit changes the turns of that story before the checkers see them.
"""

import dataclasses

import pytest

from diloco_jax.proof.checks import checkers, observers
from diloco_jax.proof.sim import world as world_lib
from diloco_jax.protocol import actions as a
from diloco_jax.protocol import events as e
from diloco_jax.protocol import facts
from diloco_jax.protocol import messages as m
from tests.protocol import transcript

MS = 1_000_000
CONFIG = transcript.protocol_config(
  learners=2,
  streams=3,
  fragments=2,
  period=2,
  overlap=1,
  quorum=1,
  total_steps=30,
  donor_wait_ms=2000,
)


class Tale(observers.Observer):
  """Everything that checkers are shown, in order."""

  def __init__(self):
    self.shown = []

  def born(self, now_ns, life):
    self.shown.append((now_ns, life, None, ()))

  def saw(self, life, now_ns, event, out):
    self.shown.append((now_ns, life, event, tuple(out)))

  def crashed(self, life, now_ns, event, error):
    raise error

  def died(self, now_ns, life, killed):
    pass

  def logged(self, now_ns, note):
    pass


@pytest.fixture(scope='module', name='tale')
def _tale() -> list:
  tale = Tale()
  world = world_lib.World(CONFIG, watchers=[tale])
  for name, step_ms in (('l0', 100), ('l1', 110)):
    world.start(name)
    world.island(name).step_ns = step_ms * MS
  world.run(550 * MS)
  world.start('l2')
  world.run(900 * MS)
  return tale.shown


def watch(tale: list, edit=lambda node, event, out: (event, out)) -> None:
  watcher = checkers.Checkers(CONFIG)
  for now_ns, life, event, out in tale:
    if event is None:
      watcher.born(now_ns, life)
    else:
      watcher.saw(life, now_ns, *edit(life.start.node, event, out))


def test_the_right_story_breaks_nothing_and_has_a_donation_in_it(tale):
  watch(tale)
  taken = [
    event
    for _, life, event, _ in tale
    if isinstance(event, e.MomentsTaken) and life.start.node == 'l2'
  ]
  assert [event.matched for event in taken] == [True]


def sends(kind, node, change):
  """Every message of a kind that a node sends is changed, or left out (None)."""

  def edit(who, event, out):
    if who != node:
      return event, out
    changed = []
    for one in out:
      if isinstance(one, a.Send) and isinstance(one.message, kind):
        one = change(one)
      changed += [] if one is None else [one]
    return event, tuple(changed)

  return edit


def says(kind, node, **values):
  return sends(
    kind,
    node,
    lambda send: dataclasses.replace(send, message=dataclasses.replace(send.message, **values)),
  )


def asks(kind, node, change):
  """Every action of a kind that a node asks for is changed."""

  def edit(who, event, out):
    if who == node:
      out = tuple(change(one) if isinstance(one, kind) else one for one in out)
    return event, out

  return edit


def hears(kind, node, change):
  """Every event of a kind that a node hears is changed."""

  def edit(who, event, out):
    return (change(event) if who == node and isinstance(event, kind) else event), out

  return edit


def steps_at_once(who, event, out):
  """l2 trains as soon as it has joined."""
  joined = who == 'l2' and isinstance(getattr(event, 'message', None), m.Joined)
  return event, (*out, a.Step(step=event.message.step)) if joined else out


def says_checkpoint(report):
  if not isinstance(report.fact, facts.Moments):
    return report
  return a.Report(fact=dataclasses.replace(report.fact, by='checkpoint'))


def of_another(send):
  return dataclasses.replace(send, session=1)


@pytest.mark.parametrize(
  'invariant, edit',
  [
    ('I23', says(m.Joined, 'syncer', donation=1)),  # the first ones: nobody can give
    ('I23', says(m.Donate, 'syncer', versions=(0, 0))),
    ('I23', says(m.Donate, 'syncer', transfer=2)),
    ('I23', sends(m.Donate, 'syncer', lambda send: dataclasses.replace(send, session=3))),
    ('I23', says(m.Donation, 'l0', step=99)),
    ('I23', says(m.Donation, 'l0', digest=1)),
    ('I23', says(m.Donation, 'l0', donor='l1')),
    ('I23', says(m.Donation, 'syncer', digest=1)),
    ('I23', sends(m.Donation, 'syncer', of_another)),
    ('I23', asks(a.TakeMoments, 'l2', lambda take: dataclasses.replace(take, digest=1))),
    ('I23', hears(e.MomentsTaken, 'l2', lambda event: dataclasses.replace(event, matched=False))),
    ('I23', asks(a.Report, 'l2', says_checkpoint)),
    ('I17', steps_at_once),
    ('L10', sends(m.Donate, 'syncer', lambda send: None)),
  ],
)
def test_a_wrong_story_is_noticed(tale, invariant, edit):
  with pytest.raises(checkers.Violation) as caught:
    watch(tale, edit)
  assert caught.value.invariant == invariant, caught.value


def test_a_joiner_whose_time_is_over_and_who_still_waits_is_noticed(tale):
  """After its Joined l2 hears nothing more, for longer than it has."""
  watcher = checkers.Checkers(CONFIG)
  for now_ns, life, event, out in tale:
    if event is None:
      watcher.born(now_ns, life)
      continue
    watcher.saw(life, now_ns, event, out)
    if life.start.node == 'l2' and isinstance(getattr(event, 'message', None), m.Joined):
      break
  late_ns = now_ns + CONFIG.donor_wait_ns + CONFIG.lease_ns
  watcher.saw(life, late_ns - 1, e.Wake(), ())
  with pytest.raises(checkers.Violation, match='L10: .*its time is over'):
    watcher.saw(life, late_ns, e.Wake(), ())
