"""Prints text of a trained model.

    diloco sample --workdir=runs/x --prompt='def '
    diloco sample --workdir=runs/x --tokens=1000 --temperature=0 --seed=1
    diloco sample --workdir=runs/x --follow

The run may be under way: then it is the model of the syncer's newest checkpoint; of a run with
--syncer=none it is that of the learner's. A task of your own must have `logits` and `tokenizer`
(train/task.py); `diloco_jax.load_params(workdir)` gives the parameters of any. --follow prints a
text of each newest model until the run has ended, as `diloco evaluate` does. Exit codes: 0 done, 42
there is no such run, no model yet, no text in it, or nobody may follow it; 75 no syncer answers.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from absl import flags

from diloco_jax.launch import cli
from diloco_jax.process import exits

_WORKDIR = flags.DEFINE_string('workdir', None, cli.TO_READ)
_PROMPT = flags.DEFINE_string('prompt', 'def ', 'The text that the sample begins with.')
_TOKENS = flags.DEFINE_integer('tokens', 400, 'The number of ids to draw.', lower_bound=1)
_TEMPERATURE = flags.DEFINE_float('temperature', 0.8, 'Divide logits by this; 0 is greedy.', 0.0)
_SEED = flags.DEFINE_integer('seed', 0, 'The seed of the draws.')
cli.define_follow()


def main(argv: list[str]) -> int:
  del argv
  if not _PROMPT.value:
    raise exits.NeverRetry('--prompt is empty: give at least one character')
  with cli.reading_a_model():  # after the flags are checked
    from diloco_jax.api import follow, load_params
    from diloco_jax.config import brought, load
    from diloco_jax.train import evaluate

  with exits.never_retry(*load_params.ERRORS), load_params.local(_WORKDIR.value) as folder:
    assembled = load_params.assemble(folder)
    task = assembled.task
    if task is None or task.logits is None or task.tokenizer is None:
      raise ValueError(
        f'the run in {folder} trains {assembled.config.task or "a model of its own loops"!r}, '
        'which has no `logits` and `tokenizer` (train/task.py); '
        f'diloco_jax.load_params({str(folder)!r}) gives its parameters'
      )
    brought.require(load.brought(folder), assembled.things, brought.TEXT_THINGS)
    tokenizer, length = task.tokenizer(), assembled.config.data.seq_len
    prompt = tokenizer.encode([_PROMPT.value])[0]
    for _, heading, params in follow.models(folder, _WORKDIR.value or '', *cli.follow_flags()):
      drawn = evaluate.sample(task, params, prompt, length, _TEMPERATURE.value, _SEED.value)
      print(heading, end='\n' if heading else '')
      _print(tokenizer, prompt, itertools.islice(drawn, _TOKENS.value))
  return 0


def _print(tokenizer: Any, prompt: Sequence[int], drawn: Iterable[int]) -> None:
  """Prints a text while it is drawn."""
  ids, shown = list(prompt), 0
  for new in itertools.chain([()], zip(drawn)):
    ids.extend(new)
    text = tokenizer.decode(ids)
    whole = text.rstrip('\ufffd')  # the next id may complete a character
    print(whole[shown:], end='', flush=True)
    shown = max(shown, len(whole))
  print(text[shown:])
