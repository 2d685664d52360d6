"""An arm of a study: one training run in virtual time, and the small model that most arms train."""

import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import flags

from diloco_jax.config import build, run_config
from diloco_jax.configs import stdlib_lm
from diloco_jax.protocol.tape import codec
from diloco_jax.train import config as train_config
from diloco_jax.train import evaluate
from diloco_jax.verification.virtual import conditions, virtual

# The conditions of most studies: steps of unequal length, a third of a step for a payload each way.
USUAL = {
  'hardware': conditions.Hardware(lognormal=0.3, merge=0.05),
  'network': conditions.Network(up=0.3, down=0.3),
}

QUICK_STEPS = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
  """One run.

  Attributes:
    study: the study it belongs to.
    name: within the study.
    config: `train.steps` is T: the learners train as many tokens as M learners do in T steps.
    kind: 'train' in virtual time, 'alone' without a syncer, or 'schedule', the protocol alone.
    where: hardware, network and faults of a virtual run.
    against: the arm that its loss is compared with, of the same seed; '' for none.
    unequal: of how many tokens each is, where they are not of equally many.
    tokens: trained by all learners; 0: those of M learners in T steps.
    suite: whether the model is asked the questions of its suite at the end.
  """

  study: str
  name: str
  config: run_config.Config
  kind: str = 'train'
  where: dict[str, Any] = dataclasses.field(default_factory=lambda: dict(USUAL))
  against: str = ''
  unequal: str = ''
  tokens: int = 0
  suite: bool = False

  @property
  def trained(self) -> int:
    """How many tokens all learners train."""
    return self.tokens or tokens_per_step(self.config) * self.config.train.steps

  @property
  def key(self) -> str:
    """Changes with every setting of the run, and with what decides what is held out."""
    config = self.config.to_dict()
    config['sync'].pop('follow_bytes_per_s')  # no follower changes a run
    config['sync'] |= {'fragmentation': 'balanced', 'wait_for': 'quorum'}  # settings until 8361d975
    where = {name: codec.encode(value) for name, value in sorted(self.where.items())}
    if self.kind == 'alone':
      del config['sync']
      where = {}
    spec = [self.kind, config, where, self.tokens, 'by text', *(['suite'] if self.suite else [])]
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]

  @property
  def seed(self) -> int:
    """Of the parameters, the order of the data, and the conditions."""
    return self.config.train.seed

  @property
  def work(self) -> float:
    """About how long it takes, in batches of 8 windows of the small model."""
    batches = self.config.train.steps * self.config.data.batch_size / 8
    learners = 1 if self.kind == 'alone' else self.config.sync.learners
    return batches * learners * (0.05 if self.kind == 'schedule' else 1)


def get_ready() -> None:
  """Before the first run of a process: grain reads absl flags."""
  flags.FLAGS.mark_as_parsed()


