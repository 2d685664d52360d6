"""A learner of several hosts: one leads, and every host does its part of the array work.

Host 0, the *lead*, has the machine, the sessions, the tape and the records. Before it performs a
work action it writes it to the key-value store of jax's coordination service, and the other hosts,
the *led hosts*, take it from there. So all hosts launch the same device programs in the same order,
which is all that their devices need. Payloads that the lead has received reach the led hosts over
the network of the devices.
"""

import contextlib
import dataclasses
import itertools
import json
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils

from diloco_jax.config import build
from diloco_jax.learner import island_port
from diloco_jax.learner import work as learner_work
from diloco_jax.protocol import actions, events
from diloco_jax.protocol.tape import codec
from diloco_jax.report import header
from diloco_jax.report import records as records_lib
from diloco_jax.train import mesh as mesh_lib
from diloco_jax.transport import payloads as payloads_lib

HEARTBEAT_S = 20  # a host that is silent for so long ends the learner
START_S = 600  # for all hosts to start, and then to compile
_SHUTDOWN_S = 60
_WAIT_MS = 3_600_000
_FOLDER, _KEPT = 100, 1000  # messages; no led host is as many behind as are kept
_STATE = distributed.global_state  # jax.process_index() would start the backend
_STOP = 'diloco/stop'
_STREAMS, _VALUES = itertools.count(), itertools.count()  # alike on all hosts


class Cluster(NamedTuple):
  """The hosts of a learner.

  Attributes:
    hosts: how many; 0: jax finds all three values itself, on TPU VMs and GKE.
    host: which of them this is; 0 leads.
    coordinator: 'HOST:PORT', where the lead listens for the others. Every process that reaches it
      can stop the learner, so it must be in a network of these hosts alone.
  """

  hosts: int = 0
  host: int = 0
  coordinator: str = ''


def connect(cluster: Cluster) -> int:
  """Waits for the other hosts and returns their number. Before anything else of jax."""
  jax.config.update('jax_enable_preemption_service', False)  # it would take SIGTERM
  given = {}
  if cluster.hosts:
    given = {
      'coordinator_address': cluster.coordinator,
      'coordinator_bind_address': cluster.coordinator,
      'num_processes': cluster.hosts,
      'process_id': cluster.host,
      'cluster_detection_method': 'deactivate',
    }
  jax.distributed.initialize(
    **given,
    initialization_timeout=START_S,
    heartbeat_timeout_seconds=HEARTBEAT_S,
    shutdown_timeout_seconds=_SHUTDOWN_S,
  )
  return _STATE.num_processes


def leads() -> bool:
  """Whether this is the first host of the learner, or the only one."""
  return jax.process_index() == 0


def are_several(params: Any) -> bool:
  """Whether arrays are on the devices of several hosts. Raises ValueError if there are other hosts
  and the arrays are not."""
  several = not all(leaf.is_fully_addressable for leaf in _arrays(params))
  if jax.process_count() > 1 and not several:
    raise ValueError(
      f'the parameters are on one of {jax.process_count()} hosts: put them on a mesh of all '
      'devices, or leave jax.distributed.initialize out'
    )
  return several


def put_on_all(tree: Any, params: Any) -> Any:
  """The tree with those arrays that only this host has, such as the counts of optax, on all devices
  of `params`."""
  mesh = next(leaf for leaf in _arrays(params) if not leaf.is_fully_addressable).sharding.mesh
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  is_there = lambda leaf: isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
  put = lambda leaf: leaf if is_there(leaf) else mesh_lib.put(np.array(leaf), everywhere)
  return jax.tree.map(put, tree)


def gather(arrays: dict[str, jax.Array]) -> Callable[[], dict[str, np.ndarray]]:
  """Returns a function that returns the values of all hosts on the lead, float32."""
  values = {}
  for name, leaf in arrays.items():
    whole = multihost_utils.process_allgather(leaf, tiled=True)
    if leads():
      values[name] = np.asarray(whole, np.float32)
  return lambda: values


def _arrays(tree: Any) -> list[jax.Array]:
  return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def wait_until_ready() -> None:
  """Waits until every host has compiled: on CPUs the first exchange of a group of devices must
  begin on all of them within 30 s."""
  if _STATE.num_processes > 1:
    _STATE.client.wait_at_barrier(f'diloco/ready/{next(_VALUES)}', START_S * 1000)


def broadcast_text(text: str) -> str:
  """Returns the text that the lead has called this with."""
  key = f'diloco/value/{next(_VALUES)}'
  if _STATE.process_id:
    return _wait_for(key)
  if _STATE.num_processes > 1:
    _STATE.client.key_value_set(key, text)
  return text


def require_same(name: str, text: str) -> None:
  """Raises RuntimeError on a led host whose text is not that of the lead."""
  if (expected := broadcast_text(text)) != text:
    raise RuntimeError(
      f'{name} of host {_STATE.process_id} is {text}, of the lead {expected}: all hosts of a '
      'learner need the same command, and one folder'
    )


def ask_to_stop(reason: str) -> None:
  """On any host: asks the lead to end the learner in order."""
  _STATE.client.key_value_set(_STOP, reason, allow_overwrite=True)


