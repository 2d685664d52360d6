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
_STEP_TOKENS = flags.DEFINE_float(
  'step_tokens', None, "Of a learner's inner step; default: of the config's task.", 1.0
)
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
    raise cli.NeverRetry(f'this run does not fit its links: {found["change"]}')


def _run(config: run_config.Config) -> tuple[Any, float | None]:
  """The run of the flags, and the tokens of a learner's step. Raises ValueError."""
  from diloco_jax.config import build
  from diloco_jax.numerics import codecs
  from diloco_jax.verification.virtual import plan

  sync, step_tokens = config.sync, _STEP_TOKENS.value
  if _PARAMETERS.value:
    blocks = -(-int(_PARAMETERS.value) // (sync.fragments * codecs.BLOCK))
    values = (blocks * codecs.BLOCK,) * sync.fragments
  elif config.task == run_config.OWN_LOOP:
    raise ValueError('this config has no model: say how large it is, as --parameters=25e6')
  else:
    assembled = build.assemble(config, data=False)
    values = tuple(map(assembled.layout.size, range(sync.fragments)))
    step_tokens = step_tokens or assembled.protocol.max_step_tokens
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
    site = part[1] if len(of) > 1 and part[1] else ''
    lines |= dict.fromkeys(of, conditions.Line(rates[0], rates[-1], site))
  return tuple(lines.values()) if words else ()


def _lines(name: str, run: Any, found: dict[str, Any]) -> list[str]:
  """The plan, at most 80 columns."""
  protocol, syncer, other = run.protocol, found['syncer'], found['data_parallel']
  rows = {
    name: f'{found["parameters"]:,} parameters in {protocol.fragments} fragments, '
    f'{protocol.learners} learners',
    'settings': f'H = {protocol.period}, tau = {protocol.overlap}, ahead = {protocol.ahead}, '
    f'{run.up} up, {run.down} down',
    'a period': f'{header.size(found["up_bytes"])} up, {header.size(found["down_bytes"])} down for '
    'each learner, headers included',
    'bandwidth': f'{_bits(found["needed_bytes_per_s"])} each way for each learner; '
    f'on average {_bits(run.mean_bytes_per_s)}',
    'data-parallel': f'{_bits(other["bytes_per_s"])}, so that an all-reduce of bfloat16 takes a '
    'step',
    'syncer': f'{header.size(syncer["memory_bytes"])} of memory, {syncer["cores"]:.2f} cores, '
    f'{_bits(syncer["bytes_per_s"])} in and out',
    'time': f'{header.duration(found["seconds"])} for {found["what"]}',
  }
  width = max(map(len, rows)) + 2
  lines = [f'{row:{width}}{text}' for row, text in rows.items()]
  lines += ['', f'{"link of":{width}}{"up":>12}{"down":>13}  computes  merged  when due']
  for names, row in found['links'].items():
    shares = (row[one] for one in ('computing', 'merged', 'on_time'))
    lines.append(
      f'{names:{width}}{_bits(row["up"]):>12}{_bits(row["down"]):>13}'
      + ''.join(f'{share:{size}.0%}' for share, size in zip(shares, (10, 8, 10)))
    )
  return lines


def _bits(bytes_per_s: float) -> str:
  """A rate for people.

  >>> _bits(1.25e6), _bits(0)
  ('10 Mbit/s', 'any')
  """
  if bytes_per_s == float('inf'):
    return 'no bandwidth is enough'
  for unit, size in (('G', 125e6), ('M', 125e3), ('k', 125.0)):
    if bytes_per_s >= size:
      return f'{bytes_per_s / size:.3g} {unit}bit/s'
  return f'{bytes_per_s * 8:.3g} bit/s' if bytes_per_s else 'any'
