"""The model of a user's own loop, how the syncer learns of it, and the loop of the settings.

Frameworks disagree about trees (dicts, nnx states, dataclasses), so here the parameters are one
dict from name to array, the name being the path in the tree: 'layers/3/kernel'. flax.nnx ends every
path in '.value', which is left out, since it would change with flax.

A syncer without a task needs names, shapes, labels and version 0. The first learner sends them
before it joins, in one gRPC call (BRING); the syncer writes them to WORKDIR/syncer/model, so that a
restarted syncer has them. It answers with the settings that all share and with the names, shapes
and labels that it has: each learner asks first, by a call without arrays (`meet`).
"""

import contextlib
import dataclasses
import json
import operator
import pathlib
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from typing import Any

import grpc
import jax
import numpy as np

from diloco_jax.certs import proofs
from diloco_jax.config import build, run_config
from diloco_jax.configs import own_loop
from diloco_jax.launch import accelerators
from diloco_jax.protocol import agreement, formats, safe_json
from diloco_jax.protocol import printable as printable_lib
from diloco_jax.storage import arrays, checkpoint, folders, json_files
from diloco_jax.train import task as task_lib
from diloco_jax.transport import addresses, credentials, grpc_session, listen

FOLDER = pathlib.Path('syncer') / 'model'
_METHOD = f'/{grpc_session.SERVICE}/{grpc_session.BRING}'
_PIECE_BYTES = 1 << 20
_MAX_HEADER_BYTES = 4 << 20
_CALLS = 4  # one brings a model, the others are told to wait
_UPLOAD_S = 60.0
_UPLOAD_BYTES_PER_S = 1 << 20
_TOLD = ('grpc.max_receive_message_length', 2 * _MAX_HEADER_BYTES)
_DIAL_S = 0.2  # between two calls to a syncer that does not listen yet


@dataclasses.dataclass(frozen=True)
class Model:
  """What a syncer must know of a user's own model.

  Attributes:
    shapes: name -> ShapeDtypeStruct of each parameter.
    labels: name -> the label of its merge rule (train/task.py).
    values: returns version 0, name -> float32 array.
  """

  shapes: Mapping[str, jax.ShapeDtypeStruct]
  labels: Mapping[str, str]
  values: Callable[[], dict[str, Any]]

  def header(self) -> str:
    """Everything but the values, as JSON."""
    return json.dumps(
      {
        **formats.stamp('model header'),
        'shapes': {name: [leaf.shape, str(leaf.dtype)] for name, leaf in self.shapes.items()},
        'labels': dict(self.labels),
      }
    )


def from_header(text: str, values: Callable[[], dict[str, Any]]) -> Model:
  """The inverse of `Model.header`. Raises ValueError if it is not one."""
  try:
    given = formats.taken('model header', safe_json.parse_object(text), 'the model of this loop')
    shapes = {
      name: jax.ShapeDtypeStruct(tuple(shape), dtype)
      for name, (shape, dtype) in given['shapes'].items()
    }
    sizes = [size for leaf in shapes.values() for size in leaf.shape]
    if not all(type(size) is int and size >= 0 for size in sizes):
      raise ValueError('a size is no whole number, or negative')
    return Model(shapes, {name: str(given['labels'][name]) for name in shapes}, values)
  except formats.OtherFormat:
    raise
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(f'not the header of a model: {type(error).__name__}: {error}') from None


def as_arrays(tree: Any, what: str) -> Any:
  """The tree with arrays for leaves, of types that jax has; a number becomes a scalar. Warns once
  of values that lose bits. Raises ValueError for what is no array of numbers."""
  narrowed = []

  def one(path: jax.tree_util.KeyPath, leaf: Any) -> Any:
    name = jax.tree_util.keystr(path, simple=True, separator='/') or 'the whole'
    value = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
      raise ValueError(
        f'{what}: {name} is a typed PRNG key, which has no bytes to exchange. Nothing was sent: '
        'keep the key out of the tree, or put jax.random.key_data(key) there'
      )
    if value.dtype != bool and not jax.dtypes.issubdtype(value.dtype, np.number):
      raise ValueError(
        f'{what}: {name} is a {type(leaf).__name__}, not an array of numbers. Nothing was sent: '
        'leave it out'
      )
    if isinstance(leaf, jax.Array):
      return leaf
    dtype = jax.dtypes.canonicalize_dtype(value.dtype)
    if dtype != value.dtype and not isinstance(leaf, int | float):
      narrowed.append(name)
    return value.astype(dtype, copy=False)

  made = jax.tree_util.tree_map_with_path(one, tree)
  if narrowed:
    warnings.warn(
      f'{what}: {len(narrowed)} leaves of NumPy have 64 bits, and jax takes 32 of them '
      f'({", ".join(narrowed[:3])}): give float32, or set JAX_ENABLE_X64=1 on all nodes',
      stacklevel=2,
    )
  return made