def run(arm: Arm, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
  """Runs an arm; returns its row: plain values for JSON."""
  begun = time.process_time()
  row = _run(arm, progress)
  return row | {'cpu_seconds': round(time.process_time() - begun, 1)}


def _run(arm: Arm, progress: Callable[[int, int], None] | None) -> dict[str, Any]:
  if arm.kind == 'alone':
    return _row(arm, virtual.alone(arm.config, progress))
  tokens = arm.trained
  config = codec.decode(run_config.Config, arm.config.to_dict(), 'config')
  # Arms of a seed that differ in arithmetic only share the search for T.
  protocol = codec.encode(dataclasses.asdict(config.protocol()))
  where = sorted((name, repr(value)) for name, value in arm.where.items())
  key = json.dumps([protocol, where, tokens, arm.seed])
  schedule = _schedule(key, _Unkeyed((config, arm.where, tokens, arm.seed)))
  if arm.kind == 'schedule':
    return _row(arm, schedule)
  config.train.steps = schedule.config.train.steps
  return _row(arm, virtual.train(config, **arm.where, seed=arm.seed, progress=progress))


@dataclasses.dataclass(frozen=True)
class _Unkeyed:
  """Arguments that do not count for a cache: the key before them says what does."""

  values: tuple = dataclasses.field(compare=False)

  def __hash__(self) -> int:
    return 0


@functools.lru_cache(maxsize=64)
def _schedule(key: str, arguments: _Unkeyed) -> virtual.Result:
  config, where, tokens, seed = arguments.values
  return virtual.schedule(config, **where, seed=seed, trained_tokens=tokens)


def _row(arm: Arm, result: virtual.Result) -> dict[str, Any]:
  row = {
    'study': arm.study,
    'arm': arm.name,
    'key': arm.key,
    'seed': arm.seed,
    'loss': result.final_loss,
    'tokens': result.tokens,
    'steps': result.config.train.steps,
    'seconds': round(result.seconds, 1),
    'device': jax.devices()[0].device_kind,
    'theta_sha256': result.theta_sha256 or _sha256(result.params),
    'curve': [dataclasses.asdict(point) for point in result.curve],
  }
  if arm.suite:
    task = build.make_task(result.config)
    scores = evaluate.scores(task, result.params, task.suite(evaluate.SUITE_EXAMPLES))
    row['right'] = {name: score.right_N.round(4).tolist() for name, score in scores.items()}
  if not result.merges:
    return row
  waits = result.waits
  return row | {
    'merged': result.merged_share,
    'merged_of': {
      name: counts['merged'] / (result.ledger.fragments * max(1, counts['tokens']))
      for name, counts in result.ledger.learners.items()
    },
    'when_due': when_due(result),
    'discarded': result.discarded_shares,
    'participants': result.participants,
    'live': sum(merge.live for merge in result.merges) / len(result.merges),
    'wait': waits[len(waits) // 2],
    'deaths': result.deaths,
    'moments': result.origins,
    'up_bytes': result.up_bytes,
    'down_bytes': result.down_bytes,
    'time': result.time,
  }


def _sha256(params: Any) -> str:
  """Of every bit of a model; '' if there is none."""
  leaves = jax.tree.leaves(params)
  return hashlib.sha256(b''.join(map(np.ascontiguousarray, leaves))).hexdigest() if leaves else ''


def when_due(result: virtual.Result) -> float:
  """The share of the live learners that are in the outer steps of the schedule: of a learner that
  is not, nothing was merged in the sync that it was due for."""
  on_time = [merge for merge in result.merges if merge.sync <= result.config.train.steps]
  present = sum(len(merge.participants) - len(merge.late) for merge in on_time)
  return present / sum(merge.live for merge in on_time)


def tokens_per_step(config: run_config.Config) -> int:
  """Of all learners, in an inner step of each."""
  return config.sync.learners * config.data.batch_size * config.data.seq_len


# --- The small model ------------------------------------------------------------------------------


def small(
  optimizer: str = 'muon',
  rate: float = 6e-3,
  *,
  steps: int = 1000,
  learners: int = 4,
  batch: int = 8,
  seed: int = 0,
  **sync: Any,
) -> run_config.Config:
  """63,264 parameters, contexts of 32 bytes of Python's sources; `sync`: settings of the exchange.

  The seed draws parameters, order of the data, and the conditions of the run."""
  settings = {
    'fragments': 12,
    'period': 12,
    'codec_up': 'float32',
    'codec_down': 'float32',
    'outer': 'nesterov(learning_rate=0.5, momentum=0.3)',
  }
  return run_config.Config(
    name='small',
    model=stdlib_lm.small().model,
    optimizer=train_config.OptimizerConfig(
      name=optimizer, learning_rate=rate, warmup_steps=steps // 20
    ),
    data=train_config.DataConfig(
      seq_len=32, batch_size=batch, shards=16, seed=seed, eval_batches=16
    ),
    sync=run_config.SyncConfig(learners=learners, **(settings | sync)),
    train=run_config.TrainConfig(
      steps=steps, eval_every=steps // 10, seed=seed, checkpoint_every_steps=0
    ),
  )


RATE = 2.4e-2  # the best inner rate of the small model with Muon (parity.md)


def decoupled(
  study: str,
  name: str,
  quick: bool,
  *,
  seed: int = 0,
  steps: int = 1000,
  against: str = '',
  where: dict[str, Any] | None = None,
  rate: float = RATE,
  optimizer: str = 'muon',
  learners: int = 4,
  batch: int = 8,
  **sync: Any,
) -> Arm:
  """An arm of Decoupled DiLoCo on the small model; `sync`: settings of the exchange."""
  config = small(
    optimizer,
    rate,
    steps=min(steps, QUICK_STEPS) if quick else steps,
    learners=learners,
    batch=batch,
    seed=seed,
    **sync,
  )
  return Arm(study=study, name=name, config=config, where=where or dict(USUAL), against=against)


def with_method(config: run_config.Config, method: str) -> run_config.Config:
  """Makes the config of Decoupled DiLoCo that of another method: 'streaming', or 'diloco' (in lock
  step). Any other name changes nothing."""
  sync = config.sync
  if method == 'streaming':
    sync.quorum, sync.max_lag = sync.learners, sync.overlap
  elif method == 'diloco':
    sync.quorum, sync.fragments, sync.overlap = sync.learners, 1, 0
  return config


def data_parallel(arm: Arm, name: str, rate: float | None = None) -> Arm:
  """The baseline of an arm: one learner that trains on the batches of all."""
  config = virtual.data_parallel(arm.config)
  config.optimizer.learning_rate = rate or config.optimizer.learning_rate
  return Arm(study=arm.study, name=name, config=config, kind='alone')


def with_tokens(arm: Arm, tokens: int) -> Arm:
  """The arm with so many trained tokens. Its clock, and with it the inner rate, ends with them."""
  return dataclasses.replace(arm, tokens=tokens)
