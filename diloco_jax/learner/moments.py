"""The state of the inner optimizer, its *moments*, for a process that begins.

The moments exist only at learners and in their checkpoints, so a process takes them from the first
of these that can be read: its own newest checkpoint; the newest checkpoint of any other learner
under the same folder, whose moments are as good (docs/studies/results.md); else they are fresh.
"""

from typing import Any, NamedTuple

from diloco_jax.protocol import formats
from diloco_jax.storage import checkpoint, folders, json_files


class Found(NamedTuple):
  """Moments from the checkpoint of `learner` at `step`, with the machine's state in it."""

  learner: str
  step: int
  moments: Any  # numpy arrays
  protocol: dict[str, Any]


def folder(place: json_files.Place, learner: str) -> json_files.Place:
  """The checkpoints of a learner, in the workdir or the store of its run."""
  return place / folders.ISLANDS / learner / folders.CHECKPOINTS


def find(
  place: json_files.Place, learner: str, like: Any, part: str = 'opt_state', run: str | None = None
) -> Found | None:
  """The moments of the newest checkpoint that verifies and has moments like these, of this learner
  if there is one, else of any other; None: there is none.

  Args:
    place: workdir or store of the run.
    learner: its id.
    like: moments of the same shapes.
    part: of the checkpoint.
    run: of which another learner's must be; None: of any. The syncer refuses a learner that comes
      back with its own one of another run.
  """
  ages = {
    (path.parts[-3] == learner, number, path.parts[-3]): path
    for path in place.glob(f'{folders.ISLANDS}/*/{folders.CHECKPOINTS}/*')
    if (number := json_files.number(path.name)) is not None
  }
  for (_, _, name), path in sorted(ages.items(), reverse=True):
    try:
      of_run = checkpoint.machine_state(path)['protocol'].get('run')  # before the arrays are read
      if name != learner and run not in (None, of_run):
        continue
      step, moments, record = checkpoint.read_part(path, part, like)
      return Found(name, step, moments, record['protocol'])
    except Exception as error:  # of any kind: the next one may be whole, or of this model
      if isinstance(error, formats.OtherFormat) and name == learner:
        raise  # its own checkpoint
  return None


def told(found: Found | None, place: json_files.Place, given: str) -> str:
  """What a process without a checkpoint says when it joins a run in progress; `given`: what it has
  if nothing was found."""
  if found is not None:
    return f'the inner optimizer begins with the moments of {found.learner} at step {found.step}'
  return (
    f'no checkpoint of a learner with this model can be read under {place / folders.ISLANDS}, so '
    f'the inner optimizer begins with {given}. No merged update is lost; expect a higher loss for '
    'some hundred steps. A workdir that outlives the process, or a train.store that the learners '
    'share, avoids this.'
  )
