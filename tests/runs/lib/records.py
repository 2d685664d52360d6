"""What the records of a run of real processes say."""

import pathlib
from typing import Any

from diloco_jax.report import records as records_lib


def facts(workdir: pathlib.Path, process: str, name: str) -> list[dict[str, Any]]:
  """The facts of a process with this name so far, as this machine has them."""
  if not (workdir / records_lib.RECORDS).is_dir():
    return []
  rows = records_lib.records(workdir)
  return [row for row in rows if (row['process'], row['name']) == (process, name)]


class Watched:
  """A run whose folder is `workdir`."""

  workdir: pathlib.Path

  def facts(self, process: str, name: str) -> list[dict[str, Any]]:
    return facts(self.workdir, process, name)

  def merges(self, learner: str) -> int:
    """Outer steps in which a learner participated."""
    return sum(learner in fact['participants'] for fact in self.facts('syncer', 'synced'))
