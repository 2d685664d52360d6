"""The folder of a run.

WORKDIR/config.json        the config that started or continued the run
WORKDIR/lock               held by the supervisor of the run
WORKDIR/records/           facts of every process        (report/records.py)
WORKDIR/logs/              output of every process
WORKDIR/tapes/             every turn of every machine   (storage/tapes.py)
WORKDIR/tensorboard/       curves
WORKDIR/syncer/, islands/  checkpoints                   (storage/checkpoint.py)
WORKDIR/syncer/lineage.json which run it is, and where its state comes from (storage/lineage.py)
WORKDIR/syncer/model/      the model of a user's own loop (process/own_model.py)
WORKDIR/model/             the trained model, for Orbax (storage/arrays.py)
WORKDIR/syncer/wal/        the log of outer steps        (storage/outer_log.py)
WORKDIR/aside-1/           files that a restore moved    (process/restore.py)
WORKDIR/report/            text, figures, page, pictures (report/summary.py)
"""

import contextlib
import itertools
import os
import pathlib
import shutil
import stat
import sys
import tempfile
from collections.abc import Collection

from diloco_jax.config import load, run_config
from diloco_jax.protocol import agreement as agreement_lib
from diloco_jax.report import folder as folder_lib
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import folders
from diloco_jax.train import corpus_files

ADDRESS = 'syncer/address'


class NothingLeft(Exception):
  """The run to continue has ended, and was given no more to do."""


def open_workdir(
  config: run_config.Config,
  workdir: pathlib.Path | None,
  resume: bool,
  alone: bool = False,
  changed: Collection[str] = (),
  whole: bool = True,
) -> pathlib.Path:
  """Makes the folder of a run, or opens the one to continue. `alone`: one learner without a syncer.
  `changed`: settings that the user wants to continue with another value of. `whole`: False if other
  programs of the run are elsewhere. Raises ValueError, NothingLeft; DirectoryError if its
  supervisor or its syncer runs, or another program makes the same folder."""
  named = workdir is not None
  if not named:
    if resume:
      raise ValueError('--resume needs --workdir=DIR, the run to continue')
    workdir = pathlib.Path(folders.new_run(config.name))
  workdir = workdir.absolute()
  files_lib.require_name(workdir)
  folders.require_apart(workdir, config.train.store)
  if resume:
    _check_same_run(config, workdir, changed)
    if whole:
      _check_same_kind(workdir, alone)
      _check_left(config, workdir)
  elif named:
    _check_empty(workdir, but_locked=True)
  if config.task == run_config.DECODER and (whole or not config.data.local):
    for learner in run_config.learner_ids(1 if alone else config.sync.learners):
      corpus_files.list_files(config.of(learner).data.corpus)
  if config.task == run_config.OWN_LOOP and whole:
    raise ValueError(
      "this config has no task: its learners are loops of the user's own, which diloco_jax.join "
      'connects to `diloco syncer --config=own_loop`'
    )
  try:
    if named:
      make_private(workdir)
    else:
      workdir = _claim_new(workdir)
    with lock(workdir):  # of programs that start together, one gets the folder
      if resume:
        _check_ended(workdir)
      else:
        _check_empty(workdir)
      (workdir / ADDRESS).unlink(missing_ok=True)  # the address of an ended run
      load.write(workdir, config)
  except OSError as error:
    raise ValueError(
      f'cannot write {workdir} ({error.strerror}); make space, or choose another folder'
    ) from error
  return workdir


def write_config(workdir: pathlib.Path, config: run_config.Config) -> None:
  """Writes the config of a run whose nodes are started one by one, unless there is one. Raises
  OSError."""
  if not os.path.lexists(workdir / load.FILE):
    load.write(workdir, config)


def _claim_new(workdir: pathlib.Path) -> pathlib.Path:
  """Makes a folder that no other program has: this one, or else the same with a number. Raises
  OSError."""
  for number in itertools.count(1):
    path = workdir if number == 1 else workdir.with_name(f'{workdir.name}-{number}')
    with contextlib.suppress(FileExistsError):  # of a run that began in the same second
      path.mkdir(mode=0o700, parents=True)
      return path
  raise AssertionError


