"""The state of the inner optimizer, its *moments*, for a process that begins.

The moments exist only at learners and in their checkpoints, so a process takes them from the first
of these that can be read: its own newest checkpoint; the newest checkpoint of any other learner
under the same folder, whose moments are as good (docs/studies/results.md); else they are fresh.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from diloco_jax.protocol import formats
from diloco_jax.storage import folders, json_files, states, tree_digest

_MOMENTS = 'opt_state'


class SavedMoments(NamedTuple):
  """Moments from the checkpoint of `learner` at `step`, with the machine's state in it."""

  learner: str
  step: int
  moments: Any  # numpy arrays
  protocol: dict[str, Any]


def folder(place: json_files.Place, learner: str) -> json_files.Place:
  """The checkpoints of a learner, in the workdir or the store of its run."""
  return place / folders.ISLANDS / learner / folders.CHECKPOINTS


def find(
  place: json_files.Place,
  learner: str,
  like: Any,
  say: Callable[[str], None],
  part: str = _MOMENTS,
  run: str | None = None,
) -> SavedMoments | None:
  """The moments of the newest checkpoint that verifies and has moments like these, of this learner
  if there is one, else of any other; None: there is none.

  Args:
    place: workdir or store of the run.
    learner: its id.
    like: moments of the same shapes.
    say: prints a line for people about each that is damaged.
    part: of the checkpoint.
    run: of which another learner's must be; None: of any. The syncer refuses a learner that comes
      back with its own one of another run.

  Raises:
    ValueError: this learner has saved another state. Its next saves would replace that one.
  """

  def list_checkpoints() -> list[json_files.Place]:
    paths = place.glob(f'{folders.ISLANDS}/*/{folders.CHECKPOINTS}/*')
    ages = {
      (path.parts[-3] == learner, number, path.parts[-3]): path
      for path in paths
      if (number := json_files.number(path.name)) is not None
    }
    return [path for _, path in sorted(ages.items())]

  def use(path: json_files.Place) -> SavedMoments | None:
    name = path.parts[-3]
    try:
      manifest = states.read(path, f'{name}/{path.name}')
      if name == learner or run in (None, manifest.run):
        _, moments = states.load_on_host(path, like, f'{part}/')
        return SavedMoments(
          name, manifest.record['step'], moments, manifest.record['protocol']['protocol']
        )
    except formats.OtherFormat:
      if name == learner:
        raise
    except tree_digest.Mismatch as mismatch:
      if name == learner and part == _MOMENTS:
        raise ValueError(
          f'{path} has another state of {learner}: {mismatch}. Nothing was changed. Start it with '
          'the program that has saved it; or move the folder above it aside, and all that is not '
          'exchanged begins anew'
        ) from None
    return None

  passed_over = lambda path, error: say(f'{error}: an older checkpoint, or another, is used')
  with contextlib.suppress(states.Damaged):
    return states.newest(list_checkpoints, use, passed_over)
  return None


def describe(saved: SavedMoments | None, place: json_files.Place, given: str) -> str:
  """The line that a process without a checkpoint prints when it joins a run in progress. `given`:
  its moments if nothing was found."""
  if saved is not None:
    return f'the inner optimizer begins with the moments of {saved.learner} at step {saved.step}'
  return (
    f'{place / folders.ISLANDS} has no checkpoint of a learner of this run, so the inner '
    f'optimizer, and all else that is not exchanged, begins with {given}. The model is that of the '
    'run; its loss may be higher for some hundred steps. A workdir that outlives the process, or a '
    'train.store that the learners share, avoids this.'
  )
