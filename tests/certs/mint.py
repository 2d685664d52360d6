"""Certificates for tests, made in this process, right and wrong in every way."""

import datetime
import pathlib

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import ExtendedKeyUsageOID

from diloco_jax.certs import allowlist, authority, mint, names, private, proofs
from diloco_jax.certs import check as check_lib

RUN = 'run-x'
CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH


def seconds(number: float) -> datetime.timedelta:
  return datetime.timedelta(seconds=number)


def owner(folder: pathlib.Path, run: str = RUN) -> authority.Authority:
  """An authority with the folders of its syncer and of learners l0 and l1."""
  now = proofs.utc_now()
  owner = authority.init(folder, run, now)
  for learner in ('l0', 'l1'):
    owner.issue(learner, now)
  return owner


def node(
  owner: authority.Authority,
  folder: pathlib.Path,
  *,
  uris: tuple[str, ...] = (f'diloco://{RUN}/learner/l0',),
  dns: tuple[str, ...] = (),
  purposes: tuple = (CLIENT,),
  begins_s: float = -60,
  ends_s: float = 3600,
  listed: str = '',
) -> pathlib.Path:
  """The folder of a node with a certificate of the authority that says what the arguments say;
  `listed`: the learner under which it is on the allowlist."""
  key, now = mint.new_key(), proofs.utc_now()
  alternatives = [*map(x509.UniformResourceIdentifier, uris), *map(x509.DNSName, dns)]
  certificate = (
    x509.CertificateBuilder()
    .subject_name(x509.Name([]))
    .issuer_name(owner.certificate.subject)
    .public_key(key.public_key())
    .serial_number(x509.random_serial_number())
    .not_valid_before(now + seconds(begins_s))
    .not_valid_after(now + seconds(ends_s))
    .add_extension(x509.SubjectAlternativeName(alternatives), critical=True)
    .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    .sign(owner.key, hashes.SHA256())
  )
  private.make_folder(folder)
  private.write_new(folder / check_lib.KEY, mint.key_pem(key))
  private.write_new(folder / check_lib.CERTIFICATE, mint.pem(certificate))
  private.write_new(folder / check_lib.AUTHORITY, mint.pem(owner.certificate))
  if listed:
    entries = owner.allowlist().listed
    entries.setdefault(listed, {})[certificate.fingerprint(hashes.SHA256()).hex()] = now + seconds(
      ends_s
    )
    allowlist.Allowlist(owner.run, entries).write(owner.folder / names.SYNCER)
  return folder


def syncer_node(owner: authority.Authority, folder: pathlib.Path, **changes) -> pathlib.Path:
  """Like `node`, of a syncer, with the allowlist of the authority."""
  right = {
    'uris': (f'diloco://{RUN}/syncer/syncer',),
    'dns': (names.host(RUN),),
    'purposes': (SERVER,),
  }
  node(owner, folder, **right | changes)
  owner.allowlist().write(folder)
  return folder
