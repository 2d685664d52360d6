"""The model of real arrays (verification/sim/processes.py): production work, done at once.

Learners and the syncer are driven through the classes that real processes use (learner/work.py,
syncer/work.py). Only what they do beside the arithmetic is left out here: threads, files, records.

All learners have the same compiled functions, and so have all runs of a process that agree in what
is compiled. So the second run of a study compiles nothing that the first one has compiled.
"""

import collections
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.config import build, run_config
from diloco_jax.learner import on_device
from diloco_jax.learner import work as learner_work
from diloco_jax.protocol import actions, events
from diloco_jax.syncer import global_model
from diloco_jax.syncer import work as syncer_work
from diloco_jax.train import config as train_config
from diloco_jax.train import island as island_lib
from diloco_jax.train import optimizer as optimizer_lib

Evaluate = Callable[[int], None]
Lie = Callable[[np.ndarray], np.ndarray]  # of the values of one tensor


class _Payloads:
  """The payloads of a process (node.ports.Payloads). `fresh`: of events that it has not got yet."""

  def __init__(self, contents: dict[int, Any]):
    self._contents, self.fresh = contents, {}

  def put(self, content: Any) -> int:
    payload_id = -1 - len(self.fresh)
    self.fresh[payload_id] = content
    return payload_id

  def get(self, payload_id: int) -> Any:
    return self._contents[payload_id]

  def drop(self, payload_id: int) -> None:
    del self._contents[payload_id]

  def answers(self, posted: list[events.Event]) -> list[tuple[events.Event, Any]]:
    """Takes the events, with their contents."""
    pairs = [(event, self.fresh.pop(getattr(event, 'payload_id', None), None)) for event in posted]
    posted.clear()
    return pairs


class Arrays:
  """The arrays of a run.

  Args:
    assembled: of its config. The mesh of the config is not used: every island has one device.
    on_evaluation: called with a sync after which the global model is to be evaluated.
    keep_moments: whether saves keep a copy of the arrays, for learners that return.
    lies: by learner, what becomes of the values of each pseudo-gradient that it sends.
    shared: whether a learner without a checkpoint reads the moments in another's newest one.

  Attributes:
    origins: how many processes that began in a run in progress had their moments from where.
  """

  def __init__(
    self,
    assembled: build.Assembly,
    on_evaluation: Evaluate,
    keep_moments: bool,
    lies: Mapping[str, Lie],
    shared: bool = True,
  ):
    self.durable = False
    self._assembled = assembled
    self._shared = shared
    self.origins: collections.Counter[str] = collections.Counter()
    self._lies = lies
    self._on_evaluation = on_evaluation
    self._keep_moments = keep_moments
    self._template = fresh_island(assembled)
    self._compiled = _compiled_exchange(_exchange_key(assembled))
    self.theta = fresh_theta(assembled)
    self._saved: dict[str, tuple[int, island_lib.Island]] = {}  # with the clock
    self.agreement, self.payload_bytes = assembled.agreement, assembled.payload_bytes
    self.digests = tuple(map(self.theta.digest, range(assembled.layout.num_fragments)))

  def syncer(self, process: Any) -> 'Syncer':
    return Syncer(self._assembled, self.theta, _Payloads(process.contents), self._on_evaluation)

  def learner(self, process: Any) -> 'Learner':
    name, restored = process.name, process.observed.start.state is not None
    _, island = self._saved.get(name, (0, None)) if restored else (0, None)
    others = self._saved.values() if self._shared else ()
    origin = 'own' if restored else 'other' if others else 'fresh'
    self.origins[origin] += any(self.theta.versions)
    island = (island or self._template).twin()
    if origin == 'other':
      _, newest = max(others, key=lambda saved: saved[0])
      island.moments = newest.twin().moments
    exchange = on_device.Exchange(self._assembled, island, self._compiled).begin()
    save = functools.partial(self._save, name, island)
    arguments = self._assembled, island, exchange, _Payloads(process.contents), save
    return Liar(*arguments, self._lies[name]) if name in self._lies else Learner(*arguments)

  def _save(self, name: str, island: island_lib.Island, clock: int) -> None:
    if self._keep_moments:
      self._saved[name] = clock, island.twin()

  def forget(self, name: str) -> None:
    self._saved.pop(name, None)

  def evaluate(self) -> float:
    """Held-out loss of the global model."""
    return self._template.evaluate(self.theta.params())

  def params(self) -> Any:
    """The published model, on the host."""
    return jax.device_get(self.theta.params())

  def theta_sha256(self) -> str:
    """The SHA-256 of every bit of the syncer's arrays: masters, published values, outer states."""
    digest = hashlib.sha256(repr(self.theta.versions).encode())
    for leaf in jax.tree.leaves(self.theta.arrays()):
      digest.update(np.ascontiguousarray(leaf))
    return digest.hexdigest()


