"""Brings a whole run back to one of its snapshots; run in a process of its own, which may use jax.

    python -m diloco_jax.launch.restore WORKDIR latest|N < config.json

First everything is verified: the manifest, and every array of every part that it names, against the
manifest. A snapshot that is damaged or partial is passed over with a line that says what differs
(`latest`), or refused (a number). Nothing has been touched until then. After that

    what came later     checkpoints, log, tapes and newer snapshots of syncer and islands move to
                        WORKDIR/aside-K: nothing is deleted
    what goes on        copies of the parts become the checkpoints, and a new log begins behind the
                        position of the syncer's part

so the run goes on from there as after any stop, each learner with its own moments. Learners that
the snapshot has no part of start from the syncer's fragments; those of the snapshot that the config
has no place for are closed as left (`RESTORED` tells the syncer of both). A restore that was cut
short is done again from the beginning; until then nothing starts (manifests.RESTORING).
"""

import json
import os
import pathlib
import shutil
import sys
from collections.abc import Callable
from typing import Any

from absl import logging

from diloco_jax.config import build, run_config
from diloco_jax.launch import program
from diloco_jax.protocol import agreement
from diloco_jax.storage import checkpoint, manifests, outer_log
from diloco_jax.storage import files as files_lib

LATEST = 'latest'
MAY_DIFFER = ('sync.learners', 'sync.quorum')
_WAL = 'wal'
_CKPT = 'ckpt'
_NEW = '.restoring'

Say = Callable[[str], None]


def restore(config: run_config.Config, workdir: pathlib.Path, which: str, say: Say) -> int:
  """Brings the run in `workdir` back to snapshot `which` (a number, or LATEST); its number.

  Raises:
    ValueError: there is no such snapshot that is whole; nothing was changed.
    DirectoryError: a syncer runs there, or it cannot be written.
    OSError: the disk failed; to be done again.
  """
  log_files = files_lib.Files(manifests.syncer_folder(workdir) / _WAL)
  try:
    log_files.lock('restore')
    manifest, books = choose(config, workdir, which, say)
    _bring_back(config, workdir, manifest, books, log_files, say)
  finally:
    log_files.close()
  return manifest['snapshot']


# --- Which ----------------------------------------------------------------------------------------


def choose(
  config: run_config.Config, workdir: pathlib.Path, which: str, say: Say
) -> tuple[dict[str, Any], dict[str, Any]]:
  """The manifest of the snapshot to go back to, and the books of its syncer's part.

  Raises ValueError; reads only.
  """
  known = manifests.numbers(workdir)
  if which != LATEST and (not which.isdecimal() or int(which) not in known):
    raise ValueError(
      f'there is no snapshot {which!r} in {workdir / manifests.FOLDER}; {_there_are(known)}'
    )
  for number in reversed(known) if which == LATEST else [int(which)]:
    try:
      manifest = manifests.read(workdir, number)
      books = verify(workdir, manifest)
    except (manifests.Unfit, checkpoint.CheckpointError) as error:
      say(f'snapshot {number} is damaged or partial and is passed over, not touched: {error}')
    else:
      _require_same_run(config, manifest)
      return manifest, books
  if which == LATEST:
    raise ValueError(
      f'no snapshot in {workdir / manifests.FOLDER} is whole ({_there_are(known)}). '
      'Nothing was changed: --resume goes on from the newest checkpoint and the log'
    )
  others = [number for number in known if number != int(which)]
  raise ValueError(
    f'snapshot {which} is not whole, nothing was changed; {_there_are(others)}: '
    '--restore=latest takes the newest that is whole'
  )


def verify(workdir: pathlib.Path, manifest: dict[str, Any]) -> dict[str, Any]:
  """Reads every part that a manifest names, whole; the books of the syncer's.

  Raises CheckpointError.
  """
  number = manifest['snapshot']
  books = _verify_part(manifests.syncer_folder(workdir), number, manifest['syncer'])
  for learner, part in sorted(manifest['learners'].items()):
    _verify_part(manifests.island_folder(workdir, learner), number, part['seal'])
  return books


def _verify_part(folder: pathlib.Path, number: int, seal: str) -> dict[str, Any]:
  root = folder / manifests.FOLDER
  if not (root / str(number)).is_dir():
    raise checkpoint.CheckpointError(f'its part {root / str(number)} is not there')
  parts = checkpoint.Checkpoints(str(root), keep_all=True)
  try:
    return parts.verify(number, seal)
  finally:
    parts.close()


def _require_same_run(config: run_config.Config, manifest: dict[str, Any]) -> None:
  """Raises ValueError."""
  found = differences(config, json.loads(manifest['agreement']))
  if found:
    raise ValueError(
      f'snapshot {manifest["snapshot"]} is of a run with another config: {"; ".join(found)}'
    )


