"""Names of the nodes of a run, as certificates carry them.

A certificate names its node in exactly one URI, `diloco://RUN/learner/ID` or
`diloco://RUN/syncer/ID`. A learner's certificate carries no other name. A syncer's carries one DNS
name more, `host(RUN)`, which is the same wherever the syncer listens: TLS compares it with the name
that the learner expects, so a learner talks to a syncer of its own run or to none.
"""

import dataclasses
import re

from diloco_jax.protocol import ids

LEARNER, SYNCER = 'learner', 'syncer'
_RUN = re.compile(r'[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?')  # a part of a DNS name
_URI = re.compile(r'diloco://([^/]+)/(learner|syncer)/([^/]+)')


@dataclasses.dataclass(frozen=True, slots=True)
class Name:
  """A node of a run. Raises ValueError if it cannot be one."""

  run: str
  role: str
  id: str

  def __post_init__(self):
    if not _RUN.fullmatch(self.run):
      raise ValueError(
        f'{self.run[:80]!r} is not the name of a run: use at most 63 of a-z 0-9 -, a letter or '
        'digit first and last'
      )
    fits = ids.is_learner if self.role == LEARNER else ids.ID.fullmatch
    if not fits(self.id):
      raise ValueError(f'{self.id[:80]!r} is not the id of a {self.role}: {ids.RULE}')

  @property
  def uri(self) -> str:
    return f'diloco://{self.run}/{self.role}/{self.id}'


def parse(uri: str) -> Name:
  """The inverse of `Name.uri`. Raises ValueError."""
  match = _URI.fullmatch(uri)
  if match is None:
    raise ValueError(f'{uri[:200]!r} is not diloco://RUN/learner/ID or diloco://RUN/syncer/ID')
  return Name(*match.groups())


def host(run: str) -> str:
  """The DNS name in the certificate of a run's syncer; no resolver needs to know it."""
  return f'{SYNCER}.{run}.diloco.internal'