class Learner(learner_work.LearnerWork):
  """The work of a learner on the caller's thread."""

  def __init__(
    self,
    assembled: build.Assembly,
    island: island_lib.Island,
    exchange: on_device.Exchange,
    payloads: _Payloads,
    save: Callable[[int], None],
  ):
    self._posted: list[events.Event] = []
    super().__init__(assembled, island, self._posted.append, None, payloads, _Silence(), exchange)
    self._keep = save

  def perform(self, action: actions.Work) -> list[tuple[events.Event, Any]]:
    if isinstance(action, actions.Step):
      self._island.step(action.clock)
    else:
      self._perform(action)
    while not self._egress.empty():
      self._egress.get()()
    return self._payloads.answers(self._posted)

  def _save(self, save: actions.Save) -> None:
    self._keep(save.clock)


class Liar(Learner):
  """A learner that trains honestly and lies in its payloads. What it keeps for itself is honest."""

  def __init__(self, assembled: build.Assembly, *rest: Any):
    *rest, self._lie = rest
    self._layout = assembled.layout
    self._codec = assembled.codec_up
    super().__init__(assembled, *rest)

  def _encoded(self, sync: int, fragment: int, data: jax.Array, ok: jax.Array) -> None:
    values_N = np.array(self._codec.decode(data, self._layout.size(fragment)))
    ends = np.cumsum([piece.padded_size for piece in self._layout.fragments[fragment]])
    for values_n in np.split(values_N, ends[:-1]):  # views
      values_n[:] = self._lie(values_n)
    super()._encoded(sync, fragment, *self._codec.encode(jnp.asarray(values_N)))


def noise(rng: np.random.Generator) -> Lie:
  """Noise of the same length."""

  def lie(values_n: np.ndarray) -> np.ndarray:
    drawn_n = rng.standard_normal(values_n.shape)
    return drawn_n * (np.linalg.norm(values_n) / np.linalg.norm(drawn_n))

  return lie


class Syncer(syncer_work.SyncerWork):
  """The work of the syncer on the caller's thread."""

  def __init__(
    self,
    assembled: build.Assembly,
    theta: global_model.Theta,
    payloads: _Payloads,
    on_evaluation: Evaluate,
  ):
    self._posted: list[events.Event] = []
    super().__init__(
      assembled,
      theta,
      self._posted.append,
      fail=None,
      payloads=payloads,
      records=_Silence(),
      checkpoints=None,
      log=_NoLog(),
      evaluation=_Evaluation(on_evaluation),
    )

  def perform(self, action: actions.Work) -> list[tuple[events.Event, Any]]:
    self._perform(action)
    return self._payloads.answers(self._posted)


class _Silence:
  """Records of nothing (report/records.py)."""

  def report(self, fact: Any) -> None:
    pass

  def say(self, text: str) -> None:
    pass


class _NoLog:
  def write(self, step: Any) -> None:
    pass


@dataclasses.dataclass
class _Evaluation:
  submit: Evaluate


# --- What runs share ------------------------------------------------------------------------------

KEPT = 8  # compiled models, of each kind


def fresh_island(assembled: build.Assembly) -> island_lib.Island:
  """An island at version 0, on the first device."""
  config = assembled.config
  rate = optimizer_lib.schedule(config.optimizer, config.train.steps)
  island = _template(_step_key(config), _Unkeyed(assembled)).twin(assembled.task, rate)
  island.params = assembled.init()
  return island


def fresh_theta(assembled: build.Assembly) -> global_model.Theta:
  """A global model at version 0."""
  sync = assembled.config.sync
  outer = sync.merge, sync.embedding_merge, sync.outer
  return _theta(repr((_exchange_key(assembled), outer)), _Unkeyed(assembled)).twin(assembled)


def _step_key(config: run_config.Config) -> str:
  """All that the compiled step and evaluation depend on; the rate is an argument of the step."""
  data = dataclasses.replace(config.data, seed=0)
  optimizer = dataclasses.replace(
    config.optimizer, learning_rate=1.0, warmup_steps=0, end_lr_ratio=1.0
  )
  return repr((config.task, config.model, data, optimizer))


def _exchange_key(assembled: build.Assembly) -> str:
  """All that encoding and adoption depend on."""
  sync = assembled.config.sync
  arithmetic = sync.codec_up, sync.codec_down, sync.adopt
  return repr((assembled.config.task, assembled.layout.digest(), arithmetic))


@dataclasses.dataclass(frozen=True)
class _Unkeyed:
  """An argument that does not count for a cache: the key before it says what does."""

  assembled: build.Assembly = dataclasses.field(compare=False)

  def __hash__(self) -> int:
    return 0


@functools.lru_cache(maxsize=KEPT)
def _template(key: str, unkeyed: _Unkeyed) -> island_lib.Island:
  config = unkeyed.assembled.config
  return island_lib.Island(
    task=unkeyed.assembled.task,
    optimizer=config.optimizer,
    mesh=train_config.MeshConfig(),
    total_steps=config.train.steps,
    devices=jax.local_devices()[:1],
    seed=config.train.seed,
  )


@functools.lru_cache(maxsize=KEPT)
def _compiled_exchange(key: str) -> dict[tuple, Any]:
  return {}


@functools.lru_cache(maxsize=KEPT)
def _theta(key: str, unkeyed: _Unkeyed) -> global_model.Theta:
  return global_model.Theta(unkeyed.assembled)
