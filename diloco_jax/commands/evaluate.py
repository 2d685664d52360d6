"""Prints the held-out loss of a trained model, of text also in bits per byte.

    diloco evaluate --workdir=runs/x
    diloco evaluate --workdir=runs/x --corpus='books/*.txt' --batches=9 --batch_size=8

A run under way is judged by its newest checkpoint. It computes on the CPU, unless JAX_PLATFORMS
names another platform. Exit codes: 0 done, 42 there is no such run, no model yet, or no held-out
data.
"""

import pathlib

from absl import flags

from diloco_jax.launch import cli

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.', required=True)
_CORPUS = flags.DEFINE_string(
  'corpus', None, 'Held-out documents of another data.corpus, if the task reads config.data.'
)
_BATCHES = flags.DEFINE_integer(
  'batches', None, 'How many batches; default: data.eval_batches of the run.', lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer(
  'batch_size', None, 'Windows of each; default: data.eval_batch_size of the run.', lower_bound=1
)


def main(argv: list[str]) -> int:
  del argv
  with cli.reading_a_model():  # after the flags are checked
    import jax

    from diloco_jax.api import load_params
    from diloco_jax.config import build
    from diloco_jax.report import facts
    from diloco_jax.storage import checkpoint
    from diloco_jax.train import config as train_config
    from diloco_jax.train import evaluate
    from diloco_jax.train import mesh as mesh_lib

  folder = pathlib.Path(_WORKDIR.value)
  with cli.never_retry(ValueError, checkpoint.CheckpointError):
    assembled = load_params.assemble(folder)
    if assembled.task is None:
      raise ValueError(
        f'the run in {folder} trains loops of its own, whose data diloco does not know; '
        f'diloco_jax.load_params({str(folder)!r}) gives their parameters'
      )
    data = assembled.config.data
    data.corpus = _CORPUS.value or data.corpus
    data.eval_batches = _BATCHES.value or data.eval_batches
    data.eval_batch_size = _BATCH_SIZE.value or data.eval_batch_size
    task = build.make_task(assembled.config)
    batches = task.eval_batches()
    if not batches:
      raise ValueError(f'the task of the run in {folder} has no held-out batches')
    params = load_params.load_params(folder)
  mesh = mesh_lib.make_mesh(train_config.MeshConfig(), jax.local_devices()[:1])
  shardings = mesh_lib.tree_shardings(mesh, assembled.shapes, task.partition)
  step = evaluate.make_eval_step(task, mesh, shardings)
  on_device = [mesh_lib.put_batch(mesh, batch) for batch in batches]
  loss = evaluate.evaluate(step, jax.device_put(params, shardings), on_device)
  bits = evaluate.bits_per_byte(task, batches)(loss)
  fact = facts.Eval(step=0, loss=loss, bits_per_byte=bits)
  print(f'held-out loss {fact.text} in {len(batches)} batches of {data.corpus}')
  return 0
