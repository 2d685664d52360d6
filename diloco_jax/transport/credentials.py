"""The proofs of both ends, judged at every session: files, names, dates and the allowlist.

Everything is read again when it changes, so certificates are renewed and revoked without a restart
of either side. A file that is half written leaves what was read before in force.
"""

import datetime
import pathlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import grpc

from diloco_jax.certs import allowlist, names, proofs
from diloco_jax.certs import check as check_lib

WATCH_S = 1.0  # between two looks at files and dates
_WARN_AGAIN = datetime.timedelta(days=1)
_JUMP = datetime.timedelta(minutes=10)  # a clock that is wrong by less is trusted at once
_TRUSTED = datetime.timedelta(minutes=5)  # after so long a clock that jumped ahead is trusted
_CERTIFICATE = 'x509_pem_cert'  # in gRPC's auth context, also of a resumed TLS session
_REFUSED = 'Socket closed'  # the error of a client whose certificate TLS refuses

Say = Callable[[str], None]
Clock = Callable[[], datetime.datetime]
Read = TypeVar('Read')


class _Date:
  """UTC that never goes back, and does not follow a wall clock that jumps ahead for a moment.

  A wall clock that is set back would revive ended certificates; one wrong answer of a time server,
  or a virtual machine that resumes, would end all of them for good. So between two looks the date
  goes on by the monotonic clock at least, and a wall clock far ahead of that counts once it has
  stayed there for minutes: then the machine slept, or the date was wrong before. Not thread-safe.
  """

  def __init__(self, say: Say, wall: Clock, monotonic: Callable[[], float]):
    self._say, self._wall, self._monotonic = say, wall, monotonic
    self._latest, self._looked_s = wall(), monotonic()
    self._ahead: tuple[datetime.datetime, float] | None = None  # a jump: its date, and since when
    self._behind = False

  def now(self) -> datetime.datetime:
    wall, looked_s = self._wall(), self._monotonic()
    self._latest += datetime.timedelta(seconds=looked_s - self._looked_s)
    self._looked_s = looked_s
    if self._trusts(wall, looked_s):
      self._latest = max(self._latest, wall)
    behind = wall < self._latest - _JUMP
    if behind and not self._behind:
      self._say(
        f'the clock of this machine says {proofs.date(wall)}, and it was '
        f'{proofs.date(self._latest)} already: certificates are judged at the later date. If the '
        'earlier one is right, restart the syncer; nothing is lost'
      )
    # Until it has caught up: a clock that runs unevenly near the limit would make a line each time.
    self._behind = behind or (self._behind and wall < self._latest - _JUMP / 2)
    return self._latest

  def _trusts(self, wall: datetime.datetime, looked_s: float) -> bool:
    if wall <= self._latest + _JUMP:
      self._ahead = None
      return True
    if self._ahead is not None:
      date, since_s = self._ahead
      passed = datetime.timedelta(seconds=looked_s - since_s)
      if abs(wall - date - passed) <= _JUMP:
        return passed >= _TRUSTED
    self._ahead = wall, looked_s
    self._say(
      f'the clock of this machine has jumped ahead to {proofs.date(wall)}: until it has stayed '
      f'there for {_TRUSTED.seconds // 60} minutes certificates are judged at '
      f'{proofs.date(self._latest)}. If the new date is wrong, set the clock; nothing is lost'
    )
    return False


