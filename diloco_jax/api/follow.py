"""The newest global model of a live run, in a process that does not train.

for version, params in diloco_jax.follow('syncer.example.org:7070', tls='certs/eval'):
  print(version, accuracy(params))
"""

import contextlib
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from diloco_jax.api import load_params
from diloco_jax.config import build
from diloco_jax.nodes import bring, dial, exits, follower_node, own_model, run_folder
from diloco_jax.protocol import safe_json
from diloco_jax.report import folder as folder_lib
from diloco_jax.transport import addresses

WAIT_S = 120.0
_ASK_AGAIN_S = 1.0  # a syncer whose first learner has not brought the model


def follow(
  syncer: str = '',
  *,
  workdir: str | pathlib.Path | None = None,
  into: Any = None,
  tls: str | pathlib.Path | None = None,
  plaintext_loopback: bool = False,
  wait_s: float = WAIT_S,
) -> Iterator[tuple[int, Any]]:
  """Yields (version, params) of the newest global model while the run goes on, until it has ended.

  This process is no learner: the run does not count it, wait for it, or slow down for it. All
  followers together get `sync.follow_bytes_per_s` of the syncer. A thread receives what is newest;
  a caller that takes longer than a version misses some. A connection that breaks is made again.

  `version` is the number of outer steps that the model contains, of all fragments together. Each
  fragment is at the newest version that has arrived, as on a learner; its bits are the syncer's.
  The number is smaller than before after a `diloco restore`. `params` are new arrays of NumPy, as
  from `load_params`. What is published within the last seconds of a run may not arrive:
  `load_params` has the trained model.

  Args:
    syncer: where it listens: 'HOST:PORT', 'unix:PATH', or 'file:PATH' of a file with one of these;
      '': where the folder of the run says.
    workdir: the folder of a run with a task (`diloco launch`), or one with copies of its
      config.json and its tokenizer. For loops of your own the address is enough.
    into: as of `load_params`: the parameters in the tree of your own.
    tls: the folder with a learner's certificate of this run, for every address that is not a Unix
      socket.
    plaintext_loopback: plain TCP on a loopback address, for debugging.
    wait_s: for how long no syncer may answer, at the beginning and later.

  Raises:
    ValueError: the arguments cannot work, the syncer refuses followers, or has another model.
    TimeoutError: no syncer answers.
  """
  access = addresses.access(tls, plaintext_loopback)
  if not syncer:
    workdir = pathlib.Path(folder_lib.chosen(workdir)).absolute()
    syncer = f'{dial.FILE}{workdir / run_folder.ADDRESS}'
  address = dial.resolver(syncer, access)
  with contextlib.suppress(addresses.RunEnded), jax.set_mesh(None):
    assembled = (
      load_params.assemble(pathlib.Path(workdir).absolute())
      if workdir is not None
      else _described(address, access, wait_s)
    )
    return _models(assembled, address, access, wait_s, into, syncer)
  return (model for model in ())  # it can be closed, too


def models(
  workdir: pathlib.Path, follows: bool, syncer: str, access: addresses.Access
) -> Iterator[tuple[str, Any]]:
  """For a command: the model of the run in a folder, or, if it follows, each newest one; and what
  to print before what it says of it. Raises ValueError, NotInTime."""
  if not follows:
    yield '', load_params.load_all(workdir)
    return
  where = {'tls': access.tls, 'plaintext_loopback': access.plaintext_loopback}
  try:
    for version, params in follow(syncer, workdir=workdir, **where):
      yield f'version {version}: ', load_params.require_all(params, workdir)
  except TimeoutError as error:
    raise exits.NotInTime(exits.one_line(error)) from error


def _described(
  address: Callable[[], str], access: addresses.Access, wait_s: float
) -> build.Assembly:
  """The objects of a run of own loops, as its syncer describes it; waits until it has a model."""
  while True:
    asks = own_model.Model({}, {}, dict)
    settings, _, header = bring.bring(asks, address, access, wait_s).decode().partition('\n')
    if header:
      config = own_model.taken(own_model.config(0, None, 0), settings)
      return own_model.complete(own_model.from_header(header, dict), config)
    if 'layout' in safe_json.parse_object(settings):
      raise ValueError(
        'this run has a task: give `workdir`, its folder, or one with copies of its config.json '
        'and its tokenizer'
      )
    threading.Event().wait(_ASK_AGAIN_S)


def _models(
  assembled: build.Assembly,
  address: Callable[[], str],
  access: addresses.Access,
  wait_s: float,
  into: Any,
  where: str,
) -> Iterator[tuple[int, Any]]:
  frozen = assembled.frozen() if assembled.never_sent else {}
  with contextlib.closing(follower_node.Follower(assembled, address, access, wait_s)) as follower:
    while (found := follower.newest()) is not None:
      version, named = found
      with jax.set_mesh(None):
        params = load_params.in_tree(assembled, frozen | named, into, where)
      yield version, params