def _wait_for(key: str) -> str:
  while True:
    try:
      return _STATE.client.blocking_key_value_get(key, _WAIT_MS)
    except jax.errors.JaxRuntimeError as error:
      if 'DEADLINE_EXCEEDED' not in str(error):
        raise


def _key(stream: int, number: int) -> str:
  return f'{_folder(stream, number)}/{number}'


def _folder(stream: int, number: int) -> str:
  return f'diloco/work/{stream}/{number // _FOLDER}'


def _broadcast(data: np.ndarray) -> memoryview:
  return memoryview(np.ascontiguousarray(multihost_utils.broadcast_one_to_all(data)))


class _HostWork(learner_work.LearnerWork):
  """The work of one of several hosts."""

  def _save(self, save: actions.Save) -> None:
    """Also compares how many device programs the hosts have launched."""
    self._finish()
    launched = f'{self._steps} steps and {self.exchange.launches} others'
    require_same('the number of launches', launched)
    super()._save(save)


class LeadWork(_HostWork):
  """The work of the lead. All calls of `submit` and `stop` come from one thread."""

  def __init__(self, *args: Any):
    """Arguments: of LearnerWork."""
    super().__init__(*args)
    self._stream, self._messages = next(_STREAMS), 0
    self._unpublished: queue.SimpleQueue[actions.Work | None] = queue.SimpleQueue()
    self._awaiting = threading.Thread(target=self._await_stop, name='stop', daemon=True)
    self._awaiting.start()

  def submit(self, action: actions.Work) -> None:
    if not isinstance(action, actions.Examine):  # it asks this host alone
      self._unpublished.put(action)
    super().submit(action)

  def stop(self) -> None:
    ask_to_stop('')
    self._awaiting.join()  # a process that ends while it waits crashes
    self._unpublished.put(None)
    super().stop()

  def _take(self) -> actions.Work | None:
    """Before an action is performed all that were submitted so far are published, in one message
    most times, as the machine asks for those of a boundary together."""
    action, published = super()._take(), []
    with contextlib.suppress(queue.Empty):
      while True:
        published.append(self._described(self._unpublished.get_nowait()))
    if published:
      _STATE.client.key_value_set(_key(self._stream, self._messages), codec.encode(published))
      if self._messages % _FOLDER == 0:
        _STATE.client.key_value_delete(_folder(self._stream, self._messages - _KEPT))
      self._messages += 1
    return action

  def _take_payload(self, payload_id: int) -> memoryview:
    return _broadcast(np.frombuffer(super()._take_payload(payload_id), np.uint8))

  def _described(self, action: actions.Work | None) -> list[Any]:
    """The action, and the size of its payload."""
    if isinstance(action, actions.Adopt):
      return [action, memoryview(self._payloads.get(action.payload_id)).nbytes]
    if isinstance(action, actions.Save):  # the lead writes the state
      action = dataclasses.replace(action, machine_state={})
    return [action, 0]

  def _await_stop(self) -> None:
    if reason := _wait_for(_STOP):
      self._post(events.Stop(reason=reason))


class LedWork(_HostWork):
  """The work of a led host: what the lead publishes. It answers nobody."""

  def __init__(
    self,
    assembled: build.Assembly,
    island: island_port.IslandState,
    records: 'records_lib.Recorder | Quiet',
  ):
    self._sizes: dict[int, int] = {}  # bytes of each payload of the lead
    fail = lambda error: self._queue.put(error)
    store = payloads_lib.PayloadStore()  # nothing arrives here
    super().__init__(assembled, island, lambda event: None, fail, store, records)
    threading.Thread(target=self._receive, name='receive', daemon=True).start()

  def _receive(self) -> None:
    """Queues what the lead publishes, up to its end."""
    stream = next(_STREAMS)
    try:
      for number in itertools.count():
        for data, size in json.loads(_wait_for(_key(stream, number))):
          if data is None:
            self.stop()
            return
          action = codec.decode(actions.Work, data)
          if isinstance(action, actions.Adopt):
            self._sizes[action.payload_id] = size
          self.submit(action)
    except BaseException as error:
      self._queue.put(error)

  def _take_payload(self, payload_id: int) -> memoryview:
    return _broadcast(np.zeros(self._sizes.pop(payload_id), np.uint8))

  def _take(self) -> actions.Work | None:
    action = super()._take()
    if isinstance(action, BaseException):
      raise action
    return action

  def _drain(self) -> None:
    """What the egress thread does is the lead's alone."""
    while self._egress.get() is not None:
      pass


ENDED_BY_LEAD = actions.Exit(code=0, text='done: the lead has ended the work')


class Quiet:
  """The records of a led host (node.ports.Records): its lines for people, and nothing else."""

  def __init__(self, learner: str):
    self._name = f'{learner}.{_STATE.process_id}'

  def say(self, text: str) -> None:
    header.say(f'[{self._name}] {text}')

  def report(self, *what: Any) -> None:
    pass

  scalars = completed = evaluated = report

  def close(self) -> None:
    pass