def describe(params: Any, label: Callable[[str], str] | None) -> Model:
  """The model of a tree of parameters, without those that are never sent; `label` maps a name to a
  label, None: the usual ones."""
  named = arrays.by_name(params)
  if label is None:
    counted = statistics(params)
    label = lambda name: 'statistic' if name in counted else task_lib.embeddings(name)
  named = {name: leaf for name, leaf in named.items() if label(name) not in task_lib.NEVER_SENT}
  shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
  return Model(
    shapes={name: shape(leaf) for name, leaf in named.items()},
    labels={name: label(name) for name in named},
    values=lambda: {name: np.asarray(leaf, np.float32) for name, leaf in named.items()},
  )


def statistics(params: Any) -> set[str]:
  """The names of leaves that look like running statistics, by their name or as a BatchStat of
  flax.nnx."""
  is_counted = lambda node: any(kind.__name__ == 'BatchStat' for kind in type(node).__mro__)
  counted = jax.tree.map(lambda node: jax.tree.map(lambda _: is_counted(node), node), params,
                         is_leaf=is_counted)  # fmt: skip
  return {
    name
    for name, found in arrays.by_name(counted).items()
    if found or task_lib.embeddings(name) == 'statistic'
  }


def config(
  total_steps: int, sync: run_config.SyncConfig | None, shards: int | None
) -> run_config.Config:
  """The config of a run of own loops; without `sync`, the settings of configs/own_loop.py. `shards`
  None: each loop has data of its own."""
  made = own_loop.get_config()
  made.train.steps, made.data.local = _plain(total_steps), shards is None
  made.data.shards = made.data.shards if shards is None else _plain(shards)
  made.sync = sync or made.sync
  return made


def _plain(number: Any) -> Any:
  """An int of a NumPy integer, say; any other value as it is, which the config refuses."""
  return operator.index(number) if hasattr(number, '__index__') else number


def complete(model: Model, config: run_config.Config) -> build.Assembly:
  """The objects of a config without a task, and a model. Raises ValueError."""
  for name in model.shapes:
    if repr(name) != f"'{name}'":
      raise ValueError(
        f'the parameter name {name!r} has quotes or unprintable characters: rename it'
      )
  config.validate()
  made = build.assemble_own_loop(config, model.values, dict(model.shapes), model.labels)
  return dataclasses.replace(made, about=about(config, model))


def about(config: run_config.Config, model: Model | None = None) -> bytes:
  """What a syncer answers: the settings that all share, and the header of the model."""
  return f'{agreement.encode(config.agreement())}\n{model.header() if model else ""}'.encode()


def taken(config: run_config.Config, settings: str) -> run_config.Config:
  """The config with the shared settings of the syncer. Raises ValueError."""
  values, shared = config.to_dict(), safe_json.parse_object(settings)
  for name in config.agreement().keys() & shared.keys():
    section, _, field = name.partition('.')
    values[section][field] = shared[name]
  return run_config.Config.from_dict(values)


def meet(
  model: Model,
  given: run_config.Config,
  address: Callable[[], str],
  access: addresses.Access,
  wait_s: float,
) -> str:
  """Returns the settings of a syncer that has this model, for `taken`; brings it if there is none.
  Shared settings of `given` that are not 0, or in `sync` not the default, must be the syncer's.
  Raises as `bring`, and ValueError for another model or setting."""
  usual = config(0, run_config.SyncConfig(), 0).agreement().items()
  mine = dict(given.agreement().items() - usual) | _arrays(model)
  for brought in (Model({}, {}, dict), model):
    settings, _, header = bring(brought, address, access, wait_s).decode().partition('\n')
    made, theirs = taken(given, settings), from_header(header, dict) if header else model
    here = agreement.encode(made.agreement() | mine)
    there = agreement.encode(safe_json.parse_object(settings) | _arrays(theirs))
    if found := agreement.refusal(here, there):
      raise ValueError(found)
    if header:
      break
    complete(model, made)
  return settings


def _arrays(model: Model) -> dict[str, str]:
  shapes = {name: f'{leaf.dtype}{list(leaf.shape)}' for name, leaf in model.shapes.items()}
  return {f'array {name}': f'{shape}, {model.labels[name]}' for name, shape in shapes.items()}


# --- On disk --------------------------------------------------------------------------------------


