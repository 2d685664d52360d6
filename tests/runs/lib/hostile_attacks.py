"""What was done to a real run, attack by attack.

Each attack is a function of a run, the number of seconds that it may take, and the scale of its
counts; it returns once it has done its worst. It may fail in what it does: that is the syncer's
defence. It raises only if the syncer does not even listen.
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import random
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator

from diloco_jax.protocol import messages
from diloco_jax.transport import chunks
from tests.runs.lib import hostile

Act = Callable[[hostile.Run, float], None]
MOST = 2**63 - 1
NORMAL, HUGE, NAN = 117, 150, 255  # exponents of a payload's blocks


@dataclasses.dataclass(frozen=True)
class Attack:
  """An attack. `sessions`: how many hostile sessions it has at a time; `says`: the syncer has to
  name its learner, whose id is the name of the attack."""

  name: str
  act: Act
  sessions: int
  says: bool


ATTACKS: dict[str, Attack] = {}
BY_DEFAULT = (  # one of each kind that takes seconds: bytes, joins, ids, floods, lies
  'bad_frames',
  'absurd_joins',
  'theft_of_a_live_id',
  'flood_of_progress',
  'steps_in_one_report',
  'a_past_that_was_not',
)


def attack(sessions: int = 1, says: bool = False) -> Callable[[Act], Act]:
  """Registers an attack under its own name."""

  def register(one: Act) -> Act:
    ATTACKS[one.__name__] = Attack(one.__name__, one, sessions, says)
    return one

  return register


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
  ATTACKS[name].act(dataclasses.replace(run, learner=name), seconds)


@contextlib.contextmanager
def clients(run: hostile.Run, count: int, **how: bool) -> Iterator[list[hostile.Client]]:
  """As many sessions as open."""
  opened: list[hostile.Client] = []
  try:
    for _ in range(count):
      with contextlib.suppress(hostile.Refused):
        opened.append(hostile.Client(run.address, **how))
    yield opened
  finally:
    for client in opened:
      client.close()


def until_ended(client: hostile.Client, seconds: float = 1.0) -> bool:
  """Waits until the syncer ends the session."""
  return client.ended.wait(seconds)


def each(run: hostile.Run, acts: list[Callable[[hostile.Client], None]]) -> None:
  """Carries out each act on a session of its own."""
  for act in acts:
    with contextlib.suppress(hostile.Refused), hostile.Client(run.address) as client:
      act(client)
      until_ended(client, 0.2)


def answering(
  run: hostile.Run, payload: Callable[[int], bytes], **lies: int
) -> Callable[[hostile.Member, messages.Pull], None]:
  """Answers every pull at once, with a payload (of a fragment) and lies about it."""

  def answer(member: hostile.Member, pull: messages.Pull) -> None:
    data = payload(pull.fragment)
    word = member.contribution(pull, data)
    if word.steps:
      member.say(dataclasses.replace(word, **lies), data)

  return answer


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
  answer: Callable[[hostile.Member, messages.Pull], None] | None = None,
) -> None:
  """Carries out an act as a member, again and again, in a new process each time."""
  for _ in lives(seconds):
    try:
      with hostile.Member(run, run.learner, answer) as member:
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


@attack()
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
  each(run, [lambda client, one=one: client.frame(one) for one in data])


@attack()
def bad_control_bytes(run: hostile.Run, seconds: float) -> None:
  """Envelopes that are none, one above gRPC's limit, and a wrong checksum."""
  join = hostile.encode(run.join('x'))
  acts = [
    lambda client: client.control(b''),
    lambda client: client.control(b'\xff' * 100),
    lambda client: client.control(join),
    lambda client: client.word(b''),
    lambda client: client.word(join[:-3]),
    lambda client: client.word(bytes(5 << 20)),
  ]
  each(run, acts)


@attack()
def words_before_joined(run: hostile.Run, seconds: float) -> None:
  """Messages of a session that is no member, and fields that are absurd."""
  payload = hostile.gradient(run, 0, NORMAL)
  announced = hostile.announced(payload)
  words = [
    messages.Progress(clock=1, steps=1, tokens=1, step_ns=1, finished=True),
    messages.Contribution(
      sync=MOST,
      fragment=MOST,
      version=MOST,
      steps=MOST,
      tokens_from=0,
      tokens_to=MOST,
      shard=MOST,
      cursor=MOST,
      payload=announced,
    ),
    messages.Adopted(fragment=MOST, version=0, tokens=MOST, matched=False),
    messages.Leave(reason='\x1b[2J'),
  ]
  each(
    run,
    [
      lambda client, word=word: client.say(word, payload if hasattr(word, 'payload') else None)
      for word in words
    ],
  )


@attack()
def absurd_joins(run: hostile.Run, seconds: float) -> None:
  """Ids and agreements of every shape; the agreement as an oracle; one that is nested deeply."""
  ids = ('../../etc/x', 'l0\n', '\0', '\u202e', '\x1b[2J', 'x' * 63, 'X', '')
  agreements = ('', '{}', '[]', 'null', '[' * 65_000, '{"a":' * 10_000, '9' * 60_000, '"\\ud800"')
  joins = [
    *(run.join(one) for one in ids),
    *(run.join('x', agreement=one) for one in agreements),
    run.join('x', protocol=0),
    run.join('x', protocol=MOST),
    run.join('x', host='\x1b[2J\r\n[syncer] all good'),
  ]
  each(run, [lambda client, join=join: client.say(join) for join in joins])


