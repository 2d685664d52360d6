"""A log of outer steps that the syncer refuses, in an operator's hands: what there is, and what to
keep.

The state behind record N can be made again if there is a checkpoint to begin from (or version 0, if
the log reaches back to record 1), and every record between it and N is whole::

    checkpoint b <= N, records b + 1 ... N whole    the log is cut behind N
    checkpoint b == N                               no record is needed: a new log begins behind it

So a log that ends before its checkpoint loses nothing that the checkpoint holds. Whatever is left
out is put aside under another name, never deleted: bytes of the log as `*.aside`, checkpoints that
are newer than N as `STEP.aside`. A repair that was interrupted is completed by running it again.

The outer steps that are dropped had been published. Learners that hold their values are sent the
older ones when they come back, and what they trained since their last contribution is discarded as
overwritten.
"""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

from diloco_jax.storage import checkpoint, outer_log, wal, wal_format, wal_recovery
from diloco_jax.storage import files as files_lib

LOG, CHECKPOINTS = 'wal', 'ckpt'


class Saved(NamedTuple):
  """A checkpoint of the syncer whose record can be read. Its arrays are read when it starts."""

  step: int  # its folder's name
  position: int  # the last record that it holds
  chain: bytes | None  # hash of the history up to there


class Findings(NamedTuple):
  """What there is on the disk of a syncer that is not running."""

  log: wal_recovery.Found
  saved: list[Saved]  # oldest first
  fits: list[Saved]  # those from which the log goes on
  newest: int  # the newest record that anything tells of

  @property
  def ways(self) -> list[tuple[int, Saved | None]]:
    """The best ways to go on, most is kept first: the last record, and the checkpoint behind which
    a new log begins (None: the log is kept up to that record)."""
    ends = sorted({self.log.last, *(one.position for one in self.saved)}, reverse=True)
    return [(end, base) for end in ends for possible, base in [self.way(end)] if possible]

  @property
  def from_the_beginning(self) -> bool:
    return self.log.first == 1 and bool(self.log.segments)

  def way(self, number: int) -> tuple[bool, Saved | None]:
    """(whether the run can go on behind a record, the checkpoint behind which a log begins)."""
    first = 0 if self.from_the_beginning else self.log.first  # else nothing would be left of it
    bases = [one.position for one in self.fits] + [0] * self.from_the_beginning
    if first <= number <= self.log.last and any(base <= number for base in bases):
      return True, None
    saved = next((one for one in reversed(self.saved) if one.position == number), None)
    return saved is not None, saved


@contextlib.contextmanager
def opened(place: pathlib.Path) -> Iterator['Repair']:
  """The log of a run for this process alone.

  Args:
    place: the folder of a run, or its syncer/wal.

  Raises:
    ValueError: there is no log.
    DirectoryError: it cannot be written, or a syncer is running on it.
  """
  folder = place if place.name == LOG else place / 'syncer' / LOG
  if not folder.is_dir():
    raise ValueError(
      f'there is no log of a syncer in {place}; give the folder of a run, or its syncer/{LOG}'
    )
  files = files_lib.Files(folder)
  try:
    files.lock('repair')
    yield Repair(files, folder.parent / CHECKPOINTS)
  finally:
    files.close()


