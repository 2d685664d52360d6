"""The agreement that a learner and the syncer must share, and the description of its differences.

An agreement is a flat JSON object: names (`model.num_layers`, `layout`) to values. The syncer
compares it at Join, before the learner can contribute.
"""

import json
from collections.abc import Collection

from diloco_jax.protocol import printable, safe_json

MAY_CHANGE = (
  'train.steps',
  'optimizer.learning_rate',
  'optimizer.warmup_steps',
  'optimizer.end_lr_ratio',
)
"""Settings that all processes share, and that a run which has ended may continue with another value
of: how far and how fast it trains from now on is no part of what has been trained."""
DIFFERENCES_SHOWN = 5
MAX_DEPTH = 8
VALUE_CHARS = 80


def encode(facts: dict) -> str:
  """Canonical text: equal facts have equal texts."""
  return json.dumps(facts, sort_keys=True, separators=(',', ':'))


def of_run(text: str) -> str:
  """The settings that stay the same for the whole run, as an agreement: all but MAY_CHANGE."""
  facts = _decode(text)
  return encode({name: value for name, value in facts.items() if name not in MAY_CHANGE})


def differences(agreement: str, of_syncer: str) -> list[str]:
  """Where the agreement of the joining learner, `here`, differs from the run's, `there`."""
  ours, theirs = _decode(agreement), _decode(of_syncer)
  return [
    f'{printable.printable(name)} is {_shown(ours, name)} here, {_shown(theirs, name)} there'
    for name in sorted(ours.keys() | theirs.keys())
    if ours.get(name) != theirs.get(name)
  ]


def changed(ours: dict, theirs: dict, but: Collection[str]) -> list[str]:
  """The differences of settings, apart from those named in `but`."""
  kept = [
    encode({name: value for name, value in facts.items() if name not in but})
    for facts in (ours, theirs)
  ]
  return differences(*kept)


def refusal(agreement: str, of_syncer: str) -> str:
  """One line for the learner's user, or '' if both agree."""
  rows = differences(agreement, of_syncer)
  if not rows:
    return ''
  shown = '; '.join(rows[:DIFFERENCES_SHOWN]) + ('; ...' if len(rows) > DIFFERENCES_SHOWN else '')
  count = f'{len(rows)} difference{"s" * (len(rows) > 1)}'
  return (
    f'This learner does not match the run: {count}: {shown}. Nothing was sent. Start it with the '
    'config and the model of the run; a loop takes each setting that it does not give `join`.'
  )


def _shown(facts: dict, name: str) -> str:
  text = repr(facts.get(name, 'absent'))
  return text if len(text) <= VALUE_CHARS else f'{text[:VALUE_CHARS]}...'


def _decode(text: str) -> dict:
  try:
    facts = safe_json.parse(text, max_depth=MAX_DEPTH)
  except safe_json.Unreadable:
    facts = None
  return facts if isinstance(facts, dict) else {'agreement': 'unreadable'}