@attack()
def many_held(run: hostile.Run, seconds: float) -> None:
  """A Confirm of 900,000 fragments."""
  held = b'\x32\x02\x08\x01'
  acts = [lambda client: client.word(b'\x12' + _varint(len(held) * 900_000) + held * 900_000)]
  each(run, acts)


def _varint(number: int) -> bytes:
  out = bytearray()
  while number > 127:
    out.append(number & 127 | 128)
    number >>= 7
  return bytes([*out, number])


# --- Places, bytes and time -----------------------------------------------------------------------


@attack()
def silent_sockets(run: hostile.Run, seconds: float) -> None:
  """Connections that say nothing, or half of HTTP/2's first words."""
  sockets: list[socket.socket] = []
  try:
    for number in range(500):
      with contextlib.suppress(OSError):
        sockets.append(connect(run.address))
        if number % 2:
          sockets[-1].send(b'PRI * HTTP/2.0\r\n'[: number % 16])
    time.sleep(seconds)
  finally:
    for one in sockets:
      one.close()


def connect(address: str) -> socket.socket:
  """A socket without gRPC."""
  if address.startswith('unix:'):
    one = socket.socket(socket.AF_UNIX)
    one.connect(address.removeprefix('unix:'))
    return one
  host, _, port = address.rpartition(':')
  return socket.create_connection((host, int(port)), timeout=1)


@attack(sessions=60)
def idle_sessions(run: hostile.Run, seconds: float) -> None:
  """Sessions that open and say nothing, with and without their second stream."""
  with clients(run, 30), clients(run, 30, bulk=False):
    time.sleep(seconds)


@attack(sessions=4)
def endless_transfers(run: hostile.Run, seconds: float) -> None:
  """Payloads of sessions that are no members, none of which ever ends."""
  data = bytes(chunks.CHUNK_BYTES)
  deadline_s = time.monotonic() + seconds
  with clients(run, 4) as opened:
    while True:
      for client in opened:
        client.frame(frame(data, total=2 << 20, count=8))
      while any(client.waiting > 8 and not client.ended.is_set() for client in opened):
        time.sleep(0.01)
        if time.monotonic() > deadline_s:
          return
      if time.monotonic() > deadline_s or all(client.ended.is_set() for client in opened):
        return


@attack()
def random_joins(run: hostile.Run, seconds: float) -> None:
  """Processes of random ids that never confirm."""
  for number in lives(seconds):
    with contextlib.suppress(hostile.Refused), hostile.Client(run.address) as client:
      client.say(run.join(f'r{number}'))
      client.hear(messages.Offer, 0.5)


@attack()
def made_up_ids(run: hostile.Run, seconds: float) -> None:
  """Processes of ever new ids that become members and go."""
  for number in lives(seconds):
    with contextlib.suppress(hostile.Refused), hostile.Member(run, f'm{number}') as member:
      member.step()


@attack()
def many_lives(run: hostile.Run, seconds: float) -> None:
  """Ever new processes of one id."""
  for _ in lives(seconds):
    with contextlib.suppress(hostile.Refused), hostile.Member(run, 'y') as member:
      member.step()


@attack()
def theft_of_a_live_id(run: hostile.Run, seconds: float) -> None:
  """Another process under the id of an honest learner."""
  for _ in lives(min(seconds, 1.0)):
    with contextlib.suppress(hostile.Refused), hostile.Member(run, 'l0') as member:
      member.step()
    time.sleep(0.05)


# --- Floods of a member ---------------------------------------------------------------------------


def flood(
  run: hostile.Run, seconds: float, word: Callable[[hostile.Member], messages.FromLearner]
) -> None:
  """Says a word as fast as the syncer takes it."""

  def act(member: hostile.Member) -> None:
    while time.monotonic() < deadline_s and not member.ended.is_set():
      if member.waiting > 200:
        time.sleep(0.001)
      else:
        member.say(word(member))

  deadline_s = time.monotonic() + seconds
  as_member(run, seconds, act)


@attack()
def flood_of_progress(run: hostile.Run, seconds: float) -> None:
  flood(run, seconds, lambda member: member.progress())


@attack()
def flood_of_joins(run: hostile.Run, seconds: float) -> None:
  """Each with an agreement of 64 KiB: a tape would hold them all."""
  flood(
    run, seconds, lambda member: run.join(run.learner, nonce=member.nonce, agreement='x' * 65_000)
  )


@attack(says=True)
def flood_of_repairs(run: hostile.Run, seconds: float) -> None:
  """Each asks for a whole fragment."""
  flood(
    run,
    seconds,
    lambda member: messages.Adopted(
      fragment=0, version=member.versions[0], tokens=member.tokens, matched=False
    ),
  )


# --- Lies of a member -----------------------------------------------------------------------------


