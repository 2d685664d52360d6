"""The ids of learners, and the name of the syncer beside them."""

import re

ID = re.compile(r'[a-z0-9][a-z0-9_-]{0,62}')
SYNCER = 'syncer'
FORGOTTEN = '(forgotten)'  # in the ledger: all ids that the syncer has dropped
NO_LEARNERS = (SYNCER, 'supervisor')  # other programs of a run, whose records have these names
RULE = 'use at most 63 of a-z 0-9 _ -, the first a letter or digit; syncer and supervisor are taken'


def is_learner(text: str) -> bool:
  """Whether it can be the id of a learner (RULE)."""
  return ID.fullmatch(text) is not None and text not in NO_LEARNERS


def natural(name: str) -> list:
  """A key that sorts names as people do.

  >>> sorted(['l10', 'l2', 'l1'], key=natural)
  ['l1', 'l2', 'l10']
  """
  return [int(part) if part.isdigit() else part for part in re.split('([0-9]+)', name)]
