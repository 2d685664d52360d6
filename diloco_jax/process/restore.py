"""Brings a whole run back to an earlier, verified state: `diloco restore`.

A run goes back to a checkpoint of the syncer: the newest that verifies (`latest`), or the newest
that verifies of those at or before a clock. Parameters, clock, ledger and data cursors come from
it. Each learner adds the moments of its own newest checkpoint at or before that clock. Checkpoints
that do not verify are passed over with a line about what differs. So a log that is refused
because it is damaged is mended, too: the run repeats the outer steps behind the checkpoint. Without
a checkpoint the run starts over. Learners that the config does not have count as having left.

Until the verification has ended nothing is changed, and only the locks are opened for writing. Then
everything later than the goal (checkpoints, log, tapes, the trained model) moves to
WORKDIR/aside-K, and what learners have saved in the store to STORE/aside-K; nothing is deleted. A
new log begins behind the position of the syncer's checkpoint. A restore that was interrupted is to
be repeated; until then no syncer of the run starts (storage/lineage.py).

Names and numbers are typed before they become paths, and links are not followed.
"""

import contextlib
import dataclasses
import os
import pathlib
import secrets
from collections.abc import Callable
from typing import Any

from diloco_jax.config import brought, build, load, run_config
from diloco_jax.process import own_model, run_folder
from diloco_jax.protocol import agreement as agreement_lib
from diloco_jax.protocol import ids
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import folders, json_files, outer_log, states, tapes
from diloco_jax.storage import lineage as lineage_lib

LATEST = 'latest'
MAY_DIFFER = ('sync.learners', 'sync.quorum', *agreement_lib.MAY_CHANGE)

Say = Callable[[str], None]
Places = tuple[json_files.Place, ...]  # the workdir, then the store if there is one


@dataclasses.dataclass(frozen=True)
class Goal:
  """The verified state that a run goes back to.

  Attributes:
    clock: of the syncer's checkpoint; 0: there is none, the run starts over.
    machine_state: in it, None if there is none.
    newest: by the folder of a node, its newest checkpoint from now on.
  """

  clock: int
  machine_state: dict[str, Any] | None
  newest: dict[json_files.Place, int]


def restore(config: run_config.Config, workdir: pathlib.Path, to: str, say: Say) -> None:
  """Brings the run in `workdir` back to LATEST or to a clock.

  Raises:
    ValueError: there is no such checkpoint that is whole, or the config cannot work; nothing was
      changed.
    DirectoryError: a syncer or a learner runs there, or the folder cannot be written.
    OSError, WalFull, WalBroken: the disk is full or failed; repeat the restore.
  """
  files_lib.require_name(workdir)
  if not folders.syncer_folder(workdir).is_dir():
    raise ValueError(f'there is no run in {workdir} to restore')
  at = json_files.number(to)
  if to != LATEST and at is None:
    available = _there_are(folders.checkpoints(folders.syncer_folder(workdir)))
    raise ValueError(
      f'--to is {LATEST!r} or a clock, not {to[:80]!r}; the newest checkpoint at or before it is '
      f'taken ({available})'
    )
  places = tuple(dict.fromkeys((workdir, folders.of_learners(workdir, config.train.store))))
  _require_plain_folders(places)
  with contextlib.ExitStack() as locked:
    if (workdir / files_lib.LOCK).is_file():  # a supervisor starts its processes again
      _lock(workdir, locked)
    log_files = _lock(folders.log_folder(workdir), locked)
    for node in _islands(workdir):
      if (node / folders.CHECKPOINTS).is_dir():
        _lock(node / folders.CHECKPOINTS, locked)
    model = own_model.read(workdir)
    own = None if model is None else own_model.complete(model, config)
    if (workdir / load.FILE).is_file():  # else the operator has given one
      _require_same_run(config, load.read(workdir).agreement())
    before = lineage_lib.read(workdir, lineage_lib.RESTORE) or lineage_lib.Lineage()
    goal = choose(places, at, before.run, say)
    assembled = own or build.assemble(config)  # it may refuse: before anything moves
    brought.require(load.brought(workdir), assembled.things, assembled.things)
    _go_back(config, assembled.agreement, places, before, goal, log_files, say)


def _lock(folder: pathlib.Path, locked: contextlib.ExitStack) -> files_lib.Files:
  """Locks the folder of a process of the run. Raises DirectoryError if it still runs."""
  files = files_lib.Files(folder)
  locked.callback(files.close)
  files.lock('restore')
  return files


def _require_plain_folders(places: Places) -> None:
  """Refuses a run whose folders are links: what a restore moves and writes would be elsewhere.
  Raises ValueError."""
  syncer = folders.syncer_folder(places[0])
  nodes = [syncer, *(node for place in places for node in _islands(place))]
  links = [places[0] / tapes.TAPES, *(place / folders.ISLANDS for place in places)]
  links += [folders.log_folder(places[0]), *nodes, *(node / folders.CHECKPOINTS for node in nodes)]
  for path in links:
    if isinstance(path, pathlib.Path) and path.is_symlink():
      raise ValueError(
        f'{path} is a symbolic link, which a restore does not follow. Nothing was changed. Put the '
        'folder itself there'
      )


def _islands(place: json_files.Place) -> list[json_files.Place]:
  """The folders of learners."""
  with json_files.as_os_errors():
    return sorted(path for path in (place / folders.ISLANDS).glob('*') if ids.is_learner(path.name))


# --- The goal -------------------------------------------------------------------------------------


