"""What a run says before its first step, and sizes and times for people."""

import time

from diloco_jax.config import run_config
from diloco_jax.report import facts


def layout(
  config: run_config.Config, parameters: int, tokens: int, bytes_up: int, bytes_down: int
) -> facts.Layout:
  """What is trained, by how many learners, and what they exchange."""
  sync, steps = config.sync, config.train.steps
  trained = f'{parameters:,} parameters, T = {steps:,} inner steps'
  if tokens:
    trained += f' of {tokens:,} tokens: {tokens * steps * sync.learners:,} on all learners'
  waits = '' if sync.max_lag is None else f', max_lag = {sync.max_lag}'
  lines = [
    trained,
    f'M = {sync.learners} learners, quorum K = {sync.quorum}; P = {sync.fragments} fragments, each '
    f'every H = {sync.period} steps',
    f'overlap tau = {sync.overlap}{waits}; outer optimizer {sync.outer}',
    f'{size(bytes_up)} up as {sync.codec_up} and {size(bytes_down)} down as {sync.codec_down} for '
    f'each learner in {sync.period} steps',
  ]
  return facts.Layout(
    parameters=parameters, tokens=tokens, bytes_up=bytes_up, bytes_down=bytes_down, lines=lines
  )


def clock() -> str:
  """The time of day, before a line for people."""
  return time.strftime('%H:%M:%S ')


def size(count_bytes: float) -> str:
  """Bytes for people.

  >>> size(512), size(2_500_000)
  ('512 B', '2.5 MB')
  """
  for unit in ('B', 'kB', 'MB', 'GB'):
    if count_bytes < 1000:
      return f'{count_bytes:.0f} B' if unit == 'B' else f'{count_bytes:.1f} {unit}'
    count_bytes /= 1000
  return f'{count_bytes:.1f} TB'


def duration(seconds: float) -> str:
  """A time for people.

  >>> duration(44.4), duration(200), duration(7_500), duration(200_000)
  ('44 s', '3 min 20 s', '2 h 5 min', '2 d 7 h')
  """
  for large, small, big, little in ((86400, 3600, 'd', 'h'), (3600, 60, 'h', 'min')):
    if seconds >= large:
      return f'{seconds // large:.0f} {big} {seconds % large // small:.0f} {little}'
  minutes = f'{seconds // 60:.0f} min ' if seconds >= 60 else ''
  return f'{minutes}{seconds % 60:.0f} s'
