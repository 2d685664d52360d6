"""What was done to a real run: an attack of each kind (bytes, joins, ids, floods, lies).

Each attack is a function of a run and the number of seconds that it may take; it returns once it
has done its worst. It may fail in what it does: that is the syncer's defence. It raises only if the
syncer does not even listen.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import struct
import time
import zlib
from collections.abc import Callable, Iterator

from diloco_jax.protocol import messages
from diloco_jax.transport import chunks
from tests.runs.lib import hostile

Act = Callable[[hostile.Run, float], None]
MOST = 2**63 - 1
TOO_LONG = 125  # exponent of a payload's blocks: 256 times the usual one
ATTACKS: dict[str, Act] = {}


def attack(function: Act) -> Act:
  """Registers an attack under its own name."""
  ATTACKS[function.__name__] = function
  return function


def prepare() -> None:
  """Gives the attacker's process only the CPU that the others leave, as if it had a core of its
  own. Linux compares nice values within a session only, and the sessions by the nice values of
  their autogroups."""
  os.setsid()
  os.nice(19)
  with contextlib.suppress(OSError):  # a kernel without autogroups
    pathlib.Path('/proc/self/autogroup').write_text('19', encoding='utf-8')


def ready() -> None:
  """Called in the attacker's process before the first attack: it has imported everything."""


def act(name: str, run: hostile.Run, seconds: float) -> None:
  """Carries out an attack."""
  ATTACKS[name](dataclasses.replace(run, learner=name), seconds)


def each(run: hostile.Run, acts: list[Callable[[hostile.Client], None]]) -> None:
  """Carries out each act on a session of its own."""
  for act in acts:
    with contextlib.suppress(hostile.Refused), hostile.Client(run.address) as client:
      act(client)
      client.ended.wait(0.2)


def answer(member: hostile.Member, pull: messages.Pull) -> None:
  """Answers a pull at once, with a payload that is far too long."""
  data = hostile.gradient(member.run, pull.fragment, TOO_LONG)
  word = member.contribution(pull, data)
  if word.steps:
    member.say(word, data)


def lives(seconds: float) -> Iterator[int]:
  """Numbers, until the time is over: a liar that was thrown out comes again."""
  deadline_s = time.monotonic() + seconds
  for number in itertools.count(1):
    if time.monotonic() > deadline_s:
      return
    yield number


def as_member(
  run: hostile.Run,
  seconds: float,
  act: Callable[[hostile.Member], None],
  member_class: type[hostile.Member] = hostile.Member,
) -> None:
  """Carries out an act as a member, again and again, in a new process each time."""
  for _ in lives(seconds):
    try:
      with member_class(run, run.learner, answer) as member:
        act(member)
    except hostile.Refused:
      time.sleep(0.1)


# --- Bad bytes ------------------------------------------------------------------------------------


def frame(data: bytes = b'abc', **changes: int | bytes) -> bytes:
  """A frame with a right check of its header."""
  fields = {
    'magic': chunks.MAGIC,
    'version': chunks.VERSION,
    'header': chunks.HEADER_BYTES,
    'total': len(data),
    'index': 0,
    'count': 1,
    'crc32': zlib.crc32(data),
  } | changes
  header = struct.pack('<4sHHQIII', *fields.values())
  return header + struct.pack('<I', zlib.crc32(header)) + data


@attack
def bad_frames(run: hostile.Run, seconds: float) -> None:
  """15 kinds of frames that no learner makes."""
  data = (
    b'',
    b'DLCB',
    bytes(40),
    frame()[:-1],
    frame() + b'x',
    frame(magic=b'HTTP'),
    frame(version=2),
    frame(header=36),
    frame(count=0),
    frame(total=2**63),
    frame(total=2**63, count=2**32 - 1),
    frame(index=1),
    frame(count=2),
    frame(crc32=1),
    bytes(1 << 20),
  )
  each(run, [functools.partial(hostile.Client.frame, data=frame) for frame in data])


@attack
def absurd_joins(run: hostile.Run, seconds: float) -> None:
  """Ids and agreements of every shape; the agreement as an oracle; one that is nested deeply."""
  ids = ('../../etc/x', 'l0\n', '\0', '\u202e', '\x1b[2J', 'x' * 63, 'X', '')
  agreements = ('', '{}', '[]', 'null', '[' * 65_000, '{"a":' * 10_000, '9' * 60_000, '"\\ud800"')
  joins = [
    *(run.join(learner) for learner in ids),
    *(run.join('x', agreement=agreement) for agreement in agreements),
    run.join('x', protocol=0),
    run.join('x', protocol=MOST),
    run.join('x', host='\x1b[2J\r\n[syncer] all good'),
  ]
  each(run, [lambda client, join=join: client.say(join) for join in joins])


@attack
def theft_of_a_live_id(run: hostile.Run, seconds: float) -> None:
  """Another process under the id of an honest learner."""
  for _ in lives(min(seconds, 1.0)):
    with contextlib.suppress(hostile.Refused), hostile.Member(run, 'l0') as member:
      member.step()
    time.sleep(0.05)


@attack
def flood_of_progress(run: hostile.Run, seconds: float) -> None:
  """As fast as the syncer takes it."""

  def act(member: hostile.Member) -> None:
    while time.monotonic() < deadline_s and not member.ended.is_set():
      if member.waiting > 200:
        time.sleep(0.001)
      else:
        member.say(member.progress())

  deadline_s = time.monotonic() + seconds
  as_member(run, seconds, act)


# --- Lies of a member -----------------------------------------------------------------------------


@attack
def steps_in_one_report(run: hostile.Run, seconds: float) -> None:
  """900,000 steps in one Progress, then payloads 256 times too long that weigh as so many."""

  def act(member: hostile.Member) -> None:
    member.step()
    for field, count in (
      ('steps', 1),
      ('clock', 1),
      ('cursor', 1),
      ('tokens', hostile.STEP_TOKENS),
    ):
      setattr(member, field, getattr(member, field) + 900_000 * count)
    member.train(seconds, pause_s=0.06)

  as_member(run, seconds, act)


class _Past(hostile.Member):
  """A new process that claims to have trained for 900,000 steps."""

  def say(self, message: messages.FromLearner, payload: bytes | None = None) -> None:
    if isinstance(message, messages.Confirm):
      self.steps = self.clock = 900_000
      self.tokens = self.steps * hostile.STEP_TOKENS
      message = dataclasses.replace(
        message, clock=self.clock, steps=self.steps, tokens=self.tokens, shard=9, cursor=self.steps
      )
    super().say(message, payload)


@attack
def a_past_that_was_not(run: hostile.Run, seconds: float) -> None:
  """The same claim in a Confirm."""
  as_member(run, seconds, lambda member: member.train(seconds, pause_s=0.06), _Past)
