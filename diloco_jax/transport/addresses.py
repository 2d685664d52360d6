"""Addresses of a syncer, and what each of them needs so that a stranger cannot use it.

unix:PATH    a Unix socket in a folder of this user alone (mode 0700): no other user reaches it
HOST:PORT    with certificates (`tls`) any host; without, only a loopback address and only if
             `plaintext_loopback` says so, for proxies and debugging: every user of the machine, and
             every container with its network, can connect there
"""

import contextlib
import dataclasses
import hashlib
import ipaddress
import os
import pathlib
import re
import tempfile

from diloco_jax.certs import check as check_lib
from diloco_jax.certs import private
from diloco_jax.protocol import messages

UNIX = 'unix:'
ENDED = messages.ENDED  # how `ended` begins
_MAX_PATH_BYTES = 100  # the kernel allows 107, and gRPC makes no longer ones known
_CUT = ','  # gRPC reads a path with one as several addresses, however it is quoted
_HOST = re.compile(r'\w[\w.-]{0,252}')  # also names that only some resolvers find: node_1, host.
_PORT = re.compile(r'[0-9]{1,5}')


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
  """How a node proves its name (`tls`: the folder with its certificate), or that it need not."""

  tls: pathlib.Path | None = None
  plaintext_loopback: bool = False


LOCAL = Access()


def access(tls: str | os.PathLike | None, plaintext_loopback: bool, node: str = '') -> Access:
  """The access with the certificate in a folder. `node`: an id; its folder may be in that one."""
  folder = pathlib.Path(tls).absolute() if tls else None
  own = folder and check_lib.folder(folder, node)
  return Access(own if own and own.is_dir() else folder, plaintext_loopback)


class RunEnded(ConnectionError):
  """The syncer has finished the run, and left `ended` where its address was. `total_steps`: T, 0
  if it is not known."""

  def __init__(self, text: str, total_steps: int = 0):
    super().__init__(text)
    self.total_steps = total_steps


def ended(total_steps: int) -> str:
  """What a syncer leaves behind instead of its address."""
  return f'{ENDED}, at clock {total_steps}'


def require_going_on(text: str, place: object) -> None:
  """Raises RunEnded if the text at `place` is what `ended` makes."""
  if match := re.fullmatch(f'{ENDED}, at clock ([0-9]{{1,18}})', text):
    raise RunEnded(f'{text}: {place} says so', int(match[1]))


def check(address: str, access: Access) -> None:
  """Raises ValueError unless the address is one, and `access` is enough for it."""
  if address.startswith(UNIX):
    if _CUT in address:
      raise ValueError(f'address {address!r}: {_objection(pathlib.Path(address[len(UNIX) :]))}')
    if access.tls is not None:
      raise ValueError(
        f'address {address!r}: a Unix socket needs no certificates, only this user reaches it; '
        'leave tls out, or give HOST:PORT'
      )
    return
  host, colon, port = address.rpartition(':')
  if not colon or not _PORT.fullmatch(port) or int(port) > 65535:
    raise ValueError(
      f'address {address!r} is not unix:PATH, nor HOST:PORT with a port from 0 to 65535'
    )
  number = _number(host)
  if number is None and not _HOST.fullmatch(host):
    raise ValueError(f'address {address!r}: {host!r} is not a host; IPv6 is written [::1]:PORT')
  of_dns(address)
  if access.tls is not None or (access.plaintext_loopback and number and number.is_loopback):
    return
  raise ValueError(
    f'address {address!r} needs certificates: give tls, a folder made by `diloco certs`; or, on '
    'one machine, use a Unix socket (the syncer without listen, the learner with syncer='
    'file:WORKDIR/syncer/address); or, to debug on 127.0.0.1 where every user can connect, '
    'plaintext_loopback on both sides'
  )


def of_dns(address: str) -> str:
  """The address as gRPC reads it, in ASCII. Raises ValueError."""
  if address.isascii():
    return address
  host, _, port = address.rpartition(':')
  try:
    return f'{host.encode("idna").decode()}:{port}'
  except UnicodeError as error:
    raise ValueError(f'address {address!r}: {host!r} is not a host: {error}') from None


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
  """The IP address that a host is; IPv6 in brackets."""
  bracketed = host.startswith('[') and host.endswith(']')
  try:
    number = ipaddress.ip_address(host[1:-1] if bracketed else host)
  except ValueError:
    return None
  return number if bracketed == (number.version == 6) else None


def in_folder(workdir: pathlib.Path) -> str:
  """The address of the Unix socket of the run in a folder; makes the socket's own folder.

  The kernel limits the length of a socket's path, and gRPC has no way to write a comma. For a
  WORKDIR that is long or has one, the socket's folder is in XDG_RUNTIME_DIR or the folder of
  temporary files, the same one at every start.
  """
  folder = workdir / 'syncer' / 'socket'
  if _objection(folder.resolve() / 'socket'):
    short = hashlib.sha256(os.fsencode(workdir)).hexdigest()[:12]
    base = os.environ.get('XDG_RUNTIME_DIR', '')
    if _CUT in base or not os.access(base, os.W_OK | os.X_OK):  # or that of the user before `su`
      base = tempfile.gettempdir()
    folder = pathlib.Path(base) / f'diloco-{os.geteuid()}-{short}'
  with contextlib.suppress(FileExistsError):
    private.make_folder(folder)
  if private.objection(folder):  # another user was first, where everybody may make folders
    folder = pathlib.Path(tempfile.mkdtemp(prefix='diloco-'))
  return f'{UNIX}{folder / "socket"}'


def _objection(path: pathlib.Path) -> str:
  """Why gRPC has no socket at this path; '' if it can have one."""
  size = len(os.fsencode(path))
  if size > _MAX_PATH_BYTES:
    limit = f'the path of a socket has at most {_MAX_PATH_BYTES} bytes'
    return f'{limit}, this one {size}: choose a shorter one'
  if _CUT in str(path):
    return f'gRPC knows no path with a comma, and {path} has one: choose another folder'
  return ''


def path_of(address: str) -> pathlib.Path:
  """The path of unix:PATH. Raises ValueError unless its folder is of this user alone, OSError
  if there is none."""
  path = pathlib.Path(address.removeprefix(UNIX))
  if not path.is_absolute():
    raise ValueError(f'address {address!r}: the path of a socket must be absolute')
  path = path.parent.resolve() / path.name
  if objection := _objection(path):
    raise ValueError(f'address {address!r}: {objection}')
  if not path.parent.is_dir():
    raise FileNotFoundError(f'address {address!r}: there is no folder {path.parent}')
  if objection := private.objection(path.parent):
    raise ValueError(f'address {address!r}: {objection}')
  return path
