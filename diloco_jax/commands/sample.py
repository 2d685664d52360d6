"""Prints text of a trained model.

    diloco sample --workdir=runs/x --prompt='def '
    diloco sample --workdir=runs/x --tokens=1000 --temperature=0 --seed=1

The run may be under way: then it is the model of the syncer's newest checkpoint; of a run with
--syncer=none it is that of the learner's. For a model of
your own `diloco_jax.load_params(workdir)` gives the parameters. Exit codes: 0 done, 42 there is no
such run, no model yet, or no decoder in it.
"""

import itertools
import os
import pathlib
import sys

from absl import flags, logging

from diloco_jax.config import run_config
from diloco_jax.launch import cli

_WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of the run.', required=True)
_PROMPT = flags.DEFINE_string('prompt', 'def ', 'What comes first.')
_TOKENS = flags.DEFINE_integer('tokens', 400, 'How many bytes to draw.', lower_bound=1)
_TEMPERATURE = flags.DEFINE_float(
  'temperature', 0.8, 'Divides the logits; 0 takes the likeliest byte.', lower_bound=0.0
)
_SEED = flags.DEFINE_integer('seed', 0, 'Of the draws.')


def main(argv: list[str]) -> int:
  del argv
  prompt = os.fsencode(_PROMPT.value)
  if not prompt:
    raise cli.NeverRetry('--prompt is empty: give at least one character')
  # The model of a run under way is read on the CPU.
  chosen = os.environ.get('JAX_PLATFORMS', 'cpu')
  os.environ['JAX_PLATFORMS'] = chosen if 'cpu' in chosen.split(',') else f'{chosen},cpu'
  logging.set_verbosity(logging.ERROR)  # Orbax writes many lines
  with cli.importing_jax():  # after the flags are checked
    from diloco_jax.api import load_params
    from diloco_jax.storage import checkpoint
    from diloco_jax.train import decoder

  folder = pathlib.Path(_WORKDIR.value)
  with cli.never_retry(ValueError, checkpoint.CheckpointError):
    config = load_params.assemble(folder).config
    if config.task != run_config.DECODER:
      raise ValueError(
        f'the run in {folder} trains {config.task or "a model of its own loops"!r}, not the '
        f'decoder; diloco_jax.load_params({str(folder)!r}) gives its parameters'
      )
    params = load_params.load_params(folder)
  drawn = decoder.sample(
    config.model,
    params,
    prompt,
    config.data.seq_len,
    _TEMPERATURE.value,
    _SEED.value,
  )
  text = (bytes([byte]) for byte in itertools.islice(drawn, _TOKENS.value))
  for piece in itertools.chain([prompt], text, [b'\n']):
    sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()
  return 0