class Repair:
  """Looks at a log and its checkpoints, and cuts them (`opened`)."""

  def __init__(self, files: files_lib.Files, checkpoints: pathlib.Path):
    self._files = files
    self._folder = checkpoints
    self.place = files.place

  def look(self) -> Findings:
    """Reads everything, changes nothing. Raises OSError, WalUnsupported."""
    log, saved = wal_recovery.scan(self._files), self._saved()
    seen = log.damage.newest if log.damage else log.last
    fits = [one for one in saved if self._fits(log, one)]
    return Findings(log, saved, fits, max([seen, log.last, *(one.position for one in saved)]))

  def cut(self, findings: Findings, number: int) -> str:
    """Lets the run go on behind a record; what was done, in words.

    Raises:
      ValueError: it cannot; nothing was changed.
      OSError, WalFull, WalBroken: the disk; to be done again.
    """
    possible, base = findings.way(number)
    if not possible:
      raise ValueError(
        f'the run cannot go on behind record {number}: {_kept(findings)}. Nothing was changed'
      )
    run = self._run(findings.log)
    aside = self._put_checkpoints_aside(findings, number)
    if base is None:
      words = wal_recovery.repair(self._files, number)
    else:
      words = self._begin_behind(base, run)
    dropped = findings.newest - number
    return f'{words}{aside} Dropped: {dropped} updates.'

  # --- What there is ------------------------------------------------------------------------------

  def _saved(self) -> list[Saved]:
    if not self._folder.is_dir():
      return []
    checkpoints, found = checkpoint.Checkpoints(str(self._folder)), []
    try:
      for step in checkpoints.steps:
        with contextlib.suppress(checkpoint.CheckpointError):  # the syncer passes over it, too
          record = checkpoints.protocol(step)
          chain = record.get(outer_log.CHAIN)
          found.append(
            Saved(step, record.get(outer_log.POSITION, 0), bytes.fromhex(chain) if chain else None)
          )
    finally:
      checkpoints.close()
    return found

  def _fits(self, log: wal_recovery.Found, saved: Saved) -> bool:
    """Whether the log goes on from a checkpoint, or ends with it."""
    if not log.segments or not log.first - 1 <= saved.position <= log.last:
      return False
    return saved.chain in (None, wal.chain_at(self._files, log.segments, saved.position))

  def _run(self, log: wal_recovery.Found) -> str:
    """Whose log it is: any header tells, also one that was put aside."""
    names = [one.name for one in log.segments]
    names += [name for name in self._files.names() if wal_format.first_of(name[:24]) is not None]
    for name in names:
      with contextlib.suppress(wal_format.Corrupt):
        return wal_format.parse_segment(
          name, self._files.read(name, 0, wal_format.SEGMENT_HEADER_BYTES)
        ).run
    raise ValueError(
      f'no header of the log in {self.place} is whole, so nobody knows which run it '
      'is of; restore its files. Nothing was changed'
    )

  # --- What is done -------------------------------------------------------------------------------

  def _put_checkpoints_aside(self, findings: Findings, number: int) -> str:
    newer = [one for one in findings.saved if one.position > number]
    for one in newer:
      _rename_free(self._folder / str(one.step))
    names = ', '.join(str(one.step) for one in newer)
    return f' Checkpoints that are newer were put aside, too: {names}.' if newer else ''

  def _begin_behind(self, base: Saved, run: str) -> str:
    """The whole log is put aside; a new one begins behind a checkpoint."""
    names = wal_recovery.segment_names(self._files)
    for name in names:
      self._files.rename(name, wal_recovery.free(self._files, name + wal_format.ASIDE))
    self._files.fsync_names()
    wal.begin(self._files, run, base.position, base.chain)
    return (
      f'A new log begins in {self.place} behind checkpoint {base.step}, which holds every '
      f'record up to {base.position}. Put aside: {", ".join(names) or "nothing"}.'
    )


def _rename_free(path: pathlib.Path) -> None:
  target, count = path.with_name(f'{path.name}{wal_format.ASIDE}'), 1
  while target.exists():
    target, count = path.with_name(f'{path.name}{wal_format.ASIDE}.{count}'), count + 1
  path.rename(target)


def _kept(findings: Findings) -> str:
  """With what it could go on, in words."""
  ends = ', '.join(str(number) for number, _ in findings.ways)
  return f'it can behind {ends}' if ends else 'nothing that there is fits together'


def text(place: str, findings: Findings) -> str:
  """The findings for people: what is there, what is wrong, what can be done."""
  log = findings.log
  lines = [
    f'Log in {place}: '
    + (
      f'records {log.first} to {log.last} are whole, in {len(log.segments)} files'
      if log.segments
      else 'no whole file'
    )
  ]
  lines += [
    f'  {one.name}  from record {one.first}, {one.size:,} bytes whole' for one in log.segments
  ]
  if log.damage:
    lines.append(
      f'Damaged: {log.damage.name} at byte {log.damage.offset}: {log.damage.why}; '
      f'records up to {log.damage.newest} were behind it'
    )
  if log.torn_bytes:
    lines.append(
      f'It ends in an unfinished record ({log.torn_bytes} bytes, never acknowledged); '
      'the syncer drops it by itself'
    )
  lines += [
    f'Checkpoint {one.step} holds every record up to {one.position}'
    + ('' if one in findings.fits else '; the log does not go on from it')
    for one in findings.saved
  ]
  lines.append('Newest record that anything tells of: ' + str(findings.newest))
  if sound(findings):
    return '\n'.join([*lines, 'The syncer can start from this: nothing is to be done.'])
  lines.append('The syncer refuses to start from this. Restore the files, or choose:')
  for number, base in findings.ways:
    how = (
      'the log is cut behind it'
      if base is None
      else (f'a new log begins behind checkpoint {base.step}, the old one is put aside')
    )
    command = wal_recovery.REPAIR.format(place=place)
    lines.append(f'  {command} --to={number}  (drops {findings.newest - number} updates; {how})')
  return '\n'.join(lines)


def sound(findings: Findings) -> bool:
  """Whether a syncer starts from this, if the newest checkpoint reads back."""
  if findings.log.damage:
    return False
  if not findings.saved or not findings.saved[-1].position:
    return findings.from_the_beginning or not findings.log.segments
  return findings.saved[-1] in findings.fits
