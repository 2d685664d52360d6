"""Data-parallel training and Decoupled DiLoCo with M = 4 and 8 at equal tokens, one program each
(lockstep.py), one after the other. The conditions are those of docs/studies/scale, and so is the
rate; the tokens are as many as the time gives, the same for all arms of a size."""

import functools
import math
import pathlib
import sysconfig
import time
from typing import NamedTuple

from absl import flags

from diloco_jax.config import build, run_config
from diloco_jax.configs import stdlib_lm
from diloco_jax.train import config as train_config
from diloco_jax.train import data as data_lib
from scripts.accelerator import figures, lockstep

ARMS = {'data-parallel': 1, 'M=4': 4, 'M=8': 8}


class Size(NamedTuple):
  layers: int
  width: int
  hidden: int
  head: int  # its size
  seeds: int
  share: float = 0.0  # of the time that is left
  fragments: int = 12
  eval_batches: int = 32

  @property
  def parameters(self) -> int:
    layer = self.width * (3 * self.width + 3 * self.hidden + 2) + 2 * self.head
    return self.width * 257 + self.layers * layer

  @property
  def windows(self) -> int:
    """Of a global batch, which grows with the root of the size."""
    return 8 * max(1, round(2 * math.sqrt(self.parameters / SMALL)))


SMALL = 63_264  # parameters
SIZES = {
  '8M': Size(7, 320, 864, 32, seeds=2, share=0.45),
  '30M': Size(10, 512, 1408, 64, seeds=1, share=0.6),
  '120M': Size(13, 896, 2432, 64, seeds=1, share=0.95),
}
REHEARSED = {
  '30k': Size(2, 32, 80, 8, seeds=2, fragments=2, eval_batches=4),
  '63k': Size(2, 48, 128, 12, seeds=1, fragments=2, eval_batches=4),
}
LENGTH = 64  # bytes of a window
PROBED_STEPS = 12  # by which the pace is found, after those that compile
MOST = 20  # tokens for each parameter
LEAST_STEPS, REHEARSED_STEPS = 100, 24
# The best rate of data-parallel training falls by a factor of 2 from SMALL to so many parameters.
LAW = 227_904, 0.024


def run(out: pathlib.Path, rehearse: bool, until: float) -> None:
  flags.FLAGS.mark_as_parsed()  # grain reads absl flags
  data_lib.load_corpus = functools.cache(data_lib.load_corpus)  # one text for all arms
  text = 'stdlib' if rehearse else f'{sysconfig.get_path("purelib")}/**/*.py'
  for name, size in (REHEARSED if rehearse else SIZES).items():
    end_s = time.monotonic() + size.share * (until - time.monotonic())
    compare(out, name, size, text, end_s, REHEARSED_STEPS if rehearse else 0)


def rate_of(parameters: int) -> float:
  """The peak rate of Muon for a size, rounded to a factor of 2.

  >>> rate_of(63_264), rate_of(227_904), rate_of(909_360)
  (0.048, 0.024, 0.012)
  """
  middle, rate = LAW
  return rate / 2.0 ** round(math.log(parameters / middle) / math.log(middle / SMALL))


def config_of(size: Size, learners: int, text: str, seed: int, steps: int) -> run_config.Config:
  """M learners share a global batch. Payloads are float32, as in the study."""
  config = stdlib_lm.get_config('decoupled')
  heads = size.width // size.head
  config.model = train_config.ModelConfig(
    num_layers=size.layers,
    embed_dim=size.width,
    num_heads=heads,
    num_kv_heads=heads // 2,
    head_dim=size.head,
    hidden_dim=size.hidden,
    scan=True,
    dtype='bfloat16',
  )
  config.optimizer = train_config.OptimizerConfig(
    name='muon', learning_rate=rate_of(size.parameters), warmup_steps=steps // 20
  )
  config.data = train_config.DataConfig(
    corpus=text,
    seq_len=LENGTH,
    batch_size=size.windows // learners,
    seed=seed,
    eval_batches=size.eval_batches,
  )
  config.mesh.data = config.sync.quorum = 1
  config.sync.learners, config.train.steps, config.train.seed = learners, steps, seed
  config.sync.fragments = config.sync.period = size.fragments
  config.sync.overlap = min(config.sync.overlap, size.fragments - 1)
  config.sync.codec_up = config.sync.codec_down = 'float32'
  config.sync.outer = 'nesterov(learning_rate=0.5, momentum=0.3)'
  config.validate()
  return config


def compare(
  out: pathlib.Path, name: str, size: Size, text: str, end_s: float, steps: int = 0
) -> None:
  """Finds the pace of each arm, then trains all of them for `steps` steps, 0: for as many as there
  is time for."""
  assembled = lambda arm, seed, steps: build.assemble(config_of(size, ARMS[arm], text, seed, steps))
  probed = size.fragments + 4, size.fragments + 4 + PROBED_STEPS  # each sync is compiled by then
  programs = {arm: lockstep.Learners(assembled(arm, 0, probed[1])) for arm in ARMS}
  step_s = {arm: pace(one, assembled(arm, 0, probed[1]), *probed) for arm, one in programs.items()}
  left_s = 0.9 * (end_s - time.monotonic())
  together = size.windows * LENGTH
  in_time = left_s / size.seeds / sum(step_s.values())
  enough = steps or in_time >= LEAST_STEPS
  steps = steps or int(min(in_time, MOST * size.parameters / together))
  conditions = {
    'parameters': size.parameters,
    'rate': rate_of(size.parameters),
    'step_ms': {arm: round(1e3 * one, 2) for arm, one in step_s.items()},
    'steps': steps,
    'tokens': steps * together,
  }
  figures.add(out, 'parity', **{name: conditions})
  for seed in range(size.seeds if enough else 0):
    base = None
    for arm, learners in programs.items():
      curve = train(learners, assembled(arm, seed, steps))
      loss = curve[-1][1]
      base = base or loss
      row = {'loss': loss, 'behind': f'{loss / base - 1:+.2%}', 'curve': curve}
      figures.add(out, 'parity', **{f'{name}, {arm}, seed {seed}': row})


def pace(learners: lockstep.Learners, assembled: build.Assembly, first: int, last: int) -> float:
  """Seconds for a step of all learners, with their merges, between two clocks."""
  times = []

  def look(clock: int) -> None:
    if clock in (first, last):
      learners.wait()
      times.append(time.monotonic())

  learners.begin(assembled).train(look)
  return (times[1] - times[0]) / (last - first)


def train(learners: lockstep.Learners, assembled: build.Assembly) -> list[tuple[int, float]]:
  """(clock, held-out loss) at each quarter of the run."""
  steps = assembled.config.train.steps
  curve, quarters = [], {steps // 4, steps // 2, 3 * steps // 4}

  def look(clock: int) -> None:
    if clock in quarters:
      curve.append((clock, learners.loss()))

  learners.begin(assembled).train(look)
  return [*curve, (steps, learners.loss())]
