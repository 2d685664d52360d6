"""The claim of a syncer on the run in a store: of two syncers, one continues it.

The claim is one object, STORE/syncer/claim, and every write of it requires its present generation.
Its holder renews it every RENEW_S. One that could not renew it for FRESH_S commits no outer step
until it can; only after EXPIRED_S without a renewal may another take it, so by then the holder has
stopped to commit. A holder whose claim was taken ends for good; one whose claim was removed makes
it again, since any other process would have made one of its own.

A process that finds the claim of its own disk on its own host continues at once: it has the lock
that the process before it had (storage/files.py), so that one is dead. It also does after a process
that has ended in order, which releases the claim. Any other waits for EXPIRED_S, and is refused if
the claim is renewed twice meanwhile; one renewal may have been on its way when its sender died.

Times are those of one host's monotonic clock, so two clocks need not agree. A host that is
paused while its clock does not run on (a virtual machine) may publish what it had just committed;
the records of `train.store_log` have no such gap, since a record is put once (syncer/stored.py).
"""

import dataclasses
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from diloco_jax.protocol import formats, rate_limited_log, safe_json
from diloco_jax.protocol.tape import codec
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import json_files
from diloco_jax.storage import lineage as lineage_lib
from diloco_jax.storage import store as store_lib

NAME = 'syncer/claim'
RENEW_S, FRESH_S, EXPIRED_S = 10.0, 20.0, 30.0
ANSWER_S = 10.0  # within which the store is to answer
LOOK_S = 2.0  # between two looks at another's claim, and after a renewal that failed


