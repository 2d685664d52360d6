"""The copies of checkpoints in the store of a run, which a syncer on another disk and followers
read; syncer/stored.py puts them there.

STORE/syncer/ckpt/N-H/   a state (states.py): checkpoint N, H a hash of its manifest
"""

import re
from collections.abc import Sequence

from diloco_jax.storage import claim as claim_lib
from diloco_jax.storage import states
from diloco_jax.storage import store as store_lib

MODEL = 'model'  # in a run's folder, and in the store: the trained model, for plain Orbax
_COPY = re.compile(rf'(.*/ckpt/\d+-[0-9a-f]{{8}})/{re.escape(states.MANIFEST)}')


def part(restored: Sequence[str]) -> str:
  """The part of the store that has the copies and records since a run's last restore."""
  return f'syncer/restored-{restored[-1]}/' if restored else 'syncer/'


def of(claim: claim_lib.Content | None) -> tuple[str, str]:
  """The part that has the newest copies, and the run that they are of; '' without a claim."""
  return (part(claim.lineage.restored), claim.lineage.run) if claim else (part(()), '')


def names(store: store_lib.Store, at: str) -> list[str]:
  """The names of the complete copies in a part of the store, the newest last. Raises StoreError."""
  found = [match[1] for match in map(_COPY.fullmatch, store.names(f'{at}ckpt/')) if match]
  return sorted(found, key=number)


def number(name: str) -> int:
  """The number of the checkpoint of a copy."""
  return int(name.rsplit('/', 1)[1].split('-')[0])


def node_name(name: str) -> str:
  """The name of the state of which this is a copy."""
  return f'syncer/{number(name)}'
