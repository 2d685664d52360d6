"""Brings a whole run back to an earlier, verified state: `diloco restore`.

`latest` or a number: back to that run snapshot (manifests.py). The restore first verifies the
manifest, and every array of every checkpoint that it pins against the manifest. A damaged or
partial snapshot is skipped with a line that says what differs (`latest`), or refused (a number).
The run then continues as after any stop, each learner with its own moments. Learners without a part
in the snapshot start from the syncer's fragments; learners of the snapshot without a place in the
config count as having left (`RESTORED` tells the syncer of both).

`checkpoint`: back to the syncer's newest checkpoint that verifies, for a log that is refused
because it is damaged. Learners keep their checkpoints and receive the fragments whole; the run
repeats the outer steps behind the checkpoint. Snapshots stay as they are.

Until the verification has ended nothing is changed. Then everything later than the goal
(checkpoints, log, tapes, newer snapshots) moves to WORKDIR/aside-K, nothing is deleted or copied,
and a new log begins behind the position of the syncer's checkpoint. An interrupted restore has to
be repeated from the beginning; until then no process of the run starts (manifests.RESTORING).
"""

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from diloco_jax.config import build, load, run_config
from diloco_jax.protocol import agreement
from diloco_jax.storage import checkpoint, manifests, outer_log
from diloco_jax.storage import files as files_lib

LATEST = 'latest'
CHECKPOINT = 'checkpoint'
MAY_DIFFER = ('sync.learners', 'sync.quorum', *agreement.MAY_CHANGE)
_WAL = 'wal'

Say = Callable[[str], None]


class Goal(NamedTuple):
  """The verified state that a run goes back to."""

  text: str
  machine_state: dict[str, Any] | None  # of the syncer's checkpoint; None: the run starts over
  newest: dict[pathlib.Path, int]  # by the folder of a node: its newest checkpoint from now on
  manifest: dict[str, Any] | None = None  # of the snapshot, if the goal is one

  def is_later(self, node: pathlib.Path, number: int) -> bool:
    """Whether a checkpoint came later; of a learner without a part in the snapshot, all did."""
    return number > self.newest.get(node, -1 if self.manifest else number)


def restore(config: run_config.Config, workdir: pathlib.Path, which: str, say: Say) -> None:
  """Brings the run in `workdir` back to a snapshot (its number, or LATEST) or to CHECKPOINT.

  Raises:
    ValueError: there is no such snapshot or checkpoint that is whole; nothing was changed.
    DirectoryError: a syncer runs there, or the folder cannot be written.
    OSError: the disk failed; repeat the restore.
  """
  if not manifests.syncer_folder(workdir).is_dir():
    raise ValueError(f'there is no run in {workdir} to restore')
  log_files = files_lib.Files(manifests.syncer_folder(workdir) / _WAL)
  try:
    log_files.lock('restore')
    if which == CHECKPOINT:
      goal = newest_checkpoint(config, workdir, say)
    else:
      goal = choose(config, workdir, which, say)
    _go_back(config, workdir, goal, log_files, say)
  finally:
    log_files.close()


# --- The goal -------------------------------------------------------------------------------------


def choose(config: run_config.Config, workdir: pathlib.Path, which: str, say: Say) -> Goal:
  """Finds the snapshot to go back to. Raises ValueError; only reads."""
  known = manifests.numbers(workdir)
  if which != LATEST and (not which.isdecimal() or int(which) not in known):
    raise ValueError(
      f'there is no snapshot {which!r} in {workdir / manifests.FOLDER}; {_there_are(known)}'
    )
  for number in reversed(known) if which == LATEST else [int(which)]:
    try:
      manifest = manifests.read(workdir, number)
      goal = verify(workdir, manifest)
    except (manifests.Unfit, checkpoint.CheckpointError) as error:
      say(f'snapshot {number} is damaged or partial and is skipped, not changed: {error}')
    else:
      _require_same_run(config, json.loads(manifest['agreement']), f'snapshot {number} is of')
      return goal
  if which == LATEST:
    raise ValueError(
      f'no snapshot in {workdir / manifests.FOLDER} is whole ({_there_are(known)}). '
      'Nothing was changed: train --resume continues from the newest checkpoint and the log'
    )
  others = [number for number in known if number != int(which)]
  raise ValueError(
    f'snapshot {which} is not whole, nothing was changed; {_there_are(others)}: '
    '--to=latest takes the newest that is whole'
  )


def verify(workdir: pathlib.Path, manifest: dict[str, Any]) -> Goal:
  """Verifies every checkpoint that a manifest pins. Raises CheckpointError."""
  pinned = {manifests.syncer_folder(workdir): manifest['syncer']} | {
    manifests.island_folder(workdir, learner): part
    for learner, part in sorted(manifest['learners'].items())
  }
  records = [
    _verify(node, part['checkpoint'], part['record_sha256']) for node, part in pinned.items()
  ]
  return Goal(
    text=f'snapshot {manifest["snapshot"]}, sync {manifest["step"]}, taken {manifest["time"]}',
    machine_state=records[0],
    newest={node: part['checkpoint'] for node, part in pinned.items()},
    manifest=manifest,
  )