class Denied(ValueError):
  """The run in the store is not this process's to continue: never retry."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Content:
  """The content of the claim.

  Attributes:
    lineage: of the newest state of the run, and the disk whose folder is that state.
    taker: a disk that has taken all of the run from the store, and has not continued it yet.
    lock: the file that the holder has locked: a copy of the disk has another.
    process: the holder, by a name that only it has.
    host, pid: the holder, for people.
    renewed: how many times it was, so no renewal is equal to another.
    released: the holder has ended in order.
    over: the run has reached its end.
    log, clock: the newest committed outer step when it was renewed: its record, its sync.
    agreement: the settings of the run (protocol/agreement.py), once it has begun.
  """

  lineage: lineage_lib.Lineage
  taker: str = ''
  lock: str = ''
  process: str = ''
  host: str = ''
  pid: int = 0
  renewed: int = 0
  released: bool = False
  over: bool = False
  log: int = 0
  clock: int = 0
  agreement: str = ''

  @property
  def holder(self) -> str:
    return f'syncer pid {self.pid} on {self.host}'


def read(store: store_lib.Store) -> tuple[Content | None, bytes | None]:
  """The claim, and its generation. Raises StoreError; Denied if it is none."""
  stored = store.read(NAME)
  if stored is None:
    return None, None
  place = f'{store.place}/{NAME}'
  try:
    values = json_files.unseal(safe_json.parse_object(stored.data))
    content = formats.require('claim', values, place).get('content')
    return codec.decode(Content, content, 'it'), stored.generation
  except formats.OtherFormat as error:
    raise Denied(str(error)) from error
  except (ValueError, codec.TapeError) as error:
    raise Denied(
      f'{place} is no claim: {error}. Nothing was changed. Remove it, and start the syncer on the '
      'disk that had the run: it writes the claim again'
    ) from error


def lineage_in(store: store_lib.Store, content: Content | None) -> lineage_lib.Lineage:
  """The lineage of the newest state of the run in a store. Raises StoreError: without a claim
  nothing says where that is, as the run was restored."""
  if not content and store.names('syncer/restored-'):
    raise store_lib.StoreError(
      f'{store.place} has no {NAME}, which says what the run was restored to. Start the syncer on '
      'the disk that has the run: it writes the claim again'
    )
  return content.lineage if content else lineage_lib.Lineage()


def take(
  store: store_lib.Store,
  here: lineage_lib.Lineage,
  lock: str,
  begin: Callable[[], Content],
  say: Callable[[str], None],
) -> tuple[Content | None, 'Claim']:
  """Takes the claim, and waits for that if need be; from then on it is renewed. Returns its content
  before, and the claim.

  Args:
    store: of the run.
    here: the lineage of this process's folder.
    lock: the file that this process has locked there.
    begin: makes the claim of a run that begins in this store.
    say: prints a line for people.

  Raises:
    Denied: another process continues the run, or the store has another run; nothing was changed.
    StoreError: the store cannot be read or written.
  """
  host = files_lib.host_name()
  before, generation = read(store)
  if before and here.run not in ('', before.lineage.run):
    raise Denied(
      f'{store.place} holds the run {before.lineage.run}, this folder the run {here.run}. Nothing '
      'was changed. Choose another train.store, or another folder'
    )
  is_free = before is None or before.released
  is_free = is_free or (has(before, here.disk) and (before.lock, before.host) == (lock, host))
  if before and not is_free:
    before, generation = _wait_until_free(store, before, generation, say)
  content = dataclasses.replace(
    before or begin(),
    lock=lock,
    process=secrets.token_hex(8),
    host=host,
    pid=os.getpid(),
    released=False,
  )
  claim = Claim(store, content, generation, say)
  claim.renew()
  claim.thread.start()
  return before, claim


def has(content: Content, disk: str) -> bool:
  """Whether a disk has the newest state of the run."""
  return disk != '' and disk in (content.lineage.disk, content.taker)


def _wait_until_free(
  store: store_lib.Store, before: Content, generation: bytes | None, say: Callable[[str], None]
) -> tuple[Content, bytes | None]:
  """Returns the claim once it was not renewed for so long, or is released. Raises Denied if it is
  renewed twice."""
  say(f'{store.place} is claimed by the {before.holder}: looks for {EXPIRED_S:g} s if it is alive')
  until_s, renewed = time.monotonic() + EXPIRED_S, False
  while True:
    left_s = until_s - time.monotonic()
    time.sleep(min(max(left_s, 0.0), LOOK_S))
    now, newer = read(store)
    if now and now.released:
      return now, newer
    if newer != generation and now and not renewed:
      before, generation, renewed = now, newer, True
      until_s = time.monotonic() + EXPIRED_S
      continue
    if newer != generation:
      raise Denied(
        f'{store.place} is in use: the {(now or before).holder} continues its run and renews its '
        'claim. Nothing was changed. Stop that syncer first, or choose another train.store'
      )
    if left_s <= 0:
      return before, generation


class Claim:
  """A claim of this process. Any thread may call it.

  Attributes:
    content: its content.
    next: fields that the next renewal changes.
    on_loss: called if the claim is taken.
    thread: renews it.
  """

  def __init__(
    self,
    store: store_lib.Store,
    content: Content,
    generation: bytes | None,
    say: Callable[[str], None],
  ):
    """`generation`: of the claim that it replaces."""
    self.content = content
    self.next: dict[str, Any] = {}
    self.on_loss: Callable[[BaseException], None] = lambda error: None
    self.thread = threading.Thread(target=self._run, name='claim', daemon=True)
    self._store, self._generation, self._say = store, generation, say
    self._fresh_until_s = 0.0
    self._lost: Denied | None = None
    self._lock = threading.Lock()
    self._closed = threading.Event()

  def require(self) -> None:
    """Returns if this process holds the claim for the next seconds. Raises Denied if it was taken;
    StoreError if it could not be renewed for too long."""
    if self._lost:
      raise self._lost
    if time.monotonic() > self._fresh_until_s:
      raise store_lib.StoreError(
        f'the claim in {self._store.place} could not be renewed for {FRESH_S:g} s: another syncer '
        'may have it soon'
      )

  def renew(self, **changes: Any) -> None:
    """Renews it at once, with these changes. Raises Denied if it was taken; StoreError."""
    with self._lock:
      if self._lost:
        raise self._lost
      since_s = time.monotonic()
      changes = self.next | changes | {'renewed': self.content.renewed + 1}
      self.content = dataclasses.replace(self.content, **changes)
      values = json.loads(codec.encode(formats.stamp('claim') | {'content': self.content}))
      data = json.dumps(json_files.seal(values)).encode()
      while (generation := self._store.replace(NAME, data, self._generation)) is None:
        stored, self._generation = read(self._store)  # an earlier write of this process, perhaps
        if stored is not None and stored.process != self.content.process:
          self._lost = Denied(
            f'this syncer has lost its claim in {self._store.place}: the {stored.holder} has taken '
            'it. It commits nothing more'
          )
          raise self._lost
      self._generation, self._fresh_until_s = generation, since_s + FRESH_S

  def close(self) -> None:
    """Releases the claim: nothing of this process is under way any more."""
    self._closed.set()
    self.thread.join()
    try:
      self.renew(released=True)
    except (Denied, store_lib.StoreError) as error:
      self._say(f'the claim was not released: {error}')

  def _run(self) -> None:
    pause_s, notices = RENEW_S, rate_limited_log.Notices(60 * 10**9, self._say)
    while not self._closed.wait(pause_s):
      try:
        self.renew()
        pause_s = RENEW_S
      except Denied as error:
        self.on_loss(error)
        return
      except store_lib.StoreError as error:
        pause_s = min(RENEW_S, LOOK_S)
        notices.say(time.monotonic_ns(), '', f'the claim could not be renewed: {error}')
