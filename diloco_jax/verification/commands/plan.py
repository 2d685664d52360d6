"""Says what a run needs before it starts: bandwidth, settings that fit its links, its syncer, time.

    diloco plan --config=stdlib_lm:cpu --step_s=0.1
    diloco plan --config=gemma:12b --step_s=2.6 --link=5Gbit,l3=500Mbit/2Gbit --tokens=1e12
    diloco plan --config=own_loop --parameters=25e6 --step_s=0.25 --link=50Mbit,l0+l1=20Mbit

A link has a rate each way, or one up and one down, as l3 above; `l0+l1=20Mbit` is one link of two
learners. The shares come from the machines of the protocol, which run in virtual time without
arrays; nothing of a model is allocated. Exit codes: 0 the run fits its links, as it does if there
are no --link and no --latency_s, and its syncer; 42 it does not, and the last line says what to
change; or wrong flags.
"""

import itertools
import json
import os
import re
from collections.abc import Iterator
from typing import Any

from absl import flags

from diloco_jax.config import run_config
from diloco_jax.launch import cli
from diloco_jax.process import exits
from diloco_jax.report import header

cli.define_config(without='')
_OF_STEPS = 'An inner step takes so long without any exchange; once for each of l0, l1, ...'
_STEP_S = flags.DEFINE_multi_float('step_s', None, _OF_STEPS, 1e-6, 1e6, required=True)
_LINK = flags.DEFINE_list('link', [], 'The links of the learners; without it they have any speed.')
_LATENCY_S = flags.DEFINE_float('latency_s', 0.0, 'A message takes so long one way.', 0.0, 1e3)
_PARAMETERS = flags.DEFINE_float('parameters', None, 'A loop has so many parameters.', 1e3)
_TOKENS = flags.DEFINE_float('tokens', None, 'Train on so many tokens, not for train.steps.', 1.0)
_JSON = flags.DEFINE_bool('json', False, 'Print everything as JSON, in bytes and seconds.')

_RATE = r'(\d+(?:\.\d+)?)([kMG])bit'
_LINKS = re.compile(rf'(?:([^=]+)=)?{_RATE}(?:/{_RATE})?')
_UNITS = {'k': 125.0, 'M': 125e3, 'G': 125e6}  # bytes


def main(argv: list[str]) -> None:
  del argv
  config = cli.config()
  os.environ['JAX_PLATFORMS'] = 'cpu'
  with cli.importing_jax():
    from diloco_jax.config import build
    from diloco_jax.verification.virtual import plan

  sync, step_tokens = config.sync, 0
  with exits.never_retry(ValueError, RuntimeError):
    if len(_STEP_S.value) > sync.learners:
      raise ValueError(
        f'--step_s is given {len(_STEP_S.value)} times for {sync.learners} learners: write it once '
        'for all or at most once for each, or raise --config.sync.learners'
      )
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
    run = plan.Run(
      protocol=config.protocol(),
      values=values,
      codecs=(sync.codec_up, sync.codec_down),
      step_s=tuple(_STEP_S.value),
      lines=links(_LINK.value, run_config.learner_ids(sync.learners)),
      latency_s=_LATENCY_S.value,
    )
    facts = plan.facts(run, step_tokens, _TOKENS.value)
  print(json.dumps(facts) if _JSON.value else '\n'.join(_lines(config.name, run, facts)))
  if not facts['fits']:
    longer = facts['period'] > sync.period
    instead = f'. As it is, the syncer exchanges every {facts["period"]} steps' if longer else ''
    raise exits.NeverRetry(f'this run does not fit its {facts["change"]}{instead}')


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


def _lines(name: str, run: Any, facts: dict[str, Any]) -> Iterator[str]:
  """The plan, at most 80 columns."""
  protocol, shares, size = run.protocol, facts['learners'], header.size
  up, down, needed = facts['up_bytes'], facts['down_bytes'], facts['needed_bytes_per_s']
  enough = f'{_bits(needed)} each way for each learner' if needed else 'none is enough'
  tokens = f'{_TOKENS.value:.3g} tokens' if _TOKENS.value else f'{protocol.total_steps:,} steps'
  for row, text in {
    name: f'{facts["parameters"]:,} parameters in {protocol.fragments} fragments, '
    f'{protocol.learners} learners',
    'settings': f'H = {protocol.period}, tau = {protocol.overlap}, ahead = {protocol.ahead}, '
    f'{run.codecs[0]} up, {run.codecs[1]} down',
    'a period': f'{size(up)} up, {size(down)} down for each learner, headers included',
    'bandwidth': f'{enough}; on average {_bits(max(up, down) / run.period_s)}',
    'data-parallel': f'{_bits(facts["data_parallel_bytes_per_s"])}, so that an all-reduce of '
    'bfloat16 takes a step',
    'syncer': f'{size(facts["syncer_memory_bytes"])} of memory, {facts["syncer_cores"]:.2f} cores, '
    f'{_bits(facts["syncer_bytes_per_s"])} in and out',
    **_transport(facts['transport_processes']),
    'time': f'{header.duration(facts["seconds"])} for {tokens}',
    **_loss(run.delays, facts['loss']),
    **({'lower loss': facts['better']} if facts['better'] else {}),
  }.items():
    yield f'{row:15}{text}'
  yield f'\n{"link of":15}{"up":>12}{"down":>13}{"computes":>10}{"merged":>8}{"when due":>10}'
  for learner, (up, down, *_) in zip(shares['steps'], itertools.cycle(run.lines or [(0, 0)])):
    computing, merged, due = (
      shares[share][learner] for share in ('computing', 'merged', 'on_time')
    )
    yield f'{learner:15}{_bits(up):>12}{_bits(down):>13}{computing:10.0%}{merged:8.0%}{due:10.0%}'


def _loss(delays: dict[str, float], costs: dict[str, dict[str, float] | None]) -> dict[str, str]:
  """The row about the loss, if delays cost some."""
  words = {'latency': 'a latency of {:.2g} steps', 'thin': 'links with 1/{:.2g} of what is due'}
  texts = [
    f'+{cost["mean"]:.1%} ({cost["low"]:.1%} to {cost["high"]:.1%}) for ' + of
    if cost
    else f'much higher, as there are too few exchanges on {of}'
    for of, cost in ((words[kind].format(delays[kind]), cost) for kind, cost in costs.items())
  ]
  return {'loss': f'\n{"":15}'.join(texts)} if texts else {}


def _transport(processes: int) -> dict[str, str]:
  """The row about transport processes, if the syncer needs some."""
  text = f'{processes} processes: start the syncer with --transport_processes={processes}'
  return {'transport': text} if processes else {}


def _bits(bytes_per_s: float) -> str:
  """A rate for people.

  >>> _bits(1.25e6), _bits(0)
  ('10 Mbit/s', 'any')
  """
  unit = next((unit for unit in 'GM' if bytes_per_s >= _UNITS[unit]), 'k')
  return f'{bytes_per_s / _UNITS[unit]:.3g} {unit}bit/s' if bytes_per_s else 'any'
