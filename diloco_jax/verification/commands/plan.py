"""Says what a run needs before it starts: bandwidth, settings that fit its links, its syncer, time.

    diloco plan --config=stdlib_lm:cpu --step_s=0.1
    diloco plan --config=gemma:12b --step_s=2.6 --link=5Gbit,l3=500Mbit/2Gbit --tokens=1e12
    diloco plan --config=own_loop --parameters=25e6 --step_s=0.25 --link=50Mbit,l0+l1=20Mbit

A link has a rate each way, or one up and one down, as l3 above; `l0+l1=20Mbit` is one link of two
learners. The shares come from the machines of the protocol, which run in virtual time without
arrays; nothing of a model is allocated. Exit codes: 0 the run fits its links, or none are given; 42
it does not, and the last line says what to change; or wrong flags.
"""

import json
import os
import re
from typing import Any

from absl import flags

from diloco_jax.config import run_config
from diloco_jax.launch import cli
from diloco_jax.report import header

cli.define_config()
_STEP_S = flags.DEFINE_list(
  'step_s', [], 'Seconds of an inner step without any exchange; several: of l0, l1, ... in turn.'
)
_LINK = flags.DEFINE_list('link', [], 'Links of the learners, see above; default: of any speed.')
_LATENCY_MS = flags.DEFINE_float('latency_ms', 0.0, 'Of each link, one way.', 0.0)
_PARAMETERS = flags.DEFINE_float('parameters', None, 'Of a model that is not in the config.', 1e3)
_TOKENS = flags.DEFINE_float('tokens', None, 'To train on; default: those of train.steps.', 1.0)
_JSON = flags.DEFINE_bool('json', False, 'Print everything as JSON, in bytes and seconds.')

_RATE = r'(\d+(?:\.\d+)?)([kMG])bit'
_LINKS = re.compile(rf'(?:([^=]+)=)?{_RATE}(?:/{_RATE})?')
_UNITS = {'k': 125.0, 'M': 125e3, 'G': 125e6}  # bytes


def main(argv: list[str]) -> None:
  del argv
  config = cli.config()
  os.environ['JAX_PLATFORMS'] = 'cpu'
  with cli.importing_jax():
    from diloco_jax.verification.virtual import plan

  with cli.never_retry(ValueError, RuntimeError):
    run, step_tokens = _run(config)
    found = plan.facts(run, step_tokens, _TOKENS.value)
  print(json.dumps(found) if _JSON.value else '\n'.join(_lines(config.name, run, found)))
  if not found['fits']:
    raise cli.NeverRetry(f'this run does not fit its {found["change"]}')