def obtain(
  workdir: pathlib.Path,
  config: run_config.Config,
  address: str,
  access: addresses.Access,
  listening: Callable[[str], None],
  stopped: threading.Event,
  say: credentials.Say,
) -> Model:
  """The model in the run's folder, or else what the first learner brings (`receive`). Its values
  are read from the folder when they are asked for, and not held for the whole run."""
  if read(workdir) is None:
    _require_no_run(workdir)
    keep = lambda model: write(workdir, model, config)
    receive(address, access, listening, stopped, say, keep, about(config))
  return read(workdir)


def write(workdir: pathlib.Path, model: Model, config: run_config.Config) -> None:
  """Writes a model to WORKDIR/syncer/model. Raises CheckpointError or OSError; ValueError, and
  writes nothing, if no syncer of this config could use it, or the folder has a run without one."""
  complete(model, config)
  _require_no_run(workdir)
  folder, values = workdir / FOLDER, model.values()
  for name, value in values.items():
    _require_finite(name, value)
  arrays.save(folder / 'values', values)
  json_files.replace(folder / 'model.json', model.header().encode())


def _require_no_run(workdir: pathlib.Path) -> None:
  """Raises ValueError if a syncer has begun a run: one of own loops has its model before that."""
  if (workdir / folders.RUN).exists():
    raise ValueError(
      f'{workdir} holds a run without {FOLDER}, so it is none of own loops. Nothing was changed. '
      'Choose another folder'
    )


def read(workdir: pathlib.Path) -> Model | None:
  """The model in a folder, None if there is none. Raises ValueError if it is damaged."""
  folder = workdir / FOLDER
  if not (folder / 'model.json').is_file():
    return None
  text = json_files.read_bytes(folder / 'model.json', _MAX_HEADER_BYTES).decode()
  return from_header(text, lambda: arrays.load(folder / 'values'))


# --- The call -------------------------------------------------------------------------------------


def bring(
  model: Model,
  address: Callable[[], str],
  access: addresses.Access,
  wait_s: float,
  now_s: Callable[[], float] = time.monotonic,
) -> bytes:
  """Sends the model to the syncer, if it has none; waits until one listens. Returns the answer,
  `about`.

  Raises:
    RunEnded: there is no syncer any more.
    TimeoutError: no syncer has listened for `wait_s`. While another learner brings the model, the
      syncer listens.
    ValueError: the syncer refused the model, or would refuse it.
  """
  header = model.header().encode()
  if len(header) > _MAX_HEADER_BYTES:
    raise ValueError(
      f'names and shapes of the model have {len(header)} bytes, a syncer takes '
      f'{_MAX_HEADER_BYTES}; nothing was sent: use fewer or shorter names'
    )
  limit_s = wait_s + _size_bytes(model) / _UPLOAD_BYTES_PER_S
  deadline_s = now_s() + wait_s
  while True:
    try:
      with listen.dial(address(), access, (*grpc_session.COMMON_OPTIONS, _TOLD)) as channel:
        return channel.stream_unary(_METHOD)(_pieces(header, model), timeout=limit_s)
    except grpc.RpcError as error:
      if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
        raise ValueError(f'the syncer refused the model: {error.details()}') from None
      if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:  # it listens, to another learner
        deadline_s = now_s() + wait_s
      reason = f'{error.details()}{credentials.explain(error.details()) if access.tls else ""}'
    except addresses.RunEnded:
      raise
    except OSError as error:  # no address yet
      reason = str(error)
    if now_s() >= deadline_s:
      raise TimeoutError(f'no syncer answered within {wait_s:g} s: {reason}')
    threading.Event().wait(_DIAL_S)


def _size_bytes(model: Model) -> int:
  """Of the values on their way: float32."""
  return sum(4 * leaf.size for leaf in model.shapes.values())


def _pieces(header: bytes, model: Model) -> Iterator[bytes]:
  yield header
  values = model.values()
  for name in model.shapes:
    data = memoryview(np.ascontiguousarray(values[name])).cast('B')
    for start in range(0, len(data), _PIECE_BYTES):
      yield bytes(data[start : start + _PIECE_BYTES])


