"""Replay of arrays (level L2): the log makes Theta again, the tapes say what it must be.

A tape replays the decisions of a machine, anywhere. Here the outer steps are carried out again, one
record of the log after the other, from version 0, by the function that merged them first::

    version 0 (config, seed)          = what the first tape of the syncer began with
    each record: its payloads merged  = the digest that was committed with it
                                      = the digest that the tape has of this version

It takes the same build: jax, flags and kind of machine. It takes the whole log (sync.keep_log); the
log and the tapes are only read.
"""

import hashlib
import json
import pathlib
from typing import NamedTuple

from diloco_jax.config import build, run_config
from diloco_jax.protocol import actions, events
from diloco_jax.protocol.tape import tape
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import outer_log, tapes, wal
from diloco_jax.syncer import global_model as global_model_lib

Versions = dict[tuple[int, int], int]  # (fragment, version): digest of the published value


class Differs(Exception):
  """What the log makes is not what the tapes have."""


class Rebuilt(NamedTuple):
  """Theta was made again.

  Attributes:
    outer_steps: records of the log.
    refused: so many of them changed nothing, and did not again.
    on_tape: versions whose digest the tapes have; the same.
    digests: of the published value of each fragment in the end.
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


def rebuild(workdir: pathlib.Path) -> Rebuilt:
  """Makes Theta again from the log of a run, and compares it at every version.

  Raises:
    ValueError: there is no such run, or its log does not reach back to version 0.
    Differs, NotReproduced: another value comes out.
    WalError, TapeError, OSError: log or tape cannot be read.
  """
  assembled = build.assemble(_config(workdir))
  files = files_lib.Files(workdir / 'syncer' / 'wal')
  log = wal.read_log(files, outer_log.run_of(assembled.agreement))
  if log.first > 1:
    raise ValueError(
      f'the log in {files.place} begins with record {log.first}: what came before was '
      'dropped behind checkpoints (start runs with --config.sync.keep_log=true to keep it), or set '
      'aside by a restore'
    )
  theta, told = global_model_lib.Theta(assembled), _told(workdir)
  made: Versions = {(p, 0): theta.digest(p) for p in range(assembled.protocol.fragments)}
  refused = 0
  for record in log.records():
    merge, done, *_ = outer_log.redo(theta, record, files.place)
    refused += bool(done.failed)
    if not done.failed:
      made[merge.fragment, merge.version] = done.digest
  _compare(made, told)
  digests = tuple(made[p, version] for p, version in enumerate(theta.versions))
  return Rebuilt(log.last, refused, len(told), digests)


def _config(workdir: pathlib.Path) -> run_config.Config:
  path = workdir / run_config.FILE
  if not path.is_file():
    raise ValueError(f'there is no run in {workdir} ({run_config.FILE} is missing)')
  return run_config.Config.from_dict(json.loads(path.read_text()))


def _told(workdir: pathlib.Path) -> Versions:
  """What the syncer's tapes say of every version; where two lives tell of one, the later."""
  told: Versions = {}
  for life in tapes.find(workdir):
    if life.node != 'syncer':
      continue
    reader, merging = tapes.read(life), {}
    digests = reader.header.start.digests
    told |= {(p, 0): digest for p, digest in enumerate(digests or ())}
    for turn in reader:
      event = turn.event
      if isinstance(event, events.MergeDone) and not event.failed:
        told[event.fragment, merging[event.sync]] = event.digest
      if isinstance(turn, tape.Record):
        merging |= {one.sync: one.version for one in turn.actions if isinstance(one, actions.Merge)}
  return told


def _compare(made: Versions, told: Versions) -> None:
  for (p, version), digest in sorted(told.items()):
    if (p, version) not in made:
      raise Differs(f'version {version} of fragment {p} is on the tape, the log does not have it')
    if made[p, version] != digest:
      raise Differs(
        f'version {version} of fragment {p} is {made[p, version]:016x}, the tape has {digest:016x}'
      )
