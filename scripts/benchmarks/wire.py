"""Bytes on a learner's link, against data-parallel training with a bfloat16 ring.

    python scripts/benchmarks/wire.py [--quick] [--json=FILE]     # about four minutes

Two learners, loops of one's own whose inner step is a pause, join a syncer process over gRPC; a
model of 6.3M parameters in 24 equal fragments, P = H = 24, one codec both ways. Each learner counts
the bytes of all its gRPC messages: payloads, headers, control, acknowledgements. Without the first
two periods and the last one:

  bytes           for each parameter, learner and period: sent, received, both
  peak            bytes of the inner step with most of them, over the mean step: both ways, sent,
                  and in windows of a period. A busy host moves bytes over the ends of steps
  within 4/3      share of the inner steps with at most 4/3 of the mean
  of a ring       both ways for an inner step, against those of a ring all-reduce of bfloat16
                  gradients, in which each of M learners sends and receives 2 (M - 1) / M of them
  of its sends    the same against what the ring's learners send, as the network counts: there each
                  byte of a star crosses one link and each byte of a ring one as well

Then the largest fragment over the mean one, where a decoder is cut as the default has it: the least
that the peak can be.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np

from scripts.benchmarks import measured, processes

LEARNERS, FRAGMENTS, WIDTH = 2, 24, 512
PARAMETERS = FRAGMENTS * WIDTH * WIDTH
STEP_S = 0.2
CODECS = ('int8', 'int4', 'float32')
RINGS = (4, 8, 64)  # M
CUT = {  # decoders: layers, width, fragments
  '0.25M parameters, P=12': (2, 96, 12),
  '25M parameters, P=24': (7, 512, 24),
  '25M parameters, P=12': (7, 512, 12),
}
SKIPPED = 2  # periods at the start, in which functions compile


def settings(codec: str) -> dict[str, int | str]:
  return {
    'learners': LEARNERS,
    'fragments': FRAGMENTS,
    'period': FRAGMENTS,
    'codec_up': codec,
    'codec_down': codec,
  }


def learner(name: str, workdir: str, codec: str, steps: int) -> None:
  """A learner's process: writes the bytes sent and received until each of its steps."""
  import jax.numpy as jnp

  import diloco_jax
  from diloco_jax.configs import own_loop
  from diloco_jax.transport import link

  total = [0, 0]
  add = link.Traffic.add

  def count(traffic: link.Traffic, sent_bytes: int = 0, received_bytes: int = 0) -> None:
    total[0] += sent_bytes
    total[1] += received_bytes
    add(traffic, sent_bytes, received_bytes)

  link.Traffic.add = count  # before the process has a transport
  sync = own_loop.get_config().sync
  for key, value in settings(codec).items():
    setattr(sync, key, value)
  params = {f'w{k:02}': jnp.zeros((WIDTH, WIDTH)) for k in range(FRAGMENTS)}
  found = []
  join = diloco_jax.join(
    params,
    learner=name,
    syncer=f'file:{workdir}/syncer/address',
    total_steps=steps,
    sync=sync,
    wait_s=processes.DEADLINE_S,
  )
  with join as peer:
    params = peer.params
    for _ in peer.steps():
      time.sleep(STEP_S)
      params = {key: leaf + 1e-3 for key, leaf in params.items()}
      found.append(tuple(total))
      params = peer.sync(params, tokens=1)
  (pathlib.Path(workdir) / f'{name}.json').write_text(json.dumps(found), 'utf-8')