def make_private(workdir: pathlib.Path) -> None:
  """Makes the folder of a run, for this user alone; warns if other users can write to it. Raises
  OSError, and ValueError for a path that `files.require_name` refuses."""
  files_lib.require_name(workdir)
  workdir.mkdir(mode=0o700, parents=True, exist_ok=True)
  status = workdir.stat()
  if status.st_mode & 0o022:
    print(
      f'warning: other users can write to {workdir} (mode {stat.S_IMODE(status.st_mode):04o}), and '
      'so change what the run reads: chmod 700 it',
      file=sys.stderr,
      flush=True,
    )


def or_temporary(workdir: str | os.PathLike | None, cleanup: contextlib.ExitStack) -> pathlib.Path:
  """The folder to work in, as `claim`; None: a temporary one, which `cleanup` removes."""
  if workdir is None:
    folder = tempfile.mkdtemp(prefix='diloco-')  # a TemporaryDirectory would end with any fork
    cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
    return pathlib.Path(folder)
  path = pathlib.Path(workdir).absolute()
  make_private(path)
  return path


def lock(workdir: pathlib.Path) -> contextlib.AbstractContextManager[files_lib.Files]:
  """Locks the run for one supervisor. Raises DirectoryError."""
  folder = files_lib.Files(workdir)
  try:
    folder.lock('train')
  except BaseException:
    folder.close()
    raise
  return contextlib.closing(folder)


def _check_empty(workdir: pathlib.Path, but_locked: bool = False) -> None:
  """Refuses a folder with anything but a lock. `but_locked`: not if it has one, since the program
  that holds it may be writing its first files. Raises ValueError."""
  names = {path.name for path in workdir.iterdir()} if workdir.is_dir() else set()
  if names <= {files_lib.LOCK} or (but_locked and files_lib.LOCK in names):
    return
  holds = 'is not empty:'
  if (workdir / load.FILE).is_file():
    holds = 'already holds a run: continue it (`train --resume`, diloco_jax.run in Python), or'
  raise ValueError(f'{workdir} {holds} choose another folder')


def _check_ended(workdir: pathlib.Path) -> None:
  """Refuses a run whose syncer has the log: without the address, its learners could not come back.
  A live supervisor, which starts its syncer again, holds the folder. Raises DirectoryError."""
  log = folders.log_folder(workdir)
  if log.is_dir():
    with lock(log):
      pass


def _check_same_kind(workdir: pathlib.Path, alone: bool) -> None:
  """Refuses a run with a syncer to a learner alone, and the reverse: neither could go on from the
  checkpoints of the other. Raises ValueError."""
  has_log = folders.log_folder(workdir).is_dir()
  if alone and has_log:
    raise ValueError(
      f"the run in {workdir} has a syncer; leave --syncer=none (in Python: syncer='none') out, or "
      'choose another folder'
    )
  learners = (workdir / folders.ISLANDS).glob('*')
  if not alone and not has_log and any(map(folders.checkpoints, learners)):
    raise ValueError(
      f'the run in {workdir} is of one learner without a syncer; continue it with --syncer=none '
      "(in Python: syncer='none'), or choose another folder"
    )


def _check_left(config: run_config.Config, workdir: pathlib.Path) -> None:
  """Raises NothingLeft: a start would take a while, change nothing, and count in the report."""
  now, before = config.train, load.read(workdir).train
  more = now.steps > before.steps or now.store != before.store  # which then gets the model
  if not more and folder_lib.has_ended(workdir):
    raise NothingLeft(
      f'the run in {workdir} has ended at clock {before.steps}: nothing was started. Add steps '
      'with --config.train.steps=STEPS (in Python: config.train.steps)'
    )


def _check_same_run(
  config: run_config.Config, workdir: pathlib.Path, changed: Collection[str]
) -> None:
  """Refuses another run's config. Raises ValueError."""
  if not (workdir / load.FILE).is_file():
    store = config.train.store
    what = f'continue the one in {store}, with the settings that it had' if store else 'start one'
    raise ValueError(f'there is no run in {workdir} to continue; leave --resume out to {what}')
  may = {'train.steps', *changed}.intersection(agreement_lib.MAY_CHANGE)
  if differences := agreement_lib.changed(config.agreement(), load.read(workdir).agreement(), may):
    raise ValueError(
      f'the run in {workdir} was started with another config: {"; ".join(differences)}; '
      'continue it with its own config (`train --resume` without --config, in Python '
      'diloco_jax.run(FOLDER, FOLDER)), or choose another folder'
    )
