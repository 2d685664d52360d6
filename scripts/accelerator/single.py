"""A single controller whose two islands share the device: payloads are arrays on it, and nothing
but the records of the log is copied to the host."""

import collections
import copy
import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

from diloco_jax.api import single_controller
from diloco_jax.config import run_config
from diloco_jax.configs import stdlib_lm
from diloco_jax.learner import split
from diloco_jax.protocol import actions
from diloco_jax.report import folder as folder_lib
from diloco_jax.report import summary as summary_lib
from diloco_jax.transport import payloads as payloads_lib
from diloco_jax.verification.faults import chaos_report
from diloco_jax.verification.faults import conductor as conductor_lib
from scripts.accelerator import figures

# What brings a payload to the host or back, and its checksum there.
SEAMS = (
  *((split, name) for name in ('to_wire', 'from_wire', 'values')),
  (payloads_lib.isal_zlib, 'crc32'),
)


def run(out: pathlib.Path, rehearse: bool, until: float) -> None:
  del until
  calls: collections.Counter[str] = collections.Counter()
  for module, name in (*SEAMS, (payloads_lib, 'to_host')):
    setattr(module, name, count_calls(calls, name, getattr(module, name)))
  config = stdlib_lm.get_config('tiny' if rehearse else 'decoupled')
  config.mesh.data, config.train.eval_every = 1, 0
  with tempfile.TemporaryDirectory() as folder_of_both:
    warm, workdir = (pathlib.Path(folder_of_both) / name for name in ('warm', 'run'))
    # One learner alone compiles everything: two would compile it twice, at once.
    train(config, warm, 1, 4 * config.sync.period)
    calls.clear()
    began_s = time.monotonic()
    controller, exits = train(config, workdir, 2, 60 if rehearse else 400)
    seconds = time.monotonic() - began_s
    read, verdict = folder_lib.read(workdir), conductor_lib.judge(workdir)
  summary = summary_lib.summarize(read)
  figures.add(
    out,
    'single',
    exits={name: exit.code for name, exit in exits.items()},
    devices={name: list(map(str, devices)) for name, devices in controller.devices.items()},
    syncer_devices=list(map(str, controller.syncer_devices)),
    seconds=round(seconds, 1),
    outer_steps=summary['outer_steps'],
    loss=[summary['eval_loss_start'], summary['eval_loss_end']],
    payloads_through_the_host=sum(n for name, n in calls.items() if name != 'to_host'),
    records_copied_for_the_log=calls['to_host'],
    ledger_off_by=chaos_report.balance(dataclasses.asdict(read.run.ledger)),
    violation=verdict.broken and f'{verdict.broken.id}: {verdict.broken.detail}',
  )


def train(
  config: run_config.Config, workdir: pathlib.Path, learners: int, steps: int
) -> tuple[single_controller.SingleController, dict[str, actions.Exit]]:
  config = copy.deepcopy(config)
  config.sync.learners, config.train.steps = learners, steps
  controller = single_controller.SingleController(config, workdir, share=True)
  controller.start()
  return controller, controller.join()


def count_calls(
  calls: collections.Counter[str], name: str, function: Callable
) -> Callable[..., Any]:
  def call(*args: Any, **named: Any) -> Any:
    calls[name] += 1
    return function(*args, **named)

  return call