def differences(config: run_config.Config, before: dict[str, Any]) -> list[str]:
  """In what a run may not differ from the one it goes on from, in words."""
  here = config.agreement()
  ours, theirs = (
    {name: value for name, value in facts.items() if name in here and name not in MAY_DIFFER}
    for facts in (here, before)
  )
  return agreement.differences(agreement.encode(ours), agreement.encode(theirs))


def _there_are(known: list[int]) -> str:
  return f'there are: {", ".join(map(str, known))}' if known else 'there is none'


# --- And back -------------------------------------------------------------------------------------


def _bring_back(
  config: run_config.Config,
  workdir: pathlib.Path,
  manifest: dict[str, Any],
  books: dict[str, Any],
  log_files: files_lib.Files,
  say: Say,
) -> None:
  syncer, number = manifests.syncer_folder(workdir), manifest['snapshot']
  manifests.write_durably(syncer, manifests.RESTORING, {'snapshot': number})
  aside = _set_aside(workdir, number)
  say(f'what came after snapshot {number} is set aside in {aside}; nothing was deleted')
  _copy_part(syncer, number, manifest['step'])
  learners = run_config.learner_ids(config.sync.learners)
  back = sorted(manifest['learners'].keys() & set(learners))
  for learner in back:
    _copy_part(
      manifests.island_folder(workdir, learner), number, manifest['learners'][learner]['step']
    )
  outer_log.begin(log_files, build.assemble(config).agreement, books)
  gone = sorted({row['learner'] for row in books['members'] if not row['left']} - set(learners))
  manifests.write_durably(
    syncer,
    manifests.RESTORED,
    {
      'snapshot': number,
      outer_log.POSITION: books[outer_log.POSITION],
      'gone': gone,
      'back': back,
      'aside': aside.name,
    },
  )
  (syncer / manifests.RESTORING).unlink()
  _fsync(syncer)
  say(f'the run goes on from snapshot {number}, sync {manifest["step"]}, taken {manifest["time"]}')
  for learner in learners:
    if learner not in manifest['learners']:
      why = manifest['missing'].get(learner, 'it is new')
      say(
        f'{learner} starts from the fragments of the syncer, with the moments of a peer or '
        f'fresh ones: the snapshot has no part of it ({why})'
      )
  for learner in gone:
    say(f'{learner} has no place any more: its account is closed')


def _set_aside(workdir: pathlib.Path, number: int) -> pathlib.Path:
  """Moves all that the snapshot does not hold; where to."""
  taken = [
    int(path.name.split('-')[1])
    for path in workdir.glob('aside-*')
    if path.name.split('-')[1].isdecimal()
  ]
  aside = workdir / f'aside-{max(taken, default=0) + 1}'
  aside.mkdir()
  syncer = manifests.syncer_folder(workdir)
  nodes = [syncer, *sorted((workdir / 'islands').glob('*'))]
  moved = [node / name for node in nodes for name in (_CKPT, _CKPT + _NEW)]
  moved += [path for path in (syncer / _WAL).iterdir() if path.name != files_lib.LOCK]
  moved += [workdir / 'tapes', syncer / manifests.RESTORED]
  for folder in (workdir, *nodes):
    moved += [
      path
      for path in (folder / manifests.FOLDER).glob('*')
      if path.stem.isdecimal() and int(path.stem) > number
    ]
  for path in filter(pathlib.Path.exists, moved):
    target = aside / path.relative_to(workdir)
    target.parent.mkdir(parents=True, exist_ok=True)
    path.rename(target)
    _fsync(path.parent)
  return aside


def _copy_part(folder: pathlib.Path, number: int, step: int) -> None:
  """A part becomes the one checkpoint of its node, durably; the part itself stays."""
  fresh = folder / (_CKPT + _NEW)
  shutil.copytree(folder / manifests.FOLDER / str(number), fresh / str(step))
  for path in (fresh, *fresh.rglob('*')):
    _fsync(path)
  fresh.rename(folder / _CKPT)
  _fsync(folder)


def _fsync(path: pathlib.Path) -> None:
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def main(argv: list[str]) -> int:
  """The exit code; what went wrong is the last line, as of every program (program.py)."""
  logging.set_verbosity(logging.ERROR)  # Orbax says in many lines what is said in one here
  workdir, which = argv[1:]
  try:
    config = run_config.Config.from_dict(json.load(sys.stdin))
    restore(config, pathlib.Path(workdir), which, lambda text: print(text, flush=True))
  except (ValueError, files_lib.DirectoryError) as error:
    print(f'error: {program.one_line(error)}', flush=True)
    return program.NEVER_RETRY
  except OSError as error:
    print(
      f'error: the disk failed: {program.one_line(error)}. Nothing is lost; run it again with '
      'the same --restore.',
      flush=True,
    )
    return program.DISK_FAILED
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv))
