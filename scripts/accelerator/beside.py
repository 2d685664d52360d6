"""A learner beside its syncer against the same learner alone, as scripts/benchmarks/
learner_overhead.py, with 120M parameters on the device; and what an exchange costs there."""

import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.config import build
from diloco_jax.learner import on_device
from diloco_jax.verification.virtual import arrays
from scripts.accelerator import figures, warm
from scripts.benchmarks import learner_overhead

LARGE = (
  *('model.num_layers=12', 'model.embed_dim=896', 'model.num_heads=14', 'model.num_kv_heads=7'),
  *('model.head_dim=64', 'model.hidden_dim=2560', 'model.scan=true', 'model.dtype=bfloat16'),
  *('model.remat=dots', 'data.seq_len=1024', 'data.batch_size=64', 'mesh.data=1'),
  *('data.eval_batches=1', 'data.eval_batch_size=1'),
  *('sync.fragments=12', 'sync.period=12'),  # as many as layers: few distinct programs
)
TINY = (
  *('model.scan=true', 'model.dtype=bfloat16', 'model.embed_dim=64', 'data.seq_len=128'),
  'mesh.data=1',
)
NAME, PERIODS = 'beside', 10
KEPT = (
  *('steps_per_s', 'step_ms', 'gap_ms', 'gap_p99_ms', 'gap_longest_ms', 'stall_longest_ms'),
  *('encode_ms', 'adopt_ms', 'dispatch_ms', 'dispatch_share'),
)
COPIED_BYTES, REPEATS = 1 << 28, 10


def run(out: pathlib.Path, rehearse: bool, until: float) -> None:
  """One exchange by itself, then turns of both ways as long as there is time for two more."""
  settings, period = (TINY, 4) if rehearse else (LARGE, 12)
  learner_overhead.CONFIGS[NAME] = 'stdlib_lm:tiny', settings, period, 1
  cores = learner_overhead.CORES
  middle = len(cores) // 2
  halves = [','.join(map(str, half)) for half in (cores[:middle], cores[middle:])]
  warm.fill(warm.configure('stdlib_lm:tiny', settings))
  learner_overhead.turn(NAME, False, 6 * period, halves, compiled=False)  # what else there is
  measure_exchange(out, settings)
  ways, turns_s = {'alone': [], 'beside': []}, 0.0
  steps = period * (40 if rehearse else PERIODS)
  while not turns_s or (not rehearse and time.monotonic() + 1.5 * turns_s < until):
    began_s = time.monotonic()
    for way, turns in ways.items():
      turns.append(learner_overhead.turn(NAME, way == 'alone', steps, halves))
    turns_s = time.monotonic() - began_s
    pairs = zip(ways['beside'], ways['alone'])
    ratios = [beside['steps_per_s'] / other['steps_per_s'] for beside, other in pairs]
    last = {
      way: {name: turns[-1][name] for name in KEPT if name in turns[-1]}
      for way, turns in ways.items()
    }
    figures.add(out, 'beside', ratios_of_steps_per_s=ratios, **last)


def measure_exchange(out: pathlib.Path, settings: tuple[str, ...]) -> None:
  """Each fragment encoded and adopted, one at a time: time, and the share of the bandwidth of the
  device's memory that the bytes which they must read and write have in it."""
  assembled = build.assemble(warm.configure('stdlib_lm:tiny', settings))
  exchange = on_device.Exchange(assembled, arrays.fresh_island(assembled)).begin()
  sizes = [assembled.layout.size(p) for p in range(assembled.layout.num_fragments)]
  down = [np.zeros(assembled.codec_down.encoded_size(size), np.uint8) for size in sizes]
  p = int(np.argmax(sizes))

  def wire() -> Any:
    return exchange.wire(p, exchange.encode(p)[0])

  def encode() -> Any:
    return exchange.encode(p)

  def adopt() -> Any:
    return exchange.adopt(p, down[p], whole=False, keep=True, merged=True)

  encode_s, wire_s = seconds(encode), seconds(wire)
  adopt_s = seconds(adopt, before=encode)  # which makes the capture that it takes
  up, copied = assembled.payload_bytes, bandwidth()
  figures.add(
    out,
    'beside',
    parameters=assembled.parameters,
    bytes_from_device_each_period=sum(up),
    bytes_to_device_each_period=sum(map(len, down)),
    memory_gb_s=round(copied / 1e9, 1),
    largest_fragment=sizes[p],
    encode_device_ms=1e3 * encode_s,
    encode_to_host_ms=1e3 * wire_s,
    adopt_from_host_ms=1e3 * adopt_s,
    # The parameters and the anchor are read, the payload is written.
    encode_share_of_memory=(8 * sizes[p] + up[p]) / encode_s / copied,
    # Parameters, anchor, delta and capture are read, parameters and anchor are written.
    adopt_share_of_memory=(16 * sizes[p] + len(down[p]) + up[p]) / adopt_s / copied,
  )


def seconds(work: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> float:
  """The median time of a piece of work on the device, to its end."""
  times = []
  for _ in range(REPEATS + 1):  # the first one compiles
    jax.block_until_ready(before())
    began_s = time.perf_counter()
    jax.block_until_ready(work())
    times.append(time.perf_counter() - began_s)
  return statistics.median(times[1:])


def bandwidth() -> float:
  """Of the device's memory, bytes read and written in a second."""
  add = jax.jit(lambda values: values + 1)
  values = jnp.zeros(COPIED_BYTES // 4)
  return 2 * COPIED_BYTES / seconds(lambda: add(values))
