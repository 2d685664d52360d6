"""The syncer's part of the store: what of its folder outlives its disk.

STORE/syncer/claim            which process continues the run, and the settings (claim.py)
STORE/syncer/ckpt/N-H/        a copy of checkpoint N                  (storage/states.py)
STORE/syncer/wal/             with `train.store_log` the records of outer steps, under their names
STORE/syncer/model/           of a run of own loops: names, shapes and version 0 of its model
STORE/model/                  the trained model, for plain Orbax
STORE/config.json, tokenizer  of the run, so that the model can be read from the store alone

The syncer works in its folder. A thread copies each complete checkpoint, or the newest if the
network is slower than the saves; no outer step waits for it. With `train.store_log` a record is put
before it is committed in the folder, so before anything about its outer step leaves the process:
the store has every outer step that a learner has seen.

The claim names the disk whose folder is the newest state of the run. A syncer on that disk goes on
from its folder. One on another disk takes everything from the store, and what it has of the run
itself moves to WORKDIR/aside-K, since the run has gone on without it. H is the id of a manifest, so
two different checkpoints of one number are two copies. After a restore the run begins anew under
STORE/syncer/restored-ID, from the folder that was restored; what was there before stays.
"""

import contextlib
import dataclasses
import functools
import pathlib
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from diloco_jax.config import load, run_config
from diloco_jax.node import loop
from diloco_jax.protocol import actions, events, rate_limited_log
from diloco_jax.storage import (
  checkpoint,
  folders,
  json_files,
  orbax_context,
  outer_log,
  states,
  wal,
)
from diloco_jax.storage import claim as claim_lib
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import lineage as lineage_lib
from diloco_jax.storage import store as store_lib

_LARGE = 1 << 26  # bytes: a record is hardly larger
_RETRY_S, _LOOK_S, _SAY_NS = 5.0, 0.1, 60 * 10**9


@contextlib.contextmanager
def open_store(
  config: run_config.Config, workdir: pathlib.Path, say: Callable[[str], None]
) -> Iterator['Stored | None']:
  """Locks the folder of a run, takes the claim in its store and makes the folder the newest state
  of the run; None: the run has no store. At the end the claim is released.

  Raises:
    DirectoryError: another syncer has the folder, or a restore has not ended.
    ValueError: the store and the folder lie in each other, or gcsfs is missing.
    Denied: one of these: another syncer has the claim; the newest state is on a lost disk; the
      store is that of another run; nobody may write there.
    StoreError: the store cannot be read or written: retry.
  """
  if not config.train.store:
    yield None
    return
  folders.of_learners(workdir, config.train.store)  # refuses one that may not be
  with contextlib.ExitStack() as cleanup:
    log_files = files_lib.Files(folders.log_folder(workdir))
    cleanup.callback(log_files.close)
    log_files.lock()
    stored = Stored(config, workdir, log_files, say)
    cleanup.callback(stored.close)
    try:
      stored.open()
    except store_lib.StoreError as error:
      if re.search('PERMISSION_DENIED|UNAUTHENTICATED|NOT_FOUND', str(error)):
        raise claim_lib.Denied(f'{error}. Nothing was started: check train.store') from error
      raise
    yield stored