def turn(codec: str, periods: int) -> list[np.ndarray]:
  """For each learner: bytes sent and received in each inner step, one row a step."""
  steps = FRAGMENTS * (SKIPPED + periods + 1)
  with tempfile.TemporaryDirectory() as workdir:
    words = [f'--config.sync.{key}={value}' for key, value in settings(codec).items()]
    children = [
      processes.start(
        max(os.sched_getaffinity(0)),
        ['syncer', '--config=own_loop', f'--workdir={workdir}', f'--config.train.steps={steps}']
        + words,
      )
    ]
    names = [f'l{which}' for which in range(LEARNERS)]
    for name in names:
      words = [sys.executable, __file__, name, workdir, codec, str(steps)]
      children.append(
        subprocess.Popen(words, env=processes.environment(), stdout=subprocess.DEVNULL)
      )
    try:
      for child in children[1:]:
        if child.wait(processes.DEADLINE_S):
          raise RuntimeError(f'a learner of {codec} ended with {child.returncode}')
    finally:
      for child in children:
        child.kill()
        child.wait()
    found = [
      json.loads((pathlib.Path(workdir) / f'{name}.json').read_text('utf-8')) for name in names
    ]
  kept = slice(FRAGMENTS * SKIPPED, FRAGMENTS * (SKIPPED + periods))
  return [np.diff(np.array(one), axis=0)[kept] for one in found]


def peak(steps: np.ndarray, window: int = 1) -> float:
  """The most of `window` steps, over their mean."""
  sums = np.convolve(steps, np.ones(window), 'valid')
  return float(sums.max() / sums.mean())


def main() -> None:
  flags = measured.flags(__doc__)
  turns, periods = (1, 3) if flags.quick else (3, 6)
  taken: dict[str, list[np.ndarray]] = {codec: [] for codec in CODECS}
  for _ in range(turns):
    for codec in CODECS:
      taken[codec].extend(turn(codec, periods))
  found = {codec: _figures(rows) for codec, rows in taken.items()}
  print('bytes for each parameter, learner and period')
  names = list(found[CODECS[0]])
  print(f'  {"":18}' + ''.join(f'{codec:>26}' for codec in CODECS))
  for name in names:
    print(f'  {name:18}' + ''.join(f'{measured.text(found[codec][name]):>26}' for codec in CODECS))
  largest = {name: _largest(*one) for name, one in CUT.items()}
  for name, one in largest.items():
    print(f'largest fragment over the mean one, {name}: {one:.3f}')
  measured.write(
    flags.json,
    {
      'parameters': PARAMETERS,
      'learners': LEARNERS,
      'period': FRAGMENTS,
      **found,
      'largest_fragment_over_mean': largest,
    },
  )


def _largest(layers: int, width: int, fragments: int) -> float:
  from diloco_jax.config import build
  from diloco_jax.configs import stdlib_lm

  config = stdlib_lm.get_config('decoupled')
  model = config.model
  model.num_layers, model.embed_dim, model.hidden_dim = layers, width, 4 * width
  model.num_heads, model.head_dim = max(4, width // 64), min(64, width // 4)
  config.sync.fragments = config.sync.period = fragments
  layout = build.assemble(config).layout
  sizes = [layout.size(p) for p in range(fragments)]
  return max(sizes) * fragments / sum(sizes)


def _figures(rows: list[np.ndarray]) -> dict[str, dict[str, float]]:
  """Spreads over learners and turns."""
  both = [row.sum(axis=1) for row in rows]
  per_step = [one.mean() / PARAMETERS for one in both]
  found = {
    'sent': [FRAGMENTS * row[:, 0].mean() / PARAMETERS for row in rows],
    'received': [FRAGMENTS * row[:, 1].mean() / PARAMETERS for row in rows],
    'both': [FRAGMENTS * one for one in per_step],
    'peak': [peak(one) for one in both],
    'peak of sent': [peak(row[:, 0]) for row in rows],
    'within 4/3': [float((one <= 4 / 3 * one.mean()).mean()) for one in both],
    'peak of a period': [peak(one, FRAGMENTS) for one in both],
  }
  for learners in RINGS:
    ring = 2 * 2 * (learners - 1) / learners  # bytes that a learner sends, and as many it receives
    found[f'of a ring, M={learners}'] = [one / (2 * ring) for one in per_step]
    found[f'of its sends, M={learners}'] = [one / ring for one in per_step]
  return {name: measured.spread(values) for name, values in found.items()}


if __name__ == '__main__':
  if len(sys.argv) == 5:
    learner(*sys.argv[1:4], int(sys.argv[4]))
  else:
    main()
