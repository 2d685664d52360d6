"""What a certificate proves: a node's name, until when, and in which run.

TLS has compared signatures and dates when a session begins, but it does not look at names, it lets
a resumed session in after the end of its certificate, and it never ends one. So everything here is
judged again, from the certificate itself.
"""

import dataclasses
import datetime
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from diloco_jax.certs import mint, names


class Unproved(ValueError):
  """A certificate does not prove what it must; the text says what is wrong."""


@dataclasses.dataclass(frozen=True, slots=True)
class Proof:
  """The node that a certificate names. `sha256`: of the certificate, in hex."""

  name: names.Name
  sha256: str
  not_before: datetime.datetime
  not_after: datetime.datetime

  def require_valid(self, now: datetime.datetime) -> None:
    """Raises Unproved if the certificate has ended or has not begun."""
    if now >= self.not_after:
      raise Unproved(f'the certificate of {self.name.uri} has ended at {date(self.not_after)}')
    if now < self.not_before:
      raise Unproved(
        f'the certificate of {self.name.uri} begins at {date(self.not_before)}; the clock here '
        f'says {date(now)}'
      )


def utc_now() -> datetime.datetime:
  return datetime.datetime.now(datetime.UTC)


def date(when: datetime.datetime) -> str:
  return f'{when:%Y-%m-%d %H:%M:%S} UTC'


def sha256(certificate: x509.Certificate) -> str:
  return certificate.fingerprint(hashes.SHA256()).hex()


def of_pem(pem: bytes, role: str) -> Proof:
  """The proof in a certificate. Raises Unproved if it is not one of a node of this role."""
  try:
    return of(x509.load_pem_x509_certificate(pem), role)
  except Unproved:
    raise
  except ValueError as error:
    raise Unproved(f'not a certificate: {error}') from None


def of(certificate: x509.Certificate, role: str) -> Proof:
  """The proof in a certificate. Raises Unproved if it is not one of a node of this role."""
  name = _name(certificate)
  if name.role != role:
    raise Unproved(f'the certificate of {name.uri} is not that of a {role}')
  purposes = _extension(certificate, x509.ExtendedKeyUsage)
  if list(purposes or ()) != [mint.PURPOSES[role]]:
    raise Unproved(f'the certificate of {name.uri} has not the purpose of a {role}, and no other')
  return Proof(
    name, sha256(certificate), certificate.not_valid_before_utc, certificate.not_valid_after_utc
  )


def _name(certificate: x509.Certificate) -> names.Name:
  """The one name of a certificate: exactly one URI, and nothing else but a syncer's DNS name."""
  given = list(_extension(certificate, x509.SubjectAlternativeName) or ())
  uris = [one.value for one in given if isinstance(one, x509.UniformResourceIdentifier)]
  if len(uris) != 1:
    raise Unproved(f'the certificate has {len(uris)} URIs, it must have exactly one')
  try:
    name = names.parse(uris[0])
  except ValueError as error:
    raise Unproved(f'the certificate: {error}') from None
  others = [one for one in given if not isinstance(one, x509.UniformResourceIdentifier)]
  due = [x509.DNSName(names.host(name.run))] if name.role == names.SYNCER else []
  if others != due:
    raise Unproved(
      f'the certificate of {name.uri} has {len(others)} names besides its URI, '
      f'{f"it must have {due[0].value} alone" if due else "a learner has none"}'
    )
  return name


def _extension(certificate: x509.Certificate, kind: type[x509.ExtensionType]) -> Any:
  try:
    return certificate.extensions.get_extension_for_class(kind).value
  except x509.ExtensionNotFound:
    return None
  except (x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError) as error:
    raise Unproved(f'the certificate has an extension that cannot be read: {error}') from None
