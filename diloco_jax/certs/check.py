"""Checks the folder of a node: its certificate, its key, and the authority of its run.

A learner checks its folder before every dial, because a client whose certificate is refused has no
other error from gRPC than "Socket closed".
"""

import dataclasses
import datetime
import pathlib

from diloco_jax.certs import names, private, proofs

AUTHORITY, CERTIFICATE, KEY = 'ca.pem', 'cert.pem', 'key.pem'
FILES = (AUTHORITY, CERTIFICATE, KEY)
WARN_DAYS = 7


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
  """A node's own certificate and key, checked. `authority`, `certificate`, `key` are PEM."""

  proof: proofs.Proof
  authority: bytes
  certificate: bytes
  key: bytes


def folder(tls: pathlib.Path, node: str) -> pathlib.Path:
  """Where the certificate of a node is: in the folder that is given, or in that of its name in it,
  as in the owner's."""
  return tls if any((tls / name).exists() for name in (CERTIFICATE, KEY)) else tls / node


def read(folder: pathlib.Path, role: str, now: datetime.datetime) -> Identity:
  """Reads the folder of a node. Raises ValueError that names everything that is wrong."""
  identity, wrong = _examine(folder, role, now)
  if wrong:
    raise ValueError(f'tls={folder}: {"; ".join(wrong)}')
  return identity


def require_learner(folder: pathlib.Path, learner: str, now: datetime.datetime) -> None:
  """Raises ValueError if the certificate in a folder is that of another learner."""
  identity, _ = _examine(folder, names.LEARNER, now)
  if identity and identity.proof.name.id != learner:
    raise ValueError(
      f'the certificate in {folder} is that of {identity.proof.name.id}, and this learner is '
      f'{learner}: give each learner the folder of its own id. Nothing was sent'
    )


def problems(folder: pathlib.Path, role: str, now: datetime.datetime) -> list[str]:
  """What is wrong in the folder of a node, each with what to do, and whether its certificate ends
  soon; [] if all is right."""
  identity, wrong = _examine(folder, role, now)
  if identity and (text := warning(identity.proof, now)):
    wrong.append(text)
  return wrong


def warning(proof: proofs.Proof, now: datetime.datetime) -> str:
  """Says that a certificate ends soon, from WARN_DAYS before its end on; else ''."""
  left = proof.not_after - now
  if left > datetime.timedelta(days=WARN_DAYS):
    return ''
  return (
    f'the certificate of {proof.name.uri} ends at {proofs.date(proof.not_after)}, in '
    f'{left.total_seconds() / 86400:.1f} days: `diloco certs issue {proof.name.id} --renew`, then '
    'replace the files in its folder; no restart is needed'
  )


def _examine(
  folder: pathlib.Path, role: str, now: datetime.datetime
) -> tuple[Identity | None, list[str]]:
  if not folder.is_dir():
    return None, ['there is no such folder (diloco certs --help)']
  wrong: list[str] = []
  data: dict[str, bytes] = {}
  for name in FILES:
    path = folder / name
    try:
      data[name] = private.read(path)
      if name == KEY and (objection := private.objection(path)):
        wrong.append(objection)
    except OSError as error:
      wrong.append(f'{name} cannot be read ({error.strerror})')
    except ValueError as error:
      wrong.append(str(error))
  if len(data) < len(FILES):
    return None, wrong
  from diloco_jax.certs import certificates  # here: it loads what only TLS needs

  proof, objections = certificates.judge(data, role, now)
  return proof and Identity(proof, *data.values()), wrong + objections