def receive(
  address: str,
  access: addresses.Access,
  listening: Callable[[str], None],
  stopped: threading.Event,
  say: credentials.Say,
  keep: Callable[[Model], object],
  answer: bytes,
  max_bytes: int | None = None,
  upload_s: float = _UPLOAD_S,
) -> Model:
  """Serves the call until a model has arrived. One learner at a time may bring one.

  Args:
    address: where to listen (transport/addresses.py).
    listening: called with the address; a port 0 is replaced.
    stopped: gives up when it is set.
    say: takes lines about certificates.
    keep: stores the model, before the learner hears that it has arrived, since it brings it once.
      Raises ValueError for a model that the syncer cannot use; it then waits for another one.
    answer: to each call (`about`).
    max_bytes: of the values; None: half of the memory that is free.
    upload_s: in which a learner must have brought its model, and another second for each
      _UPLOAD_BYTES_PER_S.

  Raises:
    ValueError: `access` is not enough for the address, or its files are wrong.
    OSError: the address cannot be bound.
    InterruptedError: `stopped` was set.
    Any other error of `keep`; the learner then brings the model to the next syncer.
  """
  arrived: queue.SimpleQueue[Model | Exception] = queue.SimpleQueue()
  busy = threading.Lock()  # held for good once a model is kept
  if max_bytes is None:
    max_bytes = accelerators.available_memory() // 2

  def brought(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
    try:
      listener.prove(context)
    except proofs.Unproved as error:
      context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
    if not busy.acquire(blocking=False):
      context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, 'another learner brings the model')
    timers = [grpc_session.start_timer(upload_s, context.cancel)]

    def extend(size_bytes: int) -> None:
      """The size is known."""
      timers.pop().cancel()
      seconds = upload_s + size_bytes / _UPLOAD_BYTES_PER_S
      timers.append(grpc_session.start_timer(seconds, context.cancel))

    try:
      model = _read_pieces(requests, max_bytes, extend)
      timers[0].cancel()
      if not model.shapes:  # a learner that asks
        busy.release()
        return answer
      keep(model)
    except ValueError as error:
      busy.release()
      text = printable_lib.printable(str(error), grpc_session.REASON_CHARS)
      context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
    except (OSError, checkpoint.CheckpointError) as error:
      arrived.put(error)
      context.abort(grpc.StatusCode.UNAVAILABLE, 'the syncer could not keep the model')
    except BaseException:
      busy.release()
      raise
    finally:
      timers[0].cancel()
    arrived.put(model)
    return answer

  pool = futures.ThreadPoolExecutor(_CALLS, thread_name_prefix='model')
  options = (*grpc_session.COMMON_OPTIONS, ('grpc.so_reuseport', 0))
  server = grpc.server(pool, options=options, maximum_concurrent_rpcs=_CALLS)
  handlers = {grpc_session.BRING: grpc.stream_unary_rpc_method_handler(brought)}
  generic = grpc.method_handlers_generic_handler(grpc_session.SERVICE, handlers)
  server.add_generic_rpc_handlers((generic,))
  listener = listen.Listener(server, address, access, say)
  server.start()
  try:
    listening(listener.address)
    return _wait(arrived, listener, stopped)
  finally:
    server.stop(grace=1.0).wait()
    pool.shutdown()
    listener.close()


def _wait(
  arrived: queue.SimpleQueue[Model | Exception], listener: listen.Listener, stopped: threading.Event
) -> Model:
  """Waits for a model, and follows the certificates meanwhile. Raises what arrived instead."""
  while not stopped.is_set():
    listener.refresh([])
    with contextlib.suppress(queue.Empty):
      found = arrived.get(timeout=_DIAL_S)
      if isinstance(found, Exception):
        raise found
      return found
  raise InterruptedError('stopped before a learner brought the model')


def _read_pieces(
  requests: Iterator[bytes], max_bytes: int, announced: Callable[[int], None]
) -> Model:
  header = next(requests, b'')
  if len(header) > _MAX_HEADER_BYTES:
    raise ValueError(f'the header has {len(header)} bytes, at most {_MAX_HEADER_BYTES}')
  values: dict[str, np.ndarray] = {}
  model = from_header(header.decode(errors='replace'), lambda: values)
  total = _size_bytes(model)
  if total > max_bytes:
    raise ValueError(f'the model has {total} bytes, this syncer has memory for {max_bytes}')
  announced(total)
  for name, leaf in model.shapes.items():
    data, size = bytearray(), 4 * leaf.size
    while len(data) < size:
      piece = next(requests, b'')
      if not piece or len(data) + len(piece) > size:
        raise ValueError(f'{name} has {len(data) + len(piece)} bytes, {size} were announced')
      data += piece
    values[name] = np.frombuffer(data, np.float32).reshape(leaf.shape)
    _require_finite(name, values[name])
  return model


def _require_finite(name: str, value: np.ndarray) -> None:
  if not np.isfinite(value).all():
    raise ValueError(
      f'{name} has initial values that are not finite (NaN or infinite). Nothing was written; '
      'correct the initial parameters'
    )