class SyncerCredentials:
  """The syncer's certificate, and its judgement of learners' certificates. Thread-safe.

  Args:
    folder: of the syncer: ca.pem, cert.pem, key.pem, allowlist.json.
    say: prints one line about files and dates.
    now: UTC, as the wall clock says.
    monotonic: seconds, which no setting of the clock moves.

  Raises:
    ValueError: something is wrong in the folder.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    say: Say,
    now: Clock = proofs.utc_now,
    monotonic: Callable[[], float] = time.monotonic,
  ):
    self._folder, self._say = folder, say
    self._date = _Date(say, now, monotonic)
    self._lock = threading.Lock()
    # Before the files are read: one that changes meanwhile is read again.
    self._seen = {names: self._stamp(names) for names in (check_lib.FILES, (allowlist.FILE,))}
    self._own = check_lib.read(folder, names.SYNCER, self._date.now())
    self._run = self._own.proof.name.run
    self._listed = self._read_allowlist()
    self._unread: dict[tuple[str, ...], str] = {}  # why changed files cannot be read
    self._warned: dict[
      str, datetime.datetime
    ] = {}  # by SHA-256: when the last line about it was printed

  def server_credentials(self) -> grpc.ServerCredentials:
    """For a gRPC server: learners must have a certificate of this authority. gRPC asks for changed
    files before every connection."""
    return grpc.dynamic_ssl_server_credentials(
      _configuration(self._own), self._fetch, require_client_authentication=True
    )

  def prove(self, context: grpc.ServicerContext) -> proofs.Proof:
    """The learner that makes a call. Raises Unproved."""
    pem = context.auth_context().get(_CERTIFICATE)
    if not pem:
      raise proofs.Unproved('this connection has no certificate')
    from diloco_jax.certs import certificates  # here: it loads what only TLS needs

    proof = certificates.proof_of_pem(pem[0], names.LEARNER)
    self.require(proof)
    return proof

  def require(self, proof: proofs.Proof) -> None:
    """Raises Unproved once a certificate has ended, or is not on the allowlist any more."""
    with self._lock:
      now = self._date.now()
      listed = self._listed
    proof.require_valid(now)
    listed.require(proof)

  def refresh(self, live: list[proofs.Proof]) -> None:
    """Reads a changed allowlist; warns of certificates that end soon, the syncer's and the live
    learners'."""
    with self._lock:
      listed = self._reread((allowlist.FILE,), self._read_allowlist, 'the allowlist')
      if listed is not None:
        self._listed = listed
        self._say('the allowlist has changed and is in force')
      now = self._date.now()
      warn = [proof for proof in (self._own.proof, *live) if self._must_warn(proof, now)]
    for proof in warn:
      self._say(check_lib.warning(proof, now))

  def _must_warn(self, proof: proofs.Proof, now: datetime.datetime) -> bool:
    if not check_lib.warning(proof, now):
      return False
    last = self._warned.get(proof.sha256)
    if last is not None and now < last + _WARN_AGAIN:
      return False
    self._warned[proof.sha256] = now
    return True

  def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
    """The syncer's certificate if its files have changed, else None. Never raises."""
    with self._lock:
      own = self._reread(check_lib.FILES, self._read_own, "the syncer's certificate")
      if own is None:
        return None
      self._own = own
      self._say(f"the syncer's new certificate is in use, until {proofs.date(own.proof.not_after)}")
      return _configuration(own)

  def _read_allowlist(self) -> allowlist.Allowlist:
    listed = allowlist.read(self._folder)
    if listed.run != self._run:
      raise ValueError(
        f'tls={self._folder}: the allowlist is of run {listed.run}, the certificate of {self._run}'
      )
    return listed

  def _read_own(self) -> check_lib.Identity:
    own = check_lib.read(self._folder, names.SYNCER, self._date.now())
    if own.proof.name.run != self._run:
      raise ValueError(f'the certificate is of run {own.proof.name.run}')
    return own

  def _reread(self, files: tuple[str, ...], read: Callable[[], Read], what: str) -> Read | None:
    """The content of changed files; None: they have not changed, or cannot be read now. Then they
    are read at the next look, too: the cause may go away without a trace in them."""
    stamp = self._stamp(files)
    if stamp == self._seen[files]:
      return None
    try:
      content = read()
    except ValueError as error:
      if self._unread.get(files) != str(error):
        self._say(f'{what} before stays in force: {error}')
      self._unread[files] = str(error)
      return None
    self._unread.pop(files, None)
    self._seen[files] = stamp
    return content

  def _stamp(self, files: tuple[str, ...]) -> tuple:
    """Differs after every change of the files."""
    stats = []
    for name in files:
      try:
        stat = (self._folder / name).stat()
        stats.append((stat.st_mtime_ns, stat.st_ino, stat.st_size, stat.st_mode))
      except OSError:
        stats.append(None)
    return tuple(stats)


def _configuration(own: check_lib.Identity) -> grpc.ServerCertificateConfiguration:
  return grpc.ssl_server_certificate_configuration([(own.key, own.certificate)], own.authority)


def dial(
  address: str, folder: pathlib.Path, options: tuple[tuple[str, object], ...]
) -> grpc.Channel:
  """A channel to the syncer of the run that the learner's certificate names, and to no other
  server. Raises ValueError that names everything that is wrong in the folder."""
  own = check_lib.read(folder, names.LEARNER, proofs.utc_now())
  expected = ('grpc.ssl_target_name_override', names.host(own.proof.name.run))
  credentials = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
  return grpc.secure_channel(address, credentials, options=(*options, expected))


def explain(details: str) -> str:
  """What the end of a TLS connection means for the learner's operator; '' if nothing is known."""
  if _REFUSED in details:
    return (
      ' The files of this learner are in order (`diloco certs check`), so the syncer may have '
      'another authority (ca.pem), or no TLS at all.'
    )
  if 'WRONG_VERSION_NUMBER' in details:
    return ' What listens there has no TLS: nothing was sent.'
  if 'Hostname Verification' in details or 'handshake failed' in details:
    return ' What listens there has no certificate of the syncer of this run: nothing was sent.'
  return ''
