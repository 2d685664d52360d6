"""Reads certificates: whom they name, and whether they are what a node may show.

Imported where there is TLS alone: the library cryptography takes time to load.
"""

import datetime
from typing import Any

from cryptography import exceptions, x509
from cryptography.hazmat.primitives import hashes, serialization

from diloco_jax.certs import mint, names, proofs


def proof_of_pem(pem: bytes, role: str) -> proofs.Proof:
  """The proof in a certificate. Raises Unproved if it is not one of a node of this role."""
  try:
    return proof_of(x509.load_pem_x509_certificate(pem), role)
  except proofs.Unproved:
    raise
  except ValueError as error:
    raise proofs.Unproved(f'not a certificate: {error}') from None


def proof_of(certificate: x509.Certificate, role: str) -> proofs.Proof:
  """The proof in a certificate. Raises Unproved if it is not one of a node of this role."""
  name = _name(certificate)
  if name.role != role:
    raise proofs.Unproved(f'the certificate of {name.uri} is not that of a {role}')
  purposes = _extension(certificate, x509.ExtendedKeyUsage)
  if list(purposes or ()) != [mint.PURPOSES[role]]:
    raise proofs.Unproved(
      f'the certificate of {name.uri} has not the purpose of a {role}, and no other'
    )
  sha256 = certificate.fingerprint(hashes.SHA256()).hex()
  return proofs.Proof(
    name, sha256, certificate.not_valid_before_utc, certificate.not_valid_after_utc
  )


def _name(certificate: x509.Certificate) -> names.Name:
  """The one name of a certificate: exactly one URI, and nothing else but a syncer's DNS name."""
  alternatives = list(_extension(certificate, x509.SubjectAlternativeName) or ())
  is_uri = lambda alternative: isinstance(alternative, x509.UniformResourceIdentifier)
  uris = [uri.value for uri in filter(is_uri, alternatives)]
  if len(uris) != 1:
    raise proofs.Unproved(f'the certificate has {len(uris)} URIs, it must have exactly one')
  try:
    name = names.parse(uris[0])
  except ValueError as error:
    raise proofs.Unproved(f'the certificate: {error}') from None
  others = [alternative for alternative in alternatives if not is_uri(alternative)]
  due = [x509.DNSName(names.host(name.run))] if name.role == names.SYNCER else []
  if others != due:
    raise proofs.Unproved(
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
    raise proofs.Unproved(
      f'the certificate has an extension that cannot be read: {error}'
    ) from None


def judge(
  files: dict[str, bytes], role: str, now: datetime.datetime
) -> tuple[proofs.Proof | None, list[str]]:
  """The proof in a node's certificate, None if it proves nothing; and what is wrong in its files:
  the certificate of the authority, that of the node, and its key, by name, in PEM."""
  (ca, ca_pem), (cert, cert_pem), (key, key_pem) = files.items()
  wrong: list[str] = []
  try:
    authorities = x509.load_pem_x509_certificates(ca_pem)
  except ValueError:
    return None, [f'{ca} is not a certificate in PEM']
  try:
    certificate = x509.load_pem_x509_certificate(cert_pem)
  except ValueError:
    return None, [f'{cert} is not a certificate in PEM']
  try:
    private = serialization.load_pem_private_key(key_pem, password=None)
    if private.public_key() != certificate.public_key():
      wrong.append(f'{key} is not the key of {cert}')
  except (ValueError, TypeError, exceptions.UnsupportedAlgorithm):
    wrong.append(f'{key} is not a private key in PEM without a password')
  issuers = [authority for authority in authorities if _issued_by(certificate, authority)]
  if not issuers:
    wrong.append(f'{cert} is not signed by {ca}: both must be of the same authority')
  elif all(now >= issuer.not_valid_after_utc for issuer in issuers):
    wrong.append(f'{ca} has ended at {proofs.date(issuers[0].not_valid_after_utc)}')
  try:
    proof = proof_of(certificate, role)
    proof.require_valid(now)
  except proofs.Unproved as error:
    return None, [*wrong, str(error)]
  return proof, wrong


def _issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
  try:
    certificate.verify_directly_issued_by(issuer)
  except (ValueError, TypeError, exceptions.InvalidSignature):
    return False
  return True
