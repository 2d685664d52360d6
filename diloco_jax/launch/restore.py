"""Brings a whole run back to an earlier, verified state: `diloco restore`.

`latest` or a number: back to that run snapshot (manifests.py). The restore first verifies the
manifest, and every array of every checkpoint that it pins against the manifest. A snapshot whose
manifest or syncer's part is damaged is skipped with a line that says what differs (`latest`), or
refused (a number). A learner's part that is missing or damaged is named, and nothing is changed
until the operator says to go on without that learner (`Asked.without`). The run then continues as
after any stop, each learner with its own moments. Learners without a part in the snapshot start
from the syncer's fragments; learners of the snapshot without a place in the config count as having
left (`manifests.RESTORED` tells the syncer of both).

`checkpoint`: back to the syncer's newest checkpoint that verifies, for a log that is refused
because it is damaged. Learners keep their checkpoints and receive the fragments whole; the run
repeats the outer steps behind the checkpoint. Snapshots stay as they are.

Until the verification has ended nothing is changed, and only the locks are opened for writing. Then
everything later than the goal (checkpoints, log, tapes, newer snapshots, the trained model) moves
to WORKDIR/aside-K, nothing is deleted or copied, and a new log begins behind the position of the
syncer's checkpoint. An interrupted restore has to be repeated from the beginning; until then no
syncer of the run starts (manifests.RESTORING).

Names and numbers are typed before they become paths, and links are not followed.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Collection
from typing import Any

from diloco_jax.config import build, load, run_config
from diloco_jax.launch import own_model, run_folder
from diloco_jax.protocol import agreement, ids, safe_json
from diloco_jax.storage import checkpoint, json_files, manifests, outer_log, tree_digest
from diloco_jax.storage import files as files_lib
from diloco_jax.syncer import process as syncer_process

LATEST = 'latest'
CHECKPOINT = 'checkpoint'
MAY_DIFFER = ('sync.learners', 'sync.quorum', *agreement.MAY_CHANGE)
_WAL = 'wal'
_SHOWN_CHARS = 200

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Asked:
  """What the operator asked for.

  Attributes:
    which: the number of a snapshot, LATEST or CHECKPOINT.
    without: learners whose parts are not restored.
    most_bytes: says how many the arrays of one checkpoint may have; None: any number.
  """

  which: str
  without: Collection[str] = ()
  most_bytes: Callable[[], int] | None = None


@dataclasses.dataclass(frozen=True)
class Goal:
  """The verified state that a run goes back to."""

  text: str
  machine_state: dict[str, Any] | None  # of the syncer's checkpoint; None: the run starts over
  newest: dict[pathlib.Path, int]  # by the folder of a node: its newest checkpoint from now on
  manifest: manifests.Manifest | None = None  # of the snapshot, if the goal is one

  def is_later(self, node: pathlib.Path, number: int) -> bool:
    """Whether a checkpoint came later; of a learner without a part in the snapshot, all did."""
    return number > self.newest.get(node, -1 if self.manifest else number)


class PartsMissing(ValueError):
  """Parts of a snapshot are missing or damaged: a person must decide."""


def restore(config: run_config.Config, workdir: pathlib.Path, asked: Asked, say: Say) -> None:
  """Brings the run in `workdir` back to what is asked for.

  Raises:
    ValueError: there is no such snapshot or checkpoint that is whole, a part of it is missing,
      or the config cannot work; nothing was changed.
    DirectoryError: a syncer or a learner runs there, or the folder cannot be written.
    OSError, WalFull, WalBroken: the disk is full or failed; repeat the restore.
  """
  files_lib.require_name(workdir)
  if not manifests.syncer_folder(workdir).is_dir():
    raise ValueError(f'there is no run in {workdir} to restore')
  _require_plain_folders(workdir)
  with contextlib.ExitStack() as locked:
    if (workdir / files_lib.LOCK).is_file():  # a supervisor starts its processes again
      _lock(workdir, locked)
    log_files = _lock(manifests.syncer_folder(workdir) / _WAL, locked)
    for node in _islands(workdir):
      if (node / manifests.CHECKPOINTS).is_dir():
        _lock(node / manifests.CHECKPOINTS, locked)
    model = own_model.read(workdir)
    own = None if model is None else own_model.complete(model, config)
    assembly = functools.cache(lambda: own or build.assemble(config))  # it takes a second
    most_bytes = lambda: tree_digest.most_bytes(assembly().parameters)
    asked = dataclasses.replace(asked, most_bytes=most_bytes)
    if asked.which == CHECKPOINT:
      goal = newest_checkpoint(config, workdir, asked, say)
    else:
      goal = choose(own.config if own else config, workdir, asked, say)
    agreed = assembly().agreement  # it may refuse: before anything moves
    _go_back(config, agreed, workdir, goal, log_files, say)


def _lock(folder: pathlib.Path, locked: contextlib.ExitStack) -> files_lib.Files:
  """Locks the folder of a process of the run. Raises DirectoryError if it still runs."""
  files = files_lib.Files(folder)
  locked.callback(files.close)
  files.lock('restore')
  return files


def _require_plain_folders(workdir: pathlib.Path) -> None:
  """Refuses a run whose folders are links: what a restore moves and writes would be elsewhere.
  Raises ValueError."""
  nodes = [manifests.syncer_folder(workdir), *_islands(workdir)]
  folders = [workdir / name for name in (manifests.FOLDER, 'tapes', 'islands')]
  folders += [nodes[0] / _WAL, *nodes, *(node / manifests.CHECKPOINTS for node in nodes)]
  for path in folders:
    if path.is_symlink():
      raise ValueError(
        f'{path} is a symbolic link, which a restore does not follow. Nothing was changed. Put the '
        'folder itself there'
      )


def _islands(workdir: pathlib.Path) -> list[pathlib.Path]:
  """The folders of learners."""
  found = (workdir / 'islands').glob('*')
  return sorted(path for path in found if ids.is_learner(path.name))


# --- The goal -------------------------------------------------------------------------------------


def choose(config: run_config.Config, workdir: pathlib.Path, asked: Asked, say: Say) -> Goal:
  """Finds the snapshot to go back to. Raises ValueError; only reads."""
  known, which = manifests.numbers(workdir), asked.which
  if which != LATEST and json_files.number(which) not in known:
    raise ValueError(
      f'there is no snapshot {which!r} in {workdir / manifests.FOLDER}; {_there_are(known)}'
    )
  for number in reversed(known) if which == LATEST else [int(which)]:
    try:
      manifest = manifests.read(workdir, number)
      before = safe_json.parse_object(manifest.agreement)
      goal = verify(workdir, manifest, asked)
    except PartsMissing as error:
      raise ValueError(f'{error}; snapshots: {_there_are(known)}') from None
    except (manifests.Unfit, safe_json.Unreadable, checkpoint.CheckpointError) as error:
      say(f'snapshot {number} is damaged or partial and is skipped, not changed: {error}')
    else:
      _require_same_run(config, before, f'snapshot {number} is of')
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


def verify(workdir: pathlib.Path, manifest: manifests.Manifest, asked: Asked) -> Goal:
  """Verifies every checkpoint that a manifest pins.

  Raises:
    CheckpointError: the syncer's part is missing or damaged.
    PartsMissing: other parts are, of learners that are not in `asked.without`.
    ValueError: `asked.without` names a learner that has no part.
  """
  number, parts = manifest.snapshot, manifest.learners
  for name in asked.without:
    if name not in parts:
      raise ValueError(
        f'--without={name}: snapshot {number} has parts of {", ".join(sorted(parts)) or "none"}. '
        'Nothing was changed'
      )
  syncer = manifests.syncer_folder(workdir)
  machine_state = _verify(workdir, syncer, manifest.checkpoint, asked, manifest.record_sha256)
  newest, damaged = {syncer: manifest.checkpoint}, {}
  for name in sorted(parts.keys() - set(asked.without)):
    node, part = manifests.island_folder(workdir, name), parts[name]
    try:
      _verify(workdir, node, part.checkpoint, asked, part.record_sha256)
      newest[node] = part.checkpoint
    except checkpoint.CheckpointError as error:
      damaged[name] = f'{name}: {error}'
  if damaged:
    names = ','.join(sorted({*damaged, *asked.without}))
    raise PartsMissing(
      f'{len(damaged)} of the {len(parts)} parts of snapshot {number} are missing or damaged: '
      f'{"; ".join(damaged.values())}. Nothing was changed. --without={names} restores the rest; '
      'without its part a learner starts from the fragments of the syncer'
    )
  left_out = tuple((name, 'it was left out with --without') for name in sorted(asked.without))
  return Goal(
    text=f'snapshot {number}, sync {manifest.step}, taken {shown(manifest.time)}',
    machine_state=machine_state,
    newest=newest,
    manifest=dataclasses.replace(
      manifest,
      parts=tuple(part for part in manifest.parts if part.learner not in asked.without),
      missing=(*manifest.missing, *left_out),
      unverified=(),
    ),
  )


def newest_checkpoint(
  config: run_config.Config, workdir: pathlib.Path, asked: Asked, say: Say
) -> Goal:
  """Finds the syncer's newest checkpoint that verifies; before the first one the goal is the start
  of the run. Raises ValueError; only reads."""
  if asked.without:
    raise ValueError('--without is for snapshots; with --to=checkpoint learners keep their own')
  if (workdir / load.FILE).is_file():  # else the operator has given one
    _require_same_run(config, load.read(workdir).agreement(), 'it is')
  syncer = manifests.syncer_folder(workdir)
  found = manifests.checkpoints(syncer)
  for number in reversed(found):
    try:
      machine_state = _verify(workdir, syncer, number, asked)
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


def _verify(
  workdir: pathlib.Path, node: pathlib.Path, number: int, asked: Asked, record_sha256: str = ''
) -> dict[str, Any]:
  """The machine's state in a checkpoint that is whole. Raises CheckpointError; only reads."""
  folder = node / manifests.CHECKPOINTS / str(number)
  if not folder.is_dir():
    raise checkpoint.CheckpointError(f'checkpoint {folder} is missing')
  try:
    json_files.require_plain(workdir, folder)
  except (OSError, safe_json.Unreadable) as error:
    raise checkpoint.CheckpointError(str(error)) from None
  machine_state, _ = checkpoint.verify(
    folder, record_sha256, asked.most_bytes and asked.most_bytes()
  )
  if node == manifests.syncer_folder(workdir):
    _require_books(machine_state, folder)
  return machine_state


