"""The allowlist: which certificates of a run's learners the syncer accepts.

A file of the syncer's folder, JSON::

    {"format": 1, "program": "0.1.0", "run": "RUN",
     "learners": {"l0": [{"sha256": "0f...", "until": "2026-12-22T10:00:00+00:00"}]}}

A certificate that the authority has signed is not enough: it must be listed. So taking a line out
revokes it. The owner's commands write the file (authority.py), the syncer reads it again when it
changes (transport/credentials.py).
"""

import dataclasses
import datetime
import json
import pathlib

from diloco_jax.certs import names, private, proofs
from diloco_jax.protocol import formats, safe_json

FILE = 'allowlist.json'
_MAX_BYTES = 4 << 20

Listed = dict[str, dict[str, datetime.datetime]]  # by id, by SHA-256: when the certificate ends


@dataclasses.dataclass(frozen=True, slots=True)
class Allowlist:
  """The certificates that a run's syncer accepts; `listed` is not changed after construction."""

  run: str
  listed: Listed

  def require(self, proof: proofs.Proof) -> None:
    """Raises Unproved unless the certificate is one of this run, and listed for its id."""
    name = proof.name
    if name.run != self.run:
      raise proofs.Unproved(f'the certificate is of run {name.run}, this syncer serves {self.run}')
    if name.id not in self.listed:
      raise proofs.Unproved(
        f'learner {name.id} is not on the allowlist of run {self.run}: its owner lists it with '
        f'`diloco certs issue {name.id}`'
      )
    if proof.sha256 not in self.listed[name.id]:
      raise proofs.Unproved(
        f'this certificate of learner {name.id} is not on the allowlist of run {self.run}: it was '
        'revoked, or replaced by a newer one'
      )

  def with_certificate(self, proof: proofs.Proof, now: datetime.datetime) -> 'Allowlist':
    """Adds a certificate; those of its learner that have not ended stay."""
    live = lambda entries: {sha256: until for sha256, until in entries.items() if until > now}
    listed = {id: live(entries) for id, entries in self.listed.items()}
    listed.setdefault(proof.name.id, {})[proof.sha256] = proof.not_after
    return Allowlist(self.run, listed)

  def without(self, learner: str) -> 'Allowlist':
    listed = {id: entries for id, entries in self.listed.items() if id != learner}
    return Allowlist(self.run, listed)

  def write(self, folder: pathlib.Path) -> None:
    rows = {
      learner: [{'sha256': sha256, 'until': until.isoformat()} for sha256, until in entries.items()]
      for learner, entries in sorted(self.listed.items())
    }
    values = formats.stamp('allowlist') | {'run': self.run, 'learners': rows}
    private.replace(folder / FILE, json.dumps(values, indent=2).encode() + b'\n')


def read(folder: pathlib.Path) -> Allowlist:
  """Reads the allowlist in a folder. Raises ValueError if it is missing or not whole."""
  path = folder / FILE
  try:
    data = private.read(path, _MAX_BYTES)
    if path.stat().st_mode & 0o022:
      raise ValueError('other users may write it: chmod 600')
    return _parse(formats.require('allowlist', safe_json.parse_object(data), path))
  except OSError as error:
    raise ValueError(f'{path} cannot be read: {error.strerror}') from None
  except formats.OtherFormat:
    raise
  except (ValueError, TypeError, KeyError, AttributeError) as error:
    raise ValueError(f'{path} is not a whole allowlist: {error}') from None


def _parse(data: dict) -> Allowlist:
  listed: Listed = {}
  for learner, rows in data['learners'].items():
    names.Name(data['run'], names.LEARNER, learner)
    listed[learner] = {
      str(row['sha256']): datetime.datetime.fromisoformat(row['until']) for row in rows
    }
  return Allowlist(data['run'], listed)