def newest_checkpoint(config: run_config.Config, workdir: pathlib.Path, say: Say) -> Goal:
  """Finds the syncer's newest checkpoint that verifies; before the first one the goal is the start
  of the run. Raises ValueError; only reads."""
  if (workdir / load.FILE).is_file():  # absent if the processes were started one by one
    _require_same_run(config, load.read(workdir).agreement(), 'it is')
  syncer = manifests.syncer_folder(workdir)
  found = _numbers(syncer)
  for number in reversed(found):
    try:
      machine_state = _verify(syncer, number)
    except checkpoint.CheckpointError as error:
      say(f'checkpoint {number} is damaged and is skipped: {error}')
    else:
      record = machine_state[outer_log.POSITION]
      text = f'checkpoint {number} of the syncer, which holds record {record}'
      return Goal(text, machine_state, {syncer: number})
  if found:
    raise ValueError(
      f'no checkpoint in {syncer / manifests.CHECKPOINTS} is whole ({found}); nothing was changed'
    )
  return Goal('version 0: there is no checkpoint', None, {})


def _verify(node: pathlib.Path, number: int, record_sha256: str = '') -> dict[str, Any]:
  root = node / manifests.CHECKPOINTS
  if not (root / str(number)).is_dir():
    raise checkpoint.CheckpointError(f'checkpoint {root / str(number)} is missing')
  checkpoints = checkpoint.Checkpoints(str(root))
  try:
    return checkpoints.verify(number, record_sha256)
  finally:
    checkpoints.close()


def _numbers(node: pathlib.Path) -> list[int]:
  """The numbers of a node's checkpoints, whole or damaged, ascending."""
  names = (path.name for path in (node / manifests.CHECKPOINTS).glob('*'))
  return sorted(int(name) for name in names if name.isdecimal())


def _require_same_run(config: run_config.Config, before: dict[str, Any], what: str) -> None:
  """Compares the settings of a run with those before; all but MAY_DIFFER must be equal. Raises
  ValueError."""
  here = config.agreement()
  ours, theirs = (
    {name: value for name, value in facts.items() if name in here and name not in MAY_DIFFER}
    for facts in (here, before)
  )
  found = agreement.differences(agreement.encode(ours), agreement.encode(theirs))
  if found:
    raise ValueError(f'{what} of a run with another config: {"; ".join(found)}')


def _there_are(known: list[int]) -> str:
  return f'there are: {", ".join(map(str, known))}' if known else 'there is none'


# --- Going back -----------------------------------------------------------------------------------


def _go_back(
  config: run_config.Config,
  workdir: pathlib.Path,
  goal: Goal,
  log_files: files_lib.Files,
  say: Say,
) -> None:
  syncer = manifests.syncer_folder(workdir)
  manifests.write_durably(syncer, manifests.RESTORING, {'goal': goal.text})
  aside = _set_aside(workdir, goal)
  say(f'all later files have been moved to {aside}; nothing was deleted')
  learners = run_config.learner_ids(config.sync.learners)
  gone = []
  if goal.machine_state is not None:
    outer_log.begin(log_files, build.assemble(config).agreement, goal.machine_state)
    members = {row['learner'] for row in goal.machine_state['members'] if not row['left']}
    gone = sorted(members - set(learners))
    parts = goal.manifest['learners'] if goal.manifest else {}
    manifests.write_durably(
      syncer,
      manifests.RESTORED,
      {
        outer_log.POSITION: goal.machine_state[outer_log.POSITION],
        'gone': gone,
        'back': sorted(parts.keys() & set(learners)),
        'aside': aside.name,
      },
    )
  load.write(workdir, config)
  (syncer / manifests.RESTORING).unlink()
  _fsync(syncer)
  say(f'the run continues from {goal.text}')
  for learner in learners:
    if goal.manifest and learner not in goal.manifest['learners']:
      why = goal.manifest['missing'].get(learner, 'it is new')
      say(
        f'{learner} starts from the fragments of the syncer, with the moments of a peer or '
        f'fresh ones: it has no part in the snapshot ({why})'
      )
  for learner in gone:
    say(f'{learner} is not in this config: it counts as having left')


def _set_aside(workdir: pathlib.Path, goal: Goal) -> pathlib.Path:
  """Moves everything later than the goal to a new folder, which it returns."""
  taken = [
    int(path.name.split('-')[1])
    for path in workdir.glob('aside-*')
    if path.name.split('-')[1].isdecimal()
  ]
  aside = workdir / f'aside-{max(taken, default=0) + 1}'
  aside.mkdir()
  syncer = manifests.syncer_folder(workdir)
  moved = [path for path in (syncer / _WAL).iterdir() if path.name != files_lib.LOCK]
  moved += [workdir / 'tapes', syncer / manifests.RESTORED]
  moved += [
    workdir / manifests.FOLDER / f'{number}.json'
    for number in manifests.numbers(workdir)
    if goal.manifest and number > goal.manifest['snapshot']
  ]
  for node in (syncer, *sorted((workdir / 'islands').glob('*'))):
    moved += [
      node / manifests.CHECKPOINTS / str(number)
      for number in _numbers(node)
      if goal.is_later(node, number)
    ]
  for path in filter(pathlib.Path.exists, moved):
    target = aside / path.relative_to(workdir)
    target.parent.mkdir(parents=True, exist_ok=True)
    path.rename(target)
    _fsync(path.parent)
  return aside


def _fsync(path: pathlib.Path) -> None:
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
