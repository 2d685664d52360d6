"""A syncer on the CPU and three learners in processes that share the device, one of them killed and
back: what the report says of it, what the judge says of its tapes, and the same bits on both."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.numerics import codecs, exchange
from diloco_jax.report import folder as folder_lib
from diloco_jax.report import summary as summary_lib
from diloco_jax.verification.faults import chaos_report
from diloco_jax.verification.faults import conductor as conductor_lib
from scripts.accelerator import figures, warm

LEARNERS, VICTIM = 3, 'l2'
COMMON = ('mesh.data=1', 'train.eval_every=0')
LARGE = (
  *('model.num_layers=10', 'model.embed_dim=512', 'model.num_heads=8', 'model.num_kv_heads=4'),
  *('model.head_dim=64', 'model.hidden_dim=1408', 'model.scan=true', 'model.dtype=bfloat16'),
  *('data.seq_len=256', 'data.batch_size=16', 'data.eval_batches=1', 'data.eval_batch_size=8'),
  *('sync.fragments=10', 'sync.period=10'),  # as many as layers: few distinct programs
)
TINY = ('model.scan=true', 'model.dtype=bfloat16')
MODELS = {'demo': ('stdlib_lm:cpu', ()), '30M': ('stdlib_lm:cpu', LARGE)}
REHEARSED = {'demo': ('stdlib_lm:tiny', ()), '30M': ('stdlib_lm:tiny', TINY)}
WARM_UP_STEPS = 300
LEAST_STEPS, MOST_STEPS, REHEARSED_STEPS = 200, 6000, 240
VALUES = 1 << 22


def run(out: pathlib.Path, rehearse: bool, until: float) -> None:
  figures.add(out, 'processes', bits=bits(VALUES // 16 if rehearse else VALUES))
  for name, (config, settings) in (REHEARSED if rehearse else MODELS).items():
    warm.fill(warm.configure(config, (*COMMON, *settings)))
    with tempfile.TemporaryDirectory() as workdir:
      words = [f'--config={config}', *flags(settings)]
      most = REHEARSED_STEPS if rehearse else MOST_STEPS
      train_all(out, name, pathlib.Path(workdir), words, until, most)


def flags(settings: tuple[str, ...]) -> list[str]:
  return [f'--config.{setting}' for setting in (*COMMON, *settings)]


def train_all(
  out: pathlib.Path, name: str, workdir: pathlib.Path, config: list[str], until: float, most: int
) -> None:
  """One learner alone shows the pace, and compiles what one that is back needs; then all train."""
  left_s = until - time.monotonic()
  alone = train(workdir / 'alone', config, 1, min(WARM_UP_STEPS, most), 'l0', 0.1)
  step_s = alone['learners']['l0']['step_seconds_median']
  seconds = min(left_s / 4, 40.0)
  steps = round(min(max(seconds / (step_s * LEARNERS), LEAST_STEPS), most))
  summary = train(workdir / 'run', config, LEARNERS, steps, VICTIM, 0.3)
  figures.add(out, 'processes', **{name: describe(workdir / 'run', summary, step_s)})


def train(
  workdir: pathlib.Path, config: list[str], learners: int, steps: int, victim: str, at: float
) -> dict[str, Any]:
  """Runs `diloco train` with a kill of `victim`; returns the summary of its report."""
  command = [
    *(sys.executable, '-m', 'diloco_jax', 'train', *config, f'--workdir={workdir}'),
    *(f'--config.sync.learners={learners}', f'--config.train.steps={steps}'),
    f'--kill={victim}@{at}',
  ]
  subprocess.run(command, check=True)
  return json.loads((workdir / summary_lib.REPORT / summary_lib.SUMMARY).read_text('utf-8'))


def describe(workdir: pathlib.Path, summary: dict[str, Any], alone_s: float) -> dict[str, Any]:
  verdict = conductor_lib.judge(workdir)
  names = ('eval_loss_start', 'eval_loss_end', 'outer_steps', 'tokens_trained', 'tokens_merged')
  steps = {name: row['step_seconds_median'] for name, row in summary['learners'].items()}
  return {
    **{name: summary[name] for name in (*names, 'wall_seconds')},
    'parameters': summary['learners'][VICTIM]['cost']['parameters'],
    'steps': summary['steps'],
    'step_s_alone': alone_s,
    'step_s': steps,
    'kills': summary['kills'],
    'incarnations_of_the_victim': summary['learners'][VICTIM]['incarnations'],
    'merged_of_the_victim': summary['learners'][VICTIM]['contributions_merged'],
    'ledger_off_by': chaos_report.balance(dataclasses.asdict(folder_lib.read(workdir).run.ledger)),
    'violation': verdict.broken and f'{verdict.broken.id}: {verdict.broken.detail}',
  }


def bits(count: int) -> dict[str, bool]:
  """By codec, whether a pseudo-gradient and the value after a delta have the same bits on the CPU
  and on the device."""
  rng = np.random.default_rng(0)
  anchor_N, local_N = rng.standard_normal((2, count)).astype(np.float32)

  def results(codec: codecs.Codec, device: jax.Device) -> list[bytes]:
    encode = jax.jit(lambda anchor_N, local_N: codec.encode(anchor_N - local_N)[0])
    apply = jax.jit(lambda anchor_N, data: exchange.apply_delta(codec, anchor_N, data))
    put = lambda array: jax.device_put(jnp.asarray(array), device)
    data = encode(put(anchor_N), put(local_N))
    return [np.asarray(array).tobytes() for array in (data, *apply(put(anchor_N), data))]

  devices = jax.local_devices(backend='cpu')[0], jax.local_devices()[0]
  compared = {}
  for name in ('int8', 'int4', 'int2', 'bfloat16', 'float32'):
    on_cpu, on_device = (results(codecs.get(name), device) for device in devices)
    compared[name] = on_cpu == on_device
  return compared