def _require_books(machine_state: dict[str, Any], folder: pathlib.Path) -> None:
  """Raises CheckpointError unless what a restore uses of the syncer's state is of its type."""
  try:
    manifests.require_number(outer_log.POSITION, machine_state[outer_log.POSITION])
    manifests.require_sha256(machine_state[outer_log.CHAIN])
    for row in machine_state['members']:
      manifests.require_learner(row['learner'])
      if type(row['left']) is not bool:
        raise ValueError('a member has left, or has not')
  except (KeyError, TypeError, ValueError) as error:
    raise checkpoint.CheckpointError(f'{folder} is not that of a syncer: {error}') from None


def shown(text: str) -> str:
  """A text from a file, for people.

  >>> shown('noon'), shown('noon' + chr(27) + '[2J')
  ('noon', "'noon\\\\x1b[2J'")
  """
  return (text if text.isprintable() else repr(text))[:_SHOWN_CHARS]


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
  agreement_of_run: str,
  workdir: pathlib.Path,
  goal: Goal,
  log_files: files_lib.Files,
  say: Say,
) -> None:
  syncer = manifests.syncer_folder(workdir)
  json_files.write(syncer / manifests.RESTORING, {'goal': goal.text})
  aside = _set_aside(workdir, goal)
  say(f'all later files have been moved to {aside}; nothing was deleted')
  learners = run_config.learner_ids(config.sync.learners)
  gone = []
  if goal.machine_state is not None:
    outer_log.begin(log_files, agreement_of_run, goal.machine_state)
    members = {row['learner'] for row in goal.machine_state['members'] if not row['left']}
    gone = sorted(members - set(learners))
    parts = goal.manifest.learners if goal.manifest else {}
    note = manifests.Restored(
      log=goal.machine_state[outer_log.POSITION],
      gone=tuple(gone),
      back=tuple(sorted(parts.keys() & set(learners))),
    )
    manifests.write_restored(workdir, note)
  load.write(workdir, config)
  (workdir / run_folder.ADDRESS).unlink(missing_ok=True)  # it may say that the run has ended
  (syncer / manifests.RESTORING).unlink()
  json_files.fsync(syncer)
  say(f'the run continues from {goal.text}')
  for learner in learners:
    if goal.manifest and learner not in goal.manifest.learners:
      why = shown(dict(goal.manifest.missing).get(learner, 'it is new'))
      say(
        f'{learner} starts from the fragments of the syncer, with the moments of a peer or '
        f'fresh ones: it has no part in the snapshot ({why})'
      )
  for learner in gone:
    say(f'{learner} is not in this config: it counts as having left')


def _set_aside(workdir: pathlib.Path, goal: Goal) -> pathlib.Path:
  """Moves everything later than the goal to a new folder, which it returns."""
  taken = json_files.numbers(path.name.removeprefix('aside-') for path in workdir.glob('aside-*'))
  aside = workdir / f'aside-{max(taken, default=0) + 1}'
  aside.mkdir()
  syncer = manifests.syncer_folder(workdir)
  moved = [path for path in (syncer / _WAL).iterdir() if path.name != files_lib.LOCK]
  moved += [workdir / 'tapes', workdir / syncer_process.MODEL, syncer / manifests.RESTORED]
  moved += [
    workdir / manifests.FOLDER / f'{number}.json'
    for number in manifests.numbers(workdir)
    if goal.manifest and number > goal.manifest.snapshot
  ]
  for node in (syncer, *_islands(workdir)):
    moved += [
      node / manifests.CHECKPOINTS / str(number)
      for number in manifests.checkpoints(node)
      if goal.is_later(node, number)
    ]
  for path in filter(os.path.lexists, moved):
    target = aside / path.relative_to(workdir)
    target.parent.mkdir(parents=True, exist_ok=True)
    path.rename(target)
    json_files.fsync(path.parent)
  return aside