class Stored:
  """The store of one syncer process. `open_store` makes it; then `begin`, then the other calls."""

  def __init__(
    self,
    config: run_config.Config,
    workdir: pathlib.Path,
    log_files: files_lib.Files,
    say: Callable[[str], None],
  ):
    self.log_files = log_files  # locked
    self._config, self._workdir, self._say = config, workdir, say
    self._folder = folders.syncer_folder(workdir)
    self._store = store_lib.Store(config.train.store)
    self._claim: claim_lib.Claim | None = None
    self._at = ''  # where copies and records are
    self._begun: dict[str, Any] = {}  # fields of the claim once the run goes on here
    self._checkpoints: checkpoint.Checkpoints | None = None
    self._notices = rate_limited_log.Notices(_SAY_NS, say)
    # What is to be copied, by its kind: what people call it, and what copies it.
    self._due: dict[str, tuple[str, Callable[[], None]]] = {}
    self._damaged: dict[str, str] = {}  # by its kind: what cannot be copied, and why
    self._changed = threading.Condition()
    self._closed = False
    self._thread = threading.Thread(target=self._copy_what_is_due, name='copies', daemon=True)

  # --- The start ----------------------------------------------------------------------------------

  def open(self) -> None:
    """Takes the claim, and makes the folder the newest state of the run. Raises as `open_store`."""
    here = lineage_lib.read(self._workdir, lineage_lib.TAKE_OVER) or lineage_lib.Lineage()
    if here.store == self._store.place and not self._store.is_there():
      raise store_lib.StoreError(
        f'{self._store.place} is away: it has nothing of the run that has begun there. Nothing was '
        'started or made there. Is its file system mounted? If it is lost, choose another '
        'train.store: the run goes on from this folder, with a new one'
      )
    named = dataclasses.replace(here, disk=here.disk or secrets.token_hex(8))

    def begin() -> claim_lib.Content:
      self._require_own_or_empty(here)
      lineage_lib.write(self._workdir, named)  # first: this folder is the newest state of the run
      run = here.run or secrets.token_hex(8)
      if here.run:
        self._say(f'{self._store.place} is a new store: the run goes on in it from this folder')
      return claim_lib.Content(lineage=dataclasses.replace(named, run=run), log=self._end())

    claims = store_lib.Store(self._config.train.store, claim_lib.ANSWER_S)
    lock = str((folders.log_folder(self._workdir) / files_lib.LOCK).stat().st_ino)
    before, self._claim = claim_lib.take(claims, here, lock, begin, self._say)
    self._store.begun = claims.begun = True
    claimed = self._claim.content.lineage
    restored = tuple(dict.fromkeys((*claimed.restored, *here.restored)))
    store_is_behind = restored != claimed.restored  # of a restore of this folder
    self._at = lineage_lib.Lineage(restored=restored).part
    has_newest = before is None or (claim_lib.has(before, here.disk) and not here.changing)
    if store_is_behind:
      for number in folders.checkpoints(self._folder)[-1:]:
        with contextlib.suppress(states.Damaged):  # the error of `recover` has the remedy
          self._copy(number)
    elif before:
      # What the last holder has is older than the store only if its disk itself went back.
      newest, end = max(self._positions(), default=0), self._end()
      if not has_newest or newest > end or (before.log and not wal.numbers(self.log_files)):
        self._go_to_copy(before, here)
    self._fetch_own_model()
    lineage = dataclasses.replace(
      here if store_is_behind else claimed,
      run=claimed.run,
      disk=named.disk,
      store=self._store.place,
      restored=restored,
      changing='',
    )
    lineage_lib.write(self._workdir, lineage)
    # If this process cannot continue the run, the disk that had it still has it.
    self._begun = {'lineage': lineage, 'taker': '', 'over': False}
    if before and not store_is_behind:
      self._fetch_records(before, has_newest)
    if not store_is_behind:
      self._claim.renew(taker=lineage.disk, log=max(self._claim.content.log, self._end()))

  def _require_own_or_empty(self, here: lineage_lib.Lineage) -> None:
    """For a store without a claim. Raises Denied if the store has a run that is not in the
    folder."""
    self._at = here.part
    has_run = here.disk and here.run and not here.changing
    is_behind = has_run and max(self._positions(here.run), default=0) > self._end()
    if is_behind or (not has_run and self._store.names('syncer/')):
      raise claim_lib.Denied(
        f'{self._store.place} has a run, and no {claim_lib.NAME} that says which. Nothing was '
        'changed. Start the syncer on the disk that had the run: it writes the claim again. If '
        'that is lost, choose another train.store'
      )

  def _end(self) -> int:
    """The newest record in the folder."""
    return max(wal.numbers(self.log_files), default=0)

  def _positions(self, run: str = '') -> list[int]:
    """The positions in the log of the newest copies of this run (the claimed one) whose manifests
    read back, as many as the log serves, the newest first. Raises StoreError, OtherFormat."""
    positions, run = [], run or self._claim.content.lineage.run
    for name in reversed(states.copies(self._store, self._at)):
      with contextlib.suppress(states.Damaged):
        manifest, _ = states.fetch_manifest(self._store, name, f'syncer/{states.number(name)}', run)
        positions.append(manifest.record['protocol'][outer_log.POSITION])
      if len(positions) == outer_log.CHECKPOINTS:
        break
    return positions

  def _go_to_copy(self, before: claim_lib.Content, here: lineage_lib.Lineage) -> None:
    """Fetches the newest copy that is whole, and goes back to it."""
    staging, damaged = self._folder / 'from-store', []
    copies = lambda: states.copies(self._store, self._at)

    def fetch(name: str) -> states.Manifest:
      shutil.rmtree(staging, ignore_errors=True)
      to = staging / str(states.number(name))
      return states.fetch(self._store, name, to, f'syncer/{to.name}', before.lineage.run)

    def passed_over(name: str, error: Exception) -> None:
      damaged.append(f'{name}/{states.MANIFEST}')
      self._say(f'{error}: the copy before it is tried')

    with contextlib.suppress(states.Damaged):
      whole = None
      whole = states.newest(copies, fetch, passed_over)
    first = self._store.read(self._record_name(1), _LARGE)
    if not whole and not first and (damaged or before.log):
      raise claim_lib.Denied(
        f'{self._store.place} has no whole copy of the run {before.lineage.run}, of which '
        f'{before.log} outer steps are committed: only the disk of {before.host} has them. Nothing '
        'was changed. Start the syncer on that disk; if it is lost, start over with another '
        'train.store'
      )
    position = whole.record['protocol'] if whole else None
    if first and not whole:
      chain = wal.first_chain(outer_log.run_of(before.agreement)).hex()
      position = {outer_log.POSITION: 0, outer_log.CHAIN: chain}
    self._store.remove(*damaged)  # the run goes on without them, so no later start may take them
    checkpoints = self._folder / folders.CHECKPOINTS
    paths = [path for path in (self._workdir / folders.OWN_MODEL, checkpoints) if path.exists()]
    put = functools.partial(json_files.move, staging, checkpoints) if whole else lambda: None
    for aside in lineage_lib.go_back(
      self._workdir,
      here,
      lineage_lib.TAKE_OVER,
      {self._workdir: paths},
      self.log_files,
      before.agreement,
      position,
      put,
    ):
      self._say(
        f'the run has gone on without this disk: what it had of it has been moved to {aside}; '
        'nothing was deleted'
      )
    if position:
      at = position[outer_log.POSITION]
      self._say(f'the folder begins behind outer step {at}, from {self._store.place}')

  def _fetch_own_model(self) -> None:
    """Fetches the model that a loop has brought, if the folder has none that is whole. Raises
    StoreError; Damaged: neither is whole."""
    own_model = self._workdir / folders.OWN_MODEL
    try:
      states.verify(own_model, folders.VERSION_0)
    except states.Damaged:
      if self._store.read(f'{folders.OWN_MODEL}/{states.MANIFEST}'):
        if own_model.exists():
          json_files.move(own_model, folders.new_aside(self._workdir) / folders.OWN_MODEL)
        states.fetch(self._store, folders.OWN_MODEL, own_model, folders.VERSION_0)

  def _record_name(self, number: int) -> str:
    """The name of a record in the store."""
    return f'{self._at}wal/{wal.name_of(number)}'

  def _fetch_records(self, before: claim_lib.Content, has_newest: bool) -> None:
    """Adds the records that follow the newest one of the folder. Raises Denied: one is damaged."""
    names, begun = set(self._store.names(f'{self._at}wal/')), self._end()
    end = begun
    if self._record_name(end) not in names or self._has_same_history(end):
      while self._record_name(end + 1) in names:
        end += 1
        name = self._record_name(end)
        if (record := self._store.read(name, _LARGE)) is None:
          raise store_lib.StoreError(f'{self._store.place}/{name} was removed: start again')
        json_files.replace(folders.log_folder(self._workdir) / wal.name_of(end), record.data)
    if end > begun:
      try:
        wal.check(self.log_files, wal.run_in(self._header(begun)), begun, end)
      except wal.WalDamaged as error:
        raise claim_lib.Denied(
          f'{self._store.place}/{self._record_name(error.number)} is damaged. Put it back and '
          'start again, or go on without it and all behind it: '
          f'{wal.restore_command(self.log_files.place)}'
        ) from error
    if end < before.log or not (has_newest or before.released or self._config.train.store_log):
      about = f'to about {before.log}' if end < before.log else 'and later, if there were any,'
      self._say(
        f'outer steps {end + 1} {about} are gone: only the disk of {before.host} had them. The run '
        f'continues behind outer step {end}. With train.store_log=true none would be gone'
      )

  def _has_same_history(self, number: int) -> bool:
    """Whether a record of the folder has the hash of that in the store: the run may have gone on
    without this store, or with another. Raises StoreError."""
    record = self._store.read(self._record_name(number), _LARGE)
    return record is not None and wal.chain_in(record.data) == wal.chain_in(self._header(number))

  def _header(self, number: int) -> bytes:
    """The header of a record in the folder."""
    return self.log_files.read(wal.name_of(number), 0, wal.HEADER_BYTES)

  def begin(
    self,
    agreement: str,
    checkpoints: checkpoint.Checkpoints,
    on_loss: Callable[[BaseException], None],
  ) -> None:
    """Puts what a syncer on another disk needs, and starts to copy. The folder is recovered.
    Raises StoreError."""
    self._checkpoints = checkpoints
    self._claim.renew(log=self._end(), agreement=agreement, **self._begun)
    own_model = self._workdir / folders.OWN_MODEL
    if own_model.exists() and not self._store.read(f'{folders.OWN_MODEL}/{states.MANIFEST}'):
      states.put(self._store, folders.OWN_MODEL, own_model, self._require_open)
    for path in self._workdir.iterdir():
      if path.name.startswith(load.WRITTEN):
        self._store.put_file(path.name, path)
    numbers = checkpoints.numbers
    if self._config.train.store_log:
      self._put_records(numbers)
    elif not self._config.sync.checkpoint_every_syncs and not self._config.sync.keep_every:
      self._say(
        'the syncer saves only at its end, so until then the store has none of its checkpoints: '
        'set sync.checkpoint_every_syncs, or train.store_log=true'
      )
    if numbers:
      self.copy(numbers[-1])
    self._thread.start()
    self._claim.on_loss = on_loss
    self._claim.require()

  def _put_records(self, numbers: list[int]) -> None:
    """Puts the records that the store lacks: of the time before `train.store_log` was set."""
    first, *others = wal.numbers(self.log_files)
    copied = max(self._positions(), default=0)
    if copied < first:
      self._copy(numbers[-1])  # the folder has no record that could follow an older one
    names = self._store.names(f'{self._at}wal/')
    common = [number for number in others if self._record_name(number) in names]
    if common and not self._has_same_history(common[-1]):
      self._store.remove(*names)
      names = []
    for number in others:
      name = self._record_name(number)
      if number > copied and name not in names:
        self._store.put_new(name, self.log_files.read(wal.name_of(number)))

  # --- Outer steps --------------------------------------------------------------------------------

  def before_commit(self, number: int, record: Callable[[], bytes]) -> None:
    """Returns once a record may be committed. Raises StoreError while it may not; Denied if the
    claim was taken; WalBroken if a process before this one has put another record late."""
    self._claim.require()
    if self._config.train.store_log:
      name = self._record_name(number)
      if not self._store.put_new(name, record()):
        self._claim.renew()
        raise wal.WalBroken(
          f'{self._store.place}/{name} is a record of the syncer before this one, which came late. '
          'Nothing is lost: start again, the syncer continues behind it'
        )
      self._claim.require()

  def record_end(self) -> None:
    """Tells learners that dial after the end, by the claim. Raises Denied; StoreError."""
    self._claim.renew(over=True)

  def after_commit(self, number: int, clock: int) -> None:
    """An outer step was committed: the next renewal writes it. Raises StoreError, and Denied, while
    nothing about it may leave the process: the disk may have been slow."""
    self._claim.next = {'log': number, 'clock': clock}
    self._claim.require()

  # --- Copies -------------------------------------------------------------------------------------

  def copy(self, number: int | None = None) -> None:
    """Copies a complete checkpoint in the background, unless a newer one comes first; None: the
    trained model."""
    due = 'the trained model', self._copy_model
    if number is not None:
      due = f'checkpoint {number}', functools.partial(self._copy, number)
    with self._changed:
      self._due['checkpoint' if number is not None else 'model'] = due
      self._changed.notify_all()

  def forget_model(self) -> None:
    """Removes the model that an earlier end of the run has put. Raises StoreError."""
    model = folders.MODEL
    self._store.remove(f'{model}/{states.MANIFEST}', *self._store.names(f'{model}/'))

  def _copy_what_is_due(self) -> None:
    while not self._closed:
      with self._changed:
        self._changed.wait_for(lambda: self._due or self._closed)
        due = list(self._due.items())
      for kind, (text, call) in due:
        try:
          call()
        except claim_lib.Denied:
          return  # the claim ends the node
        except states.Damaged as error:  # a later one, or that of the next process, may be copied
          self._damaged[kind] = f'{text} is damaged, so it is not in {self._store.place}: {error}'
          self._say(self._damaged[kind])
        except Exception as error:  # of any kind: else nothing would be copied any more
          self._notices.say(time.monotonic_ns(), kind, f'{text} is not in the store yet: {error}')
          with self._changed:
            self._changed.wait_for(lambda: self._closed, _RETRY_S)
          break
        else:
          self._damaged.pop(kind, '')
        with self._changed:
          if self._due.get(kind) == (text, call):
            del self._due[kind]
          self._changed.notify_all()

  def _copy(self, number: int) -> None:
    folder = self._folder / folders.CHECKPOINTS / str(number)
    if self._checkpoints:
      self._checkpoints.pinned = number  # two later saves would remove it meanwhile
    digest = states.sha256(folder / states.MANIFEST)[:8]
    name = f'{self._at}ckpt/{number}-{digest}'
    if self._store.read(f'{name}/{states.MANIFEST}') is None:
      states.put(self._store, name, folder, self._require_open)
    self._remove_old()

  def _require_open(self) -> None:
    """Raises StoreError, Denied: nothing may be put any more."""
    if self._closed:
      raise store_lib.StoreError('the process ends')
    self._claim.require()

  def _remove_old(self) -> None:
    """Removes copies that need not be kept, what is left of others, and the records behind both of
    the newest two."""
    self._claim.require()
    copies = states.copies(self._store, self._at)
    numbers = sorted(map(states.number, copies))
    every = self._config.sync.keep_every
    kept = orbax_context.kept_numbers(numbers, checkpoint.CHECKPOINTS_KEPT, every)
    stay = tuple(f'{name}/' for name in copies if states.number(name) in kept)
    names = self._store.names(f'{self._at}ckpt/')
    old = [name for name in names if not name.startswith(stay)]
    self._store.remove(*sorted(old, key=lambda name: not name.endswith(states.MANIFEST)))
    if len(behind := self._positions()) == outer_log.CHECKPOINTS:
      limit = self._record_name(behind[-1])
      self._store.remove(*(name for name in self._store.names(f'{self._at}wal/') if name <= limit))

  def _copy_model(self) -> None:
    self.forget_model()
    model = folders.MODEL
    states.put(self._store, model, self._workdir / model, self._require_open)

  # --- The end ------------------------------------------------------------------------------------

  def finish(
    self, result: actions.Exit, event_queue: loop.EventQueue, stopped: bool, finished: bool
  ) -> actions.Exit:
    """Waits until everything is copied, or half of the time of an orderly end has passed since the
    process was asked to stop (`stopped`: it was). Returns the Exit of the process, after a line
    about what is not copied. `finished`: the run is over. Raises Denied."""
    until_s = None
    while self._due:
      if isinstance(event_queue.take(0), events.Stop):
        stopped = True
      if stopped and until_s is None:
        until_s = time.monotonic() + self._config.train.drain_s / 2
      if until_s and time.monotonic() > until_s:
        break
      with self._changed:
        self._changed.wait_for(lambda: not self._due, _LOOK_S)
    again = '. Start the syncer again: it goes on from what is whole, and copies that'
    lines = [text + again for text in self._damaged.values()]
    if left := ' and '.join(text for text, _ in list(self._due.values())):
      lines.append(
        f'{left} is not in {self._store.place}: there was no time. The folder has it; start the '
        'syncer there again, and it is copied'
      )
    if lines and finished:
      return actions.Exit(code=actions.NOT_IN_TIME, text='. '.join(lines))
    for line in lines:
      self._say(line)
    return result

  def close(self) -> None:
    """Ends the copies and releases the claim."""
    with self._changed:
      self._closed = True
      self._changed.notify_all()
    if self._claim:
      self._claim.close()