def choose(places: Places, at: int | None, run: str, say: Say) -> Goal:
  """Finds the state to go back to. Raises ValueError; only reads.

  Args:
    places: of the run.
    at: its clock is at most that; None: the newest.
    run: its name, if the folder has one.
    say: prints a line for people.
  """
  syncer = folders.syncer_folder(places[0])
  checkpoint = _newest(places[0], syncer, at, run, say)
  if checkpoint is None:
    numbers = folders.checkpoints(syncer)
    if numbers or at is not None:
      before = '' if at is None else f' at or before clock {at}'
      raise ValueError(
        f'no checkpoint{before} in {syncer / folders.CHECKPOINTS} is whole '
        f'({_there_are(numbers)}); nothing was changed'
      )
    return Goal(0, None, {})
  number, record = checkpoint
  newest = {syncer: number}
  for place in places:
    for node in _islands(place):
      if (own := _newest(place, node, record['step'], '', say)) is not None:
        newest[node] = own[0]
  return Goal(record['step'], record['protocol'], newest)


def _newest(
  place: json_files.Place, node: json_files.Place, at: int | None, run: str, say: Say
) -> tuple[int, dict[str, Any]] | None:
  """A node's newest checkpoint that verifies, at or before a clock: its number and its record."""
  root = node / folders.CHECKPOINTS

  def use(number: int) -> tuple[int, dict[str, Any]] | None:
    folder, name = root / str(number), f'{node.name}/{number}'
    if at is not None and states.read(folder, name, run).record['step'] > at:
      return None
    record = states.verify(folder, name, run).record
    if node == folders.syncer_folder(place):
      _require_state(record['protocol'], folder)
    return number, record

  passed_over = lambda number, error: say(f'{error}: checkpoint {number} is passed over')
  with contextlib.suppress(states.Damaged):
    return states.newest(lambda: folders.checkpoints(node), use, passed_over)
  return None


def _require_state(machine_state: dict[str, Any], folder: pathlib.Path) -> None:
  """Raises Damaged unless what a restore uses of the syncer's state is of its type."""
  try:
    folders.require_number(outer_log.POSITION, machine_state[outer_log.POSITION])
    folders.require_sha256(machine_state[outer_log.CHAIN])
    for row in machine_state['members']:
      folders.require_learner(row['learner'])
      if type(row['left']) is not bool:
        raise ValueError('a member has left, or has not')
  except (KeyError, TypeError, ValueError) as error:
    raise states.Damaged(f'{folder} is not that of a syncer: {error}') from None


def _require_same_run(config: run_config.Config, before: dict[str, Any]) -> None:
  """Compares the settings of a run with those before; all but MAY_DIFFER must be equal. Raises
  ValueError."""
  here = config.agreement()
  if differences := agreement_lib.changed(
    here, before, {*MAY_DIFFER, *(before.keys() - here.keys())}
  ):
    raise ValueError(f'it is of a run with another config: {"; ".join(differences)}')


def _there_are(known: list[int]) -> str:
  return f'there are: {", ".join(map(str, known))}' if known else 'there is none'


# --- Going back -----------------------------------------------------------------------------------


def _go_back(
  config: run_config.Config,
  agreement_of_run: str,
  places: Places,
  before: lineage_lib.Lineage,
  goal: Goal,
  log_files: files_lib.Files,
  say: Say,
) -> None:
  workdir, at = places[0], goal.machine_state or {}
  later = {place: _later(place, goal, place == workdir) for place in places}
  asides = lineage_lib.go_back(
    workdir, before, lineage_lib.RESTORE, later, log_files, agreement_of_run, goal.machine_state
  )
  if asides:
    say(f'all later files have been moved to {" and ".join(asides)}; nothing was deleted')
  learners = run_config.learner_ids(config.sync.learners)
  members = {row['learner'] for row in at.get('members', ()) if not row['left']}
  gone = tuple(sorted(members - set(learners)))
  after = dataclasses.replace(
    before,
    run=before.run or at.get('run', ''),
    restored=(*before.restored, secrets.token_hex(4)),
    log=at.get(outer_log.POSITION, 0),
    gone=gone,
    changing='',
  )
  load.write(workdir, config)
  (workdir / run_folder.ADDRESS).unlink(missing_ok=True)  # it may be that of an ended run
  lineage_lib.write(workdir, after)
  from_there = f'continues from the checkpoint of clock {goal.clock}'
  say(f'the run {from_there if at else "starts over: its syncer has saved no checkpoint"}')
  for learner in sorted(set(learners) - {node.name for node in goal.newest}):
    say(
      f'{learner} starts from the fragments of the syncer, with the moments of another or fresh '
      'ones: this folder has no checkpoint of it at that clock or before'
    )
  for learner in gone:
    say(f'{learner} is not in this config: it counts as having left')


def _later(place: json_files.Place, goal: Goal, is_workdir: bool) -> list[json_files.Place]:
  """The files of a node that are later than the goal, but for the log. Those of the syncer in a
  store stay: it will begin another part of the store (syncer/stored.py)."""
  syncer = [folders.syncer_folder(place)] if is_workdir else []
  ends = (place / tapes.TAPES, place / folders.MODEL) if is_workdir else ()
  return [
    *filter(os.path.lexists, ends),
    *(
      node / folders.CHECKPOINTS / str(number)
      for node in (*_islands(place), *syncer)
      for number in folders.checkpoints(node)
      if number > goal.newest.get(node, -1)
    ),
  ]
