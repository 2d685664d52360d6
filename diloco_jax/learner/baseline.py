"""A learner without a syncer: the data-parallel baseline, with the same jitted step."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

from diloco_jax.config import run_config
from diloco_jax.learner import work as learner_work
from diloco_jax.protocol import actions, rate_limited_log
from diloco_jax.protocol import agreement as agreement_lib
from diloco_jax.report import records as records_lib
from diloco_jax.storage import checkpoint, outer_log, states
from diloco_jax.train import island as island_lib


def state(config: run_config.Config) -> dict[str, Any]:
  """What a checkpoint has in the place of a machine's state: the run."""
  return {'run': outer_log.run_of(agreement_lib.encode(config.agreement()))}


def is_state(protocol: dict[str, Any]) -> bool:
  """Whether a checkpoint is of a learner without a syncer."""
  return not protocol.keys() - {'run'}


def run(
  config: run_config.Config,
  island: island_lib.Island,
  records: records_lib.Recorder,
  stopping: Callable[[], bool] = lambda: False,
) -> actions.Exit:
  """Trains from the newest checkpoint, if there is one, to the last step; evaluates and saves
  meanwhile. Ends early, between two steps, once `stopping` returns true. Closes the island. Raises
  StateError if the last save failed, ValueError if the checkpoint is of a learner with a syncer, or
  of another run."""
  with contextlib.closing(island):
    restored, run_state = island.restore(), state(config)
    if restored is not None and not is_state(restored.protocol):
      raise ValueError(
        'the checkpoints in this folder are of a learner with a syncer. Nothing was changed: leave '
        "--syncer=none (syncer='none') out, or choose another folder"
      )
    if restored is not None and restored.protocol != run_state:
      raise ValueError(
        'the checkpoints in this folder are of a run with other settings. Nothing was changed: '
        'choose another folder, or put its own ones back'
      )
    step = 0 if restored is None else restored.step
    records_lib.report_startup(records, 'restored')
    learner_work.introduce(island, records)
    records.config(config.to_dict())
    island.warm_up()
    train = config.train
    if restored is None:
      learner_work.evaluate(island, records, 0)
    steps = tokens = 0
    save = None  # the newest one, while no step has followed it
    failures = rate_limited_log.Notices(checkpoint.SAY_AGAIN_NS, records.say)

    def finish(ahead: int = 0) -> None:
      nonlocal steps, tokens
      while island.must_finish(ahead):
        result = island.finish()
        steps, tokens = steps + 1, tokens + result.tokens
        learner_work.record_step(records, config, island, steps, tokens, result)

    while step < train.steps and not stopping():
      island.dispatch(step)
      step, save = step + 1, None
      evaluates = train.eval_every and step % train.eval_every == 0 and step < train.steps
      saves = train.checkpoint_every_steps and step % train.checkpoint_every_steps == 0
      finish(0 if evaluates or saves else 1)
      if evaluates:
        learner_work.evaluate(island, records, step)
      if saves:
        try:
          save = island.save(step, run_state)
        except states.StateError as error:
          text = f'checkpoint of step {step} failed: {error}. Training continues.'
          failures.say(time.monotonic_ns(), 'save', text)
    finish()
    if steps and save is None:
      save = island.save(step, run_state)
    if step >= train.steps:
      learner_work.evaluate(island, records, step)
    if save is not None:
      save()
    what = 'done' if step >= train.steps else 'stopped'
    return actions.Exit(code=0, text=f'{what} at step {step}: {steps} steps, {tokens} tokens')
