"""The speed of the codecs on one core, against memcpy.

    python scripts/benchmarks/encoding.py [--quick] [--json=FILE]     # about a minute

The compiled work on a fragment, as learner and syncer do it: `encode` is a learner's, of the
difference of two float32 arrays, into a payload that is given away (donated); `accumulate` decodes
a payload and adds it to a float32 array that is given away. The figure is the CPU time of a copy of
as many float32 values between warm arrays, over that of the function: 1 is the speed of memcpy.
Medians over rounds in which all take turns, for fragments of two sizes. The smaller one fits into
the cache of a core, where a copy is several times as fast.
"""

import collections
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

os.environ['JAX_PLATFORMS'] = 'cpu'
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # before XLA counts the cores

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.numerics import codecs
from scripts.benchmarks import measured

MILLION = 1 << 20


def works(values: int) -> dict[str, Callable[[], Any]]:
  """Every function on `values` values, compiled."""
  anchor, drawn = jax.random.normal(jax.random.key(0), (2, values))
  source, target = np.array(drawn), np.zeros(values, np.float32)
  functions: dict[str, Callable[[], Any]] = {'memcpy': lambda: np.copyto(target, source)}
  for name in codecs.CODECS:
    codec = codecs.get(name)
    functions[f'{name} encode'] = _encode(codec, anchor, drawn)
    functions[f'{name} accumulate'] = _accumulate(codec, jax.jit(codec.encode)(drawn)[0], values)
  for work in functions.values():
    work()
  return functions


def _encode(codec: codecs.Codec, anchor: jax.Array, theta: jax.Array) -> Callable[[], Any]:
  encode = jax.jit(lambda data, a, b: codec.encode_into(data, a.size, 0, a - b), donate_argnums=0)
  data = jnp.zeros(codec.encoded_size(theta.size), jnp.uint8)

  def work() -> None:
    nonlocal data
    data, _ = jax.block_until_ready(encode(data, anchor, theta))

  return work


def _accumulate(codec: codecs.Codec, data: jax.Array, values: int) -> Callable[[], Any]:
  add = jax.jit(lambda total, data: total + codec.decode(data, values), donate_argnums=0)
  total = jnp.zeros(values)

  def work() -> None:
    nonlocal total
    total = jax.block_until_ready(add(total, data))

  return work


def main() -> None:
  flags = measured.flags(__doc__)
  rounds = 7 if flags.quick else 25
  sizes = {values: works(values * MILLION) for values in (1, 8)}
  times = collections.defaultdict(list)
  for _ in range(rounds):
    for millions, functions in sizes.items():
      for name, work in functions.items():
        began_ns = time.process_time_ns()
        work()
        times[millions, name].append((time.process_time_ns() - began_ns) / 1e9)
  rows: dict[str, dict[str, dict[str, float]]] = {}
  for (millions, name), seconds in times.items():
    row = rows.setdefault(f'{millions} Mi', {})
    if name == 'memcpy':
      gigabytes = 4e-9 * MILLION * millions
      row['memcpy, GB/s'] = measured.spread([gigabytes / time_s for time_s in seconds])
    else:
      copies = times[millions, 'memcpy']
      row[name] = measured.spread([copy / time_s for copy, time_s in zip(copies, seconds)])
  print('times the speed of memcpy, ' + ', '.join(f'{size} values' for size in rows))
  for name in next(iter(rows.values())):
    print(f'  {name:20}' + ''.join(f'{measured.text(row[name]):>26}' for row in rows.values()))
  measured.write(flags.json, rows)


if __name__ == '__main__':
  main()
