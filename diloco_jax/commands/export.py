"""Writes a trained model as one *.safetensors file, which other programs read.

    diloco export --workdir=runs/x --out=m.safetensors
    diloco train --config.train.init_from=m.safetensors    # begins with it

Names are paths in the tree of the parameters, 'layers/3/query'; the metadata has the config. Of
those that are never sent the frozen ones are in the file. A run under way gives its newest
checkpoint. Needs the extra [data]. Exit codes: 0 done, 42 there is no such run, no model yet, or
the file cannot be written.
"""

import json
import pathlib

from absl import flags

from diloco_jax.launch import cli

_WORKDIR = flags.DEFINE_string('workdir', None, cli.TO_READ)
_OUT = flags.DEFINE_string('out', None, 'The file, *.safetensors.', required=True)


def main(argv: list[str]) -> int:
  del argv
  with cli.reading_a_model():  # after the flags are checked
    from diloco_jax.api import load_params
    from diloco_jax.storage import arrays

  out = pathlib.Path(_OUT.value)
  with cli.never_retry(*load_params.ERRORS, OSError), load_params.local(_WORKDIR.value) as folder:
    assembled, params = load_params.assemble(folder), load_params.load_params(folder)
    arrays.export(out, params, {'config': json.dumps(assembled.config.to_dict())})
  absent = len(arrays.by_name(assembled.shapes)) - len(arrays.by_name(params))
  without = f', without {absent} parameters that never leave a learner' if absent else ''
  print(f'{out}: {out.stat().st_size:,} bytes{without}')
  return 0
