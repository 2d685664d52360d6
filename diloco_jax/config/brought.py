"""What a user brings to a run, by what is in it: `brought` in WORKDIR/config.json, and in a store.

| name | fingerprint of | if it is another when the run or its model is read again |
|---|---|---|
| data | all ids: Task.data_digest | refused; `diloco evaluate` says it |
| tokenizer | its file, and the end that one beside it names | refused |
| initial model | train.init_from, frozen parameters too | refused |
| library | of the tokenizer, and its version | said: if ids are others, so is data |
| task | the file of config.task | said: somebody may have mended it |

The syncer, or the learner that has none, writes what the run begins with. The agreement (build.py)
compares learners that are elsewhere.
"""

import pathlib
import sys
from collections.abc import Callable, Collection, Mapping

from diloco_jax.config import load, run_config
from diloco_jax.storage import folders, json_files
from diloco_jax.train import corpus_files, fingerprint
from diloco_jax.train import task as task_lib
from diloco_jax.train import tokenizer as tokenizer_lib

SAID = 'library', 'task'
MODEL = 'initial model'
TEXT_THINGS = 'tokenizer', 'library'
Things = Mapping[str, tuple[Callable[[], str], Callable[[], fingerprint.Files]]]  # and its files


def things(config: run_config.Config, task: task_lib.Task) -> Things:
  """What a run of a task reads: by name the fingerprint, '' if it has none, and the files."""
  data, init_from, things = config.data, config.train.init_from, {}
  of_files = lambda listed: (lambda: fingerprint.of(listed), lambda: listed)
  if not data.local:
    is_read = config.task == run_config.DECODER or data.corpus != load.STDLIB  # most likely
    listed = (lambda: corpus_files.list_files(data.corpus)) if is_read else tuple
    things['data'] = task.data_digest, listed
  if data.tokenizer:
    where = data.tokenizer, data.corpus, data.field
    things['tokenizer'] = (
      (lambda: tokenizer_lib.digest(*where)),
      (lambda: tokenizer_lib.files_of(*where)),
    )
    things['library'] = (lambda: tokenizer_lib.library(data.tokenizer)), tuple
  if init_from:
    from diloco_jax.storage import hugging_face  # imports jax

    files = fingerprint.in_folder(init_from)
    if hugging_face.is_model(init_from):
      files = [file for file in files if hugging_face.KNOWN.fullmatch(file[0])]
    things[MODEL] = of_files(files)
  file, dot_py, _ = config.task.partition('.py:')
  module = sys.modules.get(config.task.partition(':')[0])
  if path := f'{file}.py' if dot_py else getattr(module, '__file__', None):
    things['task'] = of_files([('', path)])
  return things


def require(
  known: Mapping[str, str], things: Things, names: Collection[str], says: Collection[str] = SAID
) -> None:
  """Compares things of these names with what a run has begun with (`load.brought`). Says that one
  of `says` is another. Raises ValueError: one that may not be."""
  for name in sorted(known.keys() & things.keys() & set(names), reverse=True):  # data comes last
    now, files = things[name]
    if now() != known[name]:
      why = fingerprint.newest(files()) or f'{now()} now, {known[name]} then'
      text = f'the {name} is not what the run has begun with: {why}'
      if name not in says:
        raise ValueError(f'{text}. All that the run has saved is whole: put the {name} back')
      corpus_files.say_once(text)


def begin(workdir: pathlib.Path, things: Things, store: str = '') -> None:
  """Compares all, and writes what the run begins with. `store`: of the run, as the folder may be
  new. Raises ValueError, OSError."""
  known = load.brought(workdir) or (load.brought(folders.place(store)) if store else {})
  require(known, things, known)
  new = {name: now() for name, (now, _) in things.items() if name not in known}
  if (path := workdir / load.FILE).exists() and (new or not load.brought(workdir)):
    json_files.write(path, json_files.read(path) | {'brought': known | new})
