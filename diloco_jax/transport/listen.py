"""The only module that binds gRPC servers and opens channels.

An address is a Unix socket of this user alone, or TLS with certificates on both ends, or, where
`Access.plaintext_loopback` says so, plain TCP on loopback (addresses.py).
"""

import fcntl
import os
import urllib.parse
from typing import IO

import grpc

from diloco_jax.transport import addresses, credentials

Options = tuple[tuple[str, object], ...]

# The proxies that the environment names are for the web: they know no syncer, and a variable must
# not send a run elsewhere.
_NO_PROXY = ('grpc.enable_http_proxy', 0)


class Listener:
  """Where a gRPC server listens.

  Attributes:
    address: where the server listens; a port 0 is replaced by the one that the kernel chose.
    credentials: judge the callers; None: callers need not prove their names.

  Args:
    server: not started yet.
    address: unix:PATH or HOST:PORT.
    say: prints lines about certificates.

  Raises:
    ValueError: `access` is not enough for the address, or something is wrong with its files.
    OSError: the address is in use, or cannot be bound.
  """

  def __init__(
    self, server: grpc.Server, address: str, access: addresses.Access, say: credentials.Say
  ):
    addresses.check(address, access)
    self.credentials = credentials.SyncerCredentials(access.tls, say) if access.tls else None
    self._lock: IO | None = None
    self.address = address
    if address.startswith(addresses.UNIX):
      self._bind_socket(server, address)
    else:
      port = self._bind(server, addresses.of_dns(address))
      self.address = f'{address.rpartition(":")[0]}:{port}'

  def close(self) -> None:
    """After the end of the server."""
    if self._lock is not None:
      self._lock.close()

  def _bind(self, server: grpc.Server, address: str) -> int:
    try:
      if self.credentials is not None:
        return server.add_secure_port(address, self.credentials.server_credentials())
      return server.add_insecure_port(address)
    except RuntimeError as error:
      raise OSError(
        f'cannot listen on {address}: the port is in use or not ours to take; choose '
        'another, or port 0 for any free one. A Unix socket needs a local disk'
      ) from error

  def _bind_socket(self, server: grpc.Server, address: str) -> None:
    """Replaces the socket of a killed syncer, never that of a live one: that one holds the lock,
    and the kernel frees it when its process dies."""
    path = addresses.path_of(address)
    self._lock = open(path.with_name(f'{path.name}.lock'), 'w', encoding='utf-8')
    try:
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      self._lock.close()
      raise OSError(
        f'cannot listen on {address}: another syncer listens there; stop it, or choose another '
        'folder or address'
      ) from None
    path.unlink(missing_ok=True)
    self._bind(server, _quoted(path))
    self.address = f'{addresses.UNIX}{path}'


def dial(address: str, access: addresses.Access, options: Options) -> grpc.Channel:
  """A channel to a syncer. Raises ValueError if `access` is not enough for the address, or if
  something is wrong with its files; OSError if they cannot be read."""
  addresses.check(address, access)
  options = (*options, _NO_PROXY)
  if address.startswith(addresses.UNIX):
    return grpc.insecure_channel(_quoted(addresses.path_of(address)), options=options)
  address = addresses.of_dns(address)
  if access.tls is not None:
    return credentials.dial(address, access.tls, options)
  return grpc.insecure_channel(address, options=options)


def _quoted(path: os.PathLike) -> str:
  """gRPC reads the path of a socket as that of a URL."""
  return f'{addresses.UNIX}{urllib.parse.quote(os.fsencode(path))}'