@attack(says=True)
def step_far_ahead(run: hostile.Run, seconds: float) -> None:
  """A clock of 2^53 ends a run that believes it."""

  def act(member: hostile.Member) -> None:
    member.step()
    member.step(clock=2**53)
    until_ended(member)

  as_member(run, min(seconds, 1.0), act)


@attack(says=True)
def tokens_of_a_lifetime(run: hostile.Run, seconds: float) -> None:
  """A contribution of 10^12 tokens, and one of 2^31."""
  for tokens in (10**12, 2**31):
    answer = answering(
      run, lambda p: hostile.gradient(run, p, NORMAL), tokens_from=0, tokens_to=tokens
    )
    as_member(run, seconds / 2, lambda member: member.train(seconds / 2), answer)


@attack(says=True)
def steps_that_were_not_made(run: hostile.Run, seconds: float) -> None:
  """Payloads a thousand times too long, of a million steps."""
  answer = answering(
    run, lambda p: hostile.gradient(run, p, NORMAL + 10), steps=10**6, cursor=10**6
  )
  as_member(run, seconds, lambda member: member.train(seconds), answer)


@attack(says=True)
def steps_in_one_report(run: hostile.Run, seconds: float) -> None:
  """900,000 steps in one Progress, then payloads 256 times too long that weigh as so many."""
  answer = answering(run, lambda p: hostile.gradient(run, p, NORMAL + 8))

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

  as_member(run, seconds, act, answer)


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


@attack(says=True)
def a_past_that_was_not(run: hostile.Run, seconds: float) -> None:
  """The same claim in a Confirm."""
  answer = answering(run, lambda p: hostile.gradient(run, p, NORMAL + 8))
  for _ in lives(seconds):
    try:
      with _Past(run, run.learner, answer) as member:
        member.train(seconds, pause_s=0.06)
    except hostile.Refused:
      time.sleep(0.1)


@attack(says=True)
def huge_payloads(run: hostile.Run, seconds: float) -> None:
  """Payloads that are far too long, or hold NaN."""
  kinds = itertools.cycle((HUGE, NAN, 254))
  answer = answering(run, lambda p: hostile.gradient(run, p, next(kinds)))
  as_member(run, seconds, lambda member: member.train(seconds), answer)


@attack(says=True)
def tiny_payloads_at_once(run: hostile.Run, seconds: float) -> None:
  """Zeros and next to zeros, before anybody else can answer: they pull the norm limit down."""
  kinds = itertools.cycle(((0, 0), (9, -128), (20, 1)))
  answer = answering(run, lambda p: hostile.gradient(run, p, *next(kinds)))

  def act(member: hostile.Member) -> None:
    member.step_ns = 1
    member.train(seconds)

  as_member(run, seconds, act, answer)


@attack()
def own_payload_declined(run: hostile.Run, seconds: float) -> None:
  """A payload waits in an open sync, then its sender disowns it."""

  def answer(member: hostile.Member, pull: messages.Pull) -> None:
    data = hostile.gradient(run, pull.fragment, NORMAL)
    word = member.contribution(pull, data)
    if word.steps:
      member.say(word, data)
      member.say(
        messages.Decline(
          sync=pull.sync,
          fragment=pull.fragment,
          reason=messages.Reason.BAD_VALUE,
          tokens_to=member.tokens + 1_000,
        )
      )

  as_member(run, seconds, lambda member: member.train(seconds), answer)


@attack()
def contributions_repeated(run: hostile.Run, seconds: float) -> None:
  """The same contribution three times, and again on a new session."""
  said: list[tuple[messages.Contribution, bytes]] = []

  def answer(member: hostile.Member, pull: messages.Pull) -> None:
    data = hostile.gradient(run, pull.fragment, NORMAL)
    word = member.contribution(pull, data)
    if word.steps:
      said.append((word, data))
      for _ in range(3):
        member.say(word, data)

  with contextlib.suppress(hostile.Refused), hostile.Member(run, run.learner, answer) as member:
    member.train(seconds / 2)
  with contextlib.suppress(hostile.Refused), hostile.Member(run, run.learner) as member:
    for word, data in said[-20:]:
      member.say(word, data)
    member.train(seconds / 4)


@attack(says=True)
def random_words(run: hostile.Run, seconds: float) -> None:
  """Messages with numbers at the limits of their fields."""
  draw = random.Random(0)
  numbers = (0, 1, 2, 2**31, 2**53, MOST)

  def act(member: hostile.Member) -> None:
    member.train(0.1)
    for _ in range(20):
      words = (
        messages.Decline(
          sync=draw.choice(numbers),
          fragment=draw.randrange(4),
          reason=messages.Reason.BAD_VALUE,
          tokens_to=draw.choice(numbers),
        ),
        messages.Adopted(
          fragment=draw.randrange(4),
          version=draw.choice(numbers),
          tokens=draw.choice(numbers),
          matched=True,
        ),
        member.progress(steps=draw.choice(numbers)),
        member.progress(tokens=draw.choice(numbers)),
      )
      member.say(draw.choice(words))
    until_ended(member, 0.1)

  as_member(run, seconds, act)
