"""Makes keys, certificates and requests, without files: P-256, one authority for each run."""

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from diloco_jax.certs import names

AUTHORITY_DAYS = 365
LEAF_DAYS = 30
_SKEW = datetime.timedelta(hours=1)  # a clock that is so much slow accepts a new certificate
PURPOSES = {
  names.LEARNER: ExtendedKeyUsageOID.CLIENT_AUTH,
  names.SYNCER: ExtendedKeyUsageOID.SERVER_AUTH,
}


def new_key() -> ec.EllipticCurvePrivateKey:
  return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
  return key.private_bytes(
    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
  )


def pem(document: x509.Certificate | x509.CertificateSigningRequest) -> bytes:
  return document.public_bytes(serialization.Encoding.PEM)


def authority(
  run: str, key: ec.EllipticCurvePrivateKey, now: datetime.datetime
) -> x509.Certificate:
  """The certificate of a run's authority, signed by itself. Its common name is the run's."""
  subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, run)])
  return (
    _begin(subject, key.public_key(), now, now + datetime.timedelta(days=AUTHORITY_DAYS))
    .issuer_name(subject)
    .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    .add_extension(_usage(signs_certificates=True), critical=True)
    .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    .sign(key, hashes.SHA256())
  )


def leaf(
  issuer: x509.Certificate,
  issuer_key: ec.EllipticCurvePrivateKey,
  name: names.Name,
  public_key: ec.EllipticCurvePublicKey,
  now: datetime.datetime,
) -> x509.Certificate:
  """The certificate of a node, for its role only: a learner cannot pose as a syncer. It ends with
  its issuer at the latest."""
  ends = min(now + datetime.timedelta(days=LEAF_DAYS), issuer.not_valid_after_utc)
  alternatives: list[x509.GeneralName] = [x509.UniformResourceIdentifier(name.uri)]
  if name.role == names.SYNCER:
    alternatives.append(x509.DNSName(names.host(name.run)))
  return (
    _begin(x509.Name([]), public_key, now, ends)
    .issuer_name(issuer.subject)
    .add_extension(x509.SubjectAlternativeName(alternatives), critical=True)
    .add_extension(x509.ExtendedKeyUsage([PURPOSES[name.role]]), critical=False)
    .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    .add_extension(_usage(signs_certificates=False), critical=True)
    .sign(issuer_key, hashes.SHA256())
  )


def request(key: ec.EllipticCurvePrivateKey) -> x509.CertificateSigningRequest:
  """A request without a name: the owner of the run gives the name when signing."""
  return (
    x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
  )


def _begin(
  subject: x509.Name,
  public_key: ec.EllipticCurvePublicKey,
  now: datetime.datetime,
  ends: datetime.datetime,
) -> x509.CertificateBuilder:
  return (
    x509.CertificateBuilder()
    .subject_name(subject)
    .public_key(public_key)
    .serial_number(x509.random_serial_number())
    .not_valid_before(now - _SKEW)
    .not_valid_after(ends)
  )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
  return x509.KeyUsage(
    digital_signature=not signs_certificates,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=signs_certificates,
    crl_sign=signs_certificates,
    encipher_only=False,
    decipher_only=False,
  )
