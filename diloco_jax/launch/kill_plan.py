"""Kills during a local run, as `diloco train --kill=l1@0.45+8` names them.

Times are fractions of the run's progress, not seconds, so that a plan means the same on a fast and
a slow machine. The supervisor follows the records and carries out the kills that are due.
"""

import dataclasses
import re
from collections.abc import Sequence

_KILL = re.compile(r'(?P<victim>\w+)@(?P<at>[01](\.\d+)?)(\+(?P<down>\d+(\.\d+)?))?', re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class Kill:
  """SIGKILL `victim` once `at_fraction` of the run is done; start it again `down_s` later."""

  victim: str
  at_fraction: float
  down_s: float


def parse(texts: Sequence[str], names: Sequence[str]) -> list[Kill]:
  """The kills of the programs with these names, in order of time. Raises ValueError.

  >>> parse(['l0@0.5+3'], ['l0', 'syncer'])
  [Kill(victim='l0', at_fraction=0.5, down_s=3.0)]
  """
  kills = []
  for text in texts:
    found = _KILL.fullmatch(text)
    if not found or found['victim'] not in names or float(found['at']) > 1:
      raise ValueError(
        f'--kill={text}: use NAME@FRACTION+SECONDS, as {names[0]}@0.45+8, for a kill when 45 % of '
        f'the run is done and a start 8 s later, with one of the names {", ".join(names)}'
      )
    kills.append(Kill(found['victim'], float(found['at']), float(found['down'] or 0)))
  return sorted(kills, key=lambda kill: kill.at_fraction)


def due(kills: list[Kill], progress: float) -> tuple[list[Kill], list[Kill]]:
  """Splits the kills into (due at this progress, still to come)."""
  return (
    [kill for kill in kills if kill.at_fraction <= progress],
    [kill for kill in kills if kill.at_fraction > progress],
  )
