"""Prints the held-out loss of a trained model, of text also in bits per byte; or its accuracies.

    diloco evaluate --workdir=runs/x
    diloco evaluate --workdir=runs/x --corpus='books/*.txt' --batches=9 --batch_size=8
    diloco evaluate --workdir=runs/x --suite
    diloco evaluate --workdir=runs/x --follow

--suite asks questions about 2,048 held-out windows (or --batches of --batch_size) and prints how
many answers are right, with the standard error; train/task.py: `suite` of a task of your own.

A run under way is judged by its newest checkpoint. With --follow this process receives the newest
model from the syncer, again and again until the run has ended, and prints a line for each that it
has judged; the run does not wait for it. --workdir may then be a folder with copies of the run's
config.json and tokenizer, with --syncer and --tls, or the store of the run, whose copies of
checkpoints are read instead (diloco_jax.follow).

It computes on the CPU, unless JAX_PLATFORMS names another platform. Exit codes: 0 done, 42 there is
no such run, no model yet, no held-out data, no suite, or parts of the model never leave the
learners, or nobody may follow the run; 75 no syncer answers.
"""

import math
from typing import Any

from absl import flags

from diloco_jax.launch import cli
from diloco_jax.process import exits

_WORKDIR = flags.DEFINE_string('workdir', None, cli.TO_READ)
_CORPUS = flags.DEFINE_string('corpus', None, 'Evaluate on the held-out part of this corpus.')
_BATCHES = flags.DEFINE_integer('batches', None, 'Evaluate on so many batches.', 1)
_BATCH_SIZE = flags.DEFINE_integer('batch_size', None, 'Take batches of this size.', 1)
_SUITE = flags.DEFINE_bool('suite', False, 'Print accuracies instead of the loss.')
cli.define_follow()


def main(argv: list[str]) -> int:
  del argv
  with cli.reading_a_model():  # after the flags are checked
    from diloco_jax.api import follow, load_params
    from diloco_jax.config import brought, build, load
    from diloco_jax.report import facts as report_facts
    from diloco_jax.train import evaluate

  with exits.never_retry(*load_params.ERRORS), load_params.local(_WORKDIR.value) as folder:
    assembled = load_params.assemble(folder)
    if assembled.task is None:
      raise ValueError(
        f"the run in {folder} trains 'a model of its own loops', which has no held-out batches; "
        f'diloco_jax.load_params({str(folder)!r}) gives its parameters'
      )
    data = assembled.config.data
    data.corpus = _CORPUS.value or data.corpus
    data.eval_batches = _BATCHES.value or data.eval_batches
    data.eval_batch_size = _BATCH_SIZE.value or data.eval_batch_size
    config = assembled.config.of('syncer')
    task = build.make_task(config)
    things, names = brought.things(config, task), ('data', *brought.TEXT_THINGS)
    brought.require(load.brought(folder), things, names, says=('data', *brought.SAID))
    models = follow.models(folder, _WORKDIR.value or '', *cli.follow_flags())
    if _SUITE.value:
      if task.suite is None or task.logits is None:
        raise ValueError(
          f'the run in {folder} trains {assembled.config.task!r}, which has no `suite` and '
          '`logits` (train/task.py): without --suite this command prints its held-out loss'
        )
      most = data.eval_batches * data.eval_batch_size
      suite = task.suite(most if _BATCHES.value else evaluate.SUITE_EXAMPLES)
      for _, heading, params in models:
        table = _table(evaluate.scores(task, params, suite, data.eval_batch_size))
        print(f'{heading}\n{table}' if heading else table, flush=True)
      return 0
    held_out = evaluate.HeldOut(task, assembled.shapes)
    if not held_out.batches:
      raise ValueError(f'the task of the run in {folder} has no held-out batches here')
    where = f'in {len(held_out.batches)} batches of {data.corpus}'
    for _, heading, params in models:
      loss, bits = held_out.evaluate(params)
      fact = report_facts.Eval(step=0, loss=loss, bits_per_byte=bits)
      print(f'{heading}held-out loss {fact.text} {where}', flush=True)
  return 0


def _table(scores: dict[str, Any]) -> str:
  lines = ['                right, %  standard error  commonest, %  questions']
  for name, score in scores.items():  # of evaluate.Score
    always = f'{score.commonest:.1f}' if score.commonest else ''
    count = len(score.right_N)
    lines.append(f'{name:14}{score.percent:10.2f}{score.error:16.2f}{always:>14}{count:11,}')
  if len(scores) > 1:
    percents, errors = zip(*((score.percent, score.error) for score in scores.values()))
    mean, error = sum(percents) / len(scores), math.hypot(*errors) / len(scores)
    lines.append(f'{"mean":14}{mean:10.2f}{error:16.2f}')
  return '\n'.join(lines)
