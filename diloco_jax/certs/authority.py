"""The owner's folder: the authority of a run, and one folder for each of its nodes.

FOLDER/ca.pem, ca.key         the authority
FOLDER/syncer/                ca.pem, cert.pem, key.pem and allowlist.json: goes to the syncer
FOLDER/ID/                    ca.pem, cert.pem, key.pem: goes to learner ID

The key of the authority signs whatever its holder likes, so keep it off the machines of the run.
The name of a certificate comes from the owner, never from a request. All errors are ValueError,
with one line.
"""

import dataclasses
import datetime
import pathlib

from cryptography import exceptions, x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from diloco_jax.certs import allowlist, certificates, mint, names, private, proofs
from diloco_jax.certs import check as check_lib

AUTHORITY_KEY = 'ca.key'
REQUEST = 'request.pem'


@dataclasses.dataclass(frozen=True, slots=True)
class Authority:
  """The authority of a run, in the owner's folder."""

  folder: pathlib.Path
  run: str
  certificate: x509.Certificate
  key: ec.EllipticCurvePrivateKey

  def issue(self, id: str, now: datetime.datetime, renew: bool = False) -> proofs.Proof:
    """Makes the folder of a node with a new key and certificate; lists a learner's certificate.

    `renew` replaces those in a folder that is there; the old certificate stays good until its end.
    """
    key = mint.new_key()
    return self._write(id, key.public_key(), now, renew, mint.key_pem(key))

  def sign(
    self, request: bytes, id: str, now: datetime.datetime, renew: bool = False
  ) -> proofs.Proof:
    """Like `issue`, for a key that never leaves its machine: the request has its public half."""
    try:
      signing_request = x509.load_pem_x509_csr(request)
    except ValueError:
      raise ValueError('the request is not one in PEM: make it with `diloco certs csr`') from None
    public_key = signing_request.public_key()
    is_elliptic = isinstance(public_key, ec.EllipticCurvePublicKey)
    if not signing_request.is_signature_valid or not is_elliptic:
      raise ValueError('the request is not signed by its own key, or its key is not P-256')
    if not isinstance(public_key.curve, ec.SECP256R1):
      raise ValueError(f'the key of the request is {public_key.curve.name}, it must be P-256')
    return self._write(id, public_key, now, renew)

  def revoke(self, learner: str) -> int:
    """Takes a learner off the allowlist; returns how many certificates it had there."""
    with private.lock(self.folder):
      listed = self.allowlist()
      if learner not in listed.listed:
        raise ValueError(
          f'{learner!r} is not on the allowlist of run {self.run}; on it: '
          f'{", ".join(sorted(listed.listed)) or "no learner"}'
        )
      listed.without(learner).write(self.folder / names.SYNCER)
    return len(listed.listed[learner])

  def allowlist(self) -> allowlist.Allowlist:
    return allowlist.read(self.folder / names.SYNCER)

  def issued(self) -> list[proofs.Proof]:
    """The newest certificate of each node, in the order of their ids."""
    return [
      certificates.proof_of_pem(private.read(path), self._name(path.parent.name).role)
      for path in sorted(self.folder.glob(f'*/{check_lib.CERTIFICATE}'))
    ]

  def _name(self, id: str) -> names.Name:
    return names.Name(self.run, names.SYNCER if id == names.SYNCER else names.LEARNER, id)

  def _write(
    self,
    id: str,
    public_key: ec.EllipticCurvePublicKey,
    now: datetime.datetime,
    renew: bool,
    key_pem: bytes = b'',
  ) -> proofs.Proof:
    """Writes the folder of a node; `key_pem`: its key, unless that stays on its machine."""
    name = self._name(id)
    ends = self.certificate.not_valid_after_utc
    if now >= ends:
      raise ValueError(
        f'the authority of run {self.run} has ended at {proofs.date(ends)}, so no certificate of '
        'it is accepted: make another one with `diloco certs init` in a new --tls'
      )
    folder = self.folder / id
    certificate = mint.leaf(self.certificate, self.key, name, public_key, now)
    proof = certificates.proof_of(certificate, name.role)
    with private.lock(self.folder):
      if folder.exists() and not renew:
        raise ValueError(
          f'{folder} is there already and is not overwritten: to replace its certificate, --renew'
        )
      if renew and not folder.is_dir():
        raise ValueError(f'there is no {folder} to renew; leave --renew out to make it')
      listed = self.allowlist() if name.role == names.LEARNER else None  # before anything changes
      if not renew:
        private.make_folder(folder)
      if key_pem:
        private.replace(folder / check_lib.KEY, key_pem)
      private.replace(folder / check_lib.AUTHORITY, mint.pem(self.certificate))
      if listed is not None:  # listed before it is used
        listed.with_certificate(proof, now).write(self.folder / names.SYNCER)
      private.replace(folder / check_lib.CERTIFICATE, mint.pem(certificate))
    return proof


def init(folder: pathlib.Path, run: str, now: datetime.datetime) -> Authority:
  """Makes the owner's folder, with the authority and the syncer's folder."""
  names.Name(run, names.SYNCER, names.SYNCER)
  try:
    private.make_folder(folder)
  except FileExistsError:
    raise ValueError(
      f'{folder} is there already and is not overwritten: choose another --tls'
    ) from None
  key = mint.new_key()
  certificate = mint.authority(run, key, now)
  private.write_new(folder / AUTHORITY_KEY, mint.key_pem(key))
  private.write_new(folder / check_lib.AUTHORITY, mint.pem(certificate))
  authority = Authority(folder, run, certificate, key)
  authority.issue(names.SYNCER, now)
  allowlist.Allowlist(run, {}).write(folder / names.SYNCER)
  return authority


def load(folder: pathlib.Path) -> Authority:
  """Opens the owner's folder."""
  for path in (folder, folder / AUTHORITY_KEY):
    try:
      objection = private.objection(path)
    except OSError as error:
      raise ValueError(
        f'{path}: {error.strerror}; make the authority of a run with `diloco certs init`'
      ) from None
    if objection:
      raise ValueError(objection)
  key = _private_key(folder / AUTHORITY_KEY)
  certificate = x509.load_pem_x509_certificate(private.read(folder / check_lib.AUTHORITY))
  if key.public_key() != certificate.public_key():
    raise ValueError(f'{folder}: {AUTHORITY_KEY} is not the key of {check_lib.AUTHORITY}')
  (run,) = certificate.subject
  return Authority(folder, str(run.value), certificate, key)


def request(folder: pathlib.Path) -> pathlib.Path:
  """Makes a learner's key in a new folder on its machine; returns the path of the request to sign.

  In a folder that has a key, the request is made for that key again.
  """
  if not folder.exists():
    private.make_folder(folder)
    private.write_new(folder / check_lib.KEY, mint.key_pem(mint.new_key()))
  path = folder / REQUEST
  private.replace(path, mint.pem(mint.request(_private_key(folder / check_lib.KEY))))
  return path


def _private_key(path: pathlib.Path) -> ec.EllipticCurvePrivateKey:
  try:
    key = serialization.load_pem_private_key(private.read(path), password=None)
  except (ValueError, TypeError, exceptions.UnsupportedAlgorithm):
    key = None
  if not isinstance(key, ec.EllipticCurvePrivateKey):
    raise ValueError(f'{path} is not an EC key in PEM without a password')
  return key
