"""The newest global model of a live run, in a process that does not train.

for version, params in diloco_jax.follow('syncer.example.org:7070', tls='certs/eval'):
  print(version, accuracy(params))
"""

import contextlib
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from diloco_jax.api import load_params
from diloco_jax.config import build
from diloco_jax.process import bring, dial, exits, own_model, run_folder
from diloco_jax.process import follower as follower_process
from diloco_jax.protocol import safe_json
from diloco_jax.report import folder as folder_lib
from diloco_jax.storage import arrays, folders, states
from diloco_jax.storage import claim as claim_lib
from diloco_jax.storage import store as store_lib
from diloco_jax.syncer import global_model
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

  From the store of a run (`workdir`) the models are those of the checkpoints that the syncer copies
  there: fewer and later ones. Nothing is sent to the syncer or by it.

  Args:
    syncer: where it listens: 'HOST:PORT', 'unix:PATH', or 'file:PATH' of a file with one of these;
      '': where the folder of the run says.
    workdir: the folder of a run with a task (`diloco launch`), or one with copies of its
      config.json and its tokenizer. For loops of your own the address is enough. Or, without
      `syncer`, the store of a run, a folder or gs://BUCKET/PREFIX.
    into: as of `load_params`: the parameters in the tree of your own.
    tls: the folder with a learner's certificate of this run, for every address that is not a Unix
      socket.
    plaintext_loopback: plain TCP on a loopback address, for debugging.
    wait_s: for how long no syncer may answer, or renew its claim in the store, at the beginning
      and later. A store has the settings of its run already.

  Raises:
    ValueError: the arguments cannot work, the syncer refuses followers, or has another model.
    TimeoutError: no syncer answers.
  """
  if not syncer:
    workdir = folder_lib.choose(workdir)
    if load_params.is_store(workdir):
      store = store_lib.Store(str(workdir))
      run = claim_lib.lineage_in(store, claim_lib.read(store)[0]).run
      with jax.set_mesh(None), load_params.local(workdir) as folder:
        assembled = load_params.assemble(folder)
        frozen = assembled.frozen() if assembled.never_sent else {}
        return _copied(assembled, frozen, store, run, wait_s, into)
  access = addresses.access(tls, plaintext_loopback)
  folder = None if workdir is None else pathlib.Path(workdir).absolute()
  where = syncer or f'{dial.FILE}{folder}/{run_folder.ADDRESS}'
  address = dial.resolver(where, access)
  with contextlib.suppress(addresses.RunEnded), jax.set_mesh(None):
    if folder is None:
      assembled = _described(address, access, wait_s)
    else:
      assembled = load_params.assemble(folder)
    if folder and syncer:  # it may be an older copy
      settings = safe_json.parse_object(_terms(address, access, wait_s).settings)
      load_params.require_same(assembled.config.agreement(), settings, folder)
    return _models(assembled, address, access, wait_s, into, where)
  return (model for model in ())  # it can be closed, too


def models(
  workdir: pathlib.Path, place: str, follows: bool, syncer: str, access: addresses.Access
) -> Iterator[tuple[int, str, Any]]:
  """For a command: the model of the run in a folder (of `place`: load_params.local), or, if it
  follows, each newest one; its version (else -1), and what the command prints before its own text.
  Raises ValueError, NotInTime."""
  if not follows:
    yield -1, '', load_params.require_all(load_params.load_params(workdir), workdir)
    return
  where = {'tls': access.tls, 'plaintext_loopback': access.plaintext_loopback}
  where['workdir'] = workdir if syncer or not place.startswith(folders.BUCKET) else place
  try:
    for version, params in follow(syncer, **where):
      yield version, f'version {version}: ', load_params.require_all(params, workdir)
  except TimeoutError as error:
    raise exits.NotInTime(exits.one_line(error)) from error


def _terms(address: Callable[[], str], access: addresses.Access, wait_s: float) -> own_model.Terms:
  """What the syncer answers to a program that has no model."""
  return own_model.Terms.decode(bring.bring(own_model.NO_MODEL, address, access, wait_s))


def _described(
  address: Callable[[], str], access: addresses.Access, wait_s: float
) -> build.Assembly:
  """The objects of a run of own loops, as its syncer describes it; waits until it has a model."""
  while True:
    terms = _terms(address, access, wait_s)
    if terms.model:
      config = terms.applied_to(own_model.config(0, None, 0))
      return own_model.complete(own_model.from_header(terms.model, dict), config)
    if 'layout' in safe_json.parse_object(terms.settings):
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
  with contextlib.closing(
    follower_process.Follower(assembled, address, access, wait_s)
  ) as follower:
    while (model := follower.newest()) is not None:
      version, named = model
      with jax.set_mesh(None):
        params = load_params.in_tree(assembled, frozen | named, into, where)
      yield version, params


def _copied(
  assembled: build.Assembly,
  frozen: dict[str, Any],
  store: store_lib.Store,
  run: str,
  wait_s: float,
  into: Any,
) -> Iterator[tuple[int, Any]]:
  """The model of each new copy of a checkpoint of this run in a store."""
  place, theta = store.place, global_model.Theta(assembled)
  seen, last, renewed, damaged, failed = '', None, None, '', ''
  deadline_s = time.monotonic() + wait_s
  while time.monotonic() < deadline_s:
    model = ended = None
    try:
      claim, generation = claim_lib.read(store)
      if generation != renewed:
        renewed, deadline_s = generation, time.monotonic() + wait_s
      ended = claim and claim.released and store.read(f'{folders.MODEL}/{states.MANIFEST}')
      lineage = claim_lib.lineage_in(store, claim)
      run = run or lineage.run
      if claim and lineage.run != run:
        raise ValueError(f'{place} has the run {lineage.run} now, the run {run} was followed')
      newest = (states.copies(store, lineage.part) or [''])[-1]
      failed = '' if claim else f': it has no {claim_lib.NAME}'
      if newest not in ('', seen):
        seen, damaged = newest, ''
        model = _in_copy(theta, store, newest, run)
    except states.Damaged as error:  # the next one may do
      damaged = f': {exits.one_line(error)}'
    except store_lib.StoreError as error:
      failed = f': {exits.one_line(error)}'
    if model and (lineage.part, model[0]) != last:  # the end of a process saves once more
      version, named = model
      last = lineage.part, version
      with jax.set_mesh(None):
        params = load_params.in_tree(assembled, frozen | named, into, place)
      yield version, params
      deadline_s = time.monotonic() + wait_s
    elif ended and not damaged:
      return
    else:
      time.sleep(claim_lib.LOOK_S)
  raise TimeoutError(
    f'no syncer has renewed its claim in {place} for {wait_s:g} s{damaged or failed}'
  )


def _in_copy(
  theta: global_model.Theta, store: store_lib.Store, name: str, run: str
) -> tuple[int, dict[str, Any]]:
  """The version and the arrays of a copy. Raises Damaged, StoreError."""
  with tempfile.TemporaryDirectory(prefix='diloco-') as temporary, jax.set_mesh(None):
    folder = pathlib.Path(temporary, str(states.number(name)))
    states.fetch(store, name, folder, f'syncer/{states.number(name)}', run)
    manifest, params = load_params.in_checkpoint(theta, folder)
    return sum(manifest.record['protocol']['versions']), arrays.by_name(params)
