"""Replay of arrays (level L2): rebuilds Theta from the log and compares it with the tapes.

A tape replays the decisions of a machine, on any host. This module repeats the outer steps, one
record of the log after the other, from version 0, with the function that merged them first::

    version 0 (config, seed)          = the digests at the start of the syncer's first tape
    each record: its payloads merged  = the gradient and the digest that were committed with it
                                      = the digest of this version on the tape

It needs the same build (jax, flags and kind of host) and the whole log (sync.keep_log). It only
reads the log and the tapes.
"""

import hashlib
import pathlib
from typing import NamedTuple

from diloco_jax.config import build
from diloco_jax.protocol import actions, events
from diloco_jax.protocol.tape import tape
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import outer_log, wal
from diloco_jax.syncer import global_model as global_model_lib
from diloco_jax.verification.replay import tape_files

Versions = dict[tuple[int, int], int]  # (fragment, version): digest of the published value


class Differs(Exception):
  """The log gives another value than the tapes."""


class Rebuilt(NamedTuple):
  """The result of a rebuild without a difference.

  Attributes:
    outer_steps: records of the log.
    refused: outer steps that were refused, in the run and now.
    on_tape: versions with a digest on the tapes, all equal.
    digests: of the final published value of each fragment.
  """

  outer_steps: int
  refused: int
  on_tape: int
  digests: tuple[int, ...]

  def text(self) -> str:
    total = hashlib.sha256(b''.join(one.to_bytes(8, 'big') for one in self.digests))
    refused = f' ({self.refused} refused, as before)' if self.refused else ''
    return (
      f'identical: {self.outer_steps} outer steps{refused}, {self.on_tape} versions on the '
      f'tape, Theta {total.hexdigest()[:12]}'
    )


def rebuild(assembled: build.Assembly, workdir: pathlib.Path) -> Rebuilt:
  """Rebuilds Theta from the log of a run and compares it at every version.

  Raises:
    ValueError: there is no log, or it does not reach back to version 0.
    Differs, NotReproduced: a value differs.
    WalError, TapeError, OSError: the log or a tape is not readable.
  """
  folder = workdir / 'syncer' / 'wal'
  if not folder.is_dir():
    raise ValueError(f'there is no log in {folder}')
  on_tape = _digests_on_tape(workdir)  # first: the log of a live run is ahead of its tapes
  files = files_lib.Files(folder)
  run = outer_log.run_of(assembled.agreement)
  log = wal.read_log(files, run)
  if log.first > 0:
    raise ValueError(
      f'the log in {files.place} begins with record {log.first + 1}: earlier records were dropped '
      'after checkpoints (start runs with --config.sync.keep_log=true to keep them) or set aside '
      'by a restore'
    )
  theta = global_model_lib.Theta(assembled)
  made: Versions = {(p, 0): theta.digest(p) for p in range(assembled.protocol.fragments)}
  refused = 0
  for record in log.records():
    merge, done, *_ = outer_log.redo(theta, record, files.place, merge_again=True)
    refused += bool(done.failed)
    if not done.failed:
      made[merge.fragment, merge.version] = done.digest
  _compare(made, on_tape)
  digests = tuple(made[p, version] for p, version in enumerate(theta.versions))
  return Rebuilt(log.committed, refused, len(on_tape), digests)


def _digests_on_tape(workdir: pathlib.Path) -> Versions:
  """The digest of every version on the syncer's tapes; a later process replaces an earlier one."""
  on_tape: Versions = {}
  for life in tape_files.find(workdir):
    if life.node != 'syncer':
      continue
    reader, merging = tape_files.read(life), {}
    if reader.header is None:
      continue  # an empty tape: the disk was full
    digests = reader.header.start.digests
    on_tape |= {(p, 0): digest for p, digest in enumerate(digests or ())}
    for turn in reader:
      event = turn.event
      if isinstance(event, events.MergeDone) and not event.failed:
        on_tape[event.fragment, merging[event.sync]] = event.digest
      if isinstance(turn, tape.Record):
        merging |= {one.sync: one.version for one in turn.actions if isinstance(one, actions.Merge)}
  return on_tape


def _compare(made: Versions, on_tape: Versions) -> None:
  for (p, version), digest in sorted(on_tape.items()):
    if (p, version) not in made:
      raise Differs(f'version {version} of fragment {p} is on the tape but not in the log')
    if made[p, version] != digest:
      raise Differs(
        f'version {version} of fragment {p} is {made[p, version]:016x}, but the tape has '
        f'{digest:016x}'
      )