def _run(config: run_config.Config) -> tuple[Any, int]:
  """The run of the flags, and the tokens of a learner's step (0: not known). Raises ValueError."""
  from diloco_jax.config import build
  from diloco_jax.verification.virtual import plan

  sync, step_tokens = config.sync, 0
  if _PARAMETERS.value:
    values = (-(-int(_PARAMETERS.value) // (sync.fragments * 32)) * 32,) * sync.fragments
  elif config.task == run_config.OWN_LOOP:
    raise ValueError('this config has no model: say how large it is, as --parameters=25e6')
  else:
    assembled = build.assemble(config, data=False)
    values = tuple(map(assembled.layout.size, range(sync.fragments)))
    step_tokens = assembled.protocol.max_step_tokens
  if _TOKENS.value and not step_tokens:
    raise ValueError('--tokens needs a config with a model, which says how many are in a step')
  try:
    step_s = tuple(map(float, _STEP_S.value))
  except ValueError:
    step_s = ()
  if not step_s or not 0 < min(step_s) <= max(step_s) < float('inf'):
    raise ValueError(f'--step_s={",".join(_STEP_S.value)}: write seconds, as --step_s=0.25')
  run = plan.Run(
    protocol=config.protocol(),
    values=values,
    up=sync.codec_up,
    down=sync.codec_down,
    slow=sync.codec_up_slow,
    step_s=step_s,
    lines=links(_LINK.value, run_config.learner_ids(sync.learners)),
    latency_s=_LATENCY_MS.value / 1e3,
  )
  return run, step_tokens


def links(words: list[str], names: list[str]) -> tuple[Any, ...]:
  """The line of each learner; () without words. Raises ValueError.

  >>> [line.down for line in links(['50Mbit', 'l1=1Gbit/500kbit'], ['l0', 'l1'])]
  [6250000.0, 62500.0]
  """
  from diloco_jax.verification.virtual import conditions

  lines = dict.fromkeys(names, conditions.Line())
  for word in words:
    part = _LINKS.fullmatch(word)
    of = part[1].split('+') if part and part[1] else names
    rates = [float(part[n]) * _UNITS[part[n + 1]] for n in (2, 4) if part[n]] if part else [0]
    if not all(rates) or not set(of) <= set(names):
      raise ValueError(
        f'--link={word}: write a rate as 50Mbit, or up and down as 50Mbit/1Gbit, perhaps of some '
        f'learners as l1=10Mbit or l0+l1=10Mbit; the learners are {", ".join(names)}'
      )
    site = part[1] if part[1] and len(of) > 1 else ''
    lines |= dict.fromkeys(of, conditions.Line(rates[0], rates[-1], site))
  return tuple(lines.values()) if words else ()


def _lines(name: str, run: Any, found: dict[str, Any]) -> list[str]:
  """The plan, at most 80 columns."""
  protocol, shares, size = run.protocol, found['learners'], header.size
  needed = found['needed_bytes_per_s']
  enough = f'{_bits(needed)} each way for each learner' if needed else 'none is enough'
  rows = {
    name: f'{found["parameters"]:,} parameters in {protocol.fragments} fragments, '
    f'{protocol.learners} learners',
    'settings': f'H = {protocol.period}, tau = {protocol.overlap}, ahead = {protocol.ahead}, '
    f'{run.up} up, {run.down} down',
    'a period': f'{size(found["up_bytes"])} up, {size(found["down_bytes"])} down for each learner, '
    'headers included',
    'bandwidth': f'{enough}; on average '
    + _bits(max(found['up_bytes'], found['down_bytes']) / run.period_s),
    'data-parallel': f'{_bits(found["data_parallel_bytes_per_s"])}, so that an all-reduce of '
    'bfloat16 takes a step',
    'syncer': f'{size(found["syncer_memory_bytes"])} of memory, {found["syncer_cores"]:.2f} cores, '
    f'{_bits(found["syncer_bytes_per_s"])} in and out together',
    'time': f'{header.duration(found["seconds"])} for '
    + (f'{_TOKENS.value:.3g} tokens' if _TOKENS.value else f'{protocol.total_steps:,} steps'),
  }
  lines = [f'{row:15}{text}' for row, text in rows.items()]
  lines += [
    '',
    f'{"link of":15}{"up":>12}{"down":>13}{"computes":>10}{"merged":>8}{"when due":>10}',
  ]
  for m, learner in enumerate(shares['steps']):
    up, down, _ = run.lines[m % len(run.lines)] if run.lines else (0, 0, '')
    columns = zip(('computing', 'merged', 'on_time'), (10, 8, 10))
    lines.append(
      f'{learner:15}{_bits(up):>12}{_bits(down):>13}'
      + ''.join(f'{shares[one][learner]:{width}.0%}' for one, width in columns)
    )
  return lines


def _bits(bytes_per_s: float) -> str:
  """A rate for people.

  >>> _bits(1.25e6), _bits(0)
  ('10 Mbit/s', 'any')
  """
  unit = next((unit for unit in 'GM' if bytes_per_s >= _UNITS[unit]), 'k')
  return f'{bytes_per_s / _UNITS[unit]:.3g} {unit}bit/s' if bytes_per_s else 'any'
